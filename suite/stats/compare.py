"""Compares arms on the same items and seeds: differences, p-values, effect sizes.

The error of a difference of two means has two parts. The items' part comes from the paired
bootstrap. The seeds' part is the sum of what the seeds do to either arm. Arms differ in how noisy
their seeds are, so a comparison of two arms takes each one's own variance and degrees of freedom,
as Welch's test does. The ranks of many arms may lend calm arms the average variance; an arm that is
noisier than the average keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from suite.errors import StatisticsError
from suite.metrics.values import Values
from suite.stats.answers import Answers
from suite.stats.bootstrap import item_covariance, unit_count
from suite.stats.exact import least_p_values
from suite.stats.significance import LEVEL, half_width, two_sided

OWN = 0.5
"""How far the degrees of freedom of two arms go from the lesser arm's towards Satterthwaite's.

All the way tells equal arms apart in up to 6.9% of comparisons (two seeds, one arm ten times as
noisy) instead of 5%.
"""
ONE_SEED = "one seed: {what}; how much seeds differ is not known (give confirm.seeds five or more)"
"""Why one seed allows no verdict."""
NO_RANK = ONE_SEED.format(what="no rank")
NO_P = ONE_SEED.format(what="no p-value")


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What tells A arms apart, on one task or on the mean over several tasks.

    Attributes:
        seeds: S seeds, the same for all arms.
        scores: Scores by arm and seed, (A, S).
        items: Covariance over resamples of the items, (A, A), as `item_covariance` gives it.
        units: How many items, or groups of items, were resampled, over all tasks.
        least_p: The least p-value that the items allow each pair, (A, A), as `least_p_values` gives
            it; None = any.
    """

    seeds: tuple[int, ...]
    scores: Values
    items: Values
    units: int
    least_p: Values | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first of two arms less the second.

    Attributes:
        first, second: Mean scores of the two arms.
        difference: `first` less `second`, in the unit of the score.
        low, high: 95% interval of the difference; not widened for the number of comparisons. With
            one seed it is over the items only.
        p: Two-sided p-value of "there is no difference"; None with one seed.
        effect: Hedges' g: the difference in standard deviations between seeds, corrected for few
            seeds. None with one seed, or where the seeds do not differ.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    p: float | None
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
    units = unit_count(first.items)
    return Evidence(tuple(seeds), scores, item_covariance(matched), units, least_p_values(matched))


def check_same(first: Answers, second: Answers) -> None:
    """Check that two arms answered the same questions with the same golds, metrics and precision.

    Arms of one sweep must also have trained on the same data with the same versions.

    Raises:
        StatisticsError: They did not; the message says what differs.
    """
    where = f"task {first.task.name}"
    if _metrics(first) != _metrics(second):
        raise StatisticsError(f"{where}: not the same metrics")
    if _score_file(first) != _score_file(second):
        raise StatisticsError(
            f"{where}: not the same metrics: {_score_file(first)} computed those of one arm and "
            f"{_score_file(second)} those of the other"
        )
    if _answer_pattern(first) != _answer_pattern(second):
        raise StatisticsError(
            f"{where}: not the same pattern of an answer ({_answer_pattern(first)} and "
            f"{_answer_pattern(second)})"
        )
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
        _check_origin(first, second)
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


def _metrics(arm: Answers) -> tuple[list[Any], str | None]:
    return arm.task.metrics, arm.task.headline


def _score_file(arm: Answers) -> str:
    """What computes the scores: `score()` of the task's own file, or the suite."""
    code = arm.task.code
    if code is None or not code.score:
        return "the suite"
    return f"score() of a file with SHA-256 {code.sha256[:12]}"


def _answer_pattern(arm: Answers) -> str | None:
    # Only tasks whose answers are taken out of a text have one.
    return getattr(arm.task, "answer", None)


def _check_origin(first: Answers, second: Answers) -> None:
    # Sweeps are also compared to learn what other training data or versions do.
    if first.sweep != second.sweep:
        return
    for what, one in first.origin.items():
        other = second.origin.get(what, one)
        if one == other:
            continue
        differ = f"not trained with the same {what} ({one} and {other})"
        if what == "data":
            differ = "not trained on the same data"
        raise StatisticsError(
            f"task {first.task.name}: {differ}; run the sweep again under another name"
        )


