"""How far a study is, and whether it goes on: edge guard and stop rule as a pure function of the study's trials.

Stage 0 is the sweep's budget. When a stage has used its budget up and the best learning rate lies at an end of the range,
the next stage has a range that is a decade longer at that end, and some trials more; its first lies in the new decade.
Only the last stage may end early, by the stop rule: while the best lies at an end that can still grow, nothing is saved.
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
from suite.record.cells import Cell, Trial


@dataclass(frozen=True, slots=True)
class Study:
    """Where a study stands.

    Attributes:
        searched: The range, extensions included.
        budget: Trials it is to have, extensions included.
        extensions: Decades added.
        opened: What the last extension added; None without one.
        ended: Its budget is used up, or the stop rule ended it; None while it goes on.
        trials: That it has; without those beyond the budget.
        edge: The end of the range at which the best lies; None inside, or without a score.
        room: What the stop rule expected a study to gain yet, in points; None where it was not asked.
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
        return self.budget - self.trials if self.ended == "stopped" else 0


def decide(cell: Cell, planned: LearningRateRange, config: SearchConfig) -> Study:
    """The study of a cell as its trials so far leave it.

    Args:
        cell: With all search trials that were handed out, in number order.
        planned: The range as the sweep has it.
        config: The budget and its rules, the same for every arm.
    """
    trials = {t.spec.number: t for t in cell.search}
    study = Study(planned, planned.trials(config.trials))
    while (longer := _next_stage(study, cell, trials, config)) is not None:
        study = longer
    counted = _of_stage(cell, trials, study.budget)
    study = replace(study, trials=len(counted.search), edge=counted.edge(study.searched))
    if _used_up(study, trials):
        return replace(study, ended="budget")
    return _stopped_early(study, counted, config)


def _next_stage(
    study: Study, cell: Cell, trials: Mapping[int, Trial], config: SearchConfig
) -> Study | None:
    """The study with a decade more; None where it has not used its budget up, or its best lies inside, or no room is left."""
    if study.extensions == config.edge_guard.extensions or not _used_up(study, trials):
        return None
    end = _of_stage(cell, trials, study.budget).edge(study.searched)
    if end is None or (longer := study.searched.extended(end)) == study.searched:
        return None
    low, high = (
        (longer.low, study.searched.low) if end == "low" else (study.searched.high, longer.high)
    )
    opened = Opened(study.budget, end, low, high)
    return Study(longer, study.budget + config.extra_trials, study.extensions + 1, opened)


def _stopped_early(study: Study, counted: Cell, config: SearchConfig) -> Study:
    """Ask the stop rule, unless a trial is on its way, there are too few, or the best lies at an end that will be extended."""
    rule, ended = config.stop, [t for t in counted.search if t.result is not None]
    first_in_new_decade = study.opened.first + 1 if study.opened is not None else 0
    too_few = (
        len(ended) < max(config.least_trials, first_in_new_decade) or counted.best_search() is None
    )
    in_order = [t.spec.number for t in ended] == list(range(study.trials))
    if (
        rule is None
        or too_few
        or not in_order
        or (study.edge is not None and _can_grow(study, config))
    ):
        return study
    task = ended[0].spec.task
    found = [(t.spec.number, t.spec.learning_rate, t.feedback) for t in ended]
    seed = derive_seed(config.seed, counted.key, "stop")
    room = room_left(study.searched, tuple(found), seed=seed) / task.point
    return replace(study, room=room, ended="stopped" if room < rule.tolerance else None)


def _can_grow(study: Study, config: SearchConfig) -> bool:
    assert study.edge is not None
    return (
        study.extensions < config.edge_guard.extensions
        and study.searched.extended(study.edge) != study.searched
    )


def _used_up(study: Study, trials: Mapping[int, Trial]) -> bool:
    return all(n in trials and trials[n].result is not None for n in range(study.budget))


def _of_stage(cell: Cell, trials: Mapping[int, Trial], budget: int) -> Cell:
    return Cell(cell.arm, cell.task, search=[trials[n] for n in sorted(trials) if n < budget])
