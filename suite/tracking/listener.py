"""Keeps MLflow up to date while a sweep runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from suite.errors import SuiteError
from suite.record.folder import Home
from suite.record.result import EpochRecord, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.tracking.follower import Follower
from suite.tracking.live import LiveTrial
from suite.tracking.store import load_mlflow, open_store
from suite.tracking.writer import Syncer


class TrackingListener(Follower):
    """Writes the curve of every trial that runs, every trial that ends, and the rows of the sweep.

    Args:
        home: The sweep's home.
        tracking_uri: As `resolve_uri` gives it.
        sweep: Only this sweep; None = all in the home.
        say: `Follower` describes this argument and those after it.
    """

    def __init__(
        self,
        home: Home,
        tracking_uri: str,
        *,
        sweep: str | None = None,
        say: Callable[[str], None] | None = None,
        patience_s: float = 20.0,
        retry_s: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        super().__init__("MLflow", say=say, patience_s=patience_s, retry_s=retry_s)
        self.home = home
        self.tracking_uri = tracking_uri
        self.sweep = sweep
        self._syncer: Syncer | None = None
        # Trials that run, by their hash.
        self._live: dict[str, LiveTrial] = {}

    def prepare(self) -> None:
        """Import MLflow here and not in the thread: Ray imports it in this one, too."""
        load_mlflow()

    def on_trial_start(self, spec: TrialSpec) -> None:
        # Pretrain runs have no run in MLflow: they belong to no cell.
        if spec.phase is not Phase.PRETRAIN:
            with self._lock:
                self._live[spec.hash] = LiveTrial(spec, time.time())

    def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
        if spec.phase is not Phase.PRETRAIN:
            self._start()

    def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
        with self._lock:
            self._live.pop(spec.hash, None)
        super().on_trial_end(spec, result)
        # Without a result it waits for another run of the sweep, and no longer runs.
        self._start()

    def on_end(self, outcome: Any) -> None:
        # Trials that have not ended go on in another run of the sweep.
        with self._lock:
            self._live.clear()
        super().on_end(outcome)

    def bring_up_to_date(self) -> str | None:
        """Write what is lacking, and return why that failed, as `Follower` describes."""
        with self._lock:
            # Read before the home: a trial that ends after this is still running in this sync.
            live = dict(self._live)
        known = self._syncer
        # Put back after success alone: whatever goes wrong below, the next attempt looks afresh.
        self._syncer = None
        try:
            # A syncer remembers what the store has, which saves the searches of each further sync.
            syncer = known or Syncer(self.home, open_store(self.tracking_uri))
            problem = syncer.run(self.sweep, step=self._note_step, live=live).unreachable
        except SuiteError as error:
            return str(error)
        if problem is not None:
            return problem
        self._syncer = syncer
        return None

    def _note_step(self, *_: int) -> None:
        # A home of many trials takes minutes: a sweep that ends meanwhile was not without MLflow.
        self._reached = True
