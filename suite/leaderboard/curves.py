"""Make the curves that a row keeps, and measure the width of the learning-rate curve's top."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from suite.leaderboard.measures import of_preparation, why_no_preparation_energy
from suite.record.cells import Trial

if TYPE_CHECKING:  # the table of fields says of its rows what is computed here
    from suite.leaderboard.fields import Row

POINT = 1.0
ROUNDING = 1e-9
"""How far below the best a score still counts as equally good.

The unit is points of a score in percent, and percent of a perplexity.
"""

CONFIRMED = "confirmed"
"""The status of a point that is no search trial; see `confirmed_point`."""

Curve = list[list[Any]]


def learning_rate_curve(search: Sequence[Trial]) -> Curve:
    """What every ended search trial tried, and what it gave.

    `[learning rate, best validation score or null, status, batch size]`.
    """
    curve: Curve = []
    for trial in search:
        if trial.result is not None:
            status = trial.result.status.value
            rate, size = trial.spec.learning_rate, trial.spec.training.batch_size
            curve.append([rate, trial.result.score, status, size])
    return curve


def search_best(curve: Curve, *, higher_is_better: bool) -> float | None:
    """The best score of a curve; None where no trial has one."""
    scores = []
    for _, score, *_ in curve:
        if score is not None:
            scores.append(score)
    if not scores:
        return None
    best: float = _better(higher_is_better)(scores)
    return best


def sensitivity_decades(curve: Curve, *, higher_is_better: bool) -> float | None:
    """Width, log10, of the unbroken run of tried rates around the best that are nearly as good.

    Nearly as good means within a point: for a score in percent at most 1.0 lower, for a perplexity
    at most 1% higher. A trial without a score ends the run. What lies between and beyond the tried
    rates is not known, so the width is that of the known part.

    Args:
        curve: What `learning_rate_curve` gives.

    Returns:
        None where fewer than two learning rates were tried, or none has a score; 0 where the best
        stands alone.
    """
    # A rate may have been tried with two batch sizes, or twice where the range has few of them.
    scores = _best_by_rate(curve, higher_is_better=higher_is_better)
    found = [score for score in scores.values() if score is not None]
    # One point has no width, and without a score there is no best.
    if len(scores) < 2 or not found:
        return None
    best: float = _better(higher_is_better)(found)
    rates = sorted(scores)

    def good(rate: float) -> bool:
        score = scores[rate]
        if score is None:
            return False
        # A score that is exactly one point lower may be a little less in floating point.
        if higher_is_better:
            return score >= best - POINT - ROUNDING
        # A perplexity is compared by its ratio, because its scale differs from task to task.
        return score <= best * (1 + POINT / 100 + ROUNDING)

    # Of several rates with the best score, the lowest.
    at = 0
    while scores[rates[at]] != best:
        at += 1
    # Each run ends at the first rate that is not good, even if a good one follows.
    above = takewhile(good, rates[at:])
    below = takewhile(good, reversed(rates[: at + 1]))
    # Both runs hold the best rate itself, so neither is empty.
    return math.log10(max(above) / min(below))


def _better(higher_is_better: bool) -> Callable[..., Any]:
    """The function that takes the better of some scores."""
    if higher_is_better:
        return max
    return min


def _best_by_rate(curve: Curve, *, higher_is_better: bool) -> dict[float, float | None]:
    """The best score of every learning rate, which may have been tried more than once."""
    better = _better(higher_is_better)
    scores: dict[float, float | None] = {}
    for rate, score, *_ in curve:
        known = scores.get(rate)
        # A run without a score never takes the place of one with a score.
        if known is None:
            scores[rate] = score
        elif score is not None:
            scores[rate] = better(known, score)
    return scores


def epochs_at_best(runs: Sequence[Trial], *, higher_is_better: bool) -> Curve:
    """`[seed, energy, score]` for every epoch of the confirm runs that is the best of its run yet.

    The best is that with the best validation score. Energy is that of what the method prepared, in
    full, and of training up to this epoch's end, kWh; it is null once a part of it has none.
    """
    points: Curve = []
    for run in runs:
        if run.result is None:
            continue
        spent: float | None = 0.0
        if run.result.made_before:
            spent = None
            if why_no_preparation_energy(run.result) is None:
                spent = of_preparation("energy_kwh")(run.result)
        best: float | None = None
        for epoch in run.result.epochs:
            # Once one epoch is unknown, so is every sum after it.
            if spent is None or epoch.energy_kwh is None:
                spent = None
            else:
                spent += epoch.energy_kwh
            score = epoch.validation_score
            if best is None:
                is_better = True
            elif higher_is_better:
                is_better = score > best
            else:
                is_better = score < best
            if is_better:
                best = score
                points.append([run.spec.seed, spent, score])
    return points


def confirmed_point(cell: Row) -> list[tuple[float, float, str, int | None]]:
    """What was confirmed, where the search did not try it, with its runs' mean validation score.

    Empty where it was tried, or nothing is confirmed.
    """
    rate = cell.learning_rate
    score = cell.validation_score
    if rate is None or score is None:
        return []
    if any(is_chosen(cell, tried, size) for tried, _, _, size in cell.curve):
        return []
    return [(rate, score, CONFIRMED, cell.batch_size)]


def points(cell: Row) -> list[dict[str, Any]]:
    """The points of a cell's learning-rate curve, and of the confirmed rate, by name of value."""
    found = []
    for rate, score, status, size in (*cell.curve, *confirmed_point(cell)):
        found.append(
            {
                "learning_rate": rate,
                "batch_size": size,
                "validation_score": score,
                "status": status,
                "chosen": is_chosen(cell, rate, size),
            }
        )
    return found


def is_chosen(cell: Row, rate: float, batch_size: int | None) -> bool:
    """Whether a search trial with this rate and batch size tried what was confirmed."""
    # The search of an architecture that lost has a best rate too, and nothing confirmed it.
    if cell.chosen is False:
        return False
    # Sweeps with one batch size do not search it, and their rows need not name it.
    same_size = cell.batch_size in (None, batch_size)
    return rate == cell.learning_rate and same_size
