"""How often intervals, comparisons and ranks are right, on made-up runs whose truth is known.

    python -m benchmarks.protocol.verdicts [--sweeps 1000]

Prints the tables of docs/results/protocol.md. All draws have fixed seeds.
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
from suite.errors import StatisticsError
from suite.metrics.items import STATISTICS, Items
from suite.metrics.values import Values
from suite.stats.answers import Answers
from suite.stats.bootstrap import item_covariance
from suite.stats.compare import Evidence, gather, over_tasks, p_values
from suite.stats.interval import mean_interval
from suite.stats.power import Spread, power_of
from suite.stats.ranks import rank_groups

POSITIVE = 0.4
"""Share of class 1."""
SLOPE = 1.5
"""How sharply ability decides whether an answer is right."""
EASE = (1.4, 0.9)
"""Mean ease of an item by its class."""
SPREAD = 1.2
"""Standard deviation of ease."""
LEVEL = 0.05
ITEMS_SD = 0.5
"""What the choice of items does to an arm, in points, where no items are drawn."""
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
    runs = []
    for able in ability:
        right = rng.random(items) < expit(SLOPE * (ease + able))
        runs.append((np.where(right, golds, 1 - golds), golds))
    return runs


def _numbers(rng: np.random.Generator, ability: Values, items: int) -> Sequence[tuple[Any, Any]]:
    golds = rng.normal(size=items)
    common = rng.normal(size=items)
    runs = []
    for able in ability:
        own = 0.4 * np.exp(-able) * rng.normal(size=items)
        runs.append((golds + 0.4 * common + own, golds))
    return runs


def _windows(rng: np.random.Generator, ability: Values, items: int) -> Sequence[tuple[Any, Any]]:
    tokens = 100 + rng.poisson(100, items)
    common = rng.normal(0, 0.4, items)
    runs = []
    for able in ability:
        loss = 3.0 - 0.1 * able + common + rng.normal(0, 0.1, items)
        runs.append((tokens * loss, tokens))
    return runs


def _confusion(ability: Values) -> Values:
    """Shares of items: true negatives, false positives, false negatives, true positives."""
    # So many items that their choice no longer matters.
    ease = np.random.default_rng(0).normal(0, SPREAD, 20_000)
    right = [expit(SLOPE * (ability[..., None] + mean + ease)).mean(-1) for mean in EASE]
    negative = 1 - POSITIVE
    return np.stack(
        [
            negative * right[0],
            negative * (1 - right[0]),
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
    label = LabelConfig(words=["no", "yes"])
    if metric == "pearson":
        label = LabelConfig(range=[0.0, 5.0])
    return ClassificationTask(
        **common, inputs=["text"], label=label, text_to_text="{text}", metrics=[metric]
    )


def simulate(metric: Metric, rng: np.random.Generator, ability: Values, items: int) -> Answers:
    """The runs of one arm on new items."""
    return make_answers(metric.name, metric.draw(rng, ability, items))


def make_answers(metric: str, runs: Sequence[tuple[Any, Any]]) -> Answers:
    """Answers from predictions and golds by seed."""
    statistic = STATISTICS[metric]
    answers = {}
    scores = {}
    for seed, (predictions, golds) in enumerate(runs):
        items = Items(predictions.tolist(), golds.tolist())
        answers[seed] = items
        scores[seed] = float(statistic.score(statistic.rows(items).sum(0)))
    index = tuple(map(str, range(len(runs[0][1]))))
    return Answers(make_task(metric), index, answers, scores)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Shares of intervals that hold the truth, with their mean half width, and a bootstrap's."""

    ours: float
    width: float
    plain: float
    plain_width: float


