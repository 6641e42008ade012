"""Tell where a cell stands: its trials, its study, what is left to run, and the word for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from filelock import FileLock, Timeout

from suite.plan.contest import Contest, contests
from suite.plan.plan import Plan, PlannedCell
from suite.plan.proposer import propose
from suite.plan.second_objective import costs
from suite.plan.study import Study, decide
from suite.record.attempts import is_given_up
from suite.record.cells import Cell, Trial, ended, read_cells
from suite.record.folder import Home, TrialFolder
from suite.record.looks import Looks, RunSet, looks_of, read_looks
from suite.record.result import TrialResult
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


@dataclass(slots=True)
class CellState:
    """The trials of one planned cell, and what follows from them.

    Attributes:
        pretrain: The run that must end before the cell begins; where it fails, the cell fails.
        contest: The architectures of which one is confirmed, this cell's among them; None where
            there is only one architecture.
        search: Search trials by number.
        confirm: Confirm runs by learning rate and seed.
        live: Hashes of the trials that this process has handed out.
        given_up: Hashes of the trials that used up their retries.
        set_aside: Confirm runs with a test score whose seeds the sweep no longer names.
        logged: Sets of confirm runs that the cell had when the sweep's seeds changed.
    """

    plan: Plan
    cell: PlannedCell
    pretrain: PretrainState | None = None
    contest: Contest | None = field(default=None, repr=False, compare=False)
    search: dict[int, Trial] = field(default_factory=dict)
    confirm: dict[tuple[float, int], Trial] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    set_aside: list[Trial] = field(default_factory=list)
    logged: Sequence[RunSet] = ()
    _study: Study | None = field(default=None, repr=False, compare=False)

    def add(self, trial: Trial) -> None:
        """Take in a trial, or its newer state."""
        spec = trial.spec
        if spec.phase is Phase.SEARCH:
            self.search[spec.number] = trial
            self._study = None  # it is decided anew when it is asked for
        else:
            # The rate is part of the key: a study that goes on may choose another one, and the runs
            # at the old rate stay.
            self.confirm[spec.learning_rate, spec.seed] = trial

    @property
    def study(self) -> Study:
        """How far the study is: its range and budget, extensions included, and whether it ended."""
        if self._study is None:
            # Trials end in any order, and `decide` expects the order of their numbers.
            in_order = [self.search[number] for number in sorted(self.search)]
            handed_out = Cell(self.cell.arm, self.cell.task.name, search=in_order)
            self._study = decide(handed_out, self.cell.learning_rate, self.plan.config.search)
        return self._study

    @property
    def searched(self) -> list[Trial]:
        """The search trials that count, by number: not those beyond a lowered budget."""
        budget = self.study.budget
        return [self.search[number] for number in sorted(self.search) if number < budget]

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
        """Trials that the cell has in the end, as far as is known now."""
        return self.study.budget - self.study.saved_trials + self.confirm_runs

    def best(self) -> Trial | None:
        """The search trial with the best validation score; the lowest number wins a tie."""
        return Cell(self.cell.arm, self.cell.task.name, search=self.searched).best_search()

    @property
    def best_score(self) -> float | None:
        """Validation score of the best search trial; None before one has a score."""
        best = self.best()
        if best is None or best.result is None:
            return None
        return best.result.score

    @property
    def best_learning_rate(self) -> float | None:
        """Learning rate of the best search trial; None before one has a score."""
        best = self.best()
        if best is None:
            return None
        return best.spec.learning_rate

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
        rate = self.best_learning_rate
        return [self.confirm[key] for key in sorted(self.confirm) if key[0] == rate]

    @property
    def looks(self) -> Looks:
        """The sets of confirm runs that a test score of this cell was read from."""
        tested: dict[float, set[int]] = defaultdict(set)
        for trial in (*self.confirm.values(), *self.set_aside):
            if trial.result is not None and trial.result.score is not None:
                tested[trial.spec.learning_rate].add(trial.spec.seed)
        present = None
        rate = self.best_learning_rate
        seeds = set(self.plan.config.confirm.seeds)
        # A learning rate without a test score of its own is no look.
        if rate is not None and tested[rate] & seeds:
            present = (rate, tuple(sorted(seeds)))
        return looks_of(present, self.logged, tested)

    def as_cell(self) -> Cell:
        """The cell with the trials that count: the search, and all confirm runs of the seeds."""
        confirm = sorted(self.confirm.values(), key=lambda trial: trial.spec.seed)
        return Cell(
            self.cell.arm,
            self.cell.task.name,
            search=self.searched,
            confirm=confirm,
            looks=self.looks,
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
        if self.best() is None:
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
        for trial in self.trials:
            # A live trial is being run, and one that is given up would only fail again.
            held = trial.spec.hash in self.live or trial.spec.hash in self.given_up
            if trial.result is None and not held:
                return trial.spec
        return None

    def next_spec(self) -> TrialSpec | None:
        """The next trial to hand out, or None when the cell has none (for now)."""
        if not self._may_go_on:
            return None
        # A trial on disk comes before a new one: a later driver takes up what an earlier one left.
        return self.handed_out() or self._next_search() or self._next_confirm()

    @property
    def is_due(self) -> bool:
        """Whether `next_spec` has a trial; asked where there is no room to hand one out."""
        if not self._may_go_on:
            return False
        # This asks for the number alone, because a proposal by the sampler costs time.
        if self.handed_out() is not None or self._open_number() is not None:
            return True
        return self._next_confirm() is not None

    @property
    def _may_go_on(self) -> bool:
        if self.pretrain is not None and not self.pretrain.ready:
            return False
        # An open study waits for a trial that this run could not finish.
        return self.search_done or not self.given_up

    def _open_number(self) -> int | None:
        """Number of the next search trial."""
        if self.study.ended is not None:
            return None
        # The first gap, not the count: trials of another definition are left out of `search`.
        for number in range(self.study.budget):
            if number not in self.search:
                return number
        return None

    def _next_search(self) -> TrialSpec | None:
        search = self.plan.config.search
        study = self.study
        number = self._open_number()
        if number is None:
            return None
        round_ = self._round(number)
        finished = []
        running = []
        for n, trial in self.search.items():
            # The trials of a round are proposed at once: that one of them has ended meanwhile must
            # not change what a later driver proposes for the rest.
            if trial.result is None or n in round_:
                # The sampler must know these too, or it proposes the same rate again.
                running.append((n, trial.spec.learning_rate))
            else:
                finished.append((n, trial.spec.learning_rate, trial.feedback))
        learning_rate = propose(
            self.cell.key,
            study.searched,
            sampler=search.sampler,
            seed=search.seed,
            startup_trials=search.startup_trials,
            finished=finished,
            running=running,
            number=number,
            opened=study.opened,
            costs=costs(self.searched, search.second),
        )
        return self.plan.search_spec(self.cell, number, learning_rate)

    def _round(self, number: int) -> range:
        """Numbers of the trials that are proposed together with trial `number`, up to it.

        A round holds as many trials as may train side by side. The quasi-random start and each
        extension begin a new one, because what comes before them is what they build on.
        """
        begin = 0
        startup = self.plan.config.search.startup_trials
        if number >= startup:
            begin = startup
        opened = self.study.opened
        if opened is not None and number >= opened.first:
            begin = opened.first
        lanes = self.plan.lanes(self.cell)
        return range(number - (number - begin) % lanes, number)

    def next_beside(self, spec: TrialSpec) -> TrialSpec | None:
        """A further trial of the same round that may train beside a search trial, or None.

        Args:
            spec: A trial of this cell that is handed out and has not begun, or has done as many
                epochs as it had when it was cut off.
        """
        if spec.phase is not Phase.SEARCH or not self._may_go_on:
            return None
        found = self.handed_out()
        if found is None:
            number = self._open_number()
            # Asked first, because a proposal costs time.
            if number is None or spec.number not in self._round(number):
                return None
            found = self._next_search()
        if found is None or found.phase is not Phase.SEARCH:
            return None
        if spec.number in self._round(found.number):
            return found
        return None

    def _next_confirm(self) -> TrialSpec | None:
        learning_rate = self.best_learning_rate
        if learning_rate is None or not self.search_done or not self.chosen:
            return None
        # The sweep's order of seeds, so that every cell begins with the same ones.
        for seed in self.plan.config.confirm.seeds:
            if (learning_rate, seed) not in self.confirm:
                return self.plan.confirm_spec(self.cell, learning_rate, seed)
        return None

    def _confirm_runs_so_far(self) -> list[Trial]:
        """Confirm runs that exist, in the order of the sweep's seeds."""
        if not self.search_done or not self.chosen:
            return []
        best = self.best()
        if best is None:
            return []
        found = []
        for seed in self.plan.config.confirm.seeds:
            trial = self.confirm.get((best.spec.learning_rate, seed))
            if trial is not None:
                found.append(trial)
        return found


