"""A trial as Ray Tune sees it: one epoch per step, on a group of ranks that outlives the trial."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune
from ray.util import get_current_placement_group

from suite.disk import fault_of
from suite.errors import OtherCodeError, StaleDriverError, StorageError
from suite.record.attempts import APART, REMOVED, UNEVEN, is_given_up, result_of
from suite.record.folder import TrialFolder
from suite.record.result import FailureRecord
from suite.record.spec import Phase, TrialSpec
from suite.storage.mirror import Mirror
from suite.tune.group import Group, GroupFailureError, RunSettings
from suite.tune.leave_notice import LeaveNotice

# The driver sees only the text of what a trial raises; these words say what kind of error it was.
CODE_MARK = "suite-other-code"
DISK_MARK = "suite-disk-fault"
STALE_MARK = "suite-stale-driver"
STORAGE_MARK = "suite-storage-away"


@dataclass(frozen=True, slots=True)
class Lane:
    """A trial that has not ended, alone or beside others.

    Attributes:
        peers: Hashes of the earlier trials of its study, in number order.
    """

    spec: TrialSpec
    folder: TrialFolder
    peers: Sequence[str]


class TrialTrainable(tune.Trainable):
    """Runs trials one after another in the same actor (`reuse_actors`), some side by side.

    A trial that diverges, runs out of memory, has a bug or is pruned ends with a result of that
    status: another attempt would end the same way. A failure of the machine is recorded in the
    trial's folder and raised; the driver then suggests the trial again, and the next attempt goes
    on from the last committed epoch, and trials that were side by side go on one by one. A trial is
    done without a result when its retries are used up (`suite.record.attempts`), or when it leaves
    because the sweep is stopped. Tune's own checkpoints are not used.
    """

    _started: bool
    _epochs: int
    _lanes: list[Lane]

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
        home = self._settings.workspace.home
        self._lanes = []
        for given, peers in zip(config["specs"], config["peers"], strict=True):
            spec = TrialSpec.model_validate_json(given)
            self._lanes.append(Lane(spec, home.trial(spec), peers))
        self._mirror = Mirror.of(self._settings.workspace)
        self._started = False
        self._epochs = 0
        self._began_at = time.time()

    def step(self) -> dict[str, Any]:
        """Train one epoch of every trial; each is finished after its last one."""
        try:
            return self._attempt()
        except StorageError as error:  # nothing can be kept there, nor trained, until it is back
            raise StorageError(f"{STORAGE_MARK}: {error}") from error
        except OSError as error:
            refused = fault_of(error, self._settings.workspace.home.path)
            if not refused:
                raise
            raise OSError(f"{DISK_MARK}: {refused}") from error
        except StaleDriverError as error:  # another driver owns the folder now
            raise StaleDriverError(f"{STALE_MARK}: {error}") from error
        except OtherCodeError as error:  # another attempt would find the same files
            raise OtherCodeError(f"{CODE_MARK}: {error}") from error

    def _attempt(self) -> dict[str, Any]:
        # Some may have been committed by an attempt that died before it could report.
        if not self._started and self._all_settled():
            return _report(done=True)
        # The last attempt may have killed the process before this one, too. A trial that has failed
        # is alone.
        if self._is_given_up():
            return self._given_up()
        try:
            return self._train(self._ready_group())
        except GroupFailureError as failure:
            self._started = False
            lanes = len(self._lanes)
            # The trial's own end: a rank recorded it and left.
            if self._all_settled():
                return _report(done=True)
            if failure.record.type in (APART, UNEVEN):
                return _report(done=True, apart=failure.record.type)
            # The end of one lane is no failure of the others, which lost their group by it.
            if len(self._lanes) < lanes:
                return _report(done=True, apart=UNEVEN)
            self._record(failure)
            if self._notice.by_driver:
                return _report(done=True, left=True)
            if self._is_given_up():
                return self._given_up()
            raise

    def _all_settled(self) -> bool:
        """Whether no trial is left without a result; those that have one need no group."""
        left = []
        for lane in self._lanes:
            if self._mirror.settle(lane.folder) is None:
                left.append(lane)
            else:
                # One that failed, or was killed as it ended, left it.
                self._mirror.drop_checkpoint(lane.folder)
        self._lanes = left
        return not left

    def _record(self, failure: GroupFailureError) -> None:
        """Keep a failed attempt in the folder of every trial that took part.

        Raises:
            StaleDriverError: The failure is not the trial's: another driver has the sweep.
            StorageError: The same, and the storage is away.
            OtherCodeError: The same, and a host lacks the user's files.
            OSError: The same, and the home's disk refuses something. No attempt is counted.
        """
        for kind in (StaleDriverError, StorageError, OtherCodeError):
            if failure.record.type == kind.__name__:
                raise kind(failure.record.message) from failure
        record = failure.record.model_copy(update={"epoch": self._epochs})
        removed = self._removed()
        if removed is not None:
            why = f"{removed} was removed while its trial ran; the trial begins anew"
            record = FailureRecord(type=REMOVED, message=why, log_path=record.log_path)
        elif failure.disk:
            raise OSError(f"{DISK_MARK}: {failure.disk}") from failure
        with contextlib.suppress(OSError):  # the folder may be what failed
            for lane in self._lanes:
                self._mirror.add_failure(lane.folder, record)

    def _removed(self) -> Path | None:
        """The folder of one of its trials that is gone; None while all are there."""
        # With a storage, the specification lies on the driver's disk and on that of rank 0.
        if self._mirror.storage is None:
            for lane in self._lanes:
                # Ranks that still run make a folder anew, but not what was written before them.
                if lane.folder.spec() is None:
                    return lane.folder.path
        return None

    def _ready_group(self) -> Group:
        if self._group is None:
            self._group = Group(self._settings, get_current_placement_group(), notice=self._notice)
        if not self._started:
            self._epochs = self._group.start([lane.spec for lane in self._lanes])
            self._started = True
        return self._group

    def _train(self, group: Group) -> dict[str, Any]:
        for lane in [lane for lane in self._lanes if self._is_weak(lane)]:
            self._finish(group, lane, pruned=True)
        if not self._lanes:
            return _report(done=True)
        reports = group.epoch()
        self._epochs += 1
        records = {}
        for lane in list(self._lanes):
            epoch = reports[lane.folder.hash]
            if epoch.record is not None:
                # JSON, because Tune keeps running statistics of every number it is given and never
                # frees them.
                records[lane.folder.hash] = epoch.record.model_dump_json()
            if epoch.done:
                self._finish(group, lane)
        return _report(records, done=not self._lanes)

    def _finish(self, group: Group, lane: Lane, *, pruned: bool = False) -> None:
        group.finish(lane.folder.hash, pruned=pruned)
        self._lanes.remove(lane)

    def _is_weak(self, lane: Lane) -> bool:
        """Whether to prune a trial.

        Asked before each epoch but the first, so that an attempt that takes it up asks again.
        """
        pruning = self._settings.pruning
        if pruning is None or lane.spec.phase is not Phase.SEARCH:
            return False
        if not 0 < self._epochs < lane.spec.training.epochs:
            return False
        # Optuna is imported here, because the actor of a sweep that prunes nothing need not load
        # it.
        from suite.plan.pruning import is_weak

        home = self._settings.workspace.home
        for folder in (lane.folder, *map(home.trial, lane.peers)):
            self._mirror.fetch(folder)
        return is_weak(lane.spec, self._epochs, lane.peers, home, pruning)

    def _is_given_up(self) -> bool:
        retries = self._settings.failures.retries
        return any(is_given_up(lane.folder, retries=retries) for lane in self._lanes)

    def _given_up(self) -> dict[str, Any]:
        """End a trial without a further attempt.

        It gets a result if every attempt ran out of memory, else none.
        """
        for lane in self._lanes:
            result = result_of(lane.folder, started_at=self._began_at)
            if result is not None:
                self._mirror.end(lane.folder, result)
                self._mirror.drop_checkpoint(lane.folder)
        return _report(done=True)


def _report(
    records: Mapping[str, str] | None = None,
    *,
    done: bool,
    left: bool = False,
    apart: str | None = None,
) -> dict[str, Any]:
    """What the driver is told of a step.

    Args:
        records: The epochs that were committed, as JSON by trial.
        done: Whether this attempt has ended.
        left: Whether it leaves unfinished trials because the sweep is stopped.
        apart: Why its trials cannot go on side by side (`suite.record.attempts`).
    """
    return {"records": dict(records or {}), "done": done, "left": left, "apart": apart}
