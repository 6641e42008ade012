"""Decide how far a study is, and whether it goes on: a pure function of the study's trials.

Stage 0 is the sweep's budget. When a stage has used its budget up, the edge guard looks at both
ends of the range. Where the curve may still rise at an end, the end itself is tried. Where it does
rise there, the next stage begins: the range is a decade longer at that end, and there are some
trials more, the first of them in the new decade. Only the last stage may end early, by the stop
rule: while the range can still grow, nothing is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from suite.config.space import End, LearningRateRange
from suite.config.sweep import SearchConfig
from suite.plan.curve_model import STEP, CurveModel
from suite.plan.proposer import Opened
from suite.record.cells import Trial, ended

Fit = Callable[[LearningRateRange, Sequence[Trial]], CurveModel | None]
"""Models the curve of some trials over a range; None where none of them has a score."""


@dataclass(frozen=True, slots=True)
class Study:
    """Where a study stands.

    Attributes:
        searched: The range, extensions included.
        budget: Number of trials that it gets, extensions included.
        extensions: Decades added.
        opened: What the last extension added; None without one.
        at_end: Number of a trial that goes to an end of the range, and that end; None without one.
        ended: `budget` where it is used up, `stopped` where the stop rule ended the study; None
            while it goes on.
        trials: Number of trials that it has; those beyond the budget do not count.
        edge: The end of the range at which the curve may still rise; None where it does not,
            without a score, or while the study goes on.
        room: What the model expects the study to gain yet at most, in points; None where the stop
            rule was not asked.
    """

    searched: LearningRateRange
    budget: int
    extensions: int = 0
    opened: Opened | None = None
    at_end: tuple[int, End] | None = None
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


def decide(
    trials: Sequence[Trial],
    planned: LearningRateRange,
    config: SearchConfig,
    fit: Fit,
    *,
    choices: int = 0,
) -> Study:
    """The study as its trials so far leave it.

    Args:
        trials: All search trials that were handed out, in number order.
        planned: The range as the sweep has it.
        config: The budget and its rules, the same for every arm.
        fit: Makes the model of the curve.
        choices: Among how many architectures and batch sizes it chooses; 0 = nothing to choose.
    """
    study = Study(planned, planned.trials(config.trials, choices))
    # All stages are gone through from the first, so the outcome depends on the trials alone and not
    # on when somebody asks.
    longer = _next_stage(study, trials, config, fit)
    while longer is not None:
        study = longer
        longer = _next_stage(study, trials, config, fit)
    counted = within(trials, study.budget)
    study = replace(study, trials=len(counted))
    if _is_used_up(study.budget, trials):
        edge = _rising_end(study.searched, ended(counted), config, fit)
        return replace(study, ended="budget", edge=edge)
    return _stopped_early(study, counted, config, fit)


def within(trials: Sequence[Trial], budget: int) -> list[Trial]:
    """The trials that a budget counts."""
    return [trial for trial in trials if trial.spec.number < budget]


def best_tried(trials: Sequence[Trial]) -> Trial | None:
    """The trial with the best validation score; the lowest number wins a tie."""
    best: Trial | None = None
    highest = -math.inf
    # In number order, so that only a better one replaces the first.
    for trial in sorted(trials, key=lambda trial: trial.spec.number):
        utility = trial.utility
        if utility is not None and (best is None or utility > highest):
            best = trial
            highest = utility
    return best


def _next_stage(
    study: Study, trials: Sequence[Trial], config: SearchConfig, fit: Fit
) -> Study | None:
    """The study with one more trial, at an end of its range, or with a range longer by a decade.

    It is None where the study has not used its budget up, its curve falls towards both ends, or the
    range cannot grow.
    """
    guard = config.edge_guard.extensions
    if study.extensions == guard or not _is_used_up(study.budget, trials):
        return None
    counted = ended(within(trials, study.budget))
    end = _rising_end(study.searched, counted, config, fit)
    if end is None:
        return None
    longer = study.searched.extended(end)
    # The range has reached the end of what is allowed.
    if longer == study.searched:
        return None
    if not _was_tried(study.searched, end, counted):
        # A stage has one such trial: a range whose ends both rise has learnt nothing.
        if study.at_end is not None and study.at_end[0] == study.budget - 1:
            return None
        return replace(study, budget=study.budget + 1, at_end=(study.budget, end))
    # Numbers begin at 0, so the old budget is the number of the first trial after it.
    if end == "low":
        opened = Opened(study.budget, end, longer.low, study.searched.low)
    else:
        opened = Opened(study.budget, end, study.searched.high, longer.high)
    return Study(longer, study.budget + config.extra_trials, study.extensions + 1, opened)


def _rising_end(
    searched: LearningRateRange, trials: Sequence[Trial], config: SearchConfig, fit: Fit
) -> End | None:
    """The end of the range at which the best may lie, or beyond which it may.

    Where the end was tried the model decides, or the best trial where that is what is confirmed.
    Where it was not, the best trial is a reason too, if none was tried further out: nobody has seen
    the curve fall there.
    """
    best = best_tried(trials)
    if searched.fixed or best is None:
        return None
    rates = [trial.spec.learning_rate for trial in trials]
    if config.choose == "best":
        at_end = searched.end_of(best.spec.learning_rate, rates)
        if at_end is not None:
            return at_end
    model = fit(searched, trials)
    if model is None:
        return None
    rising = model.rises_to()
    if rising is not None:
        return rising
    ends: tuple[End, End] = ("high", "low")
    for end in ends:
        outermost = max(rates) if end == "high" else min(rates)
        if best.spec.learning_rate == outermost and not _was_tried(searched, end, trials):
            return end
    return None


def lies_at_end(
    searched: LearningRateRange, rate: float, *, ends: Sequence[End] = ("low", "high")
) -> bool:
    """Whether a learning rate lies at an end of the range, within a step of the model's grid."""
    places = {"low": math.log10(searched.low), "high": math.log10(searched.high)}
    return any(abs(math.log10(rate) - places[end]) <= STEP for end in ends)


