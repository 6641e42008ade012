"""Metrics as sums over items: the same numbers as the metrics themselves, on the sample and on every resample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from suite.metrics.items import STATISTICS, Items, unit_rows
from suite.metrics.quality import score
from suite.metrics.squad import SPAN_METRICS, score_spans
from suite.metrics.text import perplexity, score_texts

NAN = float("nan")
INF = float("inf")
WORDS = ["a", "cat", "dog", "sat", "on", "the", "mat", "and", "ran"]


def labels(rng: np.random.Generator, n: int, classes: int = 2) -> Items:
    """Answers that are right two times in three, and some that are no label."""
    golds = rng.integers(0, classes, n)
    guesses = rng.integers(-1, classes, n)
    return Items(np.where(rng.random(n) < 2 / 3, golds, guesses).tolist(), golds.tolist())


def classes(rng: np.random.Generator, n: int) -> Items:
    return labels(rng, n, 4)


def quantities(rng: np.random.Generator, n: int) -> Items:
    golds = rng.random(n) * 5
    return Items((0.5 * golds + rng.normal(100.0, 1.0, n)).tolist(), golds.tolist())


def windows(rng: np.random.Generator, n: int) -> Items:
    tokens = rng.integers(1, 60, n)
    return Items((tokens * rng.uniform(2.0, 6.0, n)).tolist(), tokens.tolist())


def texts(rng: np.random.Generator, n: int) -> Items:
    golds = [" ".join(rng.choice(WORDS, rng.integers(1, 12))) for _ in range(n)]
    return Items([" ".join(w for w in gold.split() if rng.random() < 0.9) for gold in golds], golds)


def groups(rng: np.random.Generator, n: int) -> Items:
    """Up to three answers to a question, not all side by side."""
    items = labels(rng, n)
    return Items(
        items.predictions,
        items.golds,
        [f"question {q}" for q in rng.permutation(np.arange(n) // 3)],
    )


def spans(rng: np.random.Generator, n: int) -> Items:
    """Questions with one to three accepted answers, some with none."""
    golds = [
        [" ".join(rng.choice(WORDS, rng.integers(1, 4))) for _ in range(rng.integers(0, 4))]
        for _ in range(n)
    ]
    guesses = [" ".join(rng.choice(WORDS, 2)) for _ in range(n)]
    return Items(
        [
            (gold or [""])[0] if rng.random() < 0.5 else guess
            for gold, guess in zip(golds, guesses, strict=True)
        ],
        golds,
    )


def library(metric: str) -> Callable[[Items], float]:
    if metric == "perplexity":
        return lambda items: perplexity(items.predictions, items.golds)
    if metric == "group_em":
        return lambda items: score([metric], items.predictions, items.golds, items.groups)[metric]
    if metric in SPAN_METRICS:
        return lambda items: score_spans([metric], items.predictions, items.golds)[metric]
    of_texts = metric in ("bleu", "exact_match") or metric.startswith("rouge")
    return lambda items: (score_texts if of_texts else score)(
        [metric], items.predictions, items.golds
    )[metric]


SAMPLES: list[tuple[str, Callable[[np.random.Generator, int], Items]]] = [
    *[
        ("accuracy", labels),
        ("accuracy", classes),
        ("f1", labels),
        ("matthews", labels),
        ("matthews", classes),
    ],
    *[("pearson", quantities), ("spearman", quantities), ("perplexity", windows)],
    *[
        ("macro_f1", labels),
        ("macro_f1", classes),
        ("group_em", groups),
        ("em", spans),
        ("token_f1", spans),
    ],
    *[(metric, texts) for metric in ("bleu", "exact_match", "rouge1", "rouge2", "rougeL")],
]


def test_every_metric_is_held_against_its_statistic() -> None:
    assert {metric for metric, _ in SAMPLES} == set(STATISTICS)


def resampled(items: Items, chosen: Any) -> Items:
    return Items([items.predictions[i] for i in chosen], [items.golds[i] for i in chosen])


@pytest.mark.parametrize(("metric", "sample"), SAMPLES)
@pytest.mark.parametrize("n", [1, 2, 7, 200])
def test_the_score_of_the_sums_is_the_metric(
    metric: str, sample: Callable[[np.random.Generator, int], Items], n: int
) -> None:
    items = sample(np.random.default_rng(n), n)
    rows = STATISTICS[metric].rows(items)
    assert len(rows) == n
    assert float(STATISTICS[metric].score(rows.sum(0))) == pytest.approx(
        library(metric)(items), abs=1e-8
    )


@pytest.mark.parametrize(
    ("metric", "sample"), [(m, s) for m, s in SAMPLES if m not in ("spearman", "group_em")]
)
def test_the_score_of_weighted_sums_is_the_metric_of_the_resample(
    metric: str, sample: Callable[[np.random.Generator, int], Items]
) -> None:
    rng = np.random.default_rng(0)
    items = sample(rng, 60)
    chosen = rng.integers(0, 60, (5, 60))
    counts = np.stack([np.bincount(c, minlength=60) for c in chosen])
    found = STATISTICS[metric].score(counts @ STATISTICS[metric].rows(items))
    assert found.tolist() == pytest.approx(
        [library(metric)(resampled(items, c)) for c in chosen], abs=1e-8
    )


def test_spearman_of_a_resample_is_close_although_its_ranks_are_the_samples() -> None:
    rng = np.random.default_rng(0)
    items = quantities(rng, 300)
    chosen = rng.integers(0, 300, 300)
    found = STATISTICS["spearman"].score(
        np.bincount(chosen, minlength=300) @ STATISTICS["spearman"].rows(items)
    )
    assert float(found) == pytest.approx(
        library("spearman")(resampled(items, chosen)), abs=1.5
    )  # percent; ranks move by about 1 / sqrt(n)


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
@pytest.mark.parametrize("predictions", [[3.0] * 4, [1.0, 2.0, NAN, 4.0], [1.0, 2.0, INF, 4.0]])
def test_a_correlation_with_what_does_not_vary_is_zero(
    metric: str, predictions: list[float]
) -> None:
    assert library(metric)(Items(predictions, [1.0, 2.0, 3.0, 4.0])) == 0.0
    rows = STATISTICS[metric].rows(Items(predictions, [1.0, 2.0, 3.0, 4.0]))
    assert float(STATISTICS[metric].score(rows.sum(0))) == 0.0


def test_a_resample_of_one_item_many_times_has_no_correlation() -> None:
    rows = STATISTICS["pearson"].rows(quantities(np.random.default_rng(0), 50))
    assert float(STATISTICS["pearson"].score(50 * rows[3])) == 0.0


def test_the_score_of_resampled_groups_is_the_metric_of_their_items() -> None:
    rng = np.random.default_rng(0)
    items = groups(rng, 60)
    rows = unit_rows(STATISTICS["group_em"], items)
    names = list(dict.fromkeys(items.groups or ()))
    drawn = rng.integers(0, len(names), len(names))
    chosen = [
        (i, f"{name} {copy}")
        for copy, unit in enumerate(drawn)
        for i, name in enumerate(items.groups or ())
        if name == names[unit]
    ]
    again = Items(
        *([values[i] for i, _ in chosen] for values in (items.predictions, items.golds)),
        [name for _, name in chosen],
    )
    found = STATISTICS["group_em"].score(np.bincount(drawn, minlength=len(names)) @ rows)
    assert float(found) == pytest.approx(library("group_em")(again), abs=1e-8)


def test_groups_are_the_units_where_there_are_groups() -> None:
    items = Items([1, 0, 1, 1], [1, 1, 1, 0], groups=["q", "p", "q", "p"])
    assert unit_rows(STATISTICS["accuracy"], items).tolist() == [[2.0, 2.0], [0.0, 2.0]]
