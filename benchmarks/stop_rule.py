"""What the stop rule saves and what it costs: python -m benchmarks.stop_rule [HOME ...] [--evaluators emmr,regret]

Replays every finished study of the homes as if it had been searched with the rule, and simulates studies with the suite's own
proposals: on the recorded curves themselves, drawn anew with the noise between their seeds, and on made ones (a parabola, a
plateau with a cliff, a rise to the end) with the noise that validation sets of some hundred rows have.

Loss: best score of the whole study minus best score when stopped, in points: of the noisy scores that a study sees, and, where
the curve is made, of the true score at the two learning rates that would be confirmed.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import get_args

from suite.config.space import LearningRateRange
from suite.plan.definition import read_plan, sweeps
from suite.plan.optuna_trials import Finished
from suite.plan.proposer import propose
from suite.plan.stop_rule import Evaluator, room_left
from suite.record.cells import Cell, read_cells
from suite.record.folder import Home

RANGE = LearningRateRange(low=1e-6, high=3e-3)
STARTUP, TOLERANCES, BUDGETS = 4, (0.25, 0.5, 1.0), (8, 16, 32)
Curve = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Study:
    """Trials in number order, utilities in points; `truth` gives the score without noise, None where nobody knows it."""

    name: str
    searched: LearningRateRange
    trials: tuple[Finished, ...]
    least: int
    truth: Curve | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one study under one rule."""

    trials: int
    saved: int
    loss: float
    true_loss: float | None


def replay(study: Study, tolerance: float, evaluator: Evaluator) -> Outcome:
    """Stop where the rule first says so."""
    whole = len(study.trials)
    used = next(
        (n for n in range(study.least, whole) if _stops(study, n, tolerance, evaluator)), whole
    )
    (chosen, best), (full_chosen, full_best) = _best(study.trials[:used]), _best(study.trials)
    true_loss = None if study.truth is None else study.truth(full_chosen) - study.truth(chosen)
    return Outcome(whole, whole - used, full_best - best, true_loss)


def _stops(study: Study, n: int, tolerance: float, evaluator: Evaluator) -> bool:
    found = study.trials[:n]
    if sum(score is not None for _, _, score in found) < 2:
        return False
    chosen, _ = _best(found)
    if (
        study.searched.end_of(chosen, [lr for _, lr, _ in found]) is not None
    ):  # the edge guard's business
        return False
    return room_left(study.searched, found, seed=0, evaluator=evaluator) < tolerance


def _best(trials: Iterable[Finished]) -> tuple[float, float]:
    return max(
        ((lr, score) for _, lr, score in trials if score is not None), key=lambda found: found[1]
    )


def recorded(path: Path) -> list[tuple[Study, float]]:
    """Finished studies of a home with more trials than its quasi-random ones, and the noise between seeds of their cell, in points."""
    found, home = [], Home(path)
    for sweep in sweeps(home):
        plan = read_plan(home, sweep)
        cells = read_cells(home, sweep)
        for planned in plan.cells:
            cell = cells.get(planned.key)
            if (
                cell is None
                or planned.learning_rate.fixed
                or any(t.result is None for t in cell.search)
            ):
                continue
            point = planned.task.point
            trials = tuple(
                (
                    t.spec.number,
                    t.spec.learning_rate,
                    None if t.utility is None else t.utility / point,
                )
                for t in cell.search
            )
            if sum(score is not None for _, _, score in trials) < 3:
                continue
            name, least = (
                f"{path.name}: {cell.arm.method} on {cell.task}",
                plan.config.search.startup_trials + 2,
            )
            found.append((Study(name, planned.learning_rate, trials, least), _noise(cell, point)))
    return found


def _noise(cell: Cell, point: float) -> float:
    scores = [
        t.spec.task.utility(t.result.validation_score)
        for t in cell.confirm
        if t.result is not None and t.result.validation_score
    ]
    return stdev(scores) / point if len(scores) > 1 else 0.7


