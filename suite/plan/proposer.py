"""Propose the next learning rate of a study, as a pure function of what was tried.

A sampler is made anew at every call from (seed, study, trial number), so that a killed and
resumed sweep proposes what an uninterrupted one would have. The suite's own sampler, `gp`, is
`suite.plan.curve_model`; what is here are the points that follow no model, and Optuna's samplers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from suite.config.hashing import derive_seed
from suite.config.space import End, LearningRateRange, rounded
from suite.config.sweep import Sampler
from suite.plan.optuna_trials import (
    NAME,
    Finished,
    Running,
    as_trials,
    distribution_of,
    quiet,
    rates_of,
)

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

MAX_REDRAWS = 64
"""Only a range of a few representable rates can use all of these up."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The part of a range that an extension added, from `low` to `high`, at its `end`.

    `first` is the number of the first trial after the extension.
    """

    first: int
    end: End
    low: float
    high: float

    def at(self, fraction: float) -> float:
        """A learning rate, from the old end (0) to the new one (1), on the log scale."""
        inward = fraction
        if self.end == "low":
            inward = 1.0 - fraction
        return math.exp(math.log(self.low) + inward * math.log(self.high / self.low))


def propose(
    study_key: str,
    lr_range: LearningRateRange,
    *,
    sampler: Sampler,
    seed: int,
    startup_trials: int,
    finished: Sequence[Finished],
    running: Sequence[Running],
    number: int,
    opened: Opened | None = None,
    costs: Mapping[int, float] | None = None,
) -> float:
    """Ask Optuna for the learning rate of trial `number` of a study, rounded to four digits.

    The first `startup_trials` lie evenly over the range on the log scale; the sampler follows. A
    trial without a score (diverged, out of memory, failed) counts as the worst score seen, so that
    the sampler learns to stay away; while no trial has a score there is nothing to learn from, and
    the even points go on. Running trials are known to the sampler. The search runs one seed, so a
    learning rate that was tried before teaches nothing: the next even point takes its place.

    Args:
        study_key: The cell's key.
        lr_range: Closed range, log scale.
        sampler: "grid" halves the range again and again, so that a larger budget refines the grid
            of a smaller one; after an extension it goes through the new part in the same way.
        seed: Seed of the sweep's search.
        startup_trials: Even points at the start.
        finished: (number, learning rate, score or None); a higher score is better
            (`Trial.feedback`).
        running: (number, learning rate) of trials without a result yet.
        number: Number of the trial that needs a learning rate.
        opened: What the last extension added to the range; only the grid follows it here.
        costs: Values of the second objective by trial number, where less is better; None = the
            score is the only objective.
    """
    tried = set(rates_of(finished, running))
    has_score = any(score is not None for _, _, score in finished)
    if sampler == "grid":
        value = clip(_at(lr_range, _dyadic(number)), lr_range)
        if opened is not None and number >= opened.first:
            value = clip(opened.at(_outward(number - opened.first)), lr_range)
        if value not in tried:
            return value
    elif number >= startup_trials and has_score:
        sampled = _sample(study_key, lr_range, sampler, seed, finished, running, number, costs)
        # Earlier trials may have widened the range that the sampler sees; the proposal stays in the
        # range of the study.
        value = clip(sampled, lr_range)
        if value not in tried:
            return value
    return even_point(lr_range, number, tried)


def even_point(lr_range: LearningRateRange, number: int, tried: set[float]) -> float:
    """Point `number` of the study's even sequence, or a later one where that was tried."""
    value = lr_range.low
    for step in range(MAX_REDRAWS):
        value = clip(_at(lr_range, _even(number + step)), lr_range)
        if value not in tried:
            break
    return value


def _at(lr_range: LearningRateRange, fraction: float) -> float:
    """The learning rate at a fraction of the range, on the log scale."""
    low = math.log(lr_range.low)
    high = math.log(lr_range.high)
    return math.exp(low + fraction * (high - low))


def clip(value: float, lr_range: LearningRateRange) -> float:
    """Round to four digits, within the range."""
    return max(lr_range.low, min(rounded(value), lr_range.high))


def _even(number: int) -> float:
    """Point of 1/2, 5/6, 1/6, 17/18, 13/18, ...: middles of the range, of its thirds, its ninths.

    The same for every study, so that all arms begin with the same learning rates.
    """
    cells = 1
    before = 0
    # A third of the middles of finer cells are those of the coarser ones.
    while number >= cells:
        before = cells
        cells *= 3
    places = []
    for cell in reversed(range(cells)):
        if cells == 1 or cell % 3 != 1:
            places.append((2 * cell + 1) / (2 * cells))
    return places[number - before]


def _dyadic(number: int) -> float:
    """Point of 0, 1, 1/2, 1/4, 3/4, 1/8, ...: 2^k + 1 of them are an even grid with both ends."""
    if number < 2:
        return float(number)
    # Level n has 2^(n - 1) points: the odd multiples of 1/2^n.
    level = (number - 1).bit_length()
    return float((2 * (number - 1 - 2 ** (level - 1)) + 1) / 2**level)


def _outward(step: int) -> float:
    """Point of 1/2, 1, 1/4, 3/4, 1/8, ...: `_dyadic` without the old end, and the middle first."""
    # The old end was tried by the study, so this leaves out 0 and takes 1/2 before 1.
    if step < 2:
        return _dyadic((2, 1)[step])
    return _dyadic(step + 1)


def _sample(
    study_key: str,
    lr_range: LearningRateRange,
    sampler: Sampler,
    seed: int,
    finished: Sequence[Finished],
    running: Sequence[Running],
    number: int,
    costs: Mapping[int, float] | None,
) -> float:
    """Ask Optuna, in memory, over all trials in number order."""
    import optuna
    from optuna.study import StudyDirection

    distribution = distribution_of(lr_range, rates_of(finished, running))
    # Score and cost, in the order of the values in `as_trials`.
    directions = [StudyDirection.MAXIMIZE]
    if costs is not None:
        directions.append(StudyDirection.MINIMIZE)
    with quiet():
        study = optuna.create_study(
            directions=directions, sampler=_sampler(sampler, derive_seed(seed, study_key, number))
        )
        study.add_trials(as_trials(lr_range, finished, running, costs))
        return float(study.ask({NAME: distribution}).params[NAME])


def _sampler(name: Sampler, seed: int) -> BaseSampler:
    from optuna.samplers import GPSampler, RandomSampler, TPESampler

    # The even points have been the start, so neither sampler draws one of its own. Scores are
    # noisy, so the Gaussian process must not run through each of them.
    if name == "gp":
        return GPSampler(seed=seed, n_startup_trials=0, deterministic_objective=False)
    if name == "tpe":
        # A running trial counts as a bad one, so that its rate is not proposed again.
        return TPESampler(seed=seed, n_startup_trials=0, constant_liar=True)
    return RandomSampler(seed=seed)