def read_states(plan: Plan, home: Home, *, outcomes: bool = False) -> dict[str, CellState]:
    """The state of every planned cell, from its trial folders, by key in the plan's order.

    Args:
        plan: The sweep.
        home: Where its trials are.
        outcomes: Whether to keep of each result only what other trials depend on.
    """
    found = read_cells(home, plan.config.name)
    return make_states(plan, home, plan.cells, found, outcomes=outcomes)


def make_states(
    plan: Plan,
    home: Home,
    cells: Iterable[PlannedCell],
    found: Mapping[str, Cell],
    *,
    outcomes: bool = False,
) -> dict[str, CellState]:
    """The states of some cells of a plan, by key.

    Args:
        cells: Whole contests: of an architecture contest all cells, or none.
        found: Trials by key of the cell; those that are not of the plan are left out.
        outcomes: The same as for `read_states`.
    """
    retries = plan.config.failures.retries
    pretrains = read_pretrains(plan, home)
    logged = read_looks(home, plan.config.name)
    states: dict[str, CellState] = {}
    for cell in cells:
        # An arm without a pretrain run has no hash, and nothing has the key "".
        state = CellState(plan, cell, pretrains.get(cell.arm.pretrain or ""))
        states[cell.key] = state
        state.logged = logged.get(cell.key, ())
        trials = found.get(cell.key)
        if trials is None:
            continue
        for trial in (*trials.search, *trials.confirm):
            # Such a folder stays on disk: it belongs to a larger budget or an earlier definition.
            if not plan.includes(cell, trial):
                # It was tested all the same, and the row says so.
                if plan.leaves_out(cell, trial):
                    state.set_aside.append(trial)
                continue
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