def coverage(
    name: str, *, seeds: int, items: int, seed_sd: float, data_sets: int, stream: int = 0
) -> Coverage:
    """How often the interval of a row holds the score of all seeds on all items.

    Args:
        name: A key of `METRICS`.
        seed_sd: Standard deviation of the seeds' abilities, on the scale on which items spread by
            1.2.
    """
    metric = METRICS[name]
    rng = np.random.default_rng([stream, seeds, items, data_sets])
    # The mean over all seeds is an integral over their normal abilities.
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    truth = float(metric.truth(seed_sd * nodes) @ weights / weights.sum())
    sets = []
    for _ in range(data_sets):
        sets.append(simulate(metric, rng, rng.normal(0, seed_sd, seeds), items))
    rows = []
    for answers, shared, spread in zip(sets, *_item_variances(sets), strict=True):
        scores = np.array(list(answers.scores.values()))
        found = mean_interval(scores.tolist(), max(float(shared), 0.0), [answers.task])
        # The usual bootstrap adds the variances, and takes the seeds for all that there are.
        plain = 1.96 * float(np.sqrt(spread + scores.var() / seeds))
        rows.append(
            (
                found.low <= truth <= found.high,
                (found.high - found.low) / 2,
                abs(scores.mean() - truth) <= plain,
                plain,
            )
        )
    return Coverage(*np.mean(rows, axis=0).tolist())


def _item_variances(sets: Sequence[Answers]) -> tuple[Values, Values]:
    """What items do to all seeds of a data set alike, and to the mean of its seeds."""
    shared = []
    spread = []
    # One resampling for many data sets, as if they were arms.
    for start in range(0, len(sets), 50):
        part = sets[start : start + 50]
        runs = [answers.with_seeds([seed]) for answers in part for seed in answers.runs]
        seeds = len(runs) // len(part)
        blocks = item_covariance(runs).reshape(len(part), seeds, len(part), seeds)
        shared.append(np.diag(item_covariance(part)))
        spread.append(np.diag(blocks.mean((1, 3))))
    return np.concatenate(shared), np.concatenate(spread)


@dataclass(frozen=True, slots=True)
class Alarms:
    """Shares of sweeps, of equal arms that are told apart.

    Attributes:
        any_pair: By the ranks, any two; None where there are no ranks.
        pair: By `suite compare`, the first two; None where there is no p-value.
    """

    any_pair: float | None
    pair: float | None


def made_evidence(scores: Values, items_sd: float = ITEMS_SD) -> Evidence:
    """Evidence of scores by arm and seed that hold their items' error already."""
    items = np.eye(len(scores)) * items_sd**2
    return Evidence(tuple(range(scores.shape[1])), scores, items, 1000)


def false_alarms(seed_sds: Sequence[float], *, seeds: int, sweeps: int) -> Alarms:
    """How often equal arms are told apart.

    Args:
        seed_sds: Standard deviation of each arm's seeds, in points.
    """
    arms = len(seed_sds)
    rng = np.random.default_rng([arms, seeds, sweeps])
    any_pair = 0
    pair = 0
    # The first sweep already says whether so many seeds give a verdict.
    try:
        for _ in range(sweeps):
            own = rng.normal(size=(arms, seeds)) * np.asarray(seed_sds)[:, None]
            # All seeds of an arm answer the same items, so their error is the same.
            evidence = made_evidence(own + rng.normal(0, ITEMS_SD, (arms, 1)))
            pair += bool(p_values(evidence)[0, 1] < LEVEL)
            ranks = rank_groups(evidence, higher_is_better=True)
            any_pair += any(rank != (1, arms) for rank in ranks)
    except StatisticsError:  # one seed
        return Alarms(None, None)
    return Alarms(any_pair / sweeps, pair / sweeps)


@dataclass(frozen=True, slots=True)
class Watched:
    """Shares of sweeps, of equal arms that the ranks tell apart while they finish one by one.

    Attributes:
        end: When all have finished.
        finished: At any time, with a correction for the arms that have finished.
        planned: At any time, with a correction for all arms that the sweep plans.
    """

    end: float
    finished: float
    planned: float


def watched(*, arms: int, seeds: int, sweeps: int) -> Watched:
    """How often somebody who reads the ranks after every arm sees equal arms told apart."""
    rng = np.random.default_rng([arms, seeds, sweeps])
    end = 0
    ever = {0: 0, arms: 0}
    for _ in range(sweeps):
        scores = rng.normal(size=(arms, seeds)) + rng.normal(0, ITEMS_SD, (arms, 1))
        for planned in ever:
            told = []
            for count in range(2, arms + 1):
                evidence = made_evidence(scores[:count])
                ranks = rank_groups(evidence, higher_is_better=True, planned=planned)
                told.append(any(rank != (1, count) for rank in ranks))
            ever[planned] += any(told)
        end += told[-1]
    return Watched(end / sweeps, ever[0] / sweeps, ever[arms] / sweeps)


