"""Tell where a pretrain run stands, and claim it for one of the drivers of a home."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from suite.errors import StorageError
from suite.plan.plan import Plan
from suite.record.attempts import is_given_up
from suite.record.folder import Home, TrialFolder
from suite.record.result import TrialResult
from suite.record.spec import TrialSpec
from suite.storage.shared_run import SharedRun


@dataclass(slots=True)
class PretrainState:
    """A pretrain run, which this or another sweep of the home may be running.

    Attributes:
        live: This process has handed it out.
        given_up: It used up its retries.
        shared: Lets the drivers of all sweeps agree who trains it; None = no other driver is at
            work in the home.
    """

    folder: TrialFolder
    spec: TrialSpec
    result: TrialResult | None = None
    live: bool = False
    given_up: bool = False
    shared: SharedRun | None = None

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

    def claim(self, fetch: Callable[[TrialFolder], None]) -> bool:
        """Take the run for this process, unless it has ended or another sweep runs it.

        Args:
            fetch: Gets what other hosts wrote of the run.

        Raises:
            StorageError: The storage of the claims does not answer.
        """
        # No waiting: the driver has other cells to serve while another sweep runs this one.
        if self.shared is not None and not self.shared.take():
            return False
        # Another sweep may have ended it since this one looked.
        fetch(self.folder)
        self.result = self.folder.result()
        self.live = self.result is None
        if not self.live:
            self._release()
        return self.live

    def end(self) -> TrialResult | None:
        """Take in how the run ended: with its result, or with the end of its retries."""
        self.result = self.folder.result()
        self.live = False
        # A run that ends without a result file has used up its retries.
        self.given_up = self.result is None
        self._release()
        return self.result

    def _release(self) -> None:
        # If this fails, other sweeps wait until this driver has ended.
        if self.shared is not None:
            with contextlib.suppress(StorageError, OSError):
                self.shared.release()


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
