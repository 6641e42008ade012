"""Bound what a study may still gain; the stop rule compares it with its tolerance."""

from __future__ import annotations

from functools import lru_cache
from statistics import pstdev
from typing import Literal

from optuna.study import StudyDirection
from optuna.terminator import EMMREvaluator, RegretBoundEvaluator

from suite.config.space import LearningRateRange
from suite.plan.optuna_trials import Finished, as_trials, quiet

Evaluator = Literal["emmr", "regret"]


# A study is decided anew each time it is looked at, and the Gaussian process behind the bound is
# slow.
@lru_cache(maxsize=4096)
def room_left(
    searched: LearningRateRange,
    finished: tuple[Finished, ...],
    *,
    seed: int,
    evaluator: Evaluator = "emmr",
) -> float:
    """Upper bound on what the best of a study may still improve by, on the scale of the scores.

    Args:
        searched: The range.
        finished: (number, learning rate, score or None) of all trials; at least two with a score.
        seed: Seed of the draws with which the bound is maximised.
        evaluator: "emmr" is Ishibashi et al., AISTATS 2023: Optuna gives it in standard deviations
            of the scores, this function in their units. "regret" is Makarova et al., AutoML 2022.
            docs/protocol.md says which one the suite takes, and why.
    """
    trials = [trial for _, trial in as_trials(searched, finished)]
    with quiet():
        if evaluator == "regret":
            return float(RegretBoundEvaluator(seed=seed).evaluate(trials, StudyDirection.MAXIMIZE))
        bound = float(EMMREvaluator(seed=seed).evaluate(trials, StudyDirection.MAXIMIZE))
    return bound * pstdev(float(trial.value) for trial in trials if trial.value is not None)
