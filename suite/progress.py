"""What a person sees while a sweep runs, on stderr or below the cell of a notebook.

On a terminal and in a notebook that is a live table, elsewhere one line per finished trial.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from suite.meters.record import ESTIMATE
from suite.plan.cell_state import CellState
from suite.plan.events import Listener, Outcome
from suite.plan.plan import Plan
from suite.plan.status import CellReport, cell_status
from suite.record.result import EpochRecord, FailureRecord, Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.redact import printable
from suite.report import values
from suite.report.text_table import Column, make_table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

COLUMNS = (
    Column("arm", str),
    Column("task", str),
    Column("done", str, right=True),
    Column("best so far", str, right=True),
    Column("learning rate", str, right=True),
    Column("now", str, wraps=True),
)
MARGIN_LINES = 6
"""Lines of a terminal that show no cell: heading, table head, and messages above them."""
NOTEBOOK_EVERY_S = 0.5
NOTEBOOK_COLUMNS = 120
NOTEBOOK_LINES = 40
"""Size in characters of what a notebook shows; a table that is higher leaves cells out."""


class Board(Listener):
    """Counts what happens in a sweep.

    One thread brings the events, another one draws the table.

    Args:
        console: Where lines are printed; on a terminal rich draws `self` there.
        clock: Seconds, monotonic.
        live: Whether the table is drawn; None = on a terminal.
    """

    def __init__(
        self, console: Console, clock: Any = time.monotonic, *, live: bool | None = None
    ) -> None:
        self.console = console
        # Where the table is drawn, only what went wrong gets a line.
        self._live = console.is_terminal if live is None else live
        self._clock = clock
        self._name = ""
        self._states: Mapping[str, CellState] = {}
        self._known: dict[str, CellReport] = {}
        self._now: dict[str, str] = {}
        self._measured_kwh: list[float] = []
        self._estimated_kwh: list[float] = []
        self._unknown_phases = 0
        self._started_s = clock()
        self._finished_here = 0

    def on_start(self, plan: Plan, cells: Mapping[str, CellState]) -> None:
        self._name = plan.config.name
        self._states = cells
        # The run's own start: what was done before must not make the pace look faster.
        self._started_s = self._clock()
        for state in cells.values():
            for trial in state.trials:
                # What the queue remembers of a result lacks the phases besides training.
                self._add_energy(trial.folder.result())
        self._take()
        # The terminal's table shows the count anyway.
        if not self._live and self.done:
            self._say(f"taking up sweep {self._name}: {self.done} of {self.total} trials are done")

    def on_trial_start(self, spec: TrialSpec) -> None:
        self._now[_key(spec)] = f"{_trial_name(spec)} starts"
        self._take(spec)

    def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
        if spec.phase is Phase.PRETRAIN:
            progress = f"step {record.step:,}"
        else:
            progress = f"epoch {record.epoch}"
        self._now[_key(spec)] = (
            f"{_trial_name(spec)} {progress}: {_score(spec, record.validation_score)}"
        )

    def on_trial_retry(self, spec: TrialSpec, failure: FailureRecord) -> None:
        self._now[_key(spec)] = f"{_trial_name(spec)} again"
        self._say(
            f"{_where(spec)}: {failure.type}: {failure.message}; tried again "
            f"(log: {failure.log_path})"
        )

    def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
        self._now.pop(_key(spec), None)
        # A pretrain run is no trial of a cell, and takes far longer than one.
        self._finished_here += spec.phase is not Phase.PRETRAIN
        self._add_energy(result)
        self._take(spec)
        # On a terminal only what went wrong gets a line, which stays above the table.
        if not self._live or result is None or not result.status.has_score:
            ending = _ending(spec, result)
            self._say(f"[{self.done}/{self.total}] {_where(spec)}: {ending}; {self._left()}")

    @property
    def done(self) -> int:
        return sum(cell.done for cell in self._cells)

    @property
    def total(self) -> int:
        return sum(cell.total for cell in self._cells)

    @property
    def left(self) -> int:
        """Trials that will still run or are running; a cell that failed has none."""
        return sum(cell.left + cell.running for cell in self._cells)

    def eta_s(self) -> float | None:
        """Seconds to the end at this run's own pace; None before its first trial ended."""
        if not self._finished_here:
            return None
        elapsed_s: float = self._clock() - self._started_s
        return elapsed_s / self._finished_here * self.left

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        elapsed = values.duration(self._clock() - self._started_s)
        heading = (
            f"sweep {self._name}: {self.done} of {self.total} trials done, {elapsed} so far, "
            f"energy {self._energy()}"
        )
        # rich would cut a table that is too high, and hide its last lines.
        cells = self._in_view(max(1, self.console.height - MARGIN_LINES))
        hidden = len(self._cells) - len(cells)
        footing = self._left()
        if hidden:
            footing += f"; {hidden} more cells (suite status shows all)"
        return Group(
            Text(heading, style="bold"),
            make_table([self._line(cell) for cell in cells], COLUMNS, self.console.width),
            Text(footing),
        )

    def _in_view(self, lines: int) -> list[CellReport]:
        """All cells, or as many as fit: those at work, then the unfinished, in the plan's order."""
        cells = self._cells
        if len(cells) <= lines:
            return cells

        def urgency(cell: CellReport) -> int:
            if cell.key in self._now:
                return 0
            if cell.done < cell.total:
                return 1
            return 2

        # The table keeps the plan's order: lines that jump about cannot be followed.
        chosen = {cell.key for cell in sorted(cells, key=urgency)[:lines]}
        return [cell for cell in cells if cell.key in chosen]

    def _line(self, cell: CellReport) -> list[str]:
        now = self._now.get(cell.key, "")
        if not now and cell.pretrain is not None:
            # Its trials cannot start before the run that many cells wait for.
            now = self._now.get(cell.pretrain.checkpoint, "")
        idle = cell.running == 0 and (cell.left == 0 or cell.waits_for > 0)
        if not now and idle:
            now = "; ".join([cell.status.value, *cell.notes])
        numbers = [
            f"{cell.done}/{cell.total}",
            values.score(cell.best_validation_score),
            values.brief(cell.best_learning_rate),
        ]
        return [_arm(cell.attention, cell.attention_options, cell.method), cell.task, *numbers, now]

    def _left(self) -> str:
        eta = self.eta_s()
        if eta is None or not self.left:
            return f"{self.left} left"
        return f"{self.left} left, about {values.duration(eta)}"

    @property
    def _cells(self) -> list[CellReport]:
        return list(self._known.values())

    def _take(self, spec: TrialSpec | None = None) -> None:
        """Look again at the cells that news of a trial can concern; None = at all cells."""
        changed = list(self._states.values())
        # A pretrain run may let any cell go on: look at all of them.
        if spec is not None and spec.phase is not Phase.PRETRAIN:
            state = self._states[spec.cell]
            changed = [state]
            if state.contest is not None:
                changed = self._rivals(state)
        reports = {state.cell.key: cell_status(state) for state in changed}
        # A new mapping: the thread that draws sees the old one or the new one, whole.
        self._known = self._known | reports

    def _rivals(self, state: CellState) -> list[CellState]:
        """All cells of a cell's contest, which wait for one another."""
        assert state.contest is not None
        return [self._states[member.cell.key] for member in state.contest.cells]

    def _add_energy(self, result: TrialResult | None) -> None:
        if result is None:
            return
        for phase in result.phases.values():
            if phase.energy_kwh is None:
                self._unknown_phases += 1
            elif phase.energy_source == ESTIMATE:
                self._estimated_kwh.append(phase.energy_kwh)
            else:
                self._measured_kwh.append(phase.energy_kwh)

    def _energy(self) -> str:
        """The energy so far: `2.00 Wh`, `2.00 Wh and 0.100 Wh estimated, 1 phase not known`."""
        shown = values.spent(self._measured_kwh, self._estimated_kwh)
        if self._unknown_phases == 1:
            shown += ", 1 phase not known"
        elif self._unknown_phases:
            shown += f", {self._unknown_phases} phases not known"
        return shown

    def _say(self, line: str) -> None:
        # Names in brackets are no markup, and a log file wants whole lines.
        self.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _key(spec: TrialSpec) -> str:
    """Key of a run's news: its cell's, or its own hash where many cells wait for it."""
    if spec.phase is Phase.PRETRAIN:
        return spec.hash
    return spec.cell


