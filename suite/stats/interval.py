"""The interval of one cell: where the mean score would lie with all seeds and all items of this kind.

`score_mean` has an error from the items and one from the seeds (`inference`). Its width is found in the unit of the score and
laid out on a scale without ends: the logit of a percentage, Fisher's z of a correlation, the logarithm of a perplexity. So
the interval stays within what is possible and is longer on the side where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from scipy.special import expit, logit

from suite.config.task import TaskConfig
from suite.errors import StatisticsError
from suite.stats.answers import Answers, headline_metrics
from suite.stats.bootstrap import item_covariance
from suite.stats.significance import half_width

MAX_EXPONENT = 700.0
CORRELATIONS = ("matthews", "pearson", "spearman")


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% interval.

    Attributes:
        low, high: In the unit of the score.
        of: "seeds x items", or "items" where one seed says nothing about seeds.
    """

    low: float
    high: float
    of: str


@dataclass(frozen=True, slots=True)
class Ends:
    """The least and the greatest value of a score."""

    least: float
    greatest: float


PERCENT, CORRELATION, FREE = Ends(0.0, 100.0), Ends(-100.0, 100.0), Ends(-math.inf, math.inf)


def cell_interval(answers: Answers) -> Interval:
    """Of the mean score over the runs.

    Raises:
        StatisticsError: As `item_covariance` and `mean_interval`.
    """
    return mean_interval(
        list(answers.scores.values()),
        max(float(item_covariance([answers])[0, 0]), 0.0),
        [answers.task],
    )


def mean_interval(scores: Sequence[float], items: float, tasks: Sequence[TaskConfig]) -> Interval:
    """Of the mean of scores by seed.

    Args:
        scores: One by seed, of the task or the mean over tasks.
        items: Variance of what they have in common over resamples of the items (`item_covariance`).
        tasks: Whose score it is, or the mean of whose scores.

    Raises:
        StatisticsError: Nothing varies; the mean is the best or worst there is.
    """
    seeds = variance(scores) / len(scores) if len(scores) > 1 else 0.0
    if items + seeds == 0:
        raise StatisticsError("neither seeds nor resamples of the items change the score")
    ends = [ends_of(task) for task in tasks]
    joint = Ends(min(e.least for e in ends), max(e.greatest for e in ends))
    return make_interval(
        fmean(scores), half_width(items, seeds, len(scores) - 1), joint, seeds=len(scores)
    )


def ends_of(task: TaskConfig) -> Ends:
    """Between which values a task's score lies; of a task's own `score` nothing is known."""
    metrics = headline_metrics(task)
    if task.code is not None and task.code.score:
        return FREE
    if task.item_score:
        return Ends(0.0, math.inf)
    return CORRELATION if any(metric in CORRELATIONS for metric in metrics) else PERCENT


def make_interval(mean: float, width: float, ends: Ends, *, seeds: int) -> Interval:
    """`mean` ± `width`, laid out on the scale of `ends`."""
    of = "seeds x items" if seeds > 1 else "items"
    if not ends.least < mean < ends.greatest:
        raise StatisticsError(
            f"a mean score of {mean:g} is as extreme as can be: its error cannot be told from the answers"
        )
    forth, back, slope = _scale(ends)
    centre, reach = forth(mean), width * slope(mean)
    if abs(centre) + reach > MAX_EXPONENT:
        raise StatisticsError(f"a mean score of {mean:g} ± {width:g}: the interval has no end")
    return Interval(back(centre - reach), back(centre + reach), of)


def _scale(
    ends: Ends,
) -> tuple[Callable[[float], float], Callable[[float], float], Callable[[float], float]]:
    """A scale without ends: to it, from it, and how much a unit of the score is on it."""
    least, span = ends.least, ends.greatest - ends.least
    if math.isinf(least):
        return (lambda x: x), (lambda y: y), (lambda x: 1.0)
    if math.isinf(span):
        return (
            (lambda x: math.log(x - least)),
            (lambda y: least + math.exp(y)),
            (lambda x: 1 / (x - least)),
        )
    return (
        lambda x: float(logit((x - least) / span)),
        lambda y: least + span * float(expit(y)),
        lambda x: span / ((x - least) * (ends.greatest - x)),
    )