def select_arms(evidence: Evidence, arms: Sequence[int]) -> Evidence:
    """The same evidence for some arms only, in the given order."""
    chosen = list(arms)
    scores = evidence.scores[chosen]
    pairs = np.ix_(chosen, chosen)
    least_p = evidence.least_p
    if least_p is not None:
        least_p = least_p[pairs]
    return replace(evidence, scores=scores, items=evidence.items[pairs], least_p=least_p)


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
    least_p: Values = np.full_like(items, 2.0)
    for task in tasks:
        # The sum of independent parts reaches the sum of what they reached at least as often as
        # each of them does so by itself. Half, because that is on one side only. A task that both
        # arms answer alike has 2, and so changes nothing.
        if task.least_p is None:
            least_p *= 0.0
        else:
            least_p *= task.least_p / 2
    units = sum(task.units for task in tasks)
    return Evidence(tasks[0].seeds, scores, items, units, least_p)


def variances(evidence: Evidence, *, pooled: bool = False) -> tuple[Values, Values, Values]:
    """Variances of the error of every difference between two arms.

    Args:
        evidence: On A arms, with two seeds or more.
        pooled: Whether arms that are calmer than the average get the average variance over seeds.
            This is for ranks: a calm majority lends a noisy arm some certainty, so that 7% of the
            comparisons with it are wrong, but at most 5% of the rankings. With two seeds or two
            arms nothing is pooled, because too few residuals tell who is noisy.

    Returns:
        The items' part, the seeds' part, and the degrees of freedom of the seeds' part, each
        (A, A).
    """
    arms, count = evidence.scores.shape
    own = seed_variances(evidence.scores)
    freedom = np.full(arms, count - 1.0)
    share = OWN
    if pooled and arms > 2 and count > 2:
        average = own.mean()
        # Equal variances may differ from their mean in the last bit.
        freedom[own <= average * (1 + 1e-9)] *= arms
        own = np.maximum(own, average)
        # A calm pair has all the degrees of freedom of the average.
        share = 1.0
    total = own[:, None] + own[None, :]
    each = own**2 / freedom
    # Satterthwaite, "An approximate distribution of estimates of variance components", 1946
    summed = each[:, None] + each[None, :]
    least = np.minimum(freedom[:, None], freedom[None, :])
    df = np.divide(total**2, summed, out=least.copy(), where=summed > 0)
    return items_part(evidence), total / count, least + share * (df - least)


def seed_variances(scores: Values) -> Values:
    """Variance of every arm's scores over its seeds, (A,), of scores (A, S)."""
    # The mean of equal numbers may be off in its last bit, and then their variance is not 0.
    return np.where(np.ptp(scores, axis=1) == 0, 0.0, scores.var(1, ddof=1))


def items_part(evidence: Evidence) -> Values:
    """Variance that the choice of items gives every difference between two arms, (A, A)."""
    own = np.diag(evidence.items)
    # rounding can push the variance of a difference slightly below 0
    return np.maximum(own[:, None] + own[None, :] - 2 * evidence.items, 0.0)


def p_values(evidence: Evidence, *, pooled: bool = False) -> Values:
    """P-values of every pair of arms, (A, A), not adjusted; 1 on the diagonal.

    Args:
        evidence: On A arms.
        pooled: As in `variances`.

    Raises:
        StatisticsError: There is one seed only.
    """
    if len(evidence.seeds) < 2:
        raise StatisticsError(NO_P)
    means = evidence.scores.mean(1)
    pairs = np.triu_indices(len(means), 1)  # each pair once
    items, seeds, df = variances(evidence, pooled=pooled)
    gaps = means[:, None] - means[None, :]
    p = two_sided(gaps[pairs], items[pairs], seeds[pairs], df[pairs])
    if evidence.least_p is not None:
        p = np.maximum(p, np.minimum(evidence.least_p[pairs], 1.0))
    # an arm does not differ from itself
    found = np.eye(len(means))
    found[pairs] = p
    return np.maximum(found, found.T)


def difference(evidence: Evidence) -> Difference:
    """The first of two arms less the second.

    Args:
        evidence: On two arms.
    """
    means = evidence.scores.mean(1)
    first = float(means[0])
    second = float(means[1])
    found = first - second
    p = None
    if len(evidence.seeds) < 2:
        width = half_width(float(items_part(evidence)[0, 1]), 0.0, 1.0)
    else:
        items, seeds, df = variances(evidence)
        width = half_width(float(items[0, 1]), float(seeds[0, 1]), float(df[0, 1]))
        p = float(p_values(evidence)[0, 1])
        # An exact test of few items is wider than the normal error behind `width`.
        if p >= 1 - LEVEL:
            width = max(width, abs(found))
    return Difference(
        first=first,
        second=second,
        difference=found,
        low=found - width,
        high=found + width,
        p=p,
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
    spread = float(np.sqrt(seed_variances(scores).mean()))
    if spread == 0:
        return None
    gap = float(scores[0].mean() - scores[1].mean())
    # m = 2S - 2 degrees of freedom
    return gap / spread * (1 - 3 / (4 * (2 * count - 2) - 1))
