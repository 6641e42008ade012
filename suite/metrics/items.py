"""Every metric as sums over items, so that a bootstrap over items is one product of matrices.

A statistic says what each item adds and what the sums make. Accuracy adds (right, 1); BLEU adds its n-gram counts. The score
of a resample is then the score of weighted sums, exact for every metric here but `spearman`: its ranks are those of the whole
sample, not of the resample (the usual approximation; it errs by O(1/n) where ties are few).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from suite.config.task import GenerationTask, TaskConfig
from suite.metrics.quality import Values, answered
from suite.metrics.squad import SPAN_METRICS, span_rows
from suite.metrics.text import ROUGE, bleu_counts, exact_matches, rouge_rows


@dataclass(frozen=True, slots=True)
class Items:
    """The answers to a split and what they are held against, in the order of the items.

    Attributes:
        predictions: Classes, numbers or texts; of running text, the negative log-likelihood of each item in nats.
        golds: As many of the same, of questions lists of accepted texts; of running text, tokens.
        groups: Of which question or the like an item is part, where they are scored together; None = each item by itself.
    """

    predictions: Sequence[Any]
    golds: Sequence[Any]
    groups: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Statistic:
    """A metric as sums.

    Attributes:
        rows: What each item adds, (items, k).
        score: Sums (..., k) to the metric (...), in the unit of a task's `scores`. Sums may be of any positive weights.
    """

    rows: Callable[[Items], Values]
    score: Callable[[Values], Values]


def unit_rows(statistic: Statistic, items: Items) -> Values:
    """What each unit of resampling adds, (units, k): the item, or the group in the order in which groups first appear."""
    rows = statistic.rows(items)
    if items.groups is None:
        return rows
    order = {group: n for n, group in enumerate(dict.fromkeys(items.groups))}
    sums = np.zeros((len(order), rows.shape[1]))
    np.add.at(sums, [order[group] for group in items.groups], rows)
    return sums


def shares(rows: Callable[[Items], Values]) -> Statistic:
    """A metric that is 100 x the mean over items of a number from 0 to 1."""
    return Statistic(
        lambda items: with_ones(rows(items)), lambda sums: 100.0 * ratio(sums[..., 0], sums[..., 1])
    )


def with_ones(values: Values) -> Values:
    """(n,) to (n, 2): the values, and a column that counts items."""
    return np.stack([values, np.ones(len(values))], axis=-1)


def ratio(top: Values, bottom: Values) -> Values:
    """`top / bottom`, 0 where the bottom is 0."""
    found: Values = np.divide(
        top, bottom, out=np.zeros(np.broadcast_shapes(top.shape, bottom.shape)), where=bottom != 0
    )
    return found


def numbers(items: Items) -> tuple[Values, Values]:
    """Predictions and golds as float64."""
    return np.asarray(items.predictions, dtype=np.float64), np.asarray(
        items.golds, dtype=np.float64
    )


def _right(items: Items) -> Values:
    predicted, gold = numbers(items)
    found: Values = (predicted == gold).astype(np.float64)
    return found


def _f1_rows(items: Items) -> Values:
    """True positives, and positives predicted plus positives in gold."""
    predicted, gold = numbers(items)
    positive, wanted = answered(predicted, gold) == 1, gold == 1
    return np.stack([positive & wanted, positive.astype(int) + wanted], axis=-1).astype(np.float64)


def _f1(sums: Values) -> Values:
    return 200.0 * ratio(sums[..., 0], sums[..., 1])


def _matthews_rows(items: Items) -> Values:
    """Items, right ones, then how often each class is predicted and how often it is gold: (n, 2 + 2C), all that the coefficient needs."""
    predicted, gold = numbers(items)
    predicted = answered(predicted, gold)
    classes = np.union1d(predicted, gold)
    counts = [
        np.ones(len(gold)),
        predicted == gold,
        *(predicted == c for c in classes),
        *(gold == c for c in classes),
    ]
    return np.stack(counts, axis=-1).astype(np.float64)


def _matthews(sums: Values) -> Values:
    """Gorodkin's R_K, as scikit-learn computes it."""
    n, right = sums[..., 0], sums[..., 1]
    predicted, gold = np.split(sums[..., 2:], 2, axis=-1)
    spread = (n**2 - (predicted**2).sum(-1)) * (n**2 - (gold**2).sum(-1))
    return 100.0 * ratio(n * right - (predicted * gold).sum(-1), np.sqrt(np.maximum(spread, 0.0)))