def shown(lead: float, *, arms: int, seeds: int, sweeps: int, items_sd: float = 0.0) -> Alarms:
    """How often an arm that is better is told apart from another: in its ranks, and by `compare`.

    Args:
        lead: What the first arm is better than all others, in standard deviations of the seeds.
    """
    rng = np.random.default_rng([arms, seeds, sweeps])
    apart = 0
    pair = 0
    for _ in range(sweeps):
        scores = rng.normal(size=(arms, seeds)) + rng.normal(0, items_sd, (arms, 1))
        scores[0] += lead
        evidence = made_evidence(scores, items_sd)
        pair += bool(p_values(evidence)[0, 1] < LEVEL)
        # Its last place is behind all arms that it was not told apart from.
        ranks = rank_groups(evidence, higher_is_better=True)
        apart += arms - ranks[0][1]
    return Alarms(apart / sweeps / (arms - 1), pair / sweeps)


def few_items(
    wrong: float, *, seeds: int, own: float, sweeps: int, items: int = 200, alike: bool = False
) -> float:
    """How often `compare` tells two equal arms apart that are wrong on few items.

    Args:
        wrong: Share of items on which an arm is wrong.
        own: Share of these errors that each seed makes anew; the others are the same for all.
        alike: Compare the mean of this task and of another one, which both arms answer alike.
    """
    rng = np.random.default_rng([seeds, sweeps, items])
    golds = np.arange(items) % 2
    alarms = 0
    for _ in range(sweeps):
        arms = []
        for _ in range(2):
            # Both arms draw from the same chances, so no difference between them is true.
            shared = rng.random(items) < wrong * (1 - own)
            runs = []
            for _ in range(seeds):
                errs = shared | (rng.random(items) < wrong * own)
                runs.append((np.where(errs, 1 - golds, golds), golds))
            arms.append(make_answers("accuracy", runs))
        evidence = gather(arms)
        if alike:
            evidence = over_tasks([evidence, gather([arms[0], arms[0]])])
        alarms += bool(p_values(evidence)[0, 1] < LEVEL)
    return alarms / sweeps


@dataclass(frozen=True, slots=True)
class Lost:
    """What happens where an arm loses the seeds that diverge.

    Attributes:
        lost: Share of sweeps in which it lost a seed.
        survivors: Share in which the seeds that are left are called better or worse.
        refused: The same share if nothing is said of an arm that lost a seed, as `compare` does.
    """

    lost: float
    survivors: float
    refused: float


def lost_seeds(chance: float, *, seeds: int, sweeps: int) -> Lost:
    """Two arms with equal means over all seeds, of which the first loses those that diverge.

    The first scores 90, or 50 with a seed that diverges; the second scores the mean of that.
    """
    rng = np.random.default_rng([seeds, sweeps])
    equal = 90 - 40 * chance
    lost = 0
    survivors = 0
    refused = 0
    for _ in range(sweeps):
        kept = rng.random(seeds) >= chance
        errors = rng.normal(size=(2, seeds)) + rng.normal(0, ITEMS_SD, (2, 1))
        scores = np.array([[90.0], [equal]]) + errors
        told = False
        # One seed allows no verdict.
        if kept.sum() > 1:
            told = bool(p_values(made_evidence(scores[:, kept]))[0, 1] < LEVEL)
        lost += not kept.all()
        survivors += told
        refused += told and bool(kept.all())
    return Lost(lost / sweeps, survivors / sweeps, refused / sweeps)


@dataclass(frozen=True, slots=True)
class Collapse:
    """What happens where a seed of a hundred falls to the constant answer.

    Attributes:
        any_pair: Share of sweeps in which the ranks tell equal arms apart.
        seen: Share of rows of which a seed fell.
        covered: Share of all rows whose interval holds the mean over all seeds.
        covered_seen: The same share of the rows of which a seed fell.
    """

    any_pair: float
    seen: float
    covered: float
    covered_seen: float


