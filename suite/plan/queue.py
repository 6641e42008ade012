"""Which trial comes next: the sweep's state machine over trial folders, without Ray.

State is rebuilt from the folders at start. Search trials of a study follow one another, because a Bayesian search that
runs side by side degrades to a random one; only when there are fewer open cells than slots does a study get more than one.
"""

from __future__ import annotations

from collections.abc import Callable

from suite.plan.admission import Turn
from suite.plan.cell_state import CellState, read_states
from suite.plan.order import Order
from suite.plan.plan import Plan
from suite.plan.resources import Capacity
from suite.plan.second_objective import unmeasured
from suite.record.cells import Trial
from suite.record.folder import Home, TrialFolder
from suite.record.result import TrialResult
from suite.record.spec import Phase, TrialSpec


class Schedule:
    """Hands out trials, one cell at a time per slot; before them the pretrain runs that cells wait for.

    Args:
        plan: The sweep.
        home: Where specifications are written at hand-out and results are read.
        slots: Trials at a time, at most.
        capacity: Room in the cluster, which may be set anew at any time; None = for any `slots` trials.

    Attributes:
        fetch: Gets what other hosts wrote of a trial, where each has a home of its own.
        held_for: Size of a trial that was handed out and found no room, because of others that are smaller: none of these follows.
    """

    def __init__(
        self, plan: Plan, home: Home, *, slots: int, capacity: Capacity | None = None
    ) -> None:
        self.plan, self.home, self.slots, self.capacity = plan, home, slots, capacity
        self.held_for = 0
        self.fetch: Callable[[TrialFolder], None] = lambda folder: None
        self.states = read_states(plan, home, outcomes=True)
        self.pretrains = {
            state.pretrain.spec.hash: state.pretrain
            for state in self.states.values()
            if state.pretrain is not None
        }
        self._sizes: dict[str, int] = {}  # workers of the live trials, by hash
        self._last: str | None = None  # cell of the trial that ended last: its engine is warm
        sizes = {plan.workers(cell) for cell in plan.cells}
        self._smallest, self._one_size = min(sizes, default=1), len(sizes) < 2
        self._order = Order(self.states)

    @property
    def live(self) -> int:
        return len(self._sizes)

    @property
    def waiting(self) -> bool:
        """Whether cells wait for a pretrain run that another sweep of this home is at."""
        return any(pretrain.is_due for pretrain in self.pretrains.values())

    def next(self) -> TrialSpec | None:
        """Hand out a trial: its specification is on disk when this returns. None = nothing for now."""
        turn = Turn(self.capacity, self._sizes.values(), held_for=self.held_for)
        if self.live >= self.slots or not turn.admits(max(1, self.held_for)):
            return None
        spec = self._choose_pretrain(turn) or self._choose(turn)
        if spec is not None:
            folder = self.home.trial(spec)
            folder.write_spec(spec)
            self._sizes[spec.hash] = spec.world_size
            if spec.phase is not Phase.PRETRAIN:
                state = self.states[spec.cell]
                state.add(Trial(folder, spec, None))
                state.live.add(spec.hash)
                self._order.handed_out(state)
        return spec

    def resized(self, spec: TrialSpec, workers: int) -> None:
        """A live trial runs, or is to run, with another number of workers than planned."""
        self._sizes[spec.hash] = workers

    def ended(self, spec: TrialSpec) -> TrialResult | None:
        """Take in the end of a trial: its result, or (no result file) the end of its retries."""
        self._sizes.pop(spec.hash, None)
        self.fetch(self.home.trial(spec))
        if spec.phase is Phase.PRETRAIN:
            return self.pretrains[spec.hash].end()
        folder = self.home.trial(spec)
        result, state = folder.result(), self.states[spec.cell]
        state.live.discard(spec.hash)
        state.add(Trial(folder, spec, result).outcome())
        if result is None:
            state.given_up.add(spec.hash)
        self._last = spec.cell
        self._order.ended(state)
        return result

    def unmeasured(self, spec: TrialSpec | None = None) -> str | None:
        """Why a search with two objectives cannot go on: the second was not measured in a trial (of this one's cell, or of any)."""
        states = (
            self.states.values()
            if spec is None
            else [self.states[spec.cell]]
            if spec.phase is Phase.SEARCH
            else []
        )
        return next(
            (
                why
                for s in states
                if (why := unmeasured(s.searched, self.plan.config.search.second))
            ),
            None,
        )

    def peers(self, spec: TrialSpec) -> list[str]:
        """Hashes of the earlier trials of a trial's study, in number order; none of a confirm or pretrain run."""
        if spec.phase is not Phase.SEARCH:
            return []
        search = self.states[spec.cell].search
        return [search[n].spec.hash for n in sorted(search) if n < spec.number]

    def _choose_pretrain(self, turn: Turn) -> TrialSpec | None:
        for pretrain in sorted(
            (p for p in self.pretrains.values() if p.is_due),
            key=lambda p: turn.order(p.spec.world_size),
        ):
            if not turn.admits(pretrain.spec.world_size):
                turn.wait(pretrain.spec.world_size)
            elif pretrain.claim():
                return pretrain.spec
        return None

    def _choose(self, turn: Turn) -> TrialSpec | None:
        """The largest trial that may start, of a cell that has none; last, of one that has. Among equals as `Order` says."""
        slots = (
            self.slots
            if self.capacity is None
            else min(self.slots, max(1, self.capacity.slots(self._smallest)))
        )
        idle, busy = self._order.ask(last=self._last, live=self.live, slots=slots)
        for state in (*self._by_size(idle, turn), *self._by_size(busy, turn)):
            workers = self.plan.workers(state.cell)
            if turn.admits(workers):
                spec = state.next_spec()
                if spec is not None:
                    return spec
                self._order.has_nothing(state)
            elif workers > self._smallest and not state.live and state.is_due:
                turn.wait(workers)
        return None

    def _by_size(self, states: list[CellState], turn: Turn) -> list[CellState]:
        return (
            states
            if self._one_size
            else sorted(states, key=lambda state: turn.order(self.plan.workers(state.cell)))
        )
