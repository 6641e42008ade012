"""How often a row is called shown to learn, over simulated tables of seven rows.

    python -m benchmarks.protocol.learning [--tables 400]

The first table has no row that learned anything: every row that is called shown to learn is an
error. In the second table every row learned, by the same number of points. The third says how often
a loss falls that does not change: under the bare comparison of two means, and under the test.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import ndtri

from suite.config.task import ClassificationTask, GeneratedData, LabelConfig
from suite.leaderboard.fields import Row
from suite.leaderboard.intervals import p_of_gain
from suite.leaderboard.learning import with_learning
from suite.leaderboard.measures import CellResults, loss_fall, loss_fall_p
from suite.metrics.items import STATISTICS, Items
from suite.metrics.values import Values
from suite.record.result import EpochRecord, Status, TrialResult
from suite.stats.answers import Answers
from suite.stats.compare import difference, gather, select_arms
from suite.stats.constant_baseline import best_constant

ROWS = 7
"""Rows of a table: the seven methods."""
SHARED = 0.5
"""Share of an item's difficulty that all seeds of an arm have in common."""
TASK = ClassificationTask(
    name="made-up",
    description="made up",
    source="ours",
    data=GeneratedData(generator="agreement"),
    inputs=["text"],
    label=LabelConfig(words=["no", "yes"]),
    text_to_text="{text}",
    metrics=["accuracy"],
)
LEVEL = 0.05


def answers_of(golds: Values, predictions: Values) -> Answers:
    """The runs of one arm from its predictions by seed and item, (S, n)."""
    statistic = STATISTICS["accuracy"]
    runs = {}
    scores = {}
    for seed, predicted in enumerate(predictions, 1):
        items = Items(predicted.tolist(), golds.tolist())
        runs[seed] = items
        scores[seed] = float(statistic.score(statistic.rows(items).sum(0)))
    return Answers(TASK, tuple(map(str, range(len(golds)))), runs, scores)


def guesses(rng: np.random.Generator, golds: Values, seeds: int) -> Values:
    """Each seed says yes at a rate of its own, whatever the item is."""
    rates = rng.random((seeds, 1))
    return (rng.random((seeds, len(golds))) < rates).astype(int)


def one_class(rng: np.random.Generator, golds: Values, seeds: int) -> Values:
    """Each seed gives all items the same class, drawn at random."""
    return np.repeat(rng.integers(0, 2, (seeds, 1)), len(golds), axis=1)


def same_bias(rng: np.random.Generator, golds: Values, seeds: int) -> Values:
    """All seeds lean to the same side of an item, for a reason that its label does not know."""
    common = rng.normal(size=len(golds))
    own = rng.normal(size=(seeds, len(golds)))
    return (np.sqrt(SHARED) * common + np.sqrt(1 - SHARED) * own > 0).astype(int)


NOTHING = {"guesses": guesses, "one class": one_class, "same bias": same_bias}


def learned(
    rng: np.random.Generator, golds: Values, seeds: int, *, gain: float, spread: float
) -> Values:
    """Seeds whose accuracy is the constant answer's plus `gain`, with deviation `spread`, points."""
    best = max(golds.mean(), 1 - golds.mean())
    accuracies = best + rng.normal(gain, spread, (seeds, 1)) / 100
    common = rng.normal(size=len(golds))
    own = rng.normal(size=(seeds, len(golds)))
    difficulty = np.sqrt(SHARED) * common + np.sqrt(1 - SHARED) * own
    right = difficulty < ndtri(np.clip(accuracies, 0.01, 0.99))
    return np.where(right, golds, 1 - golds)


def table_of(arms: Sequence[Answers]) -> list[Row]:
    """Finished rows, with what the leaderboard computes from their answers."""
    # One resampling for all rows; the leaderboard makes the same one for each.
    constant = best_constant(arms[0])
    evidence = gather([*arms, constant])
    rows = []
    for number, arm in enumerate(arms):
        found = difference(select_arms(evidence, [number, len(arms)]))
        mean = float(np.mean(list(arm.scores.values())))
        about: dict[str, Any] = {"task": "made-up", "arm": str(number), "status": "done"}
        about |= {"score_mean": mean, "constant_score": found.second}
        rows.append(Row(**about, constant_p=p_of_gain(found)))
    return rows


