"""Quality metrics against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from suite.config.task import load_task
from suite.metrics.quality import score

GOLD = [1, 1, 1, 0, 0]
PREDICTED = [1, 1, 0, 1, 0]  # 2 true, 1 false positive, 1 false negative, 1 true negative


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("accuracy", 60.0),
        ("f1", 100 * 4 / 6),
        ("matthews", 100 * (2 * 1 - 1 * 1) / math.sqrt(3 * 3 * 2 * 2)),
    ],
)
def test_class_metrics_by_hand(metric: str, expected: float) -> None:
    assert score([metric], PREDICTED, GOLD)[metric] == pytest.approx(expected)


def test_correlations_by_hand() -> None:
    found = score(["pearson", "spearman"], [1.0, 2.0, 4.0], [1.0, 2.0, 3.0])
    assert found == {
        "pearson": pytest.approx(100 * 3 / math.sqrt(2 * 14 / 3)),
        "spearman": pytest.approx(100.0),
    }


def test_matthews_of_more_than_two_classes() -> None:
    assert score(["matthews"], [0, 1, 2], [0, 1, 2])["matthews"] == pytest.approx(100.0)


def test_headline_is_the_mean_of_the_metrics() -> None:
    scores = score(["f1", "accuracy"], PREDICTED, GOLD)
    assert load_task("mrpc").score_of(scores) == pytest.approx((60 + 100 * 4 / 6) / 2)


@pytest.mark.parametrize("metric", ["accuracy", "f1", "matthews"])
@pytest.mark.parametrize("gold", [0, 1])
def test_an_answer_that_is_no_label_counts_as_a_wrong_one(metric: str, gold: int) -> None:
    golds = [0, 1, 0, 1, gold]
    no_label = [0, 1, 0, 0, -1]
    wrong = [0, 1, 0, 0, 1 - gold]
    assert score([metric], no_label, golds) == score([metric], wrong, golds)


@pytest.mark.parametrize(
    ("metric", "predicted"),
    [
        ("matthews", [1, 1, 1]),
        *(
            (metric, values)
            for metric in ("pearson", "spearman")
            for values in ([1.0] * 3, [float("nan")] * 3)
        ),
    ],
)
def test_predictions_that_say_nothing_score_zero(metric: str, predicted: list[float]) -> None:
    assert score([metric], predicted, [0, 1, 1])[metric] == 0.0


def test_f1_without_a_positive_is_zero() -> None:
    assert score(["f1"], [0, 0], [0, 0])["f1"] == 0.0


@pytest.mark.parametrize(("predicted", "gold"), [([1], [1, 0]), ([], [])])
def test_lengths_must_agree(predicted: list[float], gold: list[float]) -> None:
    with pytest.raises(ValueError, match="expected the same number"):
        score(["accuracy"], predicted, gold)