def collapse(*, arms: int, seeds: int, sweeps: int, chance: float = 0.01) -> Collapse:
    """Equal arms at 90 ± 1 of whose seeds one in a hundred ends at 50."""
    rng = np.random.default_rng([arms, seeds, sweeps])
    truth = 90 - 40 * chance
    task = make_task("accuracy")
    alarms = 0
    fell = []
    held = []
    for _ in range(sweeps):
        falls = rng.random((arms, seeds)) < chance
        errors = rng.normal(0, 1, (arms, seeds)) + rng.normal(0, ITEMS_SD, (arms, 1))
        scores = np.where(falls, 50.0, 90.0) + errors
        ranks = rank_groups(made_evidence(scores), higher_is_better=True)
        alarms += any(rank != (1, arms) for rank in ranks)
        for row, fallen in zip(scores, falls, strict=True):
            found = mean_interval(row.tolist(), ITEMS_SD**2, [task])
            held.append(found.low <= truth <= found.high)
            fell.append(bool(fallen.any()))
    seen = np.array(fell)
    return Collapse(
        alarms / sweeps,
        float(seen.mean()),
        float(np.mean(held)),
        float(np.array(held)[seen].mean()),
    )


UNEQUAL: dict[str, Callable[[int], list[float]]] = {
    "half 5 x": lambda arms: [5.0] * (arms // 2) + [1.0] * (arms - arms // 2),
    "all but one 10 x": lambda arms: [1.0] + [10.0] * (arms - 1),
    "two 20 x": lambda arms: [20.0] * 2 + [1.0] * (arms - 2),
    "from 0.1 to 10": lambda arms: np.geomspace(0.1, 10.0, arms).tolist(),
}
"""Deviations of the seeds of so many arms, where several arms are noisy."""


def _share(value: float | None) -> str:
    if value is None:
        return "no verdict"
    return f"{100 * value:.1f}%"


def _table(*head: str) -> None:
    print(f"\n| {' | '.join(head)} |\n|{' --: |' * len(head)}")


def _line(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_false_alarms(sweeps: int) -> None:
    """Equal arms: any two by rank, the first and another by `compare`."""
    _table("first arm's seeds", "arms", "seeds", "ranks: any two", "compare: first and second")
    noises = {"as the others'": 1.0, "5 x": 5.0, "10 x": 10.0, "do not vary": 0.0}
    for name, first in noises.items():
        for arms in (2, 4, 7, 12):
            for seeds in (2, 3, 5, 8):
                found = false_alarms([first] + [1.0] * (arms - 1), seeds=seeds, sweeps=sweeps)
                _line(name, arms, seeds, _share(found.any_pair), _share(found.pair))
    _table("all arms' seeds", "arms", "seeds", "ranks: any two", "compare: first and second")
    for name, make in UNEQUAL.items():
        for arms in (4, 7, 12):
            for seeds in (3, 5):
                found = false_alarms(make(arms), seeds=seeds, sweeps=sweeps)
                _line(name, arms, seeds, _share(found.any_pair), _share(found.pair))
    _table("deviation of seeds", "arms", "seeds", "ranks: any two", "compare: first and second")
    for sd in (0.5, 1.0, 2.0):
        found = false_alarms([sd] * 7, seeds=1, sweeps=sweeps)
        _line(sd, 7, 1, _share(found.any_pair), _share(found.pair))


def print_watched(sweeps: int) -> None:
    """Equal arms, whose ranks are read after each that finishes."""
    _table("arms", "seeds", "all have finished", "ever: finished arms", "ever: planned arms")
    for arms in (2, 4, 7, 12):
        for seeds in (2, 3, 5, 8):
            found = watched(arms=arms, seeds=seeds, sweeps=sweeps)
            shares = (found.end, found.finished, found.planned)
            _line(arms, seeds, *map(_share, shares))


def print_few_items(sweeps: int) -> None:
    """Equal arms that differ on few items, on a task and on its mean with another task."""
    _table("wrong on", "errors that each seed makes anew", "seeds", "compare: p < 5%", "mean")
    for wrong in (0.01, 0.02, 0.05):
        for own in (0.0, 0.5, 1.0):
            for seeds in (2, 3, 5):
                cells = []
                for alike in (False, True):
                    share = few_items(wrong, seeds=seeds, own=own, sweeps=sweeps, alike=alike)
                    cells.append(_share(share))
                _line(f"{wrong:.0%} of 200", f"{own:.0%}", seeds, *cells)


def print_lost_seeds(sweeps: int) -> None:
    """An arm that loses the seeds that diverge."""
    _table("seeds that diverge", "seeds", "sweeps that lost one", "survivors: p < 5%", "compare")
    for chance in (0.02, 0.05, 0.1, 0.2):
        for seeds in (3, 5, 8):
            found = lost_seeds(chance, seeds=seeds, sweeps=sweeps)
            shares = (found.lost, found.survivors, found.refused)
            _line(f"{chance:.0%}", seeds, *map(_share, shares))


def print_power(sweeps: int) -> None:
    """One arm better than the others, and what the formula says it takes."""
    _table("arms", "seeds", "lead, deviations of seeds", "ranks", "compare")
    for arms in (2, 4, 7, 12):
        for seeds in (2, 3, 5, 8):
            for lead in (1, 2, 4, 8):
                found = shown(lead, arms=arms, seeds=seeds, sweeps=sweeps)
                _line(arms, seeds, lead, _share(found.any_pair), _share(found.pair))


def print_formula(sweeps: int) -> None:
    """How often the lead is shown that the formula says is shown in 80%."""
    _table("arms", "seeds", "items", "compare: lead", "shown", "ranks: lead", "shown")
    for items_sd in (0.0, ITEMS_SD):
        for arms in (2, 7, 12):
            for seeds in (3, 5, 8):
                cells: list[object] = [arms, seeds, items_sd]
                # One comparison by `compare`, then all pairs of the ranks.
                for pairs in (1, arms * (arms - 1) // 2):
                    lead = power_of(Spread(1.0, 2 * items_sd**2), seeds=seeds, pairs=pairs).shown
                    assert lead is not None, "more than one seed"
                    found = shown(lead, arms=arms, seeds=seeds, sweeps=sweeps, items_sd=items_sd)
                    share = found.pair
                    if len(cells) > 3:
                        share = found.any_pair
                    cells += [f"{lead:.1f}", _share(share)]
                _line(*cells)


def print_collapse(sweeps: int) -> None:
    """A seed of a hundred falls."""
    _table(
        "arms", "seeds", "ranks: any two", "rows with a fallen seed", "coverage", "of those rows"
    )
    for seeds in (3, 5, 8):
        found = collapse(arms=7, seeds=seeds, sweeps=sweeps)
        shares = (found.any_pair, found.seen, found.covered, found.covered_seen)
        _line(7, seeds, *map(_share, shares))


def print_coverage(data_sets: int) -> None:
    """Intervals of rows."""
    _table(
        "metric",
        "seeds",
        "items",
        "sd of seeds",
        "coverage",
        "half width",
        "plain bootstrap",
        "its half width",
    )
    settings = (
        (1, 300, 0.0),
        (3, 100, 0.0),
        (3, 300, 0.1),
        (3, 300, 0.4),
        (3, 2000, 0.1),
        (3, 2000, 0.4),
        (5, 300, 0.1),
        (5, 2000, 0.4),
    )
    for metric in METRICS:
        for seeds, items, sd in settings:
            found = coverage(metric, seeds=seeds, items=items, seed_sd=sd, data_sets=data_sets)
            ours = [_share(found.ours), f"{found.width:.2f}"]
            plain = [_share(found.plain), f"{found.plain_width:.2f}"]
            _line(metric, seeds, items, sd, *ours, *plain)


PARTS: dict[str, Callable[[int], None]] = {
    "false-alarms": print_false_alarms,
    "watched": print_watched,
    "few-items": print_few_items,
    "power": print_power,
    "formula": print_formula,
    "collapse": print_collapse,
    "lost-seeds": print_lost_seeds,
    "coverage": print_coverage,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print some tables as markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweeps", type=int, default=1000, help="sweeps or data sets a line")
    parser.add_argument("--part", choices=PARTS, action="append", help="only these tables")
    asked = parser.parse_args(argv)
    for name in asked.part or PARTS:
        PARTS[name](asked.sweeps)


if __name__ == "__main__":
    main()
