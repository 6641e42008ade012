"""The search of a method on a task: its trials, the model of its curves, and what it tries next.

A study belongs to one cell, or to several: the architectures of a method share one, so that every
method gets the same number of trials, however many architectures it has. Batch sizes are searched
in the same study.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from suite.config.space import LearningRateRange
from suite.plan.curve_model import Candidate, CurveModel, Hint, Observation
from suite.plan.optuna_trials import Finished, Running
from suite.plan.plan import Plan, PlannedCell
from suite.plan.proposer import clip, even_point, propose
from suite.plan.second_objective import costs
from suite.plan.study import Study, best_tried, decide, within
from suite.record.cells import Trial, ended
from suite.record.spec import TrialSpec

WORTH_TESTING = 0.2
"""Points by which another choice must promise more than one whose confirm runs exist."""


class Chosen(NamedTuple):
    """What a study found best for one of its cells; a `suite.record.looks.Setting`."""

    learning_rate: float
    batch_size: int


@dataclass(slots=True)
class StudyState:
    """The trials of a study, and what follows from them.

    Attributes:
        cells: Its cells, the first architecture first.
        trials: By number and key of the arm. A number is one trial's, unless the home was made by a
            sweep with a study for each architecture.
        live: Hashes of the trials of its cells that this process has handed out.
        given_up: Hashes of the trials that used up their retries.
        neighbours: Gives the keys and curves of the studies from which this one may begin.
    """

    plan: Plan
    cells: tuple[PlannedCell, ...]
    trials: dict[tuple[int, str], Trial] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    neighbours: Callable[[], Sequence[tuple[str, Hint]]] = field(default=list, repr=False)
    _study: Study | None = field(default=None, repr=False)
    _models: dict[Any, CurveModel | None] = field(default_factory=dict, repr=False)
    _begun: tuple[str, dict[str, Any]] = field(default_factory=lambda: ("", {}), repr=False)

    @property
    def key(self) -> str:
        """The key of its first cell."""
        return self.cells[0].key

    @property
    def arms(self) -> list[str]:
        """The keys of its arms: one for each architecture."""
        return [cell.arm.key for cell in self.cells]

    @property
    def point(self) -> float:
        """How much utility one point is."""
        return self.cells[0].task.point

    def add(self, trial: Trial) -> None:
        """Take in a trial, or its newer state."""
        self.trials[trial.spec.number, trial.spec.arm.key] = trial
        # Both are made anew when they are asked for.
        self._study = None
        self._models.clear()

    @property
    def in_order(self) -> list[Trial]:
        """All trials by number."""
        return [self.trials[key] for key in sorted(self.trials)]

    @property
    def study(self) -> Study:
        """How far the study is: its range and budget, extensions included, and whether it ended."""
        if self._study is None:
            planned = self.cells[0].learning_rate
            self._study = decide(
                self.in_order,
                planned,
                self.plan.config.search,
                self.fit,
                choices=self.plan.choices_among(self.cells[0], len(self.cells)),
            )
        return self._study

    @property
    def counted(self) -> list[Trial]:
        """The trials that count, by number: not those beyond a lowered budget."""
        return within(self.in_order, self.study.budget)

    def best(self, cell: PlannedCell) -> Trial | None:
        """The trial of a cell with the best validation score; the lowest number wins a tie."""
        own = [trial for trial in self.counted if trial.spec.arm.key == cell.arm.key]
        return best_tried(own)

    def chosen(self, cell: PlannedCell) -> Chosen | None:
        """What is confirmed of a cell; None before a trial has a score.

        By default that is where the mean of the model's curve is highest, which need not be a rate
        that was tried: the best score among noisy ones is often the luckiest.
        """
        # Nothing was to be searched.
        if self.study.budget == 0:
            return Chosen(self.study.searched.low, self.plan.config.batch_sizes[0])
        model = self.model
        # A fixed rate has no curve.
        if self.plan.config.search.choose == "best" or model is None:
            best = self.best(cell)
            if best is None:
                return None
            return Chosen(best.spec.learning_rate, best.spec.training.batch_size)
        found: tuple[Candidate, float] | None = None
        for levels in self._scored_levels(cell):
            candidate = model.best(levels)
            if found is None or candidate[1] > found[1]:
                found = candidate
        if found is None:
            return None
        return Chosen(found[0].rate, self._batch_size(found[0].levels))

    def nearly(self, cell: PlannedCell, best: Chosen, begun: Mapping[Chosen, float]) -> Chosen:
        """The choice that a cell's confirm runs have made already, if it may stay, or the best one.

        It stays where it was made from the trials that the study has now, whatever another version
        of the suite would choose from them; and where the study has gone on, if it is nearly as
        good. Without a model nobody can tell what is nearly as good.

        Args:
            cell: One of the study's.
            best: What the study chooses now.
            begun: When the last confirm run of a choice began, seconds since 1970; 0 = not known.
        """
        if best in begun or not begun or self.plan.config.search.choose == "best":
            return best
        model = self.model
        searched = self.study.searched
        # A range that was made smaller again counts no trial beyond it.
        others = [c for c in begun if searched.low <= c.learning_rate <= searched.high]
        if model is None or not others:
            return best
        latest = max(others, key=lambda choice: begun[choice])
        ends = [trial.result.finished_at for trial in self.counted if trial.result is not None]
        if begun[latest] >= max(ends, default=math.inf):
            return latest
        places = []
        for choice in (best, *others):
            for levels in self._levels_of(cell):
                if self._batch_size(levels) == choice.batch_size:
                    places.append(Candidate(choice.learning_rate, levels))
        found = model.at(places)
        highest = max(found[1:])
        if found[0] - highest <= WORTH_TESTING:
            return others[found.index(highest, 1) - 1]
        return best

    def quality(self, cell: PlannedCell) -> float | None:
        """Utility expected of a cell, in points; None where none of its own trials has a score."""
        best = self.best(cell)
        if best is None or best.utility is None:
            return None
        model = self.model
        if self.plan.config.search.choose == "best" or model is None:
            return best.utility / self.point
        return max(model.best(levels)[1] for levels in self._scored_levels(cell))

    @property
    def model(self) -> CurveModel | None:
        """The model of all trials that have ended; None before one has a score."""
        return self.fit(self.study.searched, ended(self.counted))

    def fit(self, searched: LearningRateRange, trials: Sequence[Trial]) -> CurveModel | None:
        """The model of some trials over a range; None where none of them has a score."""
        found = ended(trials)
        if all(trial.feedback is None for trial in found):
            return None
        return self._fit(searched, found, ())

    def _fit(
        self, searched: LearningRateRange, done: Sequence[Trial], pending: Sequence[Trial]
    ) -> CurveModel | None:
        if searched.fixed:
            return None
        of_done = [trial.spec.hash for trial in done]
        key = (searched, tuple(of_done), tuple(trial.spec.hash for trial in pending))
        if key not in self._models:
            observed = []
            for trial in done:
                utility = trial.feedback
                if utility is not None:
                    utility /= self.point
                observed.append(Observation(self._candidate(trial.spec), utility))
            self._models[key] = CurveModel(
                searched.low,
                searched.high,
                observed,
                pending=[self._candidate(trial.spec) for trial in pending],
                levels=self._all_levels(),
                hint=self.hint,
            )
        return self._models[key]

    @property
    def hint(self) -> Hint | None:
        """What the study began from."""
        told = self._began_from()
        if not told:
            return None
        return Hint(tuple(told["log_rates"]), tuple(told["values"]))

    def _began_from(self) -> dict[str, Any]:
        """What the study began from, as its trials recorded it; empty where it began by itself.

        Every trial of the study has the same record, because somebody may remove the folder of one.
        """
        first = next(iter(self.in_order), None)
        if first is None:
            return {}
        # The record never changes, and it is asked for at every proposal.
        if self._begun[0] != first.spec.hash:
            self._begun = (first.spec.hash, _whole(first.folder.proposal().get("hint")))
        return self._begun[1]

    # Levels: the places of an architecture and of a batch size, of those that have a choice.

    def _all_levels(self) -> list[tuple[int, ...]]:
        factors = []
        if len(self.cells) > 1:
            factors.append(range(len(self.cells)))
        if len(self.plan.config.batch_sizes) > 1:
            factors.append(range(len(self.plan.config.batch_sizes)))
        return list(product(*factors))

    def _in_turn(self, number: int) -> tuple[int, ...]:
        """The choice whose turn it is: another architecture each time, and another batch size."""
        everything = self._all_levels()
        sizes = len(self.plan.config.batch_sizes)
        arms = len(everything) // sizes
        times, arm = divmod(number % len(everything), arms)
        return everything[arm * sizes + (times + arm) % sizes]

    def _levels_of(self, cell: PlannedCell) -> list[tuple[int, ...]]:
        if len(self.cells) == 1:
            return self._all_levels()
        place = self.cells.index(cell)
        return [levels for levels in self._all_levels() if levels[0] == place]

    def _scored_levels(self, cell: PlannedCell) -> list[tuple[int, ...]]:
        """The choices of a cell that have a score: what was never seen to train is not chosen."""
        scored = {self._levels(t.spec) for t in self.counted if t.utility is not None}
        return [levels for levels in self._levels_of(cell) if levels in scored]

    def _levels(self, spec: TrialSpec) -> tuple[int, ...]:
        levels = []
        if len(self.cells) > 1:
            levels.append(self.arms.index(spec.arm.key))
        if len(self.plan.config.batch_sizes) > 1:
            levels.append(self.plan.config.batch_sizes.index(spec.training.batch_size))
        return tuple(levels)

    def _candidate(self, spec: TrialSpec) -> Candidate:
        return Candidate(spec.learning_rate, self._levels(spec))

    def _cell(self, levels: tuple[int, ...]) -> PlannedCell:
        if len(self.cells) == 1:
            return self.cells[0]
        return self.cells[levels[0]]

    def _batch_size(self, levels: tuple[int, ...]) -> int:
        if len(self.plan.config.batch_sizes) == 1:
            return self.plan.config.batch_sizes[0]
        return self.plan.config.batch_sizes[levels[-1]]

    # What comes next.

    @property
    def open_number(self) -> int | None:
        """Number of the next trial; None where the study has none."""
        if self.study.ended is not None:
            return None
        # The first gap, not the count: trials of another definition are left out.
        taken = {number for number, _ in self.trials}
        for number in range(self.study.budget):
            if number not in taken:
                return number
        return None

    @property
    def open_trials(self) -> int:
        """Trials of the budget that are still to be handed out, as far as is known now."""
        if self.study.ended is not None:
            return 0
        taken = {number for number, _ in self.trials if number < self.study.budget}
        return self.study.budget - len(taken)

    def round(self, number: int) -> range:
        """Numbers of the trials that are proposed together with trial `number`, up to it.

        A round holds as many trials as may train side by side. The even start and each extension
        begin a new one, because what comes before them is what they build on.
        """
        lanes = self.plan.lanes(self.cells[0])
        return range(number - (number - self._begin(number)) % lanes, number)

    def _begin(self, number: int) -> int:
        """Number of the trial from which the rounds are counted that lead to a trial."""
        begin = 0
        startup = self.plan.config.search.startup_trials
        if number >= startup and self.hint is None:
            begin = startup
        for first in self._new_begins():
            if number >= first:
                begin = max(begin, first)
        return begin

    def _new_begins(self) -> list[int]:
        begins = []
        if self.study.at_end is not None:
            begins.append(self.study.at_end[0])
        if self.study.opened is not None:
            begins.append(self.study.opened.first)
        return begins

    def next(self) -> tuple[TrialSpec, dict[str, Any]] | None:
        """The next trial and where its learning rate comes from; None where there is none."""
        number = self.open_number
        if number is None:
            return None
        told = self._began_from()
        if number == 0 and not self.trials:
            told = self._best_of_neighbours()
        # Records of earlier versions have no rate; without it the trial is proposed as any other.
        if number == 0 and "rate" in told:
            rate = clip(told["rate"], self.study.searched)
            first = Candidate(rate, self._all_levels()[0])
            return self._spec(0, first), {"from": "hint", "hint": told}
        candidate, source = self._propose(number)
        proposal: dict[str, Any] = {"from": source}
        if told:
            proposal["hint"] = told
        return self._spec(number, candidate), proposal

    def _spec(self, number: int, candidate: Candidate) -> TrialSpec:
        return self.plan.search_spec(
            self._cell(candidate.levels),
            number,
            candidate.rate,
            batch_size=self._batch_size(candidate.levels),
        )

    def _best_of_neighbours(self) -> dict[str, Any]:
        """What finished studies say about the curve, and where they have the best; or nothing.

        It is recorded with the trials, so that a later driver goes on from the same.
        """
        search = self.plan.config.search
        searched = self.study.searched
        if not search.transfer or not search.by_curve or searched.fixed:
            return {}
        curves = self.neighbours()
        if not curves:
            return {}
        hint = _mean_curve(searched, [curve for _, curve in curves])
        best = int(np.argmax(hint.values))
        return {
            "studies": [key for key, _ in curves],
            "rate": clip(10.0 ** hint.log_rates[best], searched),
            "log_rates": [round(x, 6) for x in hint.log_rates],
            "values": [round(y, 4) for y in hint.values],
        }

    def _propose(self, number: int) -> tuple[Candidate, str]:
        """A candidate for a trial, and what it follows."""
        search = self.plan.config.search
        study = self.study
        levels = self._levels_for(number)
        together = self.round(number)
        done = []
        pending = []
        for trial in self.in_order:
            # A gap is a folder that was removed: what came after it knew the trial that is missing.
            if trial.spec.number > number:
                continue
            # The trials of a round are proposed at once: that one of them has ended meanwhile must
            # not change what a later driver proposes for the rest.
            if trial.result is None or trial.spec.number in together:
                pending.append(trial)
            else:
                done.append(trial)
        if study.at_end is not None and number == study.at_end[0]:
            end = study.at_end[1]
            rate = study.searched.low if end == "low" else study.searched.high
            return Candidate(rate, self._best_levels()), "end"
        # The new part of the range has no trial yet, so its middle is tried first.
        if study.opened is not None and number == study.opened.first:
            rate = clip(study.opened.at(0.5), study.searched)
            return Candidate(rate, self._best_levels()), "extension"
        has_score = any(trial.feedback is not None for trial in done)
        # A hint says something before there is a score.
        informed = self.hint is not None or (has_score and number >= search.startup_trials)
        if search.by_curve and informed:
            model = self._fit(study.searched, done, pending)
            if model is not None:
                return model.next(levels=levels), "curve"
        own = levels
        if own is None:
            own = self._in_turn(number)
        if search.by_curve:
            tried = set()
            for trial in self.in_order:
                if self._levels(trial.spec) == own:
                    tried.add(trial.spec.learning_rate)
            return Candidate(even_point(study.searched, number, tried), own), "start"
        return Candidate(self._ask_optuna(number, own, done, pending), own), search.sampler

    def _levels_for(self, number: int) -> tuple[int, ...] | None:
        """The choice that a trial must have; None where the model may choose."""
        everything = self._all_levels()
        if len(everything) == 1:
            return everything[0]
        search = self.plan.config.search
        # At the start they take turns, so that each is tried on each task. With a fixed rate a
        # second trial of a choice would repeat the first, so they always do.
        if number < search.startup_trials or self.study.searched.fixed:
            return self._in_turn(number)
        together = self.round(number)
        # What trains side by side has one architecture and one batch size.
        for trial in self.in_order:
            if trial.spec.number in together and trial.spec.number >= search.startup_trials:
                return self._levels(trial.spec)
        if search.by_curve:
            return None
        return self._in_turn(self._turn(number))

    def _turn(self, number: int) -> int:
        """The number of a trial, where each round of lanes counts as one.

        Rounds of four would otherwise begin at the same of two choices every time.
        """
        begin = self._begin(number)
        return begin + (number - begin) // self.plan.lanes(self.cells[0])

    def _best_levels(self) -> tuple[int, ...]:
        model = self.model
        if model is None:
            return self._all_levels()[0]
        return model.best()[0].levels

    def _place_in_grid(self, number: int, levels: tuple[int, ...]) -> int:
        """How far the grid of a choice has come; an extension begins a new part of it."""
        opened = self.study.opened
        first = 0
        if opened is not None and number >= opened.first:
            first = opened.first
        numbers = [t.spec.number for t in self.in_order if self._levels(t.spec) == levels]
        return first + sum(first <= other < number for other in numbers)

    def _ask_optuna(
        self,
        number: int,
        levels: tuple[int, ...],
        done: Iterable[Trial],
        pending: Iterable[Trial],
    ) -> float:
        """A learning rate by one of Optuna's samplers, from the trials with the same choice."""
        search = self.plan.config.search
        finished: list[Finished] = []
        running: list[Running] = []
        same = []
        for trial in done:
            if self._levels(trial.spec) == levels:
                finished.append((trial.spec.number, trial.spec.learning_rate, trial.feedback))
                same.append(trial)
        for trial in pending:
            if self._levels(trial.spec) == levels:
                running.append((trial.spec.number, trial.spec.learning_rate))
        return propose(
            self.key,
            self.study.searched,
            sampler=search.sampler,
            seed=search.seed,
            startup_trials=search.startup_trials,
            finished=finished,
            running=running,
            number=self._place_in_grid(number, levels) if search.sampler == "grid" else number,
            opened=self.study.opened,
            costs=costs(same, search.second),
        )


def _whole(told: object) -> dict[str, Any]:
    """A record of what a study began from; empty where it is damaged, as where there is none."""
    if not isinstance(told, dict):
        return {}
    rates = told.get("log_rates")
    values = told.get("values")
    if not isinstance(rates, list) or not isinstance(values, list):
        return {}
    if not rates or len(rates) != len(values):
        return {}
    for number in (*rates, *values, told.get("rate", 0.0)):
        # Neither NaN nor infinity is below, nor an integer that no float can hold.
        if not isinstance(number, float | int) or not abs(number) < 1e100:
            return {}
    return told


def _mean_curve(searched: LearningRateRange, curves: Sequence[Hint]) -> Hint:
    """The mean of several curves over a range; beyond its own range a curve goes on level."""
    low = np.log10(searched.low)
    high = np.log10(searched.high)
    places = np.linspace(low, high, 71)
    columns = [np.interp(places, curve.log_rates, curve.values) for curve in curves]
    values = [fmean(float(column[n]) for column in columns) for n in range(len(places))]
    top = max(values)
    return Hint(tuple(map(float, places)), tuple(value - top for value in values))
