"""A trial as Ray Tune sees it: one epoch per step, on a group of ranks that outlives the trial."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ray import tune
from ray.util import get_current_placement_group

from suite.errors import StaleDriverError, StorageError
from suite.record.attempts import is_given_up, result_of
from suite.record.result import TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.mirror import Mirror
from suite.tune.group import Group, GroupFailureError, RunSettings
from suite.tune.leave_notice import LeaveNotice

# The driver sees only the text of what a trial raises; these words say what kind of error it was.
FULL_DISK_MARK = "suite-full-disk"
STALE_MARK = "suite-stale-driver"
STORAGE_MARK = "suite-storage-away"


class TrialTrainable(tune.Trainable):
    """Runs trials one after another in the same actor (`reuse_actors`).

    A trial that diverges, runs out of memory, has a bug or is pruned ends with a result of that
    status: another attempt would end the same way. A failure of the machine is recorded in the
    trial's folder and raised; the driver then suggests the trial again, and the next attempt goes
    on from the last committed epoch. A trial is done without a result when its retries are used up
    (`suite.record.attempts`), or when it leaves because the sweep is stopped. Tune's own
    checkpoints are not used.
    """

    _started: bool
    _epochs: int

    def setup(self, config: dict[str, Any]) -> None:
        self._group: Group | None = None
        self._notice = LeaveNotice(str(config["settings"].workspace.scratch))
        self._notice.catch_sigterm()
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._begin(new_config)
        return True

    def cleanup(self) -> None:
        if self._group is not None:
            self._group.close()

    def _begin(self, config: dict[str, Any]) -> None:
        self._settings: RunSettings = config["settings"]
        self._spec = TrialSpec.model_validate_json(config["spec"])
        self._peers: list[str] = config["peers"]
        self._folder = self._settings.workspace.home.trial(self._spec)
        self._mirror = Mirror.of(self._settings.workspace)
        self._started = False
        self._epochs = 0
        self._began_at = time.time()

    def step(self) -> dict[str, Any]:
        """Train one epoch; the last step also finishes the trial."""
        try:
            return self._attempt()
        except StorageError as error:  # nothing can be kept there, nor trained, until it is back
            raise StorageError(f"{STORAGE_MARK}: {error}") from error
        except StaleDriverError as error:  # another driver owns the folder now
            raise StaleDriverError(f"{STALE_MARK}: {error}") from error

    def _attempt(self) -> dict[str, Any]:
        if not self._started:
            result = self._mirror.settle(self._folder)
            if result is not None:  # committed by an attempt that died before it could report
                return _ended(result)
        if self._is_given_up():  # the last attempt also killed the process before this one
            return self._given_up()
        try:
            return self._train(self._ready_group())
        except GroupFailureError as failure:
            self._started = False
            result = self._mirror.settle(self._folder)
            if result is not None:  # the trial's own end: a rank recorded it and left
                return _ended(result)
            self._record(failure)
            if self._notice.by_driver:
                return _unfinished(left=True)
            if self._is_given_up():
                return self._given_up()
            raise

    def _record(self, failure: GroupFailureError) -> None:
        """Keep a failed attempt in the trial's folder.

        Raises:
            StaleDriverError: The failure is not the trial's: another driver has the sweep.
            StorageError: The same, and the storage is away.
            OSError: The same, and there is no space left. No attempt is counted.
        """
        for kind in (StaleDriverError, StorageError):
            if failure.record.type == kind.__name__:
                raise kind(failure.record.message) from failure
        if failure.full_disk:
            raise OSError(f"{FULL_DISK_MARK}: {failure}") from failure
        with contextlib.suppress(OSError):  # the folder may be what failed
            record = failure.record.model_copy(update={"epoch": self._epochs})
            self._mirror.add_failure(self._folder, record)

    def _ready_group(self) -> Group:
        if self._group is None:
            self._group = Group(self._settings, get_current_placement_group(), notice=self._notice)
        if not self._started:
            self._epochs = self._group.start(self._spec)
            self._started = True
        return self._group

    def _train(self, group: Group) -> dict[str, Any]:
        if self._is_weak():
            return _ended(group.finish(pruned=True))
        epoch = group.epoch()
        self._epochs += 1
        report: dict[str, Any] = {"record": None, "done": False}
        if epoch.done:
            report = _ended(group.finish())
        if epoch.record is not None:
            # JSON, because Tune keeps running statistics of every number it is given and never
            # frees them.
            report["record"] = epoch.record.model_dump_json()
        return report

    def _is_weak(self) -> bool:
        """Whether to prune the trial.

        Asked before each epoch but the first, so that an attempt that takes it up asks again.
        """
        pruning = self._settings.pruning
        if pruning is None or self._spec.phase is not Phase.SEARCH:
            return False
        if not 0 < self._epochs < self._spec.training.epochs:
            return False
        # Optuna is imported here, because the actor of a sweep that prunes nothing need not load
        # it.
        from suite.plan.pruning import is_weak

        home = self._settings.workspace.home
        for folder in (self._folder, *map(home.trial, self._peers)):
            self._mirror.fetch(folder)
        return is_weak(self._spec, self._epochs, self._peers, home, pruning)

    def _is_given_up(self) -> bool:
        return is_given_up(self._folder, retries=self._settings.failures.retries)

    def _given_up(self) -> dict[str, Any]:
        """End the trial without a further attempt.

        It gets a result if every attempt ran out of memory, else none.
        """
        result = result_of(self._folder, started_at=self._began_at)
        if result is None:
            return _unfinished()
        return _ended(self._mirror.end(self._folder, result))


def _ended(result: TrialResult) -> dict[str, Any]:
    return {"record": None, "status": result.status.value, "done": True}


def _unfinished(*, left: bool = False) -> dict[str, Any]:
    return {"record": None, "status": None, "left": left, "done": True}
