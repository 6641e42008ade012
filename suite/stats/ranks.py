"""Ranks as groups: the places that an arm can have, given which other arms it differs from.

All pairs of arms are tested, with Holm's correction over all pairs that the sweep plans: the arms
of one backbone and task are one family, also while some of them have not finished. An arm's rank
runs from one more than the number of arms that are better, to the number of all arms less those
that are worse: 1, 1-3, 2-3. Two arms whose ranks overlap may still differ; `suite compare
--all-pairs` tests them with their own variances.
"""

from __future__ import annotations

import numpy as np

from suite.errors import StatisticsError
from suite.metrics.values import Values
from suite.stats.compare import NO_RANK, Evidence, p_values
from suite.stats.significance import LEVEL, counted, holm

Rank = tuple[int, int]
"""The best and the worst place, counted from 1."""


def pairs_of(arms: int) -> int:
    """How many pairs so many arms make."""
    return arms * (arms - 1) // 2


def rank_groups(
    evidence: Evidence, *, higher_is_better: bool, looks: Values | int = 1, planned: int = 0
) -> list[Rank]:
    """The rank of every arm, in the order of the evidence.

    Args:
        evidence: On the arms to rank.
        higher_is_better: False for perplexity and the like.
        looks: How often the test scores of each pair were looked at, (A, A), or of all pairs.
        planned: Arms that will be ranked, those that have not finished among them; 0 = these are
            all. A correction for fewer would be lifted, look by look, while the others finish.

    Raises:
        StatisticsError: There is one seed only.
    """
    if len(evidence.seeds) < 2:
        raise StatisticsError(NO_RANK)
    count = len(evidence.scores)
    pairs = np.triu_indices(count, 1)  # each pair once
    apart = np.zeros((count, count), dtype=bool)
    of_pairs = counted(p_values(evidence, pooled=True), looks)
    apart[pairs] = holm(of_pairs[pairs], family=pairs_of(planned)) < 1 - LEVEL
    apart |= apart.T
    means = evidence.scores.mean(1)
    if not higher_is_better:
        means = -means
    # how many arms are significantly better, and worse, than each
    better = (apart & (means[None, :] > means[:, None])).sum(1)
    worse = (apart & (means[None, :] < means[:, None])).sum(1)
    ranks = []
    for arm in range(count):
        ranks.append((1 + int(better[arm]), count - int(worse[arm])))
    return ranks


def rank_text(rank: Rank) -> str:
    """`1`, or `1-3` for a group."""
    low, high = rank
    return str(low) if low == high else f"{low}-{high}"
