"""How often the 95% interval of a cell holds the true score, and how often ranks tell equal arms apart, on made-up runs.

    python benchmarks/coverage.py [--data-sets 2000]

Truth is known: items have a difficulty that all seeds share, seeds have an ability that all items share, and answers are drawn
from both. The true score is that of infinitely many items, averaged over infinitely many seeds. Beside each interval stands
that of the plain bootstrap that resamples seeds and items alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit

from suite.config.task import (
    ClassificationTask,
    GeneratedData,
    LabelConfig,
    LanguageModelTask,
    TaskConfig,
)
from suite.metrics.items import STATISTICS, Items
from suite.metrics.values import Values
from suite.stats.answers import Answers
from suite.stats.bootstrap import item_covariance
from suite.stats.compare import gather
from suite.stats.interval import mean_interval
from suite.stats.ranks import rank_groups

POSITIVE, SLOPE, EASE = 0.4, 1.5, (1.4, 0.9)
"""Share of class 1; how sharply ability decides; mean ease of an item by its class."""
SPREAD = 1.2
"""Standard deviation of ease; of what is hard to predict in regression and of the loss per token, see below."""
Draw = Callable[[np.random.Generator, Values, int], Sequence[tuple[Any, Any]]]
"""Generator, ability by seed and number of items -> predictions and golds by seed."""


@dataclass(frozen=True, slots=True)
class Metric:
    """How answers are drawn, and the true score of a seed's ability."""

    name: str
    draw: Draw
    truth: Callable[[Values], Values]


def _classes(rng: np.random.Generator, ability: Values, items: int) -> Sequence[tuple[Any, Any]]:
    golds = (rng.random(items) < POSITIVE).astype(int)
    ease = rng.normal(np.take(EASE, golds), SPREAD)
    right = [rng.random(items) < expit(SLOPE * (ease + a)) for a in ability]
    return [(np.where(r, golds, 1 - golds), golds) for r in right]


def _numbers(rng: np.random.Generator, ability: Values, items: int) -> Sequence[tuple[Any, Any]]:
    golds, common = rng.normal(size=(2, items))
    return [
        (golds + 0.4 * common + 0.4 * np.exp(-a) * rng.normal(size=items), golds) for a in ability
    ]


def _windows(rng: np.random.Generator, ability: Values, items: int) -> Sequence[tuple[Any, Any]]:
    tokens = 100 + rng.poisson(100, items)
    common = rng.normal(0, 0.4, items)
    return [
        (tokens * (3.0 - 0.1 * a + common + rng.normal(0, 0.1, items)), tokens) for a in ability
    ]


def _confusion(ability: Values) -> Values:
    """Shares of items: true negatives, false positives, false negatives, true positives, (4, ...)."""
    ease = np.random.default_rng(0).normal(0, SPREAD, 20_000)
    right = [expit(SLOPE * (ability[..., None] + mean + ease)).mean(-1) for mean in EASE]
    return np.stack(
        [
            (1 - POSITIVE) * right[0],
            (1 - POSITIVE) * (1 - right[0]),
            POSITIVE * (1 - right[1]),
            POSITIVE * right[1],
        ]
    )


def _accuracy(ability: Values) -> Values:
    tn, _, _, tp = _confusion(ability)
    return 100 * (tn + tp)


def _f1(ability: Values) -> Values:
    _, fp, fn, tp = _confusion(ability)
    return 200 * tp / (2 * tp + fp + fn)


def _matthews(ability: Values) -> Values:
    tn, fp, fn, tp = _confusion(ability)
    return 100 * (tp * tn - fp * fn) / np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))


METRICS = {
    "accuracy": Metric("accuracy", _classes, _accuracy),
    "f1": Metric("f1", _classes, _f1),
    "matthews": Metric("matthews", _classes, _matthews),
    "pearson": Metric(
        "pearson", _numbers, lambda a: 100 / np.sqrt(1 + 0.16 + 0.16 * np.exp(-2 * a))
    ),
    "perplexity": Metric("perplexity", _windows, lambda a: np.exp(3.0 - 0.1 * a)),
}


def make_task(metric: str) -> TaskConfig:
    common: dict[str, Any] = {
        "name": metric,
        "description": "made up",
        "source": "ours",
        "data": GeneratedData(generator="agreement"),
    }
    if metric == "perplexity":
        return LanguageModelTask(**common, kind="language-model", inputs=["text"])
    label = (
        LabelConfig(range=[0.0, 5.0]) if metric == "pearson" else LabelConfig(words=["no", "yes"])
    )
    return ClassificationTask(
        **common, inputs=["text"], label=label, text_to_text="{text}", metrics=[metric]
    )


def simulate(metric: Metric, rng: np.random.Generator, ability: Values, items: int) -> Answers:
    """The runs of one arm on new items."""
    return _answers(metric, metric.draw(rng, ability, items))


