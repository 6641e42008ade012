"""Where a cell stands: its trials, its study, and what is left to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from filelock import FileLock, Timeout

from suite.plan.contest import Contest, contests
from suite.plan.plan import Plan, PlannedCell
from suite.plan.proposer import propose
from suite.plan.second_objective import costs
from suite.plan.study import Study, decide
from suite.record.attempts import is_given_up
from suite.record.cells import Cell, Trial, read_cells
from suite.record.folder import Home, TrialFolder
from suite.record.result import TrialResult
from suite.record.spec import Phase, TrialSpec


class Progress(StrEnum):
    """Where a cell stands.

    `WAITING`: its study has ended, others of its architecture contest have not. `NOT_CHOSEN`: another architecture won, there is
    nothing to confirm. `FAILED`: nothing is left to run, yet a confirm run lacks a score.
    """

    OPEN = "open"
    WAITING = "waiting"
    DONE = "done"
    NOT_CHOSEN = "not chosen"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to run."""
        return self not in (Progress.OPEN, Progress.WAITING)

    @property
    def is_complete(self) -> bool:
        """Whether the cell has all that the sweep wants of it."""
        return self in (Progress.DONE, Progress.NOT_CHOSEN)


@dataclass(slots=True)
class PretrainState:
    """A pretrain run, which this or another sweep of the home may be running.

    Attributes:
        live: Handed out here.
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
        """Whether there are weights to go on from."""
        return self.result is not None and self.result.status.has_score

    @property
    def failed(self) -> bool:
        """Whether there never will be."""
        return self.result is not None and not self.result.status.has_score

    @property
    def is_due(self) -> bool:
        return self.result is None and not self.live and not self.given_up

    def claim(self) -> bool:
        """Take the run for this process, unless it is finished or another sweep of the home is at it."""
        self._lock = self._lock or FileLock(
            self.folder.path.with_suffix(".lock"), thread_local=False
        )
        self.folder.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        self.result = self.folder.result()
        self.live = self.result is None
        if not self.live:
            self._lock.release()
        return self.live

    def end(self) -> TrialResult | None:
        """Take in the end of the run: its result, or the end of its retries."""
        self.result, self.live = self.folder.result(), False
        self.given_up = self.result is None
        if self._lock is not None:
            self._lock.release()
        return self.result


@dataclass(slots=True)
class CellState:
    """The trials of one planned cell by their place in it; `given_up` holds those that used up their retries.

    Attributes:
        pretrain: The run that must end before the cell begins; its failure is the cell's.
        contest: The architectures of which one is confirmed, this cell's among them; None where it is settled.
    """

    plan: Plan
    cell: PlannedCell
    pretrain: PretrainState | None = None
    contest: Contest | None = field(default=None, repr=False, compare=False)
    search: dict[int, Trial] = field(default_factory=dict)
    confirm: dict[tuple[float, int], Trial] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    _study: Study | None = field(default=None, repr=False, compare=False)

    def add(self, trial: Trial) -> None:
        """Take in a trial, or its newer state."""
        spec = trial.spec
        if spec.phase is Phase.SEARCH:
            self.search[spec.number], self._study = trial, None
        else:
            self.confirm[spec.learning_rate, spec.seed] = trial

    @property
    def study(self) -> Study:
        """How far the study is: its range and budget with all extensions, and whether it has ended."""
        if self._study is None:
            handed_out = Cell(
                self.cell.arm,
                self.cell.task.name,
                search=[self.search[n] for n in sorted(self.search)],
            )
            self._study = decide(handed_out, self.cell.learning_rate, self.plan.config.search)
        return self._study

    @property
    def searched(self) -> list[Trial]:
        """The search trials that count, by number: not those beyond a budget that was lowered."""
        return [self.search[n] for n in sorted(self.search) if n < self.study.budget]

    @property
    def trials(self) -> list[Trial]:
        """All of the plan's trials that exist: search by number, then the confirm runs of the best learning rate by seed."""
        return self.searched + [t for t in self._confirm_trials() if t is not None]

    @property
    def search_done(self) -> bool:
        return self.study.ended is not None

    @property
    def chosen(self) -> bool | None:
        """Whether this architecture is confirmed: it won its contest, or has none. None while that is open."""
        if self.contest is None:
            return True
        winner = self.contest.winner()
        return None if winner is None else winner == self.cell.arm.key

    @property
    def confirm_runs(self) -> int:
        """Confirm runs of this cell; while its contest is open they are counted as the first architecture's."""
        if self.chosen is None:
            return self.plan.confirm_runs(self.cell)
        return len(self.plan.config.confirm.seeds) if self.chosen else 0

    @property
    def total(self) -> int:
        """Trials that the cell has in the end, as far as is known now."""
        return self.study.budget - self.study.saved_trials + self.confirm_runs

    def best(self) -> Trial | None:
        """The search trial with the best validation score; the lowest number wins a tie."""
        return Cell(self.cell.arm, self.cell.task.name, search=self.searched).best_search()

    @property
    def confirmed(self) -> list[Trial]:
        """Finished confirm runs of the best learning rate."""
        return [t for t in self._confirm_trials() if t is not None and t.result is not None]

    @property
    def progress(self) -> Progress:
        if self.pretrain is not None and self.pretrain.failed:
            return Progress.FAILED
        if not self.search_done:
            return Progress.OPEN
        if not self.chosen:
            return Progress.WAITING if self.chosen is None else Progress.NOT_CHOSEN
        confirmed = self.confirmed
        if self.best() is None:
            return Progress.FAILED
        if len(confirmed) < len(self.plan.config.confirm.seeds):
            return Progress.OPEN
        return (
            Progress.DONE
            if all(t.result is not None and t.result.status.has_score for t in confirmed)
            else Progress.FAILED
        )

    def handed_out(self) -> TrialSpec | None:
        """A trial that an earlier driver handed out and nobody is running."""
        return next((t.spec for t in self.trials if self._is_free(t)), None)

    def next_spec(self) -> TrialSpec | None:
        """The next trial to hand out, or None when the cell has none (for now)."""
        return (
            self.handed_out() or self._next_search() or self._next_confirm()
            if self._may_go_on
            else None
        )

    @property
    def is_due(self) -> bool:
        """Whether `next_spec` has a trial; asked where there is no room for it, because to propose one takes time."""
        waits = (
            self.handed_out() is not None
            or self._open_number() is not None
            or self._next_confirm() is not None
        )
        return waits if self._may_go_on else False

    @property
    def _may_go_on(self) -> bool:
        if self.pretrain is not None and not self.pretrain.ready:
            return False
        return (
            self.search_done or not self.given_up
        )  # an open study waits for a trial that this run could not finish

    def _is_free(self, trial: Trial) -> bool:
        return trial.result is None and trial.spec.hash not in self.live | self.given_up

    def _open_number(self) -> int | None:
        """Of the next search trial."""
        return (
            None
            if self.study.ended is not None
            else next((n for n in range(self.study.budget) if n not in self.search), None)
        )

    def _next_search(self) -> TrialSpec | None:
        search, study, number = self.plan.config.search, self.study, self._open_number()
        if number is None:
            return None
        learning_rate = propose(
            self.cell.key,
            study.searched,
            sampler=search.sampler,
            seed=search.seed,
            startup_trials=search.startup_trials,
            finished=[
                (n, t.spec.learning_rate, t.feedback)
                for n, t in self.search.items()
                if t.result is not None
            ],
            running=[(n, t.spec.learning_rate) for n, t in self.search.items() if t.result is None],
            number=number,
            opened=study.opened,
            costs=costs(self.searched, search.second),
        )
        return self.plan.search_spec(self.cell, number, learning_rate)

    def _next_confirm(self) -> TrialSpec | None:
        best = self.best()
        if best is None or not self.search_done or not self.chosen:
            return None
        learning_rate = best.spec.learning_rate
        seeds = [
            s for s in self.plan.config.confirm.seeds if (learning_rate, s) not in self.confirm
        ]
        return self.plan.confirm_spec(self.cell, learning_rate, seeds[0]) if seeds else None

    def _confirm_trials(self) -> list[Trial | None]:
        best = self.best() if self.search_done and self.chosen else None
        if best is None:
            return []
        return [
            self.confirm.get((best.spec.learning_rate, seed))
            for seed in self.plan.config.confirm.seeds
        ]


