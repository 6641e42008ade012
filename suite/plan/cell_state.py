"""Tell where a cell stands: its trials, its study, what is left to run, and the word for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from suite.plan.contest import Contest, contests
from suite.plan.hints import link, studies_of
from suite.plan.plan import Plan, PlannedCell
from suite.plan.pretrain_state import PretrainState, read_pretrains
from suite.plan.study import Study
from suite.plan.study_state import Chosen, StudyState
from suite.record.attempts import is_given_up
from suite.record.cells import Cell, Trial, ended, read_cells
from suite.record.folder import Home
from suite.record.looks import Looks, RunSet, Setting, looks_of, read_looks
from suite.record.spec import Phase, TrialSpec


class CellStatus(StrEnum):
    """Where a cell stands; every command that shows it uses these words."""

    SEARCHING = "searching"
    """Its study has not ended."""
    WAITING = "waiting"
    """Its study has ended, another study of its architecture contest has not."""
    PARTIAL = "partial"
    """Confirm runs are left to run."""
    DONE = "done"
    """All confirm runs have a score."""
    NOT_CHOSEN = "not chosen"
    """Another architecture won, so there is nothing to confirm."""
    FAILED = "failed"
    """Nothing is left to run, yet a confirm run lacks a score."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to run."""
        return self in (CellStatus.DONE, CellStatus.NOT_CHOSEN, CellStatus.FAILED)

    @property
    def is_complete(self) -> bool:
        """Whether the cell has all that the sweep wants of it."""
        return self in (CellStatus.DONE, CellStatus.NOT_CHOSEN)


