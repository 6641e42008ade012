"""Bound what a study may still gain; the stop rule compares it with its tolerance."""

from __future__ import annotations

from contextlib import suppress
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from statistics import pstdev
from typing import Literal

from suite.config.hashing import short_hash
from suite.config.space import LearningRateRange
from suite.files import keep, kept_folder, sha256
from suite.plan.optuna_trials import Finished, as_trials, quiet

Evaluator = Literal["emmr", "regret"]


LIBRARIES = ("optuna", "scipy", "torch")
KEPT = 4096
"""Bounds that are kept, some bytes each; the oldest goes first."""


# A study is decided anew each time it is looked at, and the Gaussian process behind the bound is
# slow. `suite status`, which asks in a new process each time, would import torch for it.
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
    # As text, because JSON has no infinity, which a perplexity may be.
    asked = repr((searched, finished, seed, evaluator))
    path = kept_folder("stop-rule") / f"{short_hash([_version(), asked])}.txt"
    # A file that cannot be read is as good as none.
    with suppress(OSError, ValueError):
        return float(path.read_text())
    room = _room_left(searched, finished, seed=seed, evaluator=evaluator)
    keep(path, repr(room).encode(), most=KEPT)
    return room


@cache
def _version() -> list[str]:
    """All that the bound depends on, apart from what is asked."""
    folder = Path(__file__).parent
    code = [sha256(folder / name) for name in ("stop_rule.py", "optuna_trials.py")]
    return [*code, *map(metadata.version, LIBRARIES)]


def _room_left(
    searched: LearningRateRange,
    finished: tuple[Finished, ...],
    *,
    seed: int,
    evaluator: Evaluator,
) -> float:
    from optuna.study import StudyDirection
    from optuna.terminator import EMMREvaluator, RegretBoundEvaluator

    trials = as_trials(searched, finished)
    with quiet():
        if evaluator == "regret":
            return float(RegretBoundEvaluator(seed=seed).evaluate(trials, StudyDirection.MAXIMIZE))
        bound = float(EMMREvaluator(seed=seed).evaluate(trials, StudyDirection.MAXIMIZE))
    return bound * pstdev(float(trial.value) for trial in trials if trial.value is not None)
