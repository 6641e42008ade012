"""How often two equal arms are told apart by somebody who looks at test scores and goes on.

    python -m benchmarks.protocol.looks [--sweeps 4000]

Both arms have the same truth; the scores of their seeds are drawn from one normal distribution. The
person adds seeds until the arms are told apart, or the last number of seeds is reached; or tests
five seeds and keeps those three that tell the arms apart best. The p-values are those of `suite
compare`. Each column multiplies the p of look k by something else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from suite.metrics.values import Values
from suite.stats.compare import Evidence, p_values
from suite.stats.significance import LEVEL, counted

SCHEDULES: dict[str, Sequence[int]] = {
    "3, 5, 8 seeds": (3, 5, 8),
    "5, 8, 12 seeds": (5, 8, 12),
    "2 to 5 seeds, one by one": range(2, 6),
    "3 to 20 seeds, one by one": range(3, 21),
}
ITEMS = (0.0, 0.1, 1.0)
"""Variance of an arm's error by its items, where that of one seed is 1."""
FACTORS: dict[str, Callable[[float, int], float]] = {
    "p as it is": lambda p, looks: p,
    "p x looks": lambda p, looks: float(counted(p, looks)),
}


def scores_of(rng: np.random.Generator, seeds: int, items: float) -> Values:
    """Scores of two equal arms by seed, (2, S), with the error of their items."""
    error = rng.normal(scale=np.sqrt(items), size=(2, 1))  # the same for all seeds of an arm
    scores: Values = rng.normal(size=(2, seeds)) + error
    return scores


def p_of(scores: Values, chosen: Sequence[int], items: float) -> float:
    """The p-value of the two arms by some of their seeds."""
    evidence = Evidence(tuple(chosen), scores[:, list(chosen)], items * np.eye(2), units=100)
    return float(p_values(evidence)[0, 1])


def told_apart(p: Sequence[float], factor: Callable[[float, int], float]) -> bool:
    """Whether one of the looks told the arms apart."""
    return any(factor(value, 1 + look) < 1 - LEVEL for look, value in enumerate(p))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=4000)
    sweeps = parser.parse_args().sweeps
    print(f"| {sweeps} sweeps of two equal arms | items | {' | '.join(FACTORS)} |")
    print("| --- | --: | " + " | ".join("--:" for _ in FACTORS) + " |")
    for name, schedule in SCHEDULES.items():
        for items in ITEMS:
            rng = np.random.default_rng(0)
            told = dict.fromkeys(FACTORS, 0)
            for _ in range(sweeps):
                scores = scores_of(rng, max(schedule), items)
                p = [p_of(scores, range(seeds), items) for seeds in schedule]
                for factor, corrected in FACTORS.items():
                    told[factor] += told_apart(p, corrected)
            _print(name, items, told, sweeps)
    for items in ITEMS:
        rng = np.random.default_rng(0)
        told = dict.fromkeys(FACTORS, 0)
        for _ in range(sweeps):
            scores = scores_of(rng, 5, items)
            best = min(p_of(scores, chosen, items) for chosen in combinations(range(5), 3))
            for factor, corrected in FACTORS.items():
                # The five, and the ten ways of choosing three of them.
                told[factor] += corrected(best, 11) < 1 - LEVEL
        _print("the best 3 of 5 tested seeds", items, told, sweeps)


def _print(name: str, items: float, told: dict[str, int], sweeps: int) -> None:
    rates = " | ".join(f"{100 * count / sweeps:.1f}%" for count in told.values())
    print(f"| {name} | {items:g} | {rates} |", flush=True)


if __name__ == "__main__":
    main()