def _was_tried(searched: LearningRateRange, end: End, trials: Sequence[Trial]) -> bool:
    """Whether a trial lies at an end of the range."""
    return any(lies_at_end(searched, trial.spec.learning_rate, ends=[end]) for trial in trials)


def _stopped_early(study: Study, counted: Sequence[Trial], config: SearchConfig, fit: Fit) -> Study:
    """The study as the stop rule leaves it, where it may be asked."""
    rule = config.stop
    if rule is None or not _may_stop(study, counted, config):
        return study
    model = fit(study.searched, counted)
    # The model is asked last, because it costs time.
    if model is None:
        return study
    edge = _rising_end(study.searched, counted, config, fit)
    if edge is not None and _can_grow(study, edge, config):
        return study
    room = model.gain_left()
    if room < rule.tolerance:
        return replace(study, room=room, ended="stopped", edge=edge)
    return replace(study, room=room)


def _may_stop(study: Study, counted: Sequence[Trial], config: SearchConfig) -> bool:
    """Whether the stop rule is asked at all."""
    done = ended(counted)
    least = config.least_trials
    if study.opened is not None:
        # The first trial in the new decade is what the range was extended for.
        least = max(least, study.opened.first + 1)
    # Without a score there is nothing from which to judge.
    if len(done) < least or best_tried(done) is None:
        return False
    # A trial that is on its way may change the answer, so it would depend on who asks when.
    return [trial.spec.number for trial in done] == list(range(study.trials))


def _can_grow(study: Study, edge: End, config: SearchConfig) -> bool:
    if study.extensions >= config.edge_guard.extensions:
        return False
    return study.searched.extended(edge) != study.searched


def _is_used_up(budget: int, trials: Sequence[Trial]) -> bool:
    done = {trial.spec.number for trial in trials if trial.result is not None}
    open_ones = {trial.spec.number for trial in trials if trial.result is None}
    return all(number in done and number not in open_ones for number in range(budget))
