"""Ranks as groups: the places an arm can have, given which others are told apart from it.

All pairs of arms are tested, Holm's correction holds over all of them, and an arm's rank runs from one more than the number of
arms that are better to all less the number that are worse: 1, 1-3, 2-3. Whether two ranks overlap says nothing about the two
arms; `suite compare` tests them.
"""

from __future__ import annotations

import numpy as np

from suite.metrics.quality import Values
from suite.stats.compare import Evidence, p_values
from suite.stats.significance import LEVEL, holm

Rank = tuple[int, int]
"""The best and the worst place, from 1."""


def rank_groups(
    evidence: Evidence, *, higher_is_better: bool, noise: Values | None = None
) -> list[Rank]:
    """The rank of every arm, in the order of the evidence; `noise` as of `compare.variances`."""
    count = len(evidence.scores)
    upper = np.triu_indices(count, 1)
    apart = np.zeros((count, count), dtype=bool)
    apart[upper] = holm(p_values(evidence, noise)[upper]) < 1 - LEVEL
    apart |= apart.T
    means = evidence.scores.mean(1) * (1 if higher_is_better else -1)
    better = apart & (means[None, :] > means[:, None])
    worse = apart & (means[None, :] < means[:, None])
    return [(1 + int(b), count - int(w)) for b, w in zip(better.sum(1), worse.sum(1), strict=True)]


def rank_text(rank: Rank) -> str:
    """`1`, or `1-3` for a group."""
    low, high = rank
    return str(low) if low == high else f"{low}-{high}"
