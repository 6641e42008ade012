"""How much scores move when other items of the same kind are asked: the bootstrap over items, for many runs at once.

Every resample draws as many units as there are, with replacement: items, or whole groups where items have groups. All runs of
a task see the same resamples, so that what moves them together cancels in a difference. Resamples depend on the task's name
and the number of units only, so they are the same for every arm, today and tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from suite.config.hashing import derive_seed
from suite.config.task import TaskConfig
from suite.config.task_files import own_score
from suite.errors import StatisticsError
from suite.metrics.items import Items, unit_rows
from suite.metrics.quality import Values
from suite.stats.answers import Answers, statistics

RESAMPLES = 2000
"""The standard error of a variance from so many is 3%."""
OWN_RESAMPLES = 200
"""For a task's own `score`, which must be computed anew each time; 10%."""
CHUNK = 2_000_000


def item_covariance(arms: Sequence[Answers], *, resamples: int | None = None) -> Values:
    """Covariance, over resamples of the items, of what all seeds of an arm have in common, (A, A), in squared units of the score.

    It is the mean covariance of runs with different seeds. What an item does to one run only is part of the spread between
    seeds, and would count twice. With one seed it is the covariance of the runs themselves.

    Args:
        arms: On the same items, with as many seeds each.
        resamples: None = `RESAMPLES`, or `OWN_RESAMPLES` for a score without sums.

    Raises:
        StatisticsError: Fewer than two units, or a resample has no finite score.
    """
    task, units = arms[0].task, _units(arms[0].items)
    if units < 2:
        raise StatisticsError(f"{units} test item: nothing to resample")
    rng = np.random.default_rng(derive_seed("resampled items", task.name, units))
    if own_score(task) is None:
        scores = _by_sums(arms, _counts(rng, units, RESAMPLES if resamples is None else resamples))
    else:
        scores = _anew(arms, _counts(rng, units, OWN_RESAMPLES if resamples is None else resamples))
    if not np.isfinite(scores).all():
        raise StatisticsError("a resample of the items has no finite score")
    of_runs = (
        np.atleast_2d(np.cov(scores, rowvar=False)) * units / (units - 1)
    )  # the plug-in variance is (n - 1) / n too small
    return _between_seeds(of_runs, len(arms))


def _between_seeds(of_runs: Values, arms: int) -> Values:
    """(A·S, A·S) to (A, A): the mean over pairs of different seeds."""
    seeds = len(of_runs) // arms
    blocks = of_runs.reshape(arms, seeds, arms, seeds)
    if seeds == 1:
        return blocks[:, 0, :, 0]
    same = np.einsum("asbs->ab", blocks)
    found: Values = (blocks.sum((1, 3)) - same) / (seeds * (seeds - 1))
    return found


def _units(items: Items) -> int:
    return len(items.golds) if items.groups is None else len(set(items.groups))


def _counts(rng: np.random.Generator, units: int, resamples: int) -> Iterator[Values]:
    """How often each unit is drawn, in parts of (b, units)."""
    step = max(1, CHUNK // units)
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        drawn = rng.integers(0, units, (size, units)) + units * np.arange(size)[:, None]
        yield (
            np.bincount(drawn.ravel(), minlength=size * units)
            .reshape(size, units)
            .astype(np.float64)
        )


def _by_sums(arms: Sequence[Answers], counts: Iterator[Values]) -> Values:
    """Scores of every run on every resample, (resamples, A·S): one product of matrices for all sums of all runs."""
    rows, scorers = zip(
        *(_sums(arm.task, items) for arm in arms for items in arm.runs.values()), strict=True
    )
    joined, ends = np.concatenate(rows, axis=1), np.cumsum([r.shape[1] for r in rows])[:-1]

    def score(drawn: Values) -> Values:
        parts = np.split(drawn @ joined, ends, axis=1)
        return np.stack([scorer(part) for scorer, part in zip(scorers, parts, strict=True)], axis=1)

    return np.concatenate([score(drawn) for drawn in counts])


def _sums(task: TaskConfig, items: Items) -> tuple[Values, Callable[[Values], Values]]:
    """What each unit adds to all metrics of the score, and the score of such sums."""
    known = statistics(task)
    rows = [unit_rows(statistic, items) for statistic in known]
    ends = np.cumsum([r.shape[1] for r in rows])[:-1]

    def score(sums: Values) -> Values:
        parts = np.split(sums, ends, axis=-1)
        found: Values = np.mean(
            [s.score(part) for s, part in zip(known, parts, strict=True)], axis=0
        )
        return found

    return np.concatenate(rows, axis=1), score


def _anew(arms: Sequence[Answers], counts: Iterator[Values]) -> Values:
    """As `_by_sums`, from the items of each resample."""
    own, task = own_score(arms[0].task), arms[0].task
    assert own is not None
    members = _members(arms[0].items)

    def score(items: Items, drawn: Values) -> float:
        chosen = [i for unit, times in enumerate(drawn.astype(int)) for i in members[unit] * times]
        return task.score_of(
            own([items.predictions[i] for i in chosen], [items.golds[i] for i in chosen])
        )

    runs = [items for arm in arms for items in arm.runs.values()]
    return np.array([[score(items, drawn) for items in runs] for part in counts for drawn in part])


def _members(items: Items) -> list[list[int]]:
    """Items of each unit, in the order of `unit_rows`."""
    groups: dict[str, list[int]] = {}
    for i, group in enumerate(
        map(str, range(len(items.golds))) if items.groups is None else items.groups
    ):
        groups.setdefault(group, []).append(i)
    return list(groups.values())
