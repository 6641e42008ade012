"""The least p-value that the items allow, where two arms differ on few of them.

The error of the items is taken as normal, which holds where many items count. Where two arms differ
on four items only, a normal distribution gives p = 0.044 for 4 against 0. An exact test gives
0.125: if the arms were equal, each of the four could have gone either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from suite.config.task_files import own_score
from suite.metrics.items import statistic_of
from suite.metrics.values import Values
from suite.stats.answers import Answers, headline_metrics

FEW = 25
"""Items on which two arms differ, up to which the test is exact; the usual limit for McNemar's."""
RIGHT_OR_WRONG = ("accuracy", "exact_match", "em")
"""Metrics that are the share of the items that are right."""


def least_p_values(arms: Sequence[Answers]) -> Values:
    """The least p-value of "no difference" that the items allow, for every pair of arms.

    Where the score is a share of right items, this is the p-value of the exact test that exchanges
    the two arms on any of the items, with all seeds of an item together. With one answer to an item
    it is McNemar's exact test. For other scores it is 2^(1 - n) for n items on which the answers
    differ: no exchange of n items can be rarer.

    Args:
        arms: A arms with the same seeds, all tested on the same items.

    Returns:
        (A, A); 1 on the diagonal, 0 where the answers differ on more than `FEW` items. It is twice
        the probability on the side of the difference, so above 1 where there is no difference, and
        2 for arms with the same answers.

    Source: McNemar, "Note on the sampling error of the difference between correlated proportions",
    Psychometrika, 1947.
    """
    found = np.eye(len(arms))
    right = _right_answers(arms)
    predicted = []
    for arm in arms:
        predicted.append([np.asarray(items.predictions) for items in arm.runs.values()])
    for one, other in combinations(range(len(arms)), 2):
        if right is None:
            p = _by_count(predicted[one], predicted[other], arms[one].items.groups)
        else:
            p = _by_exchange(right[one] - right[other])
        found[one, other] = found[other, one] = p
    return found


def _right_answers(arms: Sequence[Answers]) -> list[Values] | None:
    """By arm, how many seeds are right on each item; None where the score is no share of them."""
    task = arms[0].task
    metrics = headline_metrics(task)
    if own_score(task) is not None or arms[0].items.groups is not None:
        return None
    if len(metrics) != 1 or metrics[0] not in RIGHT_OR_WRONG:
        return None
    statistic = statistic_of(task, metrics[0])
    assert statistic is not None, "each of these metrics is a sum over items"
    counts = []
    for arm in arms:
        count = np.zeros(len(arm.index))
        for items in arm.runs.values():
            # The first column says whether an item is right, the second counts items.
            count += statistic.rows(items)[:, 0]
        counts.append(count)
    return counts


def _by_exchange(differences: Values) -> float:
    """Twice the probability of so large a sum if each of them had either sign by chance."""
    sizes = np.abs(differences[differences != 0]).astype(int)
    if len(sizes) > FEW:
        return 0.0
    # The probability of every sum from -total to total; each item adds or takes its own size.
    chances = np.ones(1)
    for size in sizes:
        step = np.zeros(2 * size + 1)
        step[[0, -1]] = 0.5
        chances = np.convolve(chances, step)
    total = sizes.sum()
    sums = np.arange(-total, total + 1)
    return 2.0 * float(chances[sums >= abs(differences.sum())].sum())


def _by_count(ours: Sequence[Any], theirs: Sequence[Any], groups: Sequence[str] | None) -> float:
    """The p-value of the rarest exchange of the items, or groups, on which any seed differs."""
    differs = np.zeros(len(ours[0]), dtype=bool)
    for one, other in zip(ours, theirs, strict=True):
        differs |= one != other
    units = int(differs.sum())
    if groups is not None:
        units = len(set(np.asarray(groups)[differs]))
    return least_p(units)


def least_p(units: int) -> float:
    """The p-value of two arms that differ on this many items, all in the same direction.

    No p is lower; 0 above `FEW`.
    """
    if units > FEW:
        return 0.0
    return 2.0 ** (1 - units)