@dataclass(slots=True)
class CellState:
    """The trials of one planned cell, and what follows from them.

    Attributes:
        pretrain: The run that must end before the cell begins; where it fails, the cell fails.
        contest: The architectures of which one is confirmed, this cell's among them; None where
            there is only one architecture.
        searching: Its study, which the cells of other architectures may share.
        confirm: Confirm runs by learning rate, batch size and seed.
        set_aside: Confirm runs with a test score whose seeds the sweep no longer names.
        unplanned: How many of its search trials have ended and are none of this plan's.
        logged: Sets of confirm runs that the cell had when the sweep's seeds changed.
    """

    plan: Plan
    cell: PlannedCell
    searching: StudyState
    pretrain: PretrainState | None = None
    contest: Contest | None = field(default=None, repr=False, compare=False)
    confirm: dict[tuple[float, int, int], Trial] = field(default_factory=dict)
    set_aside: list[Trial] = field(default_factory=list)
    unplanned: int = 0
    logged: Sequence[RunSet] = ()

    def add(self, trial: Trial) -> None:
        """Take in a trial, or its newer state."""
        spec = trial.spec
        if spec.phase is Phase.SEARCH:
            self.searching.add(trial)
        else:
            # What was chosen is part of the key: a study that goes on may choose otherwise, and the
            # runs of the earlier choice stay.
            key = spec.learning_rate, spec.training.batch_size, spec.seed
            self.confirm[key] = trial

    @property
    def live(self) -> set[str]:
        """Hashes of the trials of its study's cells that this process has handed out."""
        return self.searching.live

    @property
    def given_up(self) -> set[str]:
        """Hashes of the trials of its study's cells that used up their retries."""
        return self.searching.given_up

    @property
    def leads(self) -> bool:
        """Whether it is the first cell of its study, which hands out the trials of all."""
        return self.searching.cells[0].key == self.cell.key

    @property
    def study(self) -> Study:
        """How far the study is: its range and budget, extensions included, and whether it ended."""
        return self.searching.study

    @property
    def search(self) -> dict[int, Trial]:
        """Its own search trials by number."""
        found = {}
        for (number, arm), trial in self.searching.trials.items():
            if arm == self.cell.arm.key:
                found[number] = trial
        return found

    @property
    def searched(self) -> list[Trial]:
        """Its own search trials that count, by number: not those beyond a lowered budget."""
        key = self.cell.arm.key
        return [trial for trial in self.searching.counted if trial.spec.arm.key == key]

    @property
    def left_out(self) -> int:
        """Its search trials that have ended and count in no figure.

        They lie beyond today's budget or range, or come from an earlier definition.
        """
        return self.unplanned + len(ended(self.search.values())) - len(ended(self.searched))

    @property
    def trials(self) -> list[Trial]:
        """All trials of the plan: the search, then the confirm runs of the best learning rate."""
        return self.searched + self._confirm_runs_so_far()

    @property
    def search_done(self) -> bool:
        return self.study.ended is not None

    @property
    def chosen(self) -> bool | None:
        """Whether this architecture won its contest, or has none; None while that is open."""
        if self.contest is None:
            return True
        winner = self.contest.winner()
        if winner is None:
            return None
        return winner == self.cell.arm.key

    @property
    def won(self) -> bool | None:
        """Whether this architecture won its contest; None without a contest, or before its end."""
        if self.contest is None:
            return None
        return self.chosen

    @property
    def confirm_runs(self) -> int:
        """Confirm runs of this cell; of an open contest the first architecture counts them."""
        if self.chosen is None:
            return self.plan.confirm_runs(self.cell)
        if not self.chosen:
            return 0
        return len(self.plan.config.confirm.seeds)

    @property
    def total(self) -> int:
        """Trials that the cell has in the end, as far as is known now.

        The first cell of a study counts those whose architecture is not known yet.
        """
        open_trials = self.searching.open_trials if self.leads else 0
        return len(self.searched) + open_trials + self.confirm_runs

    def best(self) -> Trial | None:
        """The search trial with the best validation score; the lowest number wins a tie."""
        return self.searching.best(self.cell)

    @property
    def quality(self) -> float | None:
        """Utility that the search expects of the cell, in points; None before it has a score."""
        return self.searching.quality(self.cell)

    @property
    def best_score(self) -> float | None:
        """Validation score of the best search trial; None before one has a score."""
        best = self.best()
        if best is None or best.result is None:
            return None
        return best.result.score

    @property
    def chosen_setting(self) -> Chosen | None:
        """What is confirmed; None before a trial has a score.

        Runs that exist are kept: a study that goes on moves its choice a little each time, and new
        runs for a difference that nobody can measure would cost time and a further test look.
        """
        best = self.searching.chosen(self.cell)
        if best is None:
            return None
        begun: dict[Chosen, float] = {}
        for (rate, batch_size, _), trial in self.confirm.items():
            setting = Chosen(rate, batch_size)
            if trial.result is None:
                begun.setdefault(setting, 0.0)
            # Where every seed has failed there is nothing to keep.
            elif trial.result.score is not None:
                begun[setting] = max(begun.get(setting, 0.0), trial.result.started_at)
        return self.searching.nearly(self.cell, best, begun)

    @property
    def confirmed(self) -> list[Trial]:
        """Confirm runs of the best learning rate that have ended."""
        return ended(self._confirm_runs_so_far())

    @property
    def at_best(self) -> list[Trial]:
        """Confirm runs at the best learning rate by seed, ended or not.

        Unlike `confirmed`, it keeps the runs of a study that has gone on since, after its budget
        was raised.
        """
        chosen = self.chosen_setting
        return [self.confirm[key] for key in sorted(self.confirm) if key[:2] == chosen]

    @property
    def looks(self) -> Looks:
        """The looks at this cell, and at other architectures that won its contest before."""
        looks = self.own_looks
        # An architecture that has not won stands in no row, and nothing was chosen by its scores.
        if not self.won:
            return looks
        assert self.contest is not None
        rivals = 0
        for other in self.contest.cells:
            if other.cell.task.name == self.cell.task.name and other.cell.key != self.cell.key:
                rivals += other.own_looks.count
        return replace(looks, rivals=rivals)

    @property
    def own_looks(self) -> Looks:
        """The sets of confirm runs that a test score of this cell was read from."""
        tested: dict[Setting, set[int]] = defaultdict(set)
        for trial in (*self.confirm.values(), *self.set_aside):
            if trial.result is not None and trial.result.score is not None:
                spec = trial.spec
                tested[spec.learning_rate, spec.training.batch_size].add(spec.seed)
        present = None
        chosen = self.chosen_setting
        seeds = set(self.plan.config.confirm.seeds)
        # A setting without a test score of its own is no look.
        if chosen is not None and tested[chosen] & seeds:
            present = (chosen, tuple(sorted(seeds)))
        return looks_of(present, self.logged, tested)

    def as_cell(self) -> Cell:
        """The cell with the trials that count: the search, and all confirm runs of the seeds."""
        confirm = sorted(self.confirm.values(), key=lambda trial: trial.spec.seed)
        learning_rate, batch_size = self.chosen_setting or (None, None)
        return Cell(
            self.cell.arm,
            self.cell.task.name,
            search=self.searched,
            confirm=confirm,
            looks=self.looks,
            learning_rate=learning_rate,
            batch_size=batch_size,
            seeds=len(self.plan.config.confirm.seeds),
        )

    @property
    def status(self) -> CellStatus:
        """The word for where the cell stands."""
        # This comes first: without the weights the search never begins.
        if self.pretrain is not None and self.pretrain.failed:
            return CellStatus.FAILED
        if not self.search_done:
            return CellStatus.SEARCHING
        if self.chosen is None:
            return CellStatus.WAITING
        if not self.chosen:
            return CellStatus.NOT_CHOSEN
        # The study is over and no trial has a score, so there is no rate to confirm.
        if self.chosen_setting is None:
            return CellStatus.FAILED
        confirmed = self.confirmed
        # While runs are left the cell is partial, even where one that ended has failed.
        if len(confirmed) < len(self.plan.config.confirm.seeds):
            return CellStatus.PARTIAL
        for trial in confirmed:
            if trial.result is None or not trial.result.status.has_score:
                return CellStatus.FAILED
        return CellStatus.DONE

    def handed_out(self) -> TrialSpec | None:
        """A trial that an earlier driver handed out and nobody is running."""
        # Its study's, not its own alone: the proposals of a study build on one another, whatever
        # architecture they have.
        for trial in (*self.searching.counted, *self._confirm_runs_so_far()):
            # A live trial is being run, and one that is given up would only fail again.
            held = trial.spec.hash in self.live or trial.spec.hash in self.given_up
            if trial.result is None and not held:
                return trial.spec
        return None

    def next_spec(self) -> tuple[TrialSpec, dict[str, Any]] | None:
        """The next trial to hand out and where its learning rate comes from, or None for now.

        The first cell of a study hands out the search trials of all its cells.
        """
        if not self._may_go_on:
            return None
        # A trial on disk comes before a new one: a later driver takes up what an earlier one left.
        found = self.handed_out()
        if found is not None:
            return found, {}
        if self.leads:
            proposed = self.searching.next()
            if proposed is not None:
                return proposed
        confirm = self._next_confirm()
        if confirm is None:
            return None
        return confirm, {}

    @property
    def is_due(self) -> bool:
        """Whether `next_spec` has a trial; asked where there is no room to hand one out."""
        if not self._may_go_on:
            return False
        # This asks for the number alone, because a proposal costs time.
        open_number = self.searching.open_number if self.leads else None
        if self.handed_out() is not None or open_number is not None:
            return True
        return self._next_confirm() is not None

    @property
    def _may_go_on(self) -> bool:
        if self.pretrain is not None and not self.pretrain.ready:
            return False
        if self.search_done:
            return True
        # An open study waits for a search trial that this run could not finish.
        return not any(trial.spec.hash in self.given_up for trial in self.searching.counted)

    def next_beside(self, spec: TrialSpec) -> tuple[TrialSpec, dict[str, Any]] | None:
        """A further trial of the same round that may train beside a search trial, or None.

        Args:
            spec: A trial of this cell that is handed out and has not begun, or has done as many
                epochs as it had when it was cut off.
        """
        if spec.phase is not Phase.SEARCH or not self._may_go_on:
            return None
        found = self.handed_out()
        if found is not None:
            if found.phase is Phase.SEARCH and self._is_beside(spec, found):
                return found, {}
            return None
        number = self.searching.open_number
        # Asked first, because a proposal costs time.
        if number is None or spec.number not in self.searching.round(number):
            return None
        proposed = self.searching.next()
        if proposed is None or not self._is_beside(spec, proposed[0]):
            return None
        return proposed

    def _is_beside(self, spec: TrialSpec, other: TrialSpec) -> bool:
        if spec.engine_key != other.engine_key:
            return False
        return spec.number in self.searching.round(other.number)

    def _next_confirm(self) -> TrialSpec | None:
        # Asked in this order: fitting the model of an open study would be in vain.
        if not self.search_done or not self.chosen:
            return None
        chosen = self.chosen_setting
        if chosen is None:
            return None
        # The sweep's order of seeds, so that every cell begins with the same ones.
        for seed in self.plan.config.confirm.seeds:
            if (*chosen, seed) not in self.confirm:
                return self.plan.confirm_spec(
                    self.cell, chosen.learning_rate, seed, batch_size=chosen.batch_size
                )
        return None

    def _confirm_runs_so_far(self) -> list[Trial]:
        """Confirm runs that exist, in the order of the sweep's seeds."""
        if not self.search_done or not self.chosen:
            return []
        chosen = self.chosen_setting
        if chosen is None:
            return []
        found = []
        for seed in self.plan.config.confirm.seeds:
            trial = self.confirm.get((*chosen, seed))
            if trial is not None:
                found.append(trial)
        return found


