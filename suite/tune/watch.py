"""What Tune's events mean for a sweep: who is told, what is kept, and when the sweep is to be cut short."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from suite.cluster.session import cluster_nodes
from suite.cluster.shared import note_epoch
from suite.errors import StorageError
from suite.plan.events import Listeners
from suite.record.folder import TrialFolder
from suite.record.result import EpochRecord, FailureRecord
from suite.record.spec import TrialSpec
from suite.storage.lease import Lease
from suite.storage.mirror import Mirror
from suite.tune import leave_notice as notice
from suite.tune.breaker import Breaker
from suite.tune.group import Settings, is_full_disk
from suite.tune.searcher import SweepSearcher
from suite.tune.trainable import FULL_DISK_MARK, STALE_MARK, STORAGE_MARK
from suite.tune.waiting import Waiting

MIN_FREE_BYTES = 256 * 2**20
CHECK_EVERY_S = 5.0


class HaltError(Exception):
    """Leave Tune's loop. Tune kills whatever still runs, which its folder survives."""


class Watch(tune.Callback):
    """Tune's events, passed on in the suite's words; also watches the disk and trials that nothing can place.

    Attributes:
        finished: Trials that ended.
        reason: Why the sweep is to be cut short; acted upon at Tune's next step.
        in_order: Whether running trials may first write a checkpoint and leave.
    """

    def __init__(
        self, searcher: SweepSearcher, settings: Settings, told: Listeners, lease: Lease
    ) -> None:
        self.searcher, self.settings, self.told, self.lease = searcher, settings, told, lease
        self.mirror = Mirror.of(settings.workspace)
        self.finished, self.reason, self.in_order = 0, "", False
        self._breaker = Breaker(settings.failures.breaker)
        self._leave_by: float | None = None
        self._started: set[str] = set()
        self._failures: dict[str, int] = {}
        deadline_s = settings.timeouts.placement_s
        self._waiting = Waiting(
            searcher.schedule, searcher.specs, settings.layout, deadline_s=deadline_s
        )
        self._checked = 0.0

    def on_step_begin(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        now = time.monotonic()
        if now - self._checked >= CHECK_EVERY_S:
            self._checked = now
            self._check(now, trials)
        if self.must_stop() and not self._leaving(now, trials):
            raise HaltError

    def _leaving(self, now: float, trials: list[TuneTrial]) -> bool:
        """Whether trials are still on their way out, as they were told to; nobody waits where nothing can be written any more."""
        if not self.in_order or self.lease.loss():
            return False
        if self._leave_by is None:
            self._leave_by = now + self.settings.failures.grace_s
            notice.post(str(self.settings.workspace.scratch))
        return now < self._leave_by and any(trial.status == TuneTrial.RUNNING for trial in trials)

    def must_stop(self) -> bool:
        """Whether the sweep is to be cut short; nothing is handed out any more."""
        self.reason = self.reason or self.lease.loss()
        return bool(self.reason)

    def _check(self, now: float, trials: list[TuneTrial]) -> None:
        """Room on the disk, room in the cluster."""
        home = self.settings.workspace.home.path
        if shutil.disk_usage(home).free < MIN_FREE_BYTES:
            self.reason = full(home)
        self.searcher.schedule.capacity = self.settings.layout.room_on(cluster_nodes())
        self.reason = self.reason or self._waiting.look(trials, now)

    def on_trial_start(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        spec = self._spec(trial)
        if spec.hash not in self._started:
            self._started.add(spec.hash)
            self._stored(
                lambda: self.mirror.push_file(
                    self.settings.workspace.home.trial(spec).path / "spec.json"
                )
            )
            self._failures[spec.hash] = len(self.settings.workspace.home.trial(spec).failures())
            self.told.on_trial_start(spec)

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        if result.get("record") is not None:
            spec, record = self._spec(trial), EpochRecord.model_validate_json(result["record"])
            if self.mirror.storage is not None:
                note_epoch(self.settings.workspace.home.trial(spec), record)
            self._breaker.progressed()
            self.told.on_epoch(spec, record)

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        if (trial.last_result or {}).get("left"):
            return
        spec = self._spec(trial)
        folder = self.settings.workspace.home.trial(spec)
        if folder.result() is not None:
            self._breaker.progressed()
        elif folder.failures():
            self._note(spec, folder.failures()[-1])
        self._end(spec)

    def on_trial_recover(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        failure = self._failure(trial)
        if failure is not None:
            self.told.on_trial_retry(self._spec(trial), failure)

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        if self._failure(trial) is not None:
            self._end(self._spec(trial))

    def _end(self, spec: TrialSpec) -> None:
        result = self.settings.workspace.home.trial(spec).result()
        self.finished += result is not None
        self.reason = self.reason or self.searcher.schedule.unmeasured(spec) or ""
        self.told.on_trial_end(spec, result)

    def _failure(self, trial: TuneTrial) -> FailureRecord | None:
        """The record of an attempt's end; made here where the trial's own process died with its node.

        None where there was no space left: the sweep is to stop then, because trying again would only use up the retries.
        """
        spec, home = self._spec(trial), self.settings.workspace.home
        error = _last_error(trial)
        if FULL_DISK_MARK in error:
            self.reason = full(home.path)
            return None
        if STALE_MARK in error or self.lease.loss():
            self.reason = self.lease.loss() or error.strip().splitlines()[-1]
            return None
        if STORAGE_MARK in error:
            self.reason = f"{error.strip().splitlines()[-1].rpartition(f'{STORAGE_MARK}: ')[2]}; run the same command again when it is back"
            return None
        folder = home.trial(spec)
        self.fetch(folder)
        if len(folder.failures()) <= self._failures.get(spec.hash, 0):
            message = error.strip().splitlines()[-1] if error.strip() else "its process is gone"
            about = {
                "log_path": str(folder.log(0)),
                "epoch": max((record.epoch for record in folder.epochs()), default=0),
            }
            record = FailureRecord(
                type="TrialProcessDied", message=message[:2000], traceback=error[-20_000:], **about
            )
            self._stored(lambda: self.mirror.add_failure(folder, record))
        self._failures[spec.hash] = len(folder.failures())
        if not folder.failures():
            return None
        self._note(spec, folder.failures()[-1])
        return folder.failures()[-1]

    def _note(self, spec: TrialSpec, failure: FailureRecord) -> None:
        self.reason = self.reason or self._breaker.failed(spec.hash, failure)

    def fetch(self, folder: TrialFolder) -> None:
        """Get what other hosts wrote of a trial."""
        self._stored(lambda: self.mirror.fetch(folder))

    def _stored(self, call: Callable[[], None]) -> None:
        """Without its storage or its disk the sweep can neither go on nor lose anything: it is cut short."""
        try:
            call()
        except StorageError as error:
            self.reason = self.reason or f"{error}; run the same command again when it is back"
        except OSError as error:
            if not is_full_disk(error):
                raise
            self.reason = self.reason or full(self.settings.workspace.home.path)

    def _spec(self, trial: TuneTrial) -> TrialSpec:
        return self.searcher.specs[trial.trial_id]

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune stores its callbacks; listeners hold terminals and connections


def _last_error(trial: TuneTrial) -> str:
    """The text Tune keeps of a trial's latest failure (its own accessor reads a copy that is not made in time)."""
    try:
        return Path(trial.error_file).read_text(errors="replace").rpartition("Failure # ")[2]
    except (OSError, TypeError):
        return ""


def full(path: Path) -> str:
    """Why a sweep stops whose disk is full, and what to do."""
    return f"less than {MIN_FREE_BYTES / 2**20:.0f} MiB left under {path}; free some space and run the same command again"