def _score(spec: TrialSpec, value: float | None) -> str:
    if spec.phase is Phase.PRETRAIN:
        return f"loss {values.brief(value)}"
    return values.score(value)


def _trial_name(spec: TrialSpec) -> str:
    if spec.phase is Phase.PRETRAIN:
        return "pretrain"
    # Search trials differ by number, confirm runs by seed.
    if spec.phase is Phase.SEARCH:
        return f"search {spec.number}"
    return f"seed {spec.seed}"


def _arm(attention: str, options: dict[str, Any], method: str) -> str:
    """`lora`; with an attention other than the checkpoint's, `gqa kv_heads=2, lora`."""
    shown = values.attention({"attention": attention, "attention_options": options})
    # The usual case gets the short name.
    if attention == "pretrained":
        return method
    return f"{shown}, {method}"


def _where(spec: TrialSpec) -> str:
    if spec.phase is Phase.PRETRAIN:
        return (
            f"pretrain of attention {spec.arm.attention.name} on {spec.arm.backbone.name}, "
            f"corpus {spec.task.name}"
        )
    attention = spec.arm.attention
    arm = _arm(attention.name, attention.options, spec.arm.method)
    return f"{arm} on {spec.task.name}, {_trial_name(spec)} at {spec.learning_rate:g}"


