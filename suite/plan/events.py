"""Events of a sweep, for whoever listens to them: the live table and the MLflow writer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from suite.plan.cell_state import CellState
from suite.plan.plan import Plan
from suite.plan.status import CellReport
from suite.record.result import EpochRecord, FailureRecord, TrialResult
from suite.record.spec import TrialSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one run of a sweep.

    Attributes:
        finished: Trials that ended in this run.
        cells: Every cell as it stands.
        failed: Keys of cells without a complete result although the run was not cut short.
        interrupted: Whether it was cut short (signal, full disk, no resources); `reason` says why.
        not_measured: Confirmed runs that lm-eval could not measure: folder -> why.
    """

    finished: int
    cells: tuple[CellReport, ...]
    failed: tuple[str, ...] = ()
    interrupted: bool = False
    reason: str = ""
    not_measured: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.failed and not self.interrupted


class Listener:
    """A listener whose methods do nothing; an error of a listener is logged and stops nothing."""

    def on_start(self, plan: Plan, cells: Mapping[str, CellState]) -> None:
        """The sweep begins; `cells` is live state, by key, in the plan's order."""

    def on_trial_start(self, spec: TrialSpec) -> None:
        """A trial's workers begin (once per trial, not again for a retry)."""

    def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
        """An epoch was committed."""

    def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
        """A trial ended; None = its retries are used up (its folder holds the failures)."""

    def on_trial_retry(self, spec: TrialSpec, failure: FailureRecord) -> None:
        """A trial's machine failed; it will be taken up again from its last committed epoch."""

    def on_end(self, outcome: Outcome) -> None:
        """The sweep has ended, after its last trial or an interrupt."""


@dataclass(slots=True)
class Listeners(Listener):
    """Several listeners as one."""

    members: Sequence[Listener] = field(default_factory=tuple)
    # Says whether this driver has lost the sweep: what happens then is another driver's to tell.
    muted: Callable[[], bool] = lambda: False

    def on_start(self, plan: Plan, cells: Mapping[str, CellState]) -> None:
        self._tell("on_start", plan, cells)

    def on_trial_start(self, spec: TrialSpec) -> None:
        self._tell("on_trial_start", spec)

    def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
        self._tell("on_epoch", spec, record)

    def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
        self._tell("on_trial_end", spec, result)

    def on_trial_retry(self, spec: TrialSpec, failure: FailureRecord) -> None:
        self._tell("on_trial_retry", spec, failure)

    def on_end(self, outcome: Outcome) -> None:
        self._tell("on_end", outcome)

    def _tell(self, event: str, *args: object) -> None:
        if self.muted():
            return
        # A listener shows or copies what happened. Its error must not end the sweep.
        for member in self.members:
            try:
                getattr(member, event)(*args)
            except Exception:
                log.exception("%s.%s failed", type(member).__name__, event)
