"""Arms against each other on the same items and seeds: differences, p-values, effects.

The error of a difference of two means has a part of the items, whose variance the paired bootstrap gives, and one of the seeds,
from the differences by seed. With three seeds one pair says little about the latter, so all arms of the comparison say it
together: the residual of scores by arm and seed, as in a two-way analysis of variance, with (A - 1)(S - 1) degrees of freedom.
For two arms that is the paired t-test. A pair that is noisier than the rest keeps its own variance, so that a calm majority
does not lend it certainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from suite.errors import StatisticsError
from suite.metrics.quality import Values
from suite.stats.answers import Answers
from suite.stats.bootstrap import item_covariance
from suite.stats.significance import half_width, two_sided


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What there is to tell A arms apart by, on one task or on the mean over several.

    Attributes:
        seeds: S seeds, the same for all arms.
        scores: By arm and seed, (A, S).
        items: Covariance over resamples of the items, (A, A), as `item_covariance` gives it.
        units: How many items, or groups of items, were resampled; of all tasks together.
    """

    seeds: tuple[int, ...]
    scores: Values
    items: Values
    units: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two arms, the first less the second.

    Attributes:
        low, high: 95% interval, in the unit of the score; not widened for the number of comparisons.
        p: Two-sided, of no difference.
        effect: Hedges' g: in standard deviations between seeds, with its correction for few; None for one seed or no spread.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    p: float
    effect: float | None


def gather(arms: Sequence[Answers]) -> Evidence:
    """Evidence from answers to one task, of the seeds that all arms have.

    Raises:
        StatisticsError: The arms were not asked the same, or share no seed; as `item_covariance`.
    """
    first = arms[0]
    for other in arms[1:]:
        check_same(first, other)
    seeds = sorted(set(first.runs).intersection(*(arm.runs for arm in arms)))
    if not seeds:
        raise StatisticsError(
            f"no seed in common: {'; '.join(', '.join(map(str, arm.runs)) for arm in arms)}"
        )
    matched = [arm.of(seeds) for arm in arms]
    scores = np.array([[arm.scores[seed] for seed in seeds] for arm in matched])
    groups = first.items.groups
    return Evidence(
        tuple(seeds),
        scores,
        item_covariance(matched),
        len(first.index) if groups is None else len(set(groups)),
    )


def check_same(first: Answers, second: Answers) -> None:
    """Answers can be compared where they are to the same questions, held against the same golds, by the same metrics.

    Raises:
        StatisticsError: They are not; says how many agree.
    """
    task = first.task.name
    if first.task.model_dump(include={"metrics", "headline"}) != second.task.model_dump(
        include={"metrics", "headline"}
    ):
        raise StatisticsError(f"task {task}: not the same metrics")
    if first.index != second.index:
        sizes = len(first.index), len(second.index), len(set(first.index) & set(second.index))
        counts = f"{sizes[0]} and {sizes[1]} items, {sizes[2]} of them in both{', in another order' if len(set(sizes)) == 1 else ''}"
        raise StatisticsError(f"task {task}: not tested on the same items ({counts})")
    one, other = first.items, second.items
    if one.groups != other.groups or one.golds != other.golds:
        differ = sum(a != b for a, b in zip(one.golds, other.golds, strict=True))
        what = (
            "tokens (another tokenizer)"
            if first.task.item_score
            else "gold answers (another version of the data)"
        )
        raise StatisticsError(
            f"task {task}: the same items, but {differ} of {len(one.golds)} differ in their {what}"
        )


def of_arms(evidence: Evidence, arms: Sequence[int]) -> Evidence:
    """The same of some arms only, in this order."""
    return replace(
        evidence,
        scores=evidence.scores[list(arms)],
        items=evidence.items[np.ix_(list(arms), list(arms))],
    )


def over_tasks(tasks: Sequence[Evidence]) -> Evidence:
    """Evidence on the mean over tasks; their items are drawn independently.

    Raises:
        StatisticsError: The tasks have different seeds.
    """
    if len({task.seeds for task in tasks}) > 1:
        raise StatisticsError("the tasks do not have the same seeds")
    scores: Values = np.mean([task.scores for task in tasks], axis=0)
    items: Values = np.sum([task.items for task in tasks], axis=0) / len(tasks) ** 2
    return Evidence(tasks[0].seeds, scores, items, sum(task.units for task in tasks))


def variances(evidence: Evidence, noise: Values | None = None) -> tuple[Values, Values, float]:
    """Of the error of every difference.

    Args:
        evidence: On A arms.
        noise: Scores by arm and seed of all arms whose seeds say how much seeds matter; None = those of `evidence`.

    Returns:
        The items' part (A, A), the seeds' part (A, A), and the latter's degrees of freedom, 0 for one seed.
    """
    spread = np.diag(evidence.items)
    items = np.maximum(spread[:, None] + spread[None, :] - 2 * evidence.items, 0.0)
    count = len(evidence.seeds)
    if count < 2:
        return items, np.zeros_like(items), 0.0
    own = (evidence.scores[:, None, :] - evidence.scores[None, :, :]).var(-1, ddof=1)
    table = evidence.scores if noise is None else noise
    residual = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    df = float(max(len(table) - 1, 1) * (count - 1))
    return items, np.maximum(own, 2 * float((residual**2).sum()) / df) / count, df


def p_values(evidence: Evidence, noise: Values | None = None) -> Values:
    """Of every pair of arms, (A, A), not adjusted; 1 on the diagonal. `noise` as of `variances`."""
    items, seeds, df = variances(evidence, noise)
    means = evidence.scores.mean(1)
    found = two_sided(means[:, None] - means[None, :], items, seeds, df)
    np.fill_diagonal(found, 1.0)
    return found


def difference(evidence: Evidence, noise: Values | None = None) -> Difference:
    """The first arm of two less the second. `noise` as of `variances`."""
    items, seeds, df = variances(evidence, noise)
    first, second = (float(mean) for mean in evidence.scores.mean(1))
    width = half_width(float(items[0, 1]), float(seeds[0, 1]), df)
    found = first - second
    p = float(two_sided(found, items[0, 1], seeds[0, 1], df))
    return Difference(
        first, second, found, found - width, found + width, p, _hedges_g(evidence.scores)
    )


def _hedges_g(scores: Values) -> float | None:
    """Source: Hedges, "Distribution theory for Glass's estimator of effect size", 1981, with J(m) = 1 - 3 / (4m - 1)."""
    count = int(scores.shape[1])
    spread = float(np.sqrt(scores.var(1, ddof=1).mean())) if count > 1 else 0.0
    if spread == 0:
        return None
    gap = float(scores[0].mean() - scores[1].mean())
    return gap / spread * (1 - 3 / (4 * (2 * count - 2) - 1))