def read_states(plan: Plan, home: Home, *, outcomes: bool = False) -> dict[str, CellState]:
    """The state of every planned cell, from its trial folders, in the plan's order; of results whole, or `outcomes` alone."""
    found = read_cells(home, plan.config.name)
    pretrains = read_pretrains(plan, home)
    states = {
        cell.key: CellState(plan, cell, pretrains.get(cell.arm.pretrain or ""))
        for cell in plan.cells
    }
    for key, state in states.items():
        if key in found:
            for trial in (*found[key].search, *found[key].confirm):
                if plan.includes(state.cell, trial):
                    state.add(trial.outcome() if outcomes else trial)
                    if trial.result is None and is_given_up(
                        trial.folder, retries=plan.config.failures.retries
                    ):
                        state.given_up.add(trial.spec.hash)
    for contest in contests(states.values()).values():
        for member in contest.cells:
            states[member.cell.key].contest = contest
    return states


def read_pretrains(plan: Plan, home: Home) -> dict[str, PretrainState]:
    """The state of every pretrain run of a plan, by hash."""
    folders = {spec.hash: home.trial(spec) for spec in plan.pretrains}
    states = {
        spec.hash: PretrainState(folders[spec.hash], spec, folders[spec.hash].result())
        for spec in plan.pretrains
    }
    for state in states.values():
        state.given_up = state.result is None and is_given_up(
            state.folder, retries=plan.config.failures.retries
        )
    return states
