"""Learning rates that follow no model of ours: the even start, the grid, Optuna's samplers."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from suite.config.space import LearningRateRange
from suite.config.sweep import Sampler
from suite.plan.proposer import Finished, Running, propose

RANGE = LearningRateRange(low=1e-6, high=3e-3)
SAMPLERS: tuple[Sampler, ...] = ("gp", "tpe", "random", "grid")


def ask(
    sampler: Sampler,
    number: int,
    finished: list[Finished],
    running: Sequence[Running] = (),
    *,
    study: str = "a/b",
    seed: int = 0,
) -> float:
    return propose(
        study,
        RANGE,
        sampler=sampler,
        seed=seed,
        startup_trials=4,
        finished=finished,
        running=running,
        number=number,
    )


def parabola(learning_rate: float) -> float:
    return -(math.log10(learning_rate / 2e-4) ** 2)


def study(sampler: Sampler, trials: int, *, seed: int = 0, noise: float = 0.0) -> list[Finished]:
    finished: list[Finished] = []
    draw = random.Random(1)
    for number in range(trials):
        learning_rate = ask(sampler, number, finished, seed=seed)
        finished.append((number, learning_rate, parabola(learning_rate) + noise * draw.gauss(0, 1)))
    return finished


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_proposals_lie_in_the_range_differ_and_depend_on_study_and_seed(sampler: Sampler) -> None:
    rates = [learning_rate for _, learning_rate, _ in study(sampler, 12)]
    assert all(RANGE.low <= r <= RANGE.high for r in rates)
    assert len(set(rates)) == 12
    assert rates == [r for _, r, _ in study(sampler, 12)]
    if sampler in ("tpe", "random"):
        begun = study(sampler, 5)
        proposed = ask(sampler, 5, begun)
        assert proposed != ask(sampler, 5, begun, study="a/c")
        assert proposed != ask(sampler, 5, begun, seed=1)


def test_another_process_proposes_the_same() -> None:
    finished = {sampler: study(sampler, 6) for sampler in SAMPLERS}
    running = [(6, 1e-4)]
    code = (
        "import json, sys; from suite.config.space import LearningRateRange; from suite.plan.proposer import propose\n"
        "trials, a = json.load(sys.stdin); r = LearningRateRange(**a.pop('range'))\n"
        "same = lambda s: propose('a/b', r, sampler=s, seed=0, startup_trials=4, finished=trials[s], **a)\n"
        "print(json.dumps({sampler: same(sampler) for sampler in trials}))"
    )
    given = [finished, {"range": RANGE.model_dump(), "running": running, "number": 7}]
    root = Path(__file__).parents[1]
    out = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
    )
    here = {sampler: ask(sampler, 7, finished[sampler], running) for sampler in SAMPLERS}
    assert json.loads(out.stdout) == here


def test_the_gaussian_process_finds_the_optimum() -> None:
    best = max(study("gp", 10, noise=0.01), key=lambda trial: trial[2] or 0.0)
    assert abs(math.log10(best[1] / 2e-4)) < 0.15


def test_the_first_trials_are_the_middles_of_the_range_and_its_thirds_for_every_arm() -> None:
    span = math.log(RANGE.high / RANGE.low)
    places = []
    for number in range(9):
        rate = ask("tpe", number, [], study=f"s{number}", seed=number)
        places.append(round(18 * math.log(rate / RANGE.low) / span))
    assert places == [9, 15, 3, 17, 13, 11, 7, 5, 1], "in eighteenths of the range"


@pytest.mark.parametrize("sampler", ["gp", "tpe"])
def test_trials_without_a_score_push_the_sampler_away(sampler: Sampler) -> None:
    """Upper half of the range diverged: fewer of the next proposals lie there than when it scored best."""
    edge = math.sqrt(RANGE.low * RANGE.high)
    rates = [1e-6 * 10 ** (0.28 * i) for i in range(12)]
    diverged: list[Finished] = [
        (i, r, None if r > edge else 1.0 + 0.1 * i) for i, r in enumerate(rates)
    ]
    good: list[Finished] = [(i, r, 3.0 + 0.1 * i if r > edge else 1.0) for i, r in enumerate(rates)]
    above = lambda history: sum(  # noqa: E731
        ask(sampler, n, history, study=f"s{n}") > edge for n in range(12, 16)
    )
    assert above(diverged) < above(good)


def test_while_no_trial_has_a_score_the_even_points_go_on() -> None:
    nothing: list[Finished] = [(i, ask("tpe", i, []), None) for i in range(6)]
    assert ask("tpe", 6, nothing) == ask("random", 6, nothing) == ask("tpe", 6, [])


def test_running_trials_are_not_proposed_again() -> None:
    finished = study("gp", 8)
    first = ask("gp", 8, finished)
    second = ask("gp", 9, finished, [(8, first)])
    assert second != first and second not in {r for _, r, _ in finished}


def test_a_learning_rate_is_never_tried_twice() -> None:
    """The optimum on the edge draws the sampler to the edge again and again."""
    finished: list[Finished] = []
    for number in range(10):
        learning_rate = ask("gp", number, finished)
        finished.append((number, learning_rate, math.log(learning_rate)))
    assert len({r for _, r, _ in finished}) == 10 and RANGE.high in {r for _, r, _ in finished}


def test_a_larger_grid_refines_a_smaller_one() -> None:
    logs = sorted(math.log(r) for _, r, _ in study("grid", 9))
    gaps = [b - a for a, b in pairwise(logs)]
    assert max(gaps) - min(gaps) < 1e-3, "rates are rounded to four digits"
    assert min(r for _, r, _ in study("grid", 2)) == RANGE.low
