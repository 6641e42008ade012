"""A trial as Ray Tune sees it: one epoch per step, on a group that outlives the trial."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ray import tune
from ray.util import get_current_placement_group

from suite.errors import StaleDriverError, StorageError
from suite.record.attempts import is_given_up, result_of
from suite.record.folder import TrialFolder
from suite.record.result import TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.mirror import Mirror
from suite.tune.group import Group, GroupFailureError, Settings
from suite.tune.leave_notice import Notice

FULL_DISK_MARK = "suite-full-disk"
STALE_MARK = "suite-stale-driver"
STORAGE_MARK = "suite-storage-away"


class TrialTrainable(tune.Trainable):
    """Runs trials one after another in the same actor (`reuse_actors`).

    A trial that diverges, runs out of memory, has a bug or is pruned ends with a result of that status: trying it again would
    end the same way. What the machine did is kept in the trial's folder and raised, so that Tune tries again; the new attempt goes on
    from the last committed epoch. A trial that was tried often enough (`suite.record.attempts`), or is to leave because the sweep is
    stopped, is done without a result. Tune's own checkpoints are not used.
    """

    _started: bool
    _epochs: int

    def setup(self, config: dict[str, Any]) -> None:
        self._group: Group | None = None
        self._notice = Notice(str(config["settings"].workspace.scratch))
        self._notice.listen()
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train one epoch; the last step also finishes the trial."""
        try:
            return self._attempt()
        except StorageError as error:  # nothing can be kept there, nor trained, until it is back
            raise StorageError(f"{STORAGE_MARK}: {error}") from error
        except StaleDriverError as error:  # the folder is another driver's by now
            raise StaleDriverError(f"{STALE_MARK}: {error}") from error

    def _attempt(self) -> dict[str, Any]:
        result = None if self._started else self._mirror.settle(self._folder)
        if result is not None:  # committed by an attempt that died before it could report
            return self._ended(result)
        if is_given_up(
            self._folder, retries=self._settings.failures.retries
        ):  # the last attempt took this process's forerunner along
            return self._given_up()
        try:
            return self._step(self._ready_group())
        except GroupFailureError as failure:
            self._started = False
            result = self._mirror.settle(self._folder)
            if result is not None:  # the trial's own end: a rank recorded it and left
                return self._ended(result)
            for kind in (StaleDriverError, StorageError):
                if failure.record.type == kind.__name__:
                    raise kind(failure.record.message) from failure
            if failure.full_disk:  # it says nothing about the trial: no attempt is counted
                raise OSError(f"{FULL_DISK_MARK}: {failure}") from failure
            with contextlib.suppress(OSError):  # the folder may be what failed
                self._mirror.add_failure(
                    self._folder, failure.record.model_copy(update={"epoch": self._epochs})
                )
            if self._notice.by_driver:
                return self._unfinished(left=True)
            if is_given_up(self._folder, retries=self._settings.failures.retries):
                return self._given_up()
            raise

    def cleanup(self) -> None:
        if self._group is not None:
            self._group.close()

    def _begin(self, config: dict[str, Any]) -> None:
        self._settings: Settings = config["settings"]
        self._spec = TrialSpec.model_validate_json(config["spec"])
        self._folder: TrialFolder = self._settings.workspace.home.trial(self._spec)
        self._mirror = Mirror.of(self._settings.workspace)
        self._peers: list[str] = config["peers"]
        self._started, self._epochs, self._began_at = False, 0, time.time()

    def _ready_group(self) -> Group:
        if self._group is None:
            self._group = Group(self._settings, get_current_placement_group(), notice=self._notice)
        if not self._started:
            self._epochs = self._group.start(self._spec)
            self._started = True
        return self._group

    def _step(self, group: Group) -> dict[str, Any]:
        if self._is_weak():
            return self._ended(group.finish(pruned=True))
        report = group.epoch()
        self._epochs += 1
        record = (
            report.record.model_dump_json() if report.record is not None else None
        )  # of numbers Tune would keep statistics, for good
        if not report.done:
            return {"record": record, "done": False}
        return {**self._ended(group.finish()), "record": record}

    def _is_weak(self) -> bool:
        """Asked before the next epoch, so that an attempt which died after the last one asks again."""
        pruning = self._settings.pruning
        if (
            pruning is None
            or self._spec.phase is not Phase.SEARCH
            or not 0 < self._epochs < self._spec.training.epochs
        ):
            return False
        from suite.plan.pruning import (
            is_weak,  # Optuna, which the actor of a sweep that prunes nothing need not load
        )

        home = self._settings.workspace.home
        for folder in (self._folder, *map(home.trial, self._peers)):
            self._mirror.fetch(folder)
        return is_weak(self._spec, self._epochs, self._peers, home, pruning)

    def _given_up(self) -> dict[str, Any]:
        """No further attempt: a result where all that failed was memory, else none, and the cell says so."""
        result = result_of(self._folder, started_at=self._began_at)
        return (
            self._unfinished()
            if result is None
            else self._ended(self._mirror.end(self._folder, result))
        )

    def _unfinished(self, *, left: bool = False) -> dict[str, Any]:
        return {"record": None, "status": None, "left": left, "done": True}

    def _ended(self, result: TrialResult) -> dict[str, Any]:
        return {"record": None, "status": result.status.value, "done": True}
