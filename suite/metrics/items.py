"""Every metric as sums over items, so that a bootstrap over items is one product of matrices.

A statistic says what each item adds to some sums, and what the metric is for such sums. Accuracy
adds (right, 1); BLEU adds its n-gram counts. The metric of a resample is then that of weighted
sums. This is exact for every metric here but `spearman`, whose ranks are those of the whole sample
and not of the resample (the usual approximation; its error is O(1/n) where ties are few).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from suite.config.task import GenerationTask, TaskConfig
from suite.metrics.squad import SPAN_METRICS, span_rows
from suite.metrics.text import ROUGE, bleu_counts, exact_matches, rouge_rows
from suite.metrics.values import Values, answered


@dataclass(frozen=True, slots=True)
class Items:
    """The answers to a split and their golds, in the order of the items.

    Attributes:
        predictions: Classes, numbers or texts. For running text the negative log-likelihood of
            each item, in nats.
        golds: Classes, numbers or texts; for questions lists of accepted texts. For running text
            the number of tokens.
        groups: Of which group (such as a question) each item is part, where items are scored
            together; None = each item by itself.
    """

    predictions: Sequence[Any]
    golds: Sequence[Any]
    groups: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Statistic:
    """A metric as sums.

    Attributes:
        rows: What each item adds, (items, k).
        score: From sums (..., k) to the metric (...), in the unit of a task's `scores`. The sums
            may be weighted with any positive weights.
    """

    rows: Callable[[Items], Values]
    score: Callable[[Values], Values]


def unit_rows(statistic: Statistic, items: Items) -> Values:
    """What each unit of resampling adds, (units, k).

    A unit is an item, or a group; groups come in the order in which they first appear.
    """
    rows = statistic.rows(items)
    if items.groups is None:
        return rows
    places: dict[str, int] = {}
    of_items = [places.setdefault(group, len(places)) for group in items.groups]
    sums = np.zeros((len(places), rows.shape[1]))
    # not `sums[of_items] += rows`, which adds one row of each group alone
    np.add.at(sums, of_items, rows)
    return sums


def shares(rows: Callable[[Items], Values]) -> Statistic:
    """A metric that is 100 x the mean over items of a number from 0 to 1."""
    # the column of ones becomes the number of items in a resample
    return Statistic(lambda items: with_ones(rows(items)), _percent)


def with_ones(values: Values) -> Values:
    """(n,) to (n, 2): the values, and a column that counts items."""
    return np.stack([values, np.ones(len(values))], axis=-1)


def _percent(sums: Values) -> Values:
    """The first sum in percent of the second."""
    return 100.0 * ratio(sums[..., 0], sums[..., 1])


def ratio(top: Values, bottom: Values) -> Values:
    """`top / bottom`, 0 where the bottom is 0."""
    zeros = np.zeros(np.broadcast_shapes(top.shape, bottom.shape))
    found: Values = np.divide(top, bottom, out=zeros, where=bottom != 0)
    return found


def numbers(items: Items) -> tuple[Values, Values]:
    """Predictions and golds as float64."""
    predicted = np.asarray(items.predictions, dtype=np.float64)
    return predicted, np.asarray(items.golds, dtype=np.float64)


def _right(items: Items) -> Values:
    predicted, gold = numbers(items)
    found: Values = (predicted == gold).astype(np.float64)
    return found


def _f1_rows(items: Items) -> Values:
    """True positives, and positives predicted plus positives in gold, (items, 2)."""
    predicted, gold = numbers(items)
    positive = answered(predicted, gold) == 1
    wanted = gold == 1
    return np.stack([positive & wanted, positive.astype(int) + wanted], axis=-1).astype(np.float64)


def _f1(sums: Values) -> Values:
    return 200.0 * ratio(sums[..., 0], sums[..., 1])


def _matthews_rows(items: Items) -> Values:
    """Items, right ones, and how often each class is predicted and how often it is gold.

    The coefficient needs no more. (items, 2 + 2 x classes).
    """
    predicted, gold = numbers(items)
    predicted = answered(predicted, gold)
    classes = np.union1d(predicted, gold)
    head = np.stack([np.ones(len(gold)), predicted == gold], axis=-1)
    said = predicted[:, None] == classes
    true = gold[:, None] == classes
    return np.concatenate([head, said, true], axis=-1).astype(np.float64)


def _matthews(sums: Values) -> Values:
    """Gorodkin's R_K, as scikit-learn computes it."""
    items = sums[..., 0]
    right = sums[..., 1]
    predicted, gold = np.split(sums[..., 2:], 2, axis=-1)
    spread = (items**2 - (predicted**2).sum(-1)) * (items**2 - (gold**2).sum(-1))
    # the product is never negative but for rounding
    root = np.sqrt(np.maximum(spread, 0.0))
    return 100.0 * ratio(items * right - (predicted * gold).sum(-1), root)


def _moments(x: Values, y: Values) -> Values:
    """1, x, y, x², y², xy of standardised values, (n, 6); all 0 where no correlation is defined."""
    if not np.isfinite(x).all() or np.ptp(x) == 0 or np.ptp(y) == 0:
        return np.zeros((len(x), 6))
    # standardised, because sums of large squares would lose digits
    x = (x - x.mean()) / x.std()
    y = (y - y.mean()) / y.std()
    return np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=-1)


