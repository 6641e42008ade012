"""Compares arms on the same items and seeds: differences, p-values, effect sizes.

The error of a difference of two means has two parts. The items' part comes from the paired
bootstrap. The seeds' part comes from the differences by seed. Three seeds say little about one
pair, so all arms of the comparison estimate it together: from the residual of scores by arm and
seed, as in a two-way analysis of variance, with (A - 1)(S - 1) degrees of freedom. For two arms
this is the paired t-test. A pair that is noisier than the rest keeps its own variance; otherwise
a calm majority would lend it certainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from suite.errors import StatisticsError
from suite.metrics.values import Values
from suite.stats.answers import Answers
from suite.stats.bootstrap import item_covariance
from suite.stats.significance import half_width, two_sided


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What tells A arms apart, on one task or on the mean over several tasks.

    Attributes:
        seeds: S seeds, the same for all arms.
        scores: Scores by arm and seed, (A, S).
        items: Covariance over resamples of the items, (A, A), as `item_covariance` gives it.
        units: How many items, or groups of items, were resampled, over all tasks.
    """

    seeds: tuple[int, ...]
    scores: Values
    items: Values
    units: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The first of two arms less the second.

    Attributes:
        first, second: Mean scores of the two arms.
        difference: `first` less `second`, in the unit of the score.
        low, high: 95% interval of the difference; not widened for the number of comparisons.
        p: Two-sided p-value of "there is no difference".
        effect: Hedges' g: the difference in standard deviations between seeds, corrected for few
            seeds. None with one seed, or where the seeds do not differ.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    p: float
    effect: float | None


def gather(arms: Sequence[Answers]) -> Evidence:
    """Evidence from the answers of several arms to one task, for the seeds that all arms have.

    Raises:
        StatisticsError: The arms were not tested on the same items, or share no seed; or as
            `item_covariance`.
    """
    first = arms[0]
    shared = set(first.runs)
    for other in arms[1:]:
        check_same(first, other)
        shared &= set(other.runs)
    if not shared:
        by_arm = [", ".join(map(str, arm.runs)) for arm in arms]
        raise StatisticsError(f"no seed in common: {'; '.join(by_arm)}")
    seeds = sorted(shared)
    matched = [arm.with_seeds(seeds) for arm in arms]
    scores = np.array([list(arm.scores.values()) for arm in matched])  # (A, S)
    groups = first.items.groups
    units = len(first.index)
    if groups is not None:
        # whole groups are resampled
        units = len(set(groups))
    return Evidence(tuple(seeds), scores, item_covariance(matched), units)


def check_same(first: Answers, second: Answers) -> None:
    """Check that two arms answered the same questions with the same golds, metrics and precision.

    Raises:
        StatisticsError: They did not; the message says how many agree.
    """
    where = f"task {first.task.name}"
    metrics = first.task.model_dump(include={"metrics", "headline"})
    if metrics != second.task.model_dump(include={"metrics", "headline"}):
        raise StatisticsError(f"{where}: not the same metrics")
    if first.precision != second.precision:
        raise StatisticsError(
            f"{where}: not the same precision ({first.precision} and {second.precision}); "
            "name one as training.precision and run the sweep again under another name"
        )
    if first.index != second.index:
        shared = len(set(first.index) & set(second.index))
        counts = f"{len(first.index)} and {len(second.index)} items, {shared} of them in both"
        if len(first.index) == len(second.index) == shared:
            counts += ", in another order"
        raise StatisticsError(f"{where}: not tested on the same items ({counts})")
    one = first.items
    other = second.items
    if one.groups == other.groups and one.golds == other.golds:
        return
    differ = 0
    for gold, other_gold in zip(one.golds, other.golds, strict=True):
        differ += gold != other_gold
    what = "gold answers (another version of the data)"
    if first.task.item_score:
        # the "gold" of running text is its number of tokens
        what = "tokens (another tokenizer)"
    raise StatisticsError(
        f"{where}: the same items, but {differ} of {len(one.golds)} differ in their {what}"
    )


