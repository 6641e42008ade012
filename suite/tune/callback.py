"""What Tune's events mean for a sweep: who is told, what is recorded, when it is cut short."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from suite.cluster.session import cluster_nodes
from suite.cluster.shared import note_epoch
from suite.disk import os_error_in, said
from suite.errors import StorageError, end_of
from suite.plan.events import Listeners
from suite.plan.preflight import MIN_FREE_BYTES
from suite.record.attempts import APART, OUT_OF_MEMORY, PROCESS_DIED, is_given_up
from suite.record.folder import PROPOSAL, SPEC, TrialFolder
from suite.record.result import MESSAGE_CHARS, TRACEBACK_CHARS, EpochRecord, FailureRecord
from suite.record.spec import TrialSpec
from suite.storage.lease import Lease
from suite.storage.mirror import Mirror
from suite.tune.breaker import CircuitBreaker
from suite.tune.group import RunSettings
from suite.tune.leave_notice import ask_to_leave
from suite.tune.pending import PendingTrials
from suite.tune.searcher import SweepSearcher
from suite.tune.trainable import CODE_MARK, DISK_MARK, STALE_MARK, STORAGE_MARK

CHECK_EVERY_S = 5.0
AGAIN = "and run the same command again"
WHEN_BACK = "run the same command again when it is back"


class HaltError(Exception):
    """Leaves Tune's loop. Tune kills what still runs; the trials' folders survive that."""


class SweepCallback(tune.Callback):
    """Passes Tune's events on in the suite's words.

    It also watches the disk, the lease and trials that find no room.

    Attributes:
        finished: Number of trials that ended with a result.
        reason: Why the sweep is to be cut short at Tune's next step; empty = it goes on.
        in_order: Whether running trials may first write a checkpoint and leave.
    """

    def __init__(
        self, searcher: SweepSearcher, settings: RunSettings, listeners: Listeners, lease: Lease
    ) -> None:
        self.searcher = searcher
        self.settings = settings
        self.listeners = listeners
        self.lease = lease
        self.home = settings.workspace.home
        self.mirror = Mirror.of(settings.workspace)
        self.finished = 0
        self.reason = ""
        self.in_order = False
        self._breaker = CircuitBreaker(settings.failures.breaker)
        self._pending = PendingTrials(
            searcher.queue,
            searcher.specs,
            settings.layout,
            deadline_s=settings.timeouts.placement_s,
        )
        self._leave_by: float | None = None
        self._leave_request: Any = None  # the request stands as long as this is kept
        self._started: set[str] = set()
        # By the trial's hash, the failures that listeners were told of.
        self._failures: dict[str, list[FailureRecord]] = {}
        self._checked = 0.0  # seconds of a monotonic clock

    def on_step_begin(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        now = time.monotonic()
        # Tune calls this ten times a second; asking the head for its nodes that often would cost.
        if now - self._checked >= CHECK_EVERY_S:
            self._checked = now
            self._check_room(now, trials)
        if self.must_stop() and not self._still_leaving(now, trials):
            raise HaltError

    def _check_room(self, now: float, trials: list[TuneTrial]) -> None:
        """Look at the room on the disk and in the cluster."""
        if shutil.disk_usage(self.home.path).free < MIN_FREE_BYTES:
            self.reason = disk_is_full(self.home.path)
        self.searcher.queue.capacity = self.settings.layout.room_on(cluster_nodes())
        self.reason = self.reason or self._pending.update(trials, now)

    def must_stop(self) -> bool:
        """Whether the sweep is to be cut short; then nothing is handed out any more."""
        if not self.reason:
            lost = self.lease.loss()
            # A signal may have given a reason while the storage was asked, and it has the word.
            self.reason = self.reason or lost
        return bool(self.reason)

    def _still_leaving(self, now: float, trials: list[TuneTrial]) -> bool:
        """Whether trials are still on their way out.

        Nobody waits for them where nothing can be written any more.
        """
        if not self.in_order or self.lease.loss():
            return False
        if self._leave_by is None:
            self._leave_by = now + self.settings.failures.grace_s
            self._leave_request = ask_to_leave(str(self.settings.workspace.scratch))
        return now < self._leave_by and any(trial.status == TuneTrial.RUNNING for trial in trials)

    def end_leave_request(self) -> None:
        """Let the trials of the sweep's next run stay."""
        self._leave_request = None

    def on_trial_start(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        for spec in self.searcher.specs[trial.trial_id]:
            if spec.hash not in self._started:  # else it is another attempt
                self._start(spec)

    def _start(self, spec: TrialSpec) -> None:
        self._started.add(spec.hash)
        folder = self.home.trial(spec)
        # A study goes on from what its first trial was proposed from, so that comes first.
        for name in (PROPOSAL, SPEC):
            path = folder.path / name
            if path.exists():
                self._stored(partial(self.mirror.push_file, path))
        self._failures[spec.hash] = folder.failures()  # those of earlier runs are known
        self.listeners.on_trial_start(spec)

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        records = result.get("records") or {}
        for spec in self.searcher.specs[trial.trial_id]:
            if spec.hash not in records:
                continue
            record = EpochRecord.model_validate_json(records[spec.hash])
            if self.mirror.storage is not None:  # else the rank has written it to the same file
                note_epoch(self.home.trial(spec), record)
            self._breaker.progressed()
            self.listeners.on_epoch(spec, record)

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        handed_back = trial.trial_id not in self.searcher.specs
        left = (trial.last_result or {}).get("left", False)
        apart = (trial.last_result or {}).get("apart")
        if handed_back:  # the trial itself has not ended
            return
        if apart is not None:
            self._part(trial, for_good=apart == APART)
            return
        for spec in self.searcher.specs[trial.trial_id]:
            # Those that leave go on in the next run of the sweep.
            if not left or self.home.trial(spec).result() is not None:
                self._end(spec)

    def _end(self, spec: TrialSpec) -> None:
        folder = self.home.trial(spec)
        result = folder.result()
        if result is not None:
            self.finished += 1
            # A trial that failed at once shows nothing about the machines.
            if result.epochs:
                self._breaker.progressed()
        elif folder.failures():
            self._count_failure(spec, folder.failures()[-1])
        self.reason = self.reason or self.searcher.queue.unmeasured(spec) or ""
        self.listeners.on_trial_end(spec, result)

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        """Have a failed attempt followed by another one, or by none if the retries are used up."""
        error = _last_error(trial)
        if self._is_of_the_sweep(error):
            return
        specs = self.searcher.specs[trial.trial_id]
        failures: list[tuple[TrialSpec, FailureRecord]] = []
        for spec in specs:
            folder = self.home.trial(spec)
            self.fetch(folder)
            # Of trials side by side some may have ended before.
            if len(specs) > 1 and folder.result() is not None:
                continue
            failure = self._failure(spec, error)
            if failure is None:  # it could not be written, and the sweep stops for that
                return
            failures.append((spec, failure))
        # Trials side by side have failed once, not once each.
        for spec, failure in failures[:1]:
            self._count_failure(spec, failure)
        if len(specs) == 1:
            # Asked here too: `TrialTrainable` cannot ask where its own process dies each time.
            if is_given_up(self.home.trial(specs[0]), retries=self.settings.failures.retries):
                self.searcher.queue.ended(specs[0])
                self._end(specs[0])
                return
            self.searcher.hand_back(trial.trial_id)
        else:
            memory = any(failure.type == OUT_OF_MEMORY for _, failure in failures)
            self._part(trial, for_good=memory)
        for spec, failure in failures:
            self.listeners.on_trial_retry(spec, failure)

    def _part(self, trial: TuneTrial, *, for_good: bool) -> None:
        """Have trials that were side by side go on one by one."""
        for spec in self.searcher.part(trial.trial_id, for_good=for_good):
            self._end(spec)

    def _is_of_the_sweep(self, error: str) -> bool:
        """Whether a failure says nothing about a trial: no space, storage, lease or file of code.

        The sweep then stops, because further attempts would only use up the retries.
        """
        last_line = end_of(error)
        for mark in (DISK_MARK, CODE_MARK):
            if mark in error:
                self.reason = f"{last_line.rpartition(f'{mark}: ')[2]} {AGAIN}"
                return True
        if STALE_MARK in error or self.lease.loss():
            self.reason = self.lease.loss() or last_line
            return True
        if STORAGE_MARK in error:
            why = last_line.rpartition(f"{STORAGE_MARK}: ")[2]
            self.reason = f"{why}; {WHEN_BACK}"
            return True
        return False

    def _failure(self, spec: TrialSpec, error: str) -> FailureRecord | None:
        """The record of a failed attempt; made here if the trial's own process died with its node.

        None if it could not be written.
        """
        folder = self.home.trial(spec)
        # The trial's process writes a record before it raises; none is new if the process died.
        # Compared, not counted: somebody may have removed the folder with the earlier records.
        if folder.failures() == self._failures.get(spec.hash, []):
            record = FailureRecord(
                type=PROCESS_DIED,
                message=end_of(error)[:MESSAGE_CHARS] or "its process is gone",
                traceback=error[-TRACEBACK_CHARS:],
                log_path=str(folder.log(0)),
                epoch=max((record.epoch for record in folder.epochs()), default=0),
            )
            self._stored(lambda: self.mirror.add_failure(folder, record))
        failures = folder.failures()
        self._failures[spec.hash] = failures
        if not failures:
            return None
        return failures[-1]

    def _count_failure(self, spec: TrialSpec, failure: FailureRecord) -> None:
        self.reason = self.reason or self._breaker.failed(spec.hash, failure)

    def fetch(self, folder: TrialFolder) -> None:
        """Get what other hosts wrote of a trial."""
        self._stored(lambda: self.mirror.fetch(folder))

    def _stored(self, call: Callable[[], None]) -> None:
        """Call what reads or writes the storage.

        Without storage or disk the sweep cannot go on, but loses nothing: it is cut short.
        """
        try:
            call()
        except (StorageError, OSError) as error:
            self.reason = self.reason or why_paused(error) or str(error)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune stores its callbacks; listeners hold terminals and connections


def _last_error(trial: TuneTrial) -> str:
    """The text that Tune keeps of a trial's latest failure.

    Its own accessor reads a copy that is not made in time.
    """
    try:
        return Path(trial.error_file).read_text(errors="replace").rpartition("Failure # ")[2]
    except (OSError, TypeError):
        return ""


def why_paused(error: Exception) -> str:
    """Why a sweep stops whose storage or disk fails, and what to do; "" for any other exception."""
    if isinstance(error, StorageError):
        return f"{error}; {WHEN_BACK}"
    found = os_error_in(error)
    if found is None:
        return ""
    return f"{said(found)} {AGAIN}"


def disk_is_full(path: Path) -> str:
    """Why a sweep stops whose disk is full, and what to do."""
    return f"less than {MIN_FREE_BYTES / 2**20:.0f} MiB left under {path}; free some space {AGAIN}"