def all_over(states: Mapping[str, CellState]) -> bool:
    """Whether nothing is left to run of a sweep."""
    return all(state.status.is_over for state in states.values())


def read_states(
    plan: Plan, home: Home, *, outcomes: bool = False, others: Iterable[StudyState] = ()
) -> dict[str, CellState]:
    """The state of every planned cell, from its trial folders, by key in the plan's order.

    Args:
        plan: The sweep.
        home: Where its trials are.
        outcomes: Whether to keep of each result only what other trials depend on.
        others: Studies of other sweeps from which its studies may begin as well.
    """
    found = read_cells(home, plan.config.name)
    return make_states(plan, home, plan.cells, found, outcomes=outcomes, others=others)


def make_states(
    plan: Plan,
    home: Home,
    cells: Iterable[PlannedCell],
    found: Mapping[str, Cell],
    *,
    outcomes: bool = False,
    others: Iterable[StudyState] = (),
) -> dict[str, CellState]:
    """The states of some cells of a plan, by key.

    Args:
        cells: Whole contests: of an architecture contest all cells, or none.
        found: Trials by key of the cell; those that are not of the plan are left out.
        outcomes, others: The same as for `read_states`.
    """
    retries = plan.config.failures.retries
    pretrains = read_pretrains(plan, home)
    logged = read_looks(home, plan.config.name)
    states: dict[str, CellState] = {}
    cells = list(cells)
    studies = studies_of(plan, cells)
    link(studies.values(), others)
    for cell in cells:
        # An arm without a pretrain run has no hash, and nothing has the key "".
        pretrain = pretrains.get(cell.arm.pretrain or "")
        state = CellState(plan, cell, studies[cell.key], pretrain)
        states[cell.key] = state
        state.logged = logged.get(cell.key, ())
        trials = found.get(cell.key)
        if trials is None:
            continue
        for trial in (*trials.search, *trials.confirm):
            # Such a folder stays on disk: it belongs to a larger budget or an earlier definition.
            if not plan.includes(cell, trial):
                # Its test score was seen all the same, and the row says so.
                if plan.leaves_out(cell, trial):
                    state.set_aside.append(trial)
                elif trial.spec.phase is Phase.SEARCH and trial.result is not None:
                    state.unplanned += 1
                continue
            # Files that were moved are the same data, and only the plan knows where they lie now.
            if trial.spec.task != cell.task:
                moved = trial.spec.model_copy(update={"task": cell.task})
                trial = replace(trial, spec=moved)
            # A driver remembers every trial for as long as it runs, so it keeps the outcome alone.
            if outcomes:
                trial = trial.outcome()
            state.add(trial)
            # A trial that ended needs no retry, however often its machine failed before.
            if trial.result is None and is_given_up(trial.folder, retries=retries):
                state.given_up.add(trial.spec.hash)
    # A contest needs the states of all its cells, so this comes last.
    for contest in contests(states.values()).values():
        for member in contest.cells:
            states[member.cell.key].contest = contest
    return states