def _moments(x: Values, y: Values) -> Values:
    """1, x, y, x², y², xy of standardised columns, (n, 6); all zero where a correlation is not defined."""
    if not np.isfinite(x).all() or np.ptp(x) == 0 or np.ptp(y) == 0:
        return np.zeros((len(x), 6))
    x, y = ((v - v.mean()) / v.std() for v in (x, y))
    return np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=-1)


def _pearson(sums: Values) -> Values:
    """0 where a resample has no spread (its variance is below 1e-12 of the sample's: rounding)."""
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    spread = ratio(n * xx - x * x, n * n) * ratio(n * yy - y * y, n * n)
    return 100.0 * ratio(
        ratio(n * xy - x * y, n * n), np.sqrt(np.where(spread > 1e-24, spread, 0.0))
    )


def _bleu(sums: Values) -> Values:
    """sacreBLEU's score of corpus sums: written and reference tokens, matches and n-grams of orders 1 to 4; `exp` smoothing."""
    written, reference, correct, total = sums[..., 0], sums[..., 1], sums[..., 2:6], sums[..., 6:10]
    none = correct == 0
    halvings = np.where(none, 2.0 ** np.cumsum(none, axis=-1), 1.0)
    precisions = ratio(np.where(none, 1.0, correct), halvings * total)
    defined = (total > 0).all(-1) & ~none.all(-1)
    brevity = np.exp(np.minimum(0.0, 1.0 - ratio(reference, written)))
    logarithms = np.log(np.where(defined[..., None], precisions, 1.0))
    return 100.0 * np.where(defined, brevity * np.exp(logarithms.mean(-1)), 0.0)


def _macro_f1_rows(items: Items) -> Values:
    """Of every class, true positives, and positives predicted plus positives in gold, (items, 2 x classes)."""
    predicted, gold = numbers(items)
    classes = np.union1d(gold, predicted[predicted >= 0])
    said, true = predicted[:, None] == classes, gold[:, None] == classes
    return np.concatenate([said & true, said.astype(np.float64) + true], axis=1)


def _macro_f1(sums: Values) -> Values:
    """The mean over the classes that occur."""
    hits, marked = np.split(sums, 2, axis=-1)
    return 100.0 * ratio(ratio(2.0 * hits, marked).sum(-1), (marked > 0).sum(-1))


def _group_em_rows(items: Items) -> Values:
    """At the first item of each group, whether all of it is right, and 1."""
    assert items.groups is not None, "group_em is a metric of tasks with groups"
    right, first = _right(items), dict[str, int]()
    rows = np.zeros((len(right), 2))
    for number, group in enumerate(items.groups):
        rows[first.setdefault(group, number)] = 1.0
    for number, group in enumerate(items.groups):
        rows[first[group], 0] *= right[number]
    return rows


def _spans(name: str) -> Statistic:
    return shares(lambda items: span_rows(name, items.predictions, items.golds))


def _rouge(name: str) -> Statistic:
    return shares(lambda items: rouge_rows(name, items.predictions, items.golds))


def exact_match(answer: str | None = None) -> Statistic:
    """Of the answers that a regular expression finds in texts, or of whole texts."""
    return shares(lambda items: exact_matches(items.predictions, items.golds, answer=answer))


def _perplexity(sums: Values) -> Values:
    with np.errstate(over="ignore"):
        return np.exp(sums[..., 0] / sums[..., 1])


STATISTICS: dict[str, Statistic] = {
    "accuracy": shares(_right),
    "f1": Statistic(_f1_rows, _f1),
    "macro_f1": Statistic(_macro_f1_rows, _macro_f1),
    "group_em": Statistic(_group_em_rows, lambda sums: 100.0 * ratio(sums[..., 0], sums[..., 1])),
    "matthews": Statistic(_matthews_rows, _matthews),
    "pearson": Statistic(lambda items: _moments(*numbers(items)), _pearson),
    "spearman": Statistic(lambda items: _moments(*map(rankdata, numbers(items))), _pearson),
    "perplexity": Statistic(lambda items: np.stack(numbers(items), axis=-1), _perplexity),
    "bleu": Statistic(lambda items: bleu_counts(items.predictions, items.golds), _bleu),
    "exact_match": exact_match(),
    **{name: _rouge(name) for name in ROUGE},
    **{name: _spans(name) for name in SPAN_METRICS},
}
"""Metric -> statistic. A metric that is none of these is computed anew from each resample's items."""


def statistic_of(task: TaskConfig, metric: str) -> Statistic | None:
    """The statistic of a task's metric; None where it has none, as the metrics of a task file's own `score`, whatever they are called."""
    if task.code is not None and task.code.score:
        return None
    if metric == "exact_match" and isinstance(task, GenerationTask):
        return exact_match(task.answer)
    return STATISTICS.get(metric)
