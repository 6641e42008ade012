"""Say which rows are shown to learn: they score better than the constant answer, and not by luck.

The arms that a sweep plans on a backbone and task are one family, the one that their ranks compare,
whether they have finished or not. The p-values are multiplied by the looks at a row's test scores,
and corrected over the family (Holm). So where no row of a family has learned anything, the chance
that one of them is ever called shown to learn is at most 5%, however often somebody looks while
they finish. A row that is not shown to learn may still have learned: with few seeds or
items a test cannot tell. It is evidence all the same, and keeps its score, its interval, its rank
and its place in the mean over tasks.

Families are made of several rows, so this is computed when the leaderboard is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from suite.leaderboard.fields import Row, with_values
from suite.leaderboard.ranks import is_ranked, planned_arms
from suite.stats.significance import LEVEL, counted, holm


def with_learning(rows: Sequence[Row]) -> list[Row]:
    """The same rows with `constant_p_holm` and `shown_to_learn`.

    Both are None for a row that is rejected, not finished, or without `constant_p`.

    Args:
        rows: Rows of cells; of each sweep of a home all of them.
    """
    families: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        # Rows that are not ranked may change or are no evidence, so they have no p-value here.
        if is_ranked(row) and row.constant_p is not None:
            families[row.home, row.sweep, row.backbone, row.task].append(place)
    found = list(rows)
    for places in families.values():
        p_values = []
        looks = []
        for place in places:
            p_values.append(rows[place].constant_p)
            # Rows that no home counts the looks of have 0.
            looks.append(max(rows[place].test_looks, 1))
        planned = planned_arms([rows[place] for place in places])
        corrected = holm(counted(np.array(p_values), np.array(looks)), family=planned)
        for place, p in zip(places, corrected.tolist(), strict=True):
            shown = p < 1 - LEVEL
            found[place] = with_values(rows[place], constant_p_holm=p, shown_to_learn=shown)
    return found
