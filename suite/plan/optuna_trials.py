"""Trials of a study in Optuna's form, in memory: what samplers and terminators are asked about."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import optuna
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from suite.config.space import LearningRateRange

Finished = tuple[int, float, float | None]
"""Number, learning rate, and score (a higher one is better) or None of a trial that has ended."""
Running = tuple[int, float]
NAME = "learning_rate"


def as_trials(
    searched: LearningRateRange,
    finished: Sequence[Finished],
    running: Sequence[Running] = (),
    costs: Mapping[int, float] | None = None,
) -> list[tuple[int, FrozenTrial]]:
    """(number, trial) in number order. A trial without a score counts as the worst one seen.

    Args:
        searched: The range; trials outside it (of a range that was longer) lengthen it.
        finished: At least one with a score.
        running: Trials without a result yet.
        costs: With two objectives the second one's value by number, of which less is better; None = one objective.
    """
    distribution = distribution_of(
        searched, [lr for _, lr, _ in finished] + [lr for _, lr in running]
    )
    worst = min(score for _, _, score in finished if score is not None)
    dearest = max(costs.values(), default=0.0) if costs is not None else 0.0

    def complete(number: int, learning_rate: float, score: float | None) -> FrozenTrial:
        values = [worst if score is None else score]
        if costs is not None:
            values.append(costs.get(number, dearest))
        given = {"params": {NAME: learning_rate}, "distributions": {NAME: distribution}}
        return create_trial(state=TrialState.COMPLETE, values=values, **given)  # type: ignore[arg-type]

    ended = [(n, complete(n, lr, score)) for n, lr, score in finished]
    live = [
        (
            n,
            create_trial(
                state=TrialState.RUNNING, params={NAME: lr}, distributions={NAME: distribution}
            ),
        )
        for n, lr in running
    ]
    return sorted([*ended, *live], key=lambda pair: pair[0])


def distribution_of(searched: LearningRateRange, tried: Sequence[float]) -> FloatDistribution:
    """The range as Optuna's, made to hold everything that was tried."""
    return FloatDistribution(min([searched.low, *tried]), max([searched.high, *tried]), log=True)


@contextmanager
def quiet() -> Iterator[None]:
    """A new study, a slower optimiser and an experimental class are not news."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # optuna.terminator moves to OptunaHub with version 6
        yield
