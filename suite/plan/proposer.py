"""Propose the next learning rate of a study, as a pure function of what was tried.

The sampler is made anew at every call from (seed, study, trial number), so that a killed and
resumed sweep proposes what an uninterrupted one would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from suite.config.hashing import derive_seed
from suite.config.space import End, LearningRateRange
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

Sampler = Literal["gp", "tpe", "random", "grid"]
MAX_REDRAWS = 64


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
    """Propose a learning rate for trial `number` of a study, rounded to four digits.

    The first `startup_trials` are a scrambled Sobol sequence on the log scale; the sampler follows.
    A trial without a score (diverged, out of memory, failed) counts as the worst score seen, so
    that the sampler learns to stay away; while no trial has a score there is nothing to learn from,
    and the Sobol sequence goes on. Running trials are known to the sampler. The search runs one
    seed, so a learning rate that was tried before teaches nothing: the next point of the Sobol
    sequence takes its place. The first trial after an extension is the middle of what was added.

    Args:
        study_key: The cell's key.
        lr_range: Closed range, log scale.
        sampler: "grid" halves the range again and again, so that a larger budget refines the grid
            of a smaller one; after an extension it goes through the new part in the same way.
        seed: Seed of the sweep's search.
        startup_trials: Quasi-random trials at the start.
        finished: (number, learning rate, score or None); a higher score is better
            (`Trial.feedback`).
        running: (number, learning rate) of trials without a result yet.
        number: Number of the trial that needs a learning rate.
        opened: What the last extension added to the range.
        costs: Values of the second objective by trial number, where less is better; None = the
            score is the only objective.
    """
    tried = set(rates_of(finished, running))
    has_score = any(score is not None for _, _, score in finished)
    # The new part of the range has no trial yet, so its middle is tried before the sampler is
    # asked.
    if opened is not None and (number == opened.first or sampler == "grid"):
        value = _clip(opened.at(_outward(number - opened.first)), lr_range)
        if value not in tried:
            return value
    elif sampler == "grid":
        return _clip(_at(lr_range, _dyadic(number)), lr_range)
    if number >= startup_trials and has_score:
        sampled = _sample(study_key, lr_range, sampler, seed, finished, running, number, costs)
        # Earlier trials may have widened the range that the sampler sees; the proposal stays in the
        # range of the study.
        value = _clip(sampled, lr_range)
        if value not in tried:
            return value
    return _quasi_random(study_key, lr_range, seed, number, tried)


def _at(lr_range: LearningRateRange, fraction: float) -> float:
    """The learning rate at a fraction of the range, on the log scale."""
    low = math.log(lr_range.low)
    high = math.log(lr_range.high)
    return math.exp(low + fraction * (high - low))


def _clip(value: float, lr_range: LearningRateRange) -> float:
    """Round to four digits: readable in tables, and equal on machines whose last bits differ."""
    rounded = float(f"{value:.4g}")
    return max(lr_range.low, min(rounded, lr_range.high))


def _quasi_random(
    study_key: str, lr_range: LearningRateRange, seed: int, number: int, tried: set[float]
) -> float:
    """Point `number` of the study's Sobol sequence, or a later one where that was tried."""
    # Optuna and scipy.stats are imported where a rate is proposed: who shows a study waits for
    # neither.
    from scipy.stats import qmc

    # The seed is the study's own, so cells do not all start with the same rates.
    sequence = qmc.Sobol(d=1, scramble=True, rng=derive_seed(seed, study_key, "startup"))
    if number:
        sequence.fast_forward(number)
    value = lr_range.low
    # Only a range of a few representable rates can use all of these up.
    for _ in range(MAX_REDRAWS):
        value = _clip(_at(lr_range, float(sequence.random(1)[0, 0])), lr_range)
        if value not in tried:
            break
    return value


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

    # The Sobol sequence has done the start, so neither sampler draws one of its own. Scores are
    # noisy, so the Gaussian process must not run through each of them.
    if name == "gp":
        return GPSampler(seed=seed, n_startup_trials=0, deterministic_objective=False)
    if name == "tpe":
        # A running trial counts as a bad one, so that its rate is not proposed again.
        return TPESampler(seed=seed, n_startup_trials=0, constant_liar=True)
    return RandomSampler(seed=seed)
