"""The bootstrap over items: how much scores would move if the test set held other such items.

Every resample draws as many units as there are, with replacement. A unit is an item, or a whole
group where items have groups. All runs of a task see the same resamples, so what moves them
together cancels in a difference. The resamples depend only on the task's name and the number of
units, so they are the same for every arm, whenever it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from suite.config.hashing import derive_seed
from suite.config.task import TaskConfig
from suite.config.task_files import own_score
from suite.errors import StatisticsError
from suite.metrics.items import Items, unit_rows
from suite.metrics.values import Values
from suite.stats.answers import Answers, statistics

RESAMPLES = 2000
"""A variance estimated from so many resamples has a standard error of 3%."""
OWN_RESAMPLES = 200
"""Resamples for a task's own `score`, which is computed anew for each; standard error 10%."""
CHUNK = 2_000_000
"""Counts held in memory at a time, 8 bytes each."""


def item_covariance(arms: Sequence[Answers], *, resamples: int | None = None) -> Values:
    """Covariance, over resamples of the items, of what all seeds of an arm have in common.

    This is the mean covariance between runs with different seeds. What an item does to one run
    only is part of the spread between seeds; here it would count twice. With one seed this is the
    covariance of the runs themselves.

    Args:
        arms: A arms, all tested on the same items with the same number of seeds.
        resamples: None = `RESAMPLES`, or `OWN_RESAMPLES` for a task's own `score`.

    Returns:
        (A, A), in squared units of the score.

    Raises:
        StatisticsError: There are fewer than two units, or a resample has no finite score.
    """
    task = arms[0].task
    units = unit_count(arms[0].items)
    if units < 2:
        raise StatisticsError(f"{units} test item: nothing to resample")
    rng = np.random.default_rng(derive_seed("resampled items", task.name, units))
    # the seed depends on no arm, so that all arms see the same resamples
    if own_score(task) is None:
        scores = _scores_from_sums(arms, _draw_counts(rng, units, resamples or RESAMPLES))
    else:
        scores = _scores_from_items(arms, _draw_counts(rng, units, resamples or OWN_RESAMPLES))
    if not np.isfinite(scores).all():
        raise StatisticsError("a resample of the items has no finite score")
    # a bootstrap's variance is too small by the factor (n - 1) / n
    of_runs = np.atleast_2d(np.cov(scores, rowvar=False)) * units / (units - 1)  # (A·S, A·S)
    return _between_seeds(of_runs, len(arms))


def _between_seeds(of_runs: Values, arms: int) -> Values:
    """Average (A·S, A·S) to (A, A), over pairs of different seeds."""
    seeds = len(of_runs) // arms
    blocks = of_runs.reshape(arms, seeds, arms, seeds)  # (A, S, A, S)
    if seeds == 1:
        return blocks[:, 0, :, 0]
    same_seed = np.einsum("asbs->ab", blocks)  # (A, A), summed over seeds
    found: Values = (blocks.sum((1, 3)) - same_seed) / (seeds * (seeds - 1))
    return found


def unit_count(items: Items) -> int:
    """How many units are resampled: items, or whole groups of them."""
    if items.groups is None:
        return len(items.golds)
    return len(set(items.groups))


def _draw_counts(rng: np.random.Generator, units: int, resamples: int) -> Iterator[Values]:
    """How often each resample draws each unit, in parts of shape (b, units)."""
    step = max(1, CHUNK // units)
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        # every resample gets a range of numbers of its own, so that one bincount counts them all
        drawn = rng.integers(0, units, (size, units)) + units * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * units)
        # float64, because the product of matrices is far faster for it than for integers
        yield counts.reshape(size, units).astype(np.float64)


def _scores_from_sums(arms: Sequence[Answers], counts: Iterator[Values]) -> Values:
    """The score of every run on every resample, (resamples, A·S)."""
    rows = []
    scorers = []
    for arm in arms:
        for items in arm.runs.values():
            added, scorer = _sums(arm.task, items)
            rows.append(added)
            scorers.append(scorer)
    # one matrix for all runs: a resample's sums are then one product with it
    joined = np.concatenate(rows, axis=1)  # (units, sums of all runs)
    cuts = _cuts(rows)
    chunks = []
    for drawn in counts:
        scores = []
        for scorer, sums in zip(scorers, np.split(drawn @ joined, cuts, axis=1), strict=True):
            scores.append(scorer(sums))
        chunks.append(np.stack(scores, axis=1))
    return np.concatenate(chunks)


def _sums(task: TaskConfig, items: Items) -> tuple[Values, Callable[[Values], Values]]:
    """What each unit adds to the sums of all metrics of the score, and the score of such sums."""
    known = statistics(task)
    rows = [unit_rows(statistic, items) for statistic in known]
    cuts = _cuts(rows)

    def score(sums: Values) -> Values:
        metrics = []
        for statistic, part in zip(known, np.split(sums, cuts, axis=-1), strict=True):
            metrics.append(statistic.score(part))
        found: Values = np.mean(metrics, axis=0)
        return found

    return np.concatenate(rows, axis=1), score


def _cuts(rows: Sequence[Values]) -> Values:
    """The columns at which matrices that were joined side by side are parted again."""
    widths = [part.shape[1] for part in rows]
    return np.cumsum(widths)[:-1]


def _scores_from_items(arms: Sequence[Answers], counts: Iterator[Values]) -> Values:
    """As `_scores_from_sums`, by calling the task's own `score` on the items of each resample."""
    task = arms[0].task
    own = own_score(task)
    assert own is not None
    members = _members(arms[0].items)
    scores = []
    for part in counts:
        for drawn in part.astype(int):
            chosen: list[int] = []
            for unit, times in enumerate(drawn):
                chosen += members[unit] * times
            for arm in arms:
                for items in arm.runs.values():
                    predictions = _take(items.predictions, chosen)
                    golds = _take(items.golds, chosen)
                    scores.append(task.score_of(own(predictions, golds)))
    runs = sum(len(arm.runs) for arm in arms)
    return np.array(scores).reshape(-1, runs)


def _take(values: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
    return [values[item] for item in chosen]


def _members(items: Items) -> list[list[int]]:
    """The numbers of each unit's items; units in the order of `unit_rows`."""
    if items.groups is None:
        return [[item] for item in range(len(items.golds))]
    groups: dict[str, list[int]] = {}
    for item, group in enumerate(items.groups):
        groups.setdefault(group, []).append(item)
    return list(groups.values())