def simulate(
    name: str,
    curve: Curve,
    noise: float,
    budget: int,
    seed: int,
    searched: LearningRateRange = RANGE,
) -> Study:
    """A study with the suite's own proposals on a curve that is known."""
    draw, trials = random.Random(f"{name}/{seed}"), list[Finished]()
    for number in range(budget):
        rate = propose(
            f"{name}/{seed}",
            searched,
            sampler="gp",
            seed=seed,
            startup_trials=STARTUP,
            finished=trials,
            running=[],
            number=number,
        )
        trials.append((number, rate, curve(rate) + draw.gauss(0, noise)))
    return Study(name, searched, tuple(trials), STARTUP + 2, curve)


def through(study: Study) -> Curve:
    """The recorded points of a study as a curve, straight between them on the log scale."""
    points = sorted((math.log(lr), score) for _, lr, score in study.trials if score is not None)

    def curve(rate: float) -> float:
        x = math.log(rate)
        for (x0, y0), (x1, y1) in pairwise(points):
            if x <= x1:
                return y0 + (y1 - y0) * max(0.0, x - x0) / (x1 - x0)
        return points[-1][1]

    return curve


def parabola(rate: float) -> float:
    return 88.0 - 5.0 * math.log10(rate / 1.5e-4) ** 2


def plateau(rate: float) -> float:
    """Chance below, a slow rise over a decade and a half, and a cliff: what fine-tuning curves look like."""
    rise = 1 / (1 + math.exp(-4 * (math.log10(rate) + 5.0)))
    cliff = 1 / (1 + math.exp(12 * (math.log10(rate) + 3.1)))
    return 50.0 + 38.0 * rise * cliff


def rise_to_the_end(rate: float) -> float:
    return 50.0 + 30.0 / (1 + math.exp(-3 * (math.log10(rate) + 4.0)))


MADE: dict[str, Curve] = {"parabola": parabola, "plateau": plateau, "rise": rise_to_the_end}


def table(heading: str, studies: list[Study], evaluators: list[Evaluator]) -> None:
    """One line per evaluator and tolerance."""
    print(
        f"\n{heading}: {len(studies)} studies of {fmean(len(s.trials) for s in studies):.1f} trials"
    )
    print(
        "| evaluator | tolerance | stopped | trials saved | loss, mean | loss, 95 % | true loss, mean | true loss, 95 % |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for evaluator in evaluators:
        for tolerance in TOLERANCES:
            print(
                _line(
                    evaluator, tolerance, [replay(study, tolerance, evaluator) for study in studies]
                )
            )


def _line(evaluator: str, tolerance: float, outcomes: list[Outcome]) -> str:
    true = [o.true_loss for o in outcomes if o.true_loss is not None]
    saved, stopped = (
        sum(o.saved for o in outcomes) / sum(o.trials for o in outcomes),
        fmean(o.saved > 0 for o in outcomes),
    )
    numbers = [*_spread([o.loss for o in outcomes]), *(_spread(true) if true else ("-", "-"))]
    return (
        f"| {evaluator} | {tolerance} | {stopped:.0%} | {saved:.0%} | " + " | ".join(numbers) + " |"
    )


def _spread(values: list[float]) -> tuple[str, str]:
    return f"{fmean(values):.2f}", f"{sorted(values)[math.ceil(0.95 * len(values)) - 1]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("homes", nargs="*", type=Path, metavar="HOME")
    parser.add_argument("--evaluators", default=",".join(get_args(Evaluator)))
    parser.add_argument(
        "--repeats", type=int, default=10, help="simulated studies per curve, noise and budget"
    )
    given = parser.parse_args()
    evaluators = [e for e in get_args(Evaluator) if e in given.evaluators.split(",")]
    found = [pair for home in given.homes for pair in recorded(home)]
    if found:
        table("recorded studies as they were", [study for study, _ in found], evaluators)
        seeds = range(max(1, given.repeats // 5))
        drawn = [
            simulate(study.name, through(study), noise, 16, seed, study.searched)
            for study, noise in found
            for seed in seeds
        ]
        table(
            "recorded curves, searched anew with the noise between their seeds", drawn, evaluators
        )
    for budget in BUDGETS:
        for noise in (0.3, 1.0):
            made = [
                simulate(name, curve, noise, budget, seed)
                for name, curve in MADE.items()
                for seed in range(given.repeats)
            ]
            table(f"made curves, noise {noise}, budget {budget}", made, evaluators)


if __name__ == "__main__":
    main()
