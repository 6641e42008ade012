"""Decide how far a study is, and whether it goes on: a pure function of the study's trials.

Stage 0 is the sweep's budget. When a stage has used its budget up and the best learning rate lies
at an end of the range, the edge guard begins the next stage: the range is a decade longer at that
end, and there are some trials more, the first of them in the new decade. Only the last stage may
end early, by the stop rule: while the best lies at an end that can still grow, nothing is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from suite.config.hashing import derive_seed
from suite.config.space import End, LearningRateRange
from suite.config.sweep import SearchConfig
from suite.plan.proposer import Opened
from suite.plan.stop_rule import room_left
from suite.record.cells import Cell, Trial, ended


@dataclass(frozen=True, slots=True)
class Study:
    """Where a study stands.

    Attributes:
        searched: The range, extensions included.
        budget: Number of trials that it gets, extensions included.
        extensions: Decades added.
        opened: What the last extension added; None without one.
        ended: `budget` where it is used up, `stopped` where the stop rule ended the study; None
            while it goes on.
        trials: Number of trials that it has; those beyond the budget do not count.
        edge: The end of the range at which the best lies; None inside, or without a score.
        room: What the stop rule expected the study to gain yet, in points; None where it was not
            asked.
    """

    searched: LearningRateRange
    budget: int
    extensions: int = 0
    opened: Opened | None = None
    ended: Literal["budget", "stopped"] | None = None
    trials: int = 0
    edge: End | None = None
    room: float | None = None

    @property
    def saved_trials(self) -> int:
        """Trials of the budget that the stop rule saved."""
        if self.ended != "stopped":
            return 0
        return self.budget - self.trials


def decide(cell: Cell, planned: LearningRateRange, config: SearchConfig) -> Study:
    """The study of a cell as its trials so far leave it.

    Args:
        cell: The cell with all search trials that were handed out, in number order.
        planned: The range as the sweep has it.
        config: The budget and its rules, the same for every arm.
    """
    trials = {trial.spec.number: trial for trial in cell.search}
    study = Study(planned, planned.trials(config.trials))
    # All stages are gone through from the first, so the outcome depends on the trials alone and not
    # on when somebody asks.
    longer = _next_stage(study, cell, trials, config)
    while longer is not None:
        study = longer
        longer = _next_stage(study, cell, trials, config)
    counted = _within_budget(cell, trials, study.budget)
    study = replace(study, trials=len(counted.search), edge=counted.edge(study.searched))
    if _is_used_up(study, trials):
        return replace(study, ended="budget")
    return _stopped_early(study, counted, config)


def _next_stage(
    study: Study, cell: Cell, trials: Mapping[int, Trial], config: SearchConfig
) -> Study | None:
    """The study with a range longer by a decade.

    It is None where the study has not used its budget up, its best lies inside, or the range cannot
    grow.
    """
    if study.extensions == config.edge_guard.extensions or not _is_used_up(study, trials):
        return None
    end = _within_budget(cell, trials, study.budget).edge(study.searched)
    if end is None:
        return None
    longer = study.searched.extended(end)
    # The range has reached the end of what is allowed.
    if longer == study.searched:
        return None
    # Numbers begin at 0, so the old budget is the number of the first trial after it.
    if end == "low":
        opened = Opened(study.budget, end, longer.low, study.searched.low)
    else:
        opened = Opened(study.budget, end, study.searched.high, longer.high)
    return Study(longer, study.budget + config.extra_trials, study.extensions + 1, opened)


def _stopped_early(study: Study, counted: Cell, config: SearchConfig) -> Study:
    """The study as the stop rule leaves it, where it may be asked."""
    rule = config.stop
    if rule is None or not _may_stop(study, counted, config):
        return study
    trials = ended(counted.search)
    found = []
    for trial in trials:
        found.append((trial.spec.number, trial.spec.learning_rate, trial.feedback))
    seed = derive_seed(config.seed, counted.key, "stop")
    room = room_left(study.searched, tuple(found), seed=seed) / trials[0].spec.task.point
    if room < rule.tolerance:
        return replace(study, room=room, ended="stopped")
    return replace(study, room=room)


def _may_stop(study: Study, counted: Cell, config: SearchConfig) -> bool:
    """Whether the stop rule is asked at all."""
    trials = ended(counted.search)
    least = config.least_trials
    if study.opened is not None:
        # The first trial in the new decade is what the range was extended for.
        least = max(least, study.opened.first + 1)
    # Without a score there is nothing from which to judge.
    if len(trials) < least or counted.best_search() is None:
        return False
    # A trial that is on its way may change the answer, so it would depend on who asks when.
    if [trial.spec.number for trial in trials] != list(range(study.trials)):
        return False
    return study.edge is None or not _can_grow(study, study.edge, config)


def _can_grow(study: Study, edge: End, config: SearchConfig) -> bool:
    if study.extensions >= config.edge_guard.extensions:
        return False
    return study.searched.extended(edge) != study.searched


def _is_used_up(study: Study, trials: Mapping[int, Trial]) -> bool:
    for number in range(study.budget):
        if number not in trials or trials[number].result is None:
            return False
    return True


def _within_budget(cell: Cell, trials: Mapping[int, Trial], budget: int) -> Cell:
    """The cell with the search trials that a budget counts."""
    counted = [trials[number] for number in sorted(trials) if number < budget]
    return Cell(cell.arm, cell.task, search=counted)