def _ending(spec: TrialSpec, result: TrialResult | None) -> str:
    if result is None:
        return f"given up, its retries are used up (trial {spec.hash})"
    took = values.duration(result.worked_s)
    if result.lanes > 1:
        took += f" as one of {result.lanes} side by side"
    if result.status is Status.PRUNED:
        return f"pruned at validation score {values.score(result.validation_score)}, {took}"
    if not result.status.has_score:
        cause = ""
        if result.failure is not None:
            failure = result.failure
            cause = f": {failure.type}: {failure.message} (log: {failure.log_path})"
        return f"{result.status.value} after {took}{cause}"
    if spec.phase is Phase.PRETRAIN:
        return f"{_score(spec, result.score)}, {took}"
    if spec.phase is Phase.CONFIRM:
        kind = "test"
    else:
        kind = "validation"
    return f"{kind} score {values.score(result.score)}, {took}"


class NotebookBoard(Board):
    """The board below a notebook's cell: one output, which is replaced while the sweep runs."""

    def __init__(self, show: Any, clock: Any = time.monotonic) -> None:
        from rich.console import Console

        # Nothing is printed to it: it has the size in which the table is drawn.
        console = Console(
            file=io.StringIO(), width=NOTEBOOK_COLUMNS, height=NOTEBOOK_LINES, force_jupyter=False
        )
        super().__init__(console, clock, live=True)
        self._show = show
        self._shown_s = -NOTEBOOK_EVERY_S
        self._said: list[str] = []

    def on_end(self, outcome: Outcome) -> None:
        self.draw()

    def draw(self) -> None:
        """Replace what the notebook shows."""
        with self.console.capture() as captured:
            self.console.print(self)
        self._shown_s = self._clock()
        lines = [line.rstrip() for line in captured.get().splitlines()]
        self._show("\n".join([*lines, *self._said]))

    def _take(self, spec: TrialSpec | None = None) -> None:
        super()._take(spec)
        self._draw_in_time()

    def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
        super().on_epoch(spec, record)
        self._draw_in_time()

    def _draw_in_time(self) -> None:
        # An output that changes faster than one can read only fills the notebook's queue.
        if self._clock() - self._shown_s >= NOTEBOOK_EVERY_S:
            self.draw()

    def _say(self, line: str) -> None:
        self._said.append(line)
        self.draw()


@contextmanager
def board() -> Iterator[Board]:
    """The listener for `run_sweep`, drawn while the block runs."""
    from rich.console import Console
    from rich.live import Live

    output = _notebook_output()
    if output is not None:
        yield NotebookBoard(output)
        return
    # On stderr, because stdout is for the leaderboard at the end.
    console = Console(stderr=True)
    listener = Board(console)
    if not console.is_terminal:
        yield listener
        return
    # Twice a second is smooth enough, and costs the driver little.
    with Live(listener, console=console, refresh_per_second=2, vertical_overflow="crop"):
        yield listener


def _notebook_output() -> Any:
    """Shows a text below the running cell, in place of the one before; None = no notebook."""
    # A notebook's kernel has imported it; a program without one must not wait for it.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython in a terminal has no kernel, and prints as other programs do.
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    handle = display({"text/plain": "the sweep starts"}, raw=True, display_id=True)

    def show(text: str) -> None:
        handle.update({"text/plain": text}, raw=True)

    return show