def rates(tables: list[list[Row]]) -> tuple[float, float, float]:
    """Share of rows and of tables with a row that is shown to learn; of tables by the raw p."""
    rows = 0
    any_row = 0
    any_raw = 0
    for table in tables:
        shown = [row.shown_to_learn for row in with_learning(table)]
        rows += sum(map(bool, shown))
        any_row += any(shown)
        # A family of one row is not corrected.
        any_raw += any(with_learning([row])[0].shown_to_learn for row in table)
    count = len(tables)
    return rows / (ROWS * count), any_row / count, any_raw / count


def draw_golds(rng: np.random.Generator, items: int, share: float) -> Values:
    """Labels with exactly this share of class 1, in random order."""
    # An even split is the hardest case: the constant answer then gains nothing from being chosen
    # by the test items.
    golds = np.zeros(items, dtype=int)
    golds[: round(share * items)] = 1
    return rng.permutation(golds)


def print_nothing(tables: int) -> None:
    print("| what the seeds do | class 1 | items | seeds | a row | a table | raw p: a table |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for name, draw in NOTHING.items():
        for share, items, seeds in (
            (0.5, 200, 3),
            (0.5, 1000, 5),
            (0.68, 200, 3),
        ):
            rng = np.random.default_rng([1, items, seeds, round(100 * share)])
            drawn = []
            for _ in range(tables):
                golds = draw_golds(rng, items, share)
                arms = [answers_of(golds, draw(rng, golds, seeds)) for _ in range(ROWS)]
                drawn.append(table_of(arms))
            shown = " | ".join(f"{100 * rate:.1f}%" for rate in rates(drawn))
            print(f"| {name} | {share} | {items} | {seeds} | {shown} |", flush=True)


def print_learned(tables: int) -> None:
    print(
        "\n| points above | sd of seeds | items | seeds | rows shown to learn | of one row alone |"
    )
    print("| --: | --: | --: | --: | --: | --: |")
    for gain in (5.0, 10.0, 20.0):
        for spread in (1.0, 5.0):
            for items, seeds in ((200, 3), (200, 5), (1000, 5)):
                rng = np.random.default_rng([2, items, seeds, round(gain), round(spread)])
                drawn = []
                alone = 0
                for _ in range(tables):
                    golds = draw_golds(rng, items, 0.5)
                    arms = []
                    for _ in range(ROWS):
                        said = learned(rng, golds, seeds, gain=gain, spread=spread)
                        arms.append(answers_of(golds, said))
                    drawn.append(table_of(arms))
                    for row in drawn[-1]:
                        alone += bool(with_learning([row])[0].shown_to_learn)
                share = 100 * rates(drawn)[0]
                single = 100 * alone / (ROWS * tables)
                print(
                    f"| {gain:g} | {spread:g} | {items} | {seeds} | {share:.0f}% | {single:.0f}% |",
                    flush=True,
                )


def run_of(losses: Values) -> TrialResult:
    """A run with these losses, one an epoch."""
    epochs = []
    for number, loss in enumerate(losses.tolist(), 1):
        about: dict[str, Any] = {"validation_score": 50.0, "validation_scores": {}}
        about |= {"learning_rate": 1e-3, "seconds": 1.0, "train_loss": loss}
        epochs.append(EpochRecord(epoch=number, step=number, **about))
    times = {"started_at": 0.0, "finished_at": 1.0}
    return TrialResult(trial="made-up", status=Status.COMPLETED, score=50.0, epochs=epochs, **times)


def print_losses(rows: int) -> None:
    print("\n| seeds | epochs | rows with a run of `last < first` false | p < 0.05: it fell |")
    print("| --: | --: | --: | --: |")
    for seeds in (3, 5):
        for epochs in (2, 5):
            rng = np.random.default_rng([3, seeds, epochs])
            bare = 0
            fell = 0
            for _ in range(rows):
                losses = rng.normal(0.69, 0.01, (seeds, epochs))
                bare += bool((losses[:, 1:].min(1) >= losses[:, 0]).any())
                found = CellResults([run_of(run) for run in losses], [])
                p = loss_fall_p(found)
                fall = loss_fall(found)
                assert p is not None and fall is not None
                fell += p < LEVEL and fall > 0
            shown = f"{100 * bare / rows:.1f}% | {100 * fell / rows:.1f}%"
            print(f"| {seeds} | {epochs} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=400, help="simulated tables a line")
    tables = parser.parse_args().tables
    print_nothing(tables)
    print_learned(max(1, tables // 5))
    print_losses(10 * tables)


if __name__ == "__main__":
    main()
