"""How good predictions are, in percent as GLUE prints them: 0 to 100, correlations -100 to 100."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats
from sklearn import metrics as sk

from suite.metrics.values import Values, answered


def score(
    metrics: Sequence[str],
    predictions: Sequence[float],
    golds: Sequence[float],
    groups: Sequence[str] | None = None,
) -> dict[str, float]:
    """Every metric of a task, over all rows at once.

    Args:
        metrics: Of "accuracy", "f1" (of class 1), "macro_f1", "group_em", "matthews", "pearson",
            "spearman".
        predictions: Class ids, -1 for an answer that is no label (always wrong); or numbers.
        golds: As many class ids or numbers.
        groups: The group of each row, for "group_em".

    Returns:
        Metric -> percent.

    Raises:
        ValueError: There are no rows; the numbers of predictions, groups and golds differ; or a
            metric needs groups and there are none.
    """
    if len(predictions) != len(golds) or not len(golds):
        raise ValueError(
            f"{len(predictions)} predictions for {len(golds)} golds; "
            "expected the same number, at least one"
        )
    predicted = np.asarray(predictions, dtype=np.float64)
    gold = np.asarray(golds, dtype=np.float64)
    scores: dict[str, float] = {}
    for name in metrics:
        # the only one that needs more than predictions and golds
        if name == "group_em":
            scores[name] = 100.0 * _group_em(predicted, gold, groups)
        else:
            scores[name] = 100.0 * _METRICS[name](predicted, gold)
    return scores


def _accuracy(predicted: Values, gold: Values) -> float:
    return float(sk.accuracy_score(gold, predicted))


def _f1(predicted: Values, gold: Values) -> float:
    return float(sk.f1_score(gold == 1, answered(predicted, gold) == 1, zero_division=0.0))


def _macro_f1(predicted: Values, gold: Values) -> float:
    """The plain mean of the F1 of every class that occurs in golds or answers."""
    # an answer that is no label (-1) is no class of its own
    classes = np.union1d(gold, predicted[predicted >= 0])
    return float(sk.f1_score(gold, predicted, labels=classes, average="macro", zero_division=0.0))


def _group_em(predicted: Values, gold: Values, groups: Sequence[str] | None) -> float:
    """The share of groups in which all rows are right."""
    if groups is None or len(groups) != len(gold):
        got = None if groups is None else len(groups)
        raise ValueError(f"group_em needs a group for each of {len(gold)} rows, got {got}")
    all_right: dict[str, bool] = {}
    for group, right in zip(groups, predicted == gold, strict=True):
        all_right[group] = all_right.get(group, True) and bool(right)
    return sum(all_right.values()) / len(all_right)


def _matthews(predicted: Values, gold: Values) -> float:
    """0 where all predictions, or all golds, are the same: there is no association to measure."""
    return float(sk.matthews_corrcoef(gold, answered(predicted, gold)))


def _pearson(predicted: Values, gold: Values) -> float:
    if not _varies(predicted, gold):
        return 0.0
    return float(stats.pearsonr(predicted, gold).statistic)


def _spearman(predicted: Values, gold: Values) -> float:
    if not _varies(predicted, gold):
        return 0.0
    return float(stats.spearmanr(predicted, gold).statistic)


def _varies(predicted: Values, gold: Values) -> bool:
    """Whether a correlation is defined.

    A constant (or NaN) prediction says nothing about the gold, so it scores 0.
    """
    return bool(np.isfinite(predicted).all() and np.ptp(predicted) > 0 and np.ptp(gold) > 0)


_METRICS: dict[str, Callable[[Values, Values], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro_f1": _macro_f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}