def select_arms(evidence: Evidence, arms: Sequence[int]) -> Evidence:
    """The same evidence for some arms only, in the given order."""
    chosen = list(arms)
    scores = evidence.scores[chosen]
    items = evidence.items[np.ix_(chosen, chosen)]
    return replace(evidence, scores=scores, items=items)


def over_tasks(tasks: Sequence[Evidence]) -> Evidence:
    """Evidence on the mean over tasks.

    Raises:
        StatisticsError: The tasks have different seeds.
    """
    if len({task.seeds for task in tasks}) > 1:
        raise StatisticsError("the tasks do not have the same seeds")
    scores: Values = np.mean([task.scores for task in tasks], axis=0)  # (A, S)
    # items of different tasks are drawn independently, so their covariances add up
    items: Values = np.sum([task.items for task in tasks], axis=0) / len(tasks) ** 2
    return Evidence(tasks[0].seeds, scores, items, sum(task.units for task in tasks))


def variances(evidence: Evidence, noise: Values | None = None) -> tuple[Values, Values, float]:
    """Variances of the error of every difference between two arms.

    Args:
        evidence: On A arms.
        noise: Scores by arm and seed of all arms from which the spread between seeds is estimated;
            None = those of `evidence`.

    Returns:
        The items' part (A, A), the seeds' part (A, A), and the degrees of freedom of the seeds'
        part, 0 with one seed.
    """
    own = np.diag(evidence.items)
    # rounding can push the variance of a difference slightly below 0
    items = np.maximum(own[:, None] + own[None, :] - 2 * evidence.items, 0.0)
    count = len(evidence.seeds)
    if count < 2:
        return items, np.zeros_like(items), 0.0
    scores = evidence.scores
    of_pairs = (scores[:, None, :] - scores[None, :, :]).var(-1, ddof=1)  # (A, A)
    table = scores if noise is None else noise  # (arms, S)
    # what is left of each score without its arm's mean and its seed's mean
    residual = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    df = float(max(len(table) - 1, 1) * (count - 1))
    # twice, because a difference has the noise of two arms
    pooled = 2 * float((residual**2).sum()) / df
    return items, np.maximum(of_pairs, pooled) / count, df


def p_values(evidence: Evidence, noise: Values | None = None) -> Values:
    """P-values of every pair of arms, (A, A), not adjusted; 1 on the diagonal.

    Args:
        evidence: On A arms.
        noise: As in `variances`.
    """
    items, seeds, df = variances(evidence, noise)
    means = evidence.scores.mean(1)
    found = two_sided(means[:, None] - means[None, :], items, seeds, df)
    # an arm does not differ from itself
    np.fill_diagonal(found, 1.0)
    return found


def difference(evidence: Evidence, noise: Values | None = None) -> Difference:
    """The first of two arms less the second.

    Args:
        evidence: On two arms.
        noise: As in `variances`.
    """
    items, seeds, df = variances(evidence, noise)
    means = evidence.scores.mean(1)
    first = float(means[0])
    second = float(means[1])
    width = half_width(float(items[0, 1]), float(seeds[0, 1]), df)
    found = first - second
    return Difference(
        first=first,
        second=second,
        difference=found,
        low=found - width,
        high=found + width,
        p=float(two_sided(found, items[0, 1], seeds[0, 1], df)),
        effect=_hedges_g(evidence.scores),
    )


def _hedges_g(scores: Values) -> float | None:
    """Hedges' g of two arms, (2, S).

    Source: Hedges, "Distribution theory for Glass's estimator of effect size", 1981, with
    J(m) = 1 - 3 / (4m - 1).
    """
    count = int(scores.shape[1])
    if count < 2:
        return None
    spread = float(np.sqrt(scores.var(1, ddof=1).mean()))
    if spread == 0:
        return None
    gap = float(scores[0].mean() - scores[1].mean())
    # m = 2S - 2 degrees of freedom
    return gap / spread * (1 - 3 / (4 * (2 * count - 2) - 1))
