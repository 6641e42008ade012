"""Trials of a study in Optuna's form, in memory, for its samplers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from suite.config.space import LearningRateRange

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution, FloatDistribution
    from optuna.trial import FrozenTrial

Finished = tuple[int, float, float | None]
"""Number, learning rate and score of a trial that has ended: higher is better, None = no score."""
Running = tuple[int, float]
NAME = "learning_rate"


def as_trials(
    searched: LearningRateRange,
    finished: Sequence[Finished],
    running: Sequence[Running] = (),
    costs: Mapping[int, float] | None = None,
) -> list[FrozenTrial]:
    """Trials in the order of their numbers; one without a score counts as the worst seen.

    Args:
        searched: The range. It grows if trials lie outside it, because it was wider before.
        finished: Trials that have ended, at least one of them with a score.
        running: Trials without a result yet.
        costs: The second objective by trial number, where less is better; None = one objective.
    """
    # Imported here and below, because showing a study reads this module and needs no Optuna.
    from optuna.trial import TrialState, create_trial

    # One distribution for all trials: Optuna refuses a value outside its trial's own.
    distribution = distribution_of(searched, rates_of(finished, running))
    distributions: dict[str, BaseDistribution] = {NAME: distribution}
    # Samplers pass over failed trials, so a diverged one would be proposed again and again.
    worst = min(score for _, _, score in finished if score is not None)
    trials: dict[int, FrozenTrial] = {}
    for number, learning_rate, score in finished:
        if score is None:
            score = worst
        values = [score]
        if costs is not None:
            # A trial whose cost is unknown counts as the dearest one.
            values.append(costs.get(number, max(costs.values(), default=0.0)))
        trials[number] = create_trial(
            state=TrialState.COMPLETE,
            values=values,
            params={NAME: learning_rate},
            distributions=distributions,
        )
    for number, learning_rate in running:
        trials[number] = create_trial(
            state=TrialState.RUNNING,
            params={NAME: learning_rate},
            distributions=distributions,
        )
    # Proposals depend on the order of the trials, so it must not depend on which ended first.
    return [trials[number] for number in sorted(trials)]


def rates_of(finished: Sequence[Finished], running: Sequence[Running]) -> list[float]:
    """The learning rates of some trials."""
    rates = []
    for _, learning_rate, _ in finished:
        rates.append(learning_rate)
    for _, learning_rate in running:
        rates.append(learning_rate)
    return rates


def distribution_of(searched: LearningRateRange, tried: Sequence[float]) -> FloatDistribution:
    """The range in Optuna's form, wide enough to hold everything that was tried."""
    from optuna.distributions import FloatDistribution

    low = min([searched.low, *tried])
    high = max([searched.high, *tried])
    return FloatDistribution(low, high, log=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna from reporting every new study and every experimental class."""
    import optuna

    # This holds for the whole process, unlike the filters below.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Version 5 says at every call that optuna.terminator moves to OptunaHub with version 6.
        warnings.simplefilter("ignore", FutureWarning)
        yield
