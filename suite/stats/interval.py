"""The interval of one cell: where the mean score would lie with all seeds and all such items.

`score_mean` has an error from the items and one from the seeds (`significance`). The width of the
interval is found in the unit of the score and laid out on a scale without ends: the logit of a
percentage, Fisher's z of a correlation, the logarithm of a perplexity. So the interval stays
within what is possible, and it is longer on the side where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from suite.config.task import TaskConfig
from suite.errors import StatisticsError
from suite.stats.answers import Answers, headline_metrics
from suite.stats.bootstrap import item_covariance
from suite.stats.significance import half_width

MAX_EXPONENT = 700.0
"""exp of more overflows a float64."""
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
    """The least and the greatest value that a score can have."""

    least: float
    greatest: float


PERCENT = Ends(0.0, 100.0)
CORRELATION = Ends(-100.0, 100.0)
FREE = Ends(-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class _Scale:
    """A scale without ends.

    Attributes:
        forth: From a score to its place on the scale.
        back: From a place on the scale to the score.
        slope: How much a unit of the score is on the scale, by score.
    """

    forth: Callable[[float], float]
    back: Callable[[float], float]
    slope: Callable[[float], float]


def cell_interval(answers: Answers) -> Interval:
    """Interval of the mean score over a cell's runs.

    Raises:
        StatisticsError: As `item_covariance` and `mean_interval`.
    """
    # the mean covariance of pairs of seeds may come out below 0
    items = max(float(item_covariance([answers])[0, 0]), 0.0)
    return mean_interval(list(answers.scores.values()), items, [answers.task])


def mean_interval(scores: Sequence[float], items: float, tasks: Sequence[TaskConfig]) -> Interval:
    """Interval of a mean of scores over seeds.

    Args:
        scores: One by seed, of one task or of the mean over tasks.
        items: Variance, over resamples of the items, of what the scores have in common
            (`item_covariance`).
        tasks: The task, or the tasks over which the scores are means.

    Raises:
        StatisticsError: Nothing varies, or the mean is the best or worst score there is.
    """
    count = len(scores)
    seeds = variance(scores) / count if count > 1 else 0.0
    if items + seeds == 0:
        raise StatisticsError("neither seeds nor resamples of the items change the score")
    # the mean over tasks can lie anywhere between the extremes of all of them
    least = math.inf
    greatest = -math.inf
    for task in tasks:
        ends = ends_of(task)
        least = min(least, ends.least)
        greatest = max(greatest, ends.greatest)
    width = half_width(items, seeds, count - 1)
    return make_interval(fmean(scores), width, Ends(least, greatest), seeds=count)


def ends_of(task: TaskConfig) -> Ends:
    """Between which values a task's score lies."""
    if task.code is not None and task.code.score:
        # nothing is known about a score that the task's own file computes
        return FREE
    if task.item_score:
        return Ends(0.0, math.inf)
    if any(metric in CORRELATIONS for metric in headline_metrics(task)):
        return CORRELATION
    return PERCENT


def make_interval(mean: float, width: float, ends: Ends, *, seeds: int) -> Interval:
    """`mean` ± `width`, laid out on the scale of `ends`.

    Raises:
        StatisticsError: The mean lies at an end, or the interval reaches beyond all numbers.
    """
    if not ends.least < mean < ends.greatest:
        raise StatisticsError(
            f"a mean score of {mean:g} is as extreme as can be: "
            "its error cannot be told from the answers"
        )
    scale = _scale(ends)
    centre = scale.forth(mean)
    # to first order, as in the delta method
    reach = width * scale.slope(mean)
    if abs(centre) + reach > MAX_EXPONENT:
        raise StatisticsError(f"a mean score of {mean:g} ± {width:g}: the interval has no end")
    of = "seeds x items" if seeds > 1 else "items"
    return Interval(scale.back(centre - reach), scale.back(centre + reach), of)


def _scale(ends: Ends) -> _Scale:
    """The scale on which a score with these ends has none."""
    # who only reads stored intervals does without scipy
    from scipy.special import expit, logit

    least = ends.least
    greatest = ends.greatest
    span = greatest - least
    if math.isinf(least):
        return _Scale(forth=lambda x: x, back=lambda y: y, slope=lambda x: 1.0)
    if math.isinf(span):
        # a logarithm, for a score without an upper end
        return _Scale(
            forth=lambda x: math.log(x - least),
            back=lambda y: least + math.exp(y),
            slope=lambda x: 1 / (x - least),
        )
    # a logit, which for a correlation is twice Fisher's z
    return _Scale(
        forth=lambda x: float(logit((x - least) / span)),
        back=lambda y: least + span * float(expit(y)),
        slope=lambda x: span / ((x - least) * (greatest - x)),
    )