def _answers(metric: Metric, runs: Sequence[tuple[Any, Any]]) -> Answers:
    statistic, answers = (
        STATISTICS[metric.name],
        {s: Items(p.tolist(), g.tolist()) for s, (p, g) in enumerate(runs)},
    )
    scores = {
        seed: float(statistic.score(statistic.rows(items).sum(0)))
        for seed, items in answers.items()
    }
    return Answers(make_task(metric.name), tuple(map(str, range(len(runs[0][1])))), answers, scores)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Shares of intervals that hold the truth, and their mean half width: ours, and the plain bootstrap's."""

    ours: float
    width: float
    plain: float
    plain_width: float


def coverage(
    name: str, *, seeds: int, items: int, seed_sd: float, data_sets: int, stream: int = 0
) -> Coverage:
    """Of many data sets; the seeds' abilities have standard deviation `seed_sd`, on the scale on which items spread by 1.2."""
    metric, rng = METRICS[name], np.random.default_rng([stream, seeds, items, data_sets])
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    truth = float(metric.truth(seed_sd * nodes) @ weights / weights.sum())
    sets = [simulate(metric, rng, rng.normal(0, seed_sd, seeds), items) for _ in range(data_sets)]
    held, widths, plain, plain_widths = [], [], [], []
    for answers, shared, spread in zip(sets, *_item_variances(sets), strict=True):
        scores = np.array(list(answers.scores.values()))
        found = mean_interval(scores.tolist(), max(float(shared), 0.0), [answers.task])
        held.append(found.low <= truth <= found.high)
        widths.append((found.high - found.low) / 2)
        width = 1.96 * float(np.sqrt(spread + scores.var() / seeds))
        plain.append(abs(scores.mean() - truth) <= width)
        plain_widths.append(width)
    return Coverage(*(float(np.mean(values)) for values in (held, widths, plain, plain_widths)))


def _item_variances(sets: Sequence[Answers]) -> tuple[Values, Values]:
    """Of every data set, what items do to all seeds alike, and to their mean; one resampling for many, as if they were arms."""
    shared, spread = [], []
    for part in (sets[start : start + 50] for start in range(0, len(sets), 50)):
        runs = [answers.with_seeds([seed]) for answers in part for seed in answers.runs]
        seeds = len(runs) // len(part)
        blocks = item_covariance(runs).reshape(len(part), seeds, len(part), seeds)
        shared.append(np.diag(item_covariance(part)))
        spread.append(np.diag(blocks.mean((1, 3))))
    return np.concatenate(shared), np.concatenate(spread)


def false_alarms(
    *, arms: int, seeds: int, items: int, seed_sds: Sequence[float], data_sets: int, stream: int = 0
) -> float:
    """How often ranks tell any two of equally good arms apart; `seed_sds` of each arm's abilities, in the unit of `coverage`."""
    metric, rng = METRICS["perplexity"], np.random.default_rng([stream, arms, seeds, items])
    alarms = 0
    for _ in range(data_sets):
        abilities = rng.normal(0, 1, (arms, seeds)) * np.asarray(seed_sds)[:, None]
        drawn = metric.draw(rng, abilities.ravel(), items)  # the same items for all
        runs = [drawn[arm * seeds : (arm + 1) * seeds] for arm in range(arms)]
        ranks = rank_groups(
            gather([_answers(metric, found) for found in runs]), higher_is_better=False
        )
        alarms += any(rank != (1, arms) for rank in ranks)
    return alarms / data_sets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-sets", type=int, default=2000)
    wanted = parser.parse_args().data_sets
    print(
        "| metric | seeds | items | sd of seeds | coverage | half width | plain bootstrap | its half width |"
    )
    print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    for metric in METRICS:
        for seeds, items, sd in (
            (1, 300, 0.0),
            (3, 100, 0.0),
            (3, 300, 0.1),
            (3, 300, 0.4),
            (3, 2000, 0.1),
            (3, 2000, 0.4),
            (5, 300, 0.1),
            (5, 2000, 0.4),
        ):
            found = coverage(metric, seeds=seeds, items=items, seed_sd=sd, data_sets=wanted)
            ours, plain = (f"{100 * share:.1f}%" for share in (found.ours, found.plain))
            print(
                f"| {metric} | {seeds} | {items} | {sd} | {ours} | {found.width:.2f} | {plain} | {found.plain_width:.2f} |",
                flush=True,
            )
    print("\n| arms | seeds | sd of seeds | any two told apart |\n| --: | --: | --- | --: |")
    for arms, seeds, sds in (
        (4, 3, [0.3] * 4),
        (8, 3, [0.3] * 8),
        (8, 5, [0.3] * 8),
        (8, 3, [1.5] + [0.3] * 7),
        (8, 3, [0.0] * 8),
    ):
        share = false_alarms(arms=arms, seeds=seeds, items=200, seed_sds=sds, data_sets=wanted // 4)
        print(
            f"| {arms} | {seeds} | {', '.join(map(str, dict.fromkeys(sds)))} | {100 * share:.1f}% |",
            flush=True,
        )


if __name__ == "__main__":
    main()