def _rank_moments(items: Items) -> Values:
    """The moments of the ranks."""
    # scipy.stats takes most of a second to import, and no other metric needs it
    from scipy.stats import rankdata

    predicted, gold = numbers(items)
    # Ranks are finite where a prediction is not, and such predictions score 0.
    if not np.isfinite(predicted).all():
        return np.zeros((len(predicted), 6))
    return _moments(rankdata(predicted), rankdata(gold))


def _pearson(sums: Values) -> Values:
    """Pearson's correlation in percent; 0 where a resample has no spread."""
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    spread = ratio(n * xx - x * x, n * n) * ratio(n * yy - y * y, n * n)
    # a variance below 1e-12 of the sample's is rounding; `spread` is a product of two variances
    root = np.sqrt(np.where(spread > 1e-24, spread, 0.0))
    return 100.0 * ratio(ratio(n * xy - x * y, n * n), root)


def _bleu(sums: Values) -> Values:
    """sacreBLEU's score of corpus sums, with its `exp` smoothing; columns as of `bleu_counts`."""
    written = sums[..., 0]
    reference = sums[..., 1]
    correct = sums[..., 2:6]  # (..., 4), by order of the n-grams
    total = sums[..., 6:10]  # (..., 4)
    none = correct == 0
    # each order without a match counts as half the match of the order before
    halvings = np.where(none, 2.0 ** np.cumsum(none, axis=-1), 1.0)
    precisions = ratio(np.where(none, 1.0, correct), halvings * total)
    defined = (total > 0).all(-1) & ~none.all(-1)
    brevity = np.exp(np.minimum(0.0, 1.0 - ratio(reference, written)))
    # 1.0 where it is not defined, so that the logarithm warns of nothing
    logarithms = np.log(np.where(defined[..., None], precisions, 1.0))
    return 100.0 * np.where(defined, brevity * np.exp(logarithms.mean(-1)), 0.0)


def _macro_f1_rows(items: Items) -> Values:
    """By class: true positives, then positives predicted plus positives in gold.

    (items, 2 x classes).
    """
    predicted, gold = numbers(items)
    classes = np.union1d(gold, predicted[predicted >= 0])
    said = predicted[:, None] == classes
    true = gold[:, None] == classes
    return np.concatenate([said & true, said.astype(np.float64) + true], axis=1)


def _macro_f1(sums: Values) -> Values:
    """The mean over the classes that occur."""
    hits, marked = np.split(sums, 2, axis=-1)
    return 100.0 * ratio(ratio(2.0 * hits, marked).sum(-1), (marked > 0).sum(-1))


def _group_em_rows(items: Items) -> Values:
    """At the first item of each group, whether all of the group is right, and 1; else 0 and 0."""
    assert items.groups is not None, "group_em is a metric of tasks with groups"
    right = _right(items)
    rows = np.zeros((len(right), 2))
    first: dict[str, int] = {}
    for number, group in enumerate(items.groups):
        if group not in first:
            first[group] = number
            rows[number] = 1.0
        rows[first[group], 0] *= right[number]
    return rows


def _rouge(name: str) -> Statistic:
    return shares(lambda items: rouge_rows(name, items.predictions, items.golds))


def _spans(name: str) -> Statistic:
    return shares(lambda items: span_rows(name, items.predictions, items.golds))


def exact_match(answer: str | None = None) -> Statistic:
    """The share of exact matches; `answer` as in `exact_matches`."""
    return shares(lambda items: exact_matches(items.predictions, items.golds, answer=answer))


def _perplexity(sums: Values) -> Values:
    # an untrained model's perplexity may be infinite
    with np.errstate(over="ignore"):
        return np.exp(sums[..., 0] / sums[..., 1])


STATISTICS: dict[str, Statistic] = {
    "accuracy": shares(_right),
    "f1": Statistic(_f1_rows, _f1),
    "macro_f1": Statistic(_macro_f1_rows, _macro_f1),
    "group_em": Statistic(_group_em_rows, _percent),
    "matthews": Statistic(_matthews_rows, _matthews),
    "pearson": Statistic(lambda items: _moments(*numbers(items)), _pearson),
    "spearman": Statistic(_rank_moments, _pearson),
    "perplexity": Statistic(lambda items: np.stack(numbers(items), axis=-1), _perplexity),
    "bleu": Statistic(lambda items: bleu_counts(items.predictions, items.golds), _bleu),
    "exact_match": exact_match(),
    **{name: _rouge(name) for name in ROUGE},
    **{name: _spans(name) for name in SPAN_METRICS},
}
"""Metric -> statistic. A metric that is missing here is computed from each resample's items."""


def statistic_of(task: TaskConfig, metric: str) -> Statistic | None:
    """The statistic of a task's metric, or None where the metric has none.

    The metrics of a task file's own `score` have none, whatever they are called.
    """
    if task.code is not None and task.code.score:
        return None
    if metric == "exact_match" and isinstance(task, GenerationTask):
        return exact_match(task.answer)
    return STATISTICS.get(metric)
