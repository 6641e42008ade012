"""Tell where a pretrain run stands, and take it for one driver among all of the home."""

from __future__ import annotations

from dataclasses import dataclass

from filelock import FileLock, Timeout

from suite.plan.plan import Plan
from suite.record.attempts import is_given_up
from suite.record.folder import Home, TrialFolder
from suite.record.result import TrialResult
from suite.record.spec import TrialSpec


@dataclass(slots=True)
class PretrainState:
    """A pretrain run, which this or another sweep of the home may be running.

    Attributes:
        live: This process has handed it out.
        given_up: It used up its retries.
    """

    folder: TrialFolder
    spec: TrialSpec
    result: TrialResult | None = None
    live: bool = False
    given_up: bool = False
    _lock: FileLock | None = None

    @property
    def ready(self) -> bool:
        """Whether its weights are there."""
        return self.result is not None and self.result.status.has_score

    @property
    def failed(self) -> bool:
        """Whether there never will be weights."""
        return self.result is not None and not self.result.status.has_score

    @property
    def is_due(self) -> bool:
        """Whether somebody has to run it."""
        return self.result is None and not self.live and not self.given_up

    def claim(self) -> bool:
        """Take the run for this process, unless it has ended or another sweep runs it."""
        if self._lock is None:
            # filelock releases a lock when its object is collected, so the object is kept. By
            # default its state is per thread, and a release in another thread would do nothing.
            path = self.folder.path.with_suffix(".lock")
            self._lock = FileLock(path, thread_local=False)
        self.folder.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # No waiting: the driver has other cells to serve while another sweep runs this one.
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        # Another sweep may have ended it since this one looked.
        self.result = self.folder.result()
        self.live = self.result is None
        if not self.live:
            self._lock.release()
        return self.live

    def end(self) -> TrialResult | None:
        """Take in how the run ended: with its result, or with the end of its retries."""
        self.result = self.folder.result()
        self.live = False
        # A run that ends without a result file has used up its retries.
        self.given_up = self.result is None
        if self._lock is not None:
            self._lock.release()
        return self.result


def read_pretrains(plan: Plan, home: Home) -> dict[str, PretrainState]:
    """The state of every pretrain run of a plan, by hash."""
    retries = plan.config.failures.retries
    states: dict[str, PretrainState] = {}
    for spec in plan.pretrains:
        folder = home.trial(spec)
        state = PretrainState(folder, spec, folder.result())
        state.given_up = state.result is None and is_given_up(folder, retries=retries)
        states[spec.hash] = state
    return states
