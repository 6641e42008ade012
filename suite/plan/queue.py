"""Decide which trial comes next: the sweep's state machine over trial folders, without Ray.

The state is rebuilt from the folders at start. Search trials of a study follow one another, because
a Bayesian search that runs side by side degrades to a random one. A study gets more than one trial
at a time only when there are fewer open cells than slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from suite.plan.admission import Admission
from suite.plan.cell_state import CellState, read_states
from suite.plan.order import CellOrder
from suite.plan.other_sweeps import studies_elsewhere
from suite.plan.plan import Plan
from suite.plan.pretrain_state import PretrainState
from suite.plan.resources import Capacity
from suite.plan.second_objective import unmeasured
from suite.record.attempts import counted
from suite.record.cells import Trial
from suite.record.folder import Home, TrialFolder
from suite.record.result import TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.fence import Fence
from suite.storage.shared_run import SharedRun


class TrialQueue:
    """Hands out trials, after the pretrain runs that their cells wait for.

    Args:
        plan: The sweep.
        home: Where specifications are written at hand-out and results are read.
        slots: Trials at a time, at most.
        capacity: Room in the cluster, which may be set anew at any time; None = for any `slots`
            trials.
        lanes: By arm, how many trials fit side by side in one group; arms that are not named train
            theirs one by one.
        fence: The driver's claim, by which it agrees with other sweeps who trains a pretrain run;
            None = no other driver is at work in the home.

    Attributes:
        states: Every cell by key, live.
        fetch: Function that gets what other hosts wrote of a trial, where each has its own home.
        held_for: Size of a trial that was handed out and found no room because of smaller ones;
            no smaller one is handed out meanwhile.
    """

    def __init__(
        self,
        plan: Plan,
        home: Home,
        *,
        slots: int,
        capacity: Capacity | None = None,
        lanes: Mapping[str, int] | None = None,
        fence: Fence | None = None,
    ) -> None:
        self.plan = plan
        self.home = home
        self.slots = slots
        self.capacity = capacity
        self.held_for = 0
        # Hosts that share one home have nothing to fetch.
        self.fetch: Callable[[TrialFolder], None] = lambda folder: None
        others = studies_elsewhere(plan, home)
        self.states = read_states(plan, home, outcomes=True, others=others)
        self.pretrains: dict[str, PretrainState] = {}
        for state in self.states.values():
            if state.pretrain is not None:
                self.pretrains[state.pretrain.spec.hash] = state.pretrain
        if fence is not None:
            for name, pretrain in self.pretrains.items():
                pretrain.shared = SharedRun(fence, name)
        self._lanes = dict(lanes or {})
        self._alone: set[str] = set()  # hashes of trials that came apart
        # Of the live trials, by hash; a trial that trains beside another one has none of its own.
        self._workers: dict[str, int] = {}
        self._last: str | None = None  # cell of the trial that ended last: its engine is warm
        sizes = {plan.workers(cell) for cell in plan.cells}
        self._smallest = min(sizes, default=1)
        # Where all are of one size, no hand-out has to sort its cells by size.
        self._one_size = len(sizes) < 2
        self._order = CellOrder(self.states)

    @property
    def live(self) -> int:
        """Number of trials that are handed out and have not ended; those side by side are one."""
        return len(self._workers)

    @property
    def waiting(self) -> bool:
        """Whether cells wait for a pretrain run that another sweep of this home runs."""
        return any(pretrain.is_due for pretrain in self.pretrains.values())

    def next(self) -> TrialSpec | None:
        """Hand out a trial, whose specification is on disk by then; None = nothing for now."""
        admission = Admission(self.capacity, self._workers.values(), held_for=self.held_for)
        # If the smallest size that may follow has no room, no cell needs to be asked.
        if self.live >= self.slots or not admission.admits(max(1, self.held_for)):
            return None
        proposal: dict[str, Any] = {}
        spec = self._choose_pretrain(admission)
        if spec is None:
            chosen = self._choose(admission)
            if chosen is None:
                return None
            spec, proposal = chosen
        self._hand_out(spec, proposal)
        self._workers[spec.hash] = spec.world_size
        return spec

    def beside(self, leader: TrialSpec) -> list[TrialSpec]:
        """Hand out the trials that train beside one that `next` has just handed out.

        They are of its study and its round, and as far as it is.
        """
        found: list[TrialSpec] = []
        most = self._lanes.get(leader.arm.key, 1)
        if leader.phase is not Phase.SEARCH or most == 1 or self._trains_alone(leader):
            return found
        state = self.states[leader.cell]
        done = len(self.home.trial(leader).epochs())
        while len(found) + 1 < most:
            proposed = state.next_beside(leader)
            if proposed is None:
                break
            spec, proposal = proposed
            if self._trains_alone(spec) or len(self.home.trial(spec).epochs()) != done:
                break
            self._hand_out(spec, proposal)
            found.append(spec)
        return found

    def _trains_alone(self, spec: TrialSpec) -> bool:
        """Whether a trial came apart or failed: beside others nobody knows whose fault it was."""
        return spec.hash in self._alone or bool(counted(self.home.trial(spec)))

    def apart(self, specs: Sequence[TrialSpec], *, for_good: bool) -> None:
        """Take back trials that could not go on side by side; each is handed out again, alone.

        Args:
            specs: Those of one group that have not ended.
            for_good: Whether further trials of their arm would meet the same.
        """
        for spec in specs:
            if for_good:
                self._lanes.pop(spec.arm.key, None)
            self._alone.add(spec.hash)
            self._workers.pop(spec.hash, None)
            state = self.states[spec.cell]
            state.live.discard(spec.hash)
            self._last = spec.cell
            self._order.ended(state)

    def _hand_out(self, spec: TrialSpec, proposal: Mapping[str, Any]) -> None:
        folder = self.home.trial(spec)
        # A study goes on from what its trials say that it began from, so this comes first.
        if proposal:
            folder.write_proposal(proposal)
        # It is on disk before it runs, so the next driver finds it after a crash.
        folder.write_spec(spec)
        # A pretrain run has become live by its claim.
        if spec.phase is not Phase.PRETRAIN:
            state = self.states[spec.cell]
            state.add(Trial(folder, spec, None))
            state.live.add(spec.hash)
            self._order.handed_out(state)

    def resized(self, spec: TrialSpec, workers: int) -> None:
        """Note that a live trial runs, or will run, with another number of workers than planned."""
        self._workers[spec.hash] = workers

    def ended(self, spec: TrialSpec) -> TrialResult | None:
        """Take in the end of a trial: its result, or (no result file) the end of its retries."""
        self._workers.pop(spec.hash, None)
        folder = self.home.trial(spec)
        # The result may lie on another host.
        self.fetch(folder)
        if spec.phase is Phase.PRETRAIN:
            return self.pretrains[spec.hash].end()
        result = folder.result()
        state = self.states[spec.cell]
        state.live.discard(spec.hash)
        state.add(Trial(folder, spec, result).outcome())
        if result is None:
            state.given_up.add(spec.hash)
        self._last = spec.cell
        self._order.ended(state)
        return result

    def unmeasured(self, spec: TrialSpec | None = None) -> str | None:
        """Why a search with two objectives cannot go on: a trial did not measure the second one.

        Args:
            spec: Look only at the cell of this trial; None = look at all cells.
        """
        states = list(self.states.values())
        if spec is not None:
            # Other phases have no second objective.
            if spec.phase is not Phase.SEARCH:
                return None
            states = [self.states[spec.cell]]
        for state in states:
            why = unmeasured(state.searched, self.plan.config.search.second)
            if why is not None:
                return why
        return None

    def peers(self, spec: TrialSpec) -> list[str]:
        """Hashes of the earlier trials of a trial's study, in number order.

        A confirm or pretrain run has none.
        """
        if spec.phase is not Phase.SEARCH:
            return []
        trials = self.states[spec.cell].searching.in_order
        return [trial.spec.hash for trial in trials if trial.spec.number < spec.number]

    def _choose_pretrain(self, admission: Admission) -> TrialSpec | None:
        due = [pretrain for pretrain in self.pretrains.values() if pretrain.is_due]
        # `Admission` expects larger ones to be asked for first.
        due.sort(key=lambda pretrain: admission.sort_key(pretrain.spec.world_size))
        for pretrain in due:
            workers = pretrain.spec.world_size
            if not admission.admits(workers):
                admission.wait(workers)
            # Where another sweep of the home holds the run, the next one is tried.
            elif pretrain.claim(self.fetch):
                return pretrain.spec
        return None

    def _choose(self, admission: Admission) -> tuple[TrialSpec, dict[str, Any]] | None:
        """The largest trial that may start, first of a cell without a live one, then of the others.

        Trials of the same size come in the order of `CellOrder`.
        """
        slots = self.slots
        if self.capacity is not None:
            # No more trials run at a time than there is room for ones of the smallest size.
            slots = min(slots, max(1, self.capacity.slots(self._smallest)))
        idle, busy = self._order.ask(last=self._last, live=self.live, slots=slots)
        for state in (*self._by_size(idle, admission), *self._by_size(busy, admission)):
            workers = self.plan.workers(state.cell)
            if admission.admits(workers):
                found = state.next_spec()
                if found is not None:
                    return found
                self._order.has_no_trial(state)
            # Nothing is smaller than the smallest, so it holds nothing back. A cell with a live
            # trial gets on without more room.
            elif workers > self._smallest and not state.live and state.is_due:
                admission.wait(workers)
        return None

    def _by_size(self, states: list[CellState], admission: Admission) -> list[CellState]:
        if self._one_size:
            return states
        return sorted(states, key=lambda state: admission.sort_key(self.plan.workers(state.cell)))
