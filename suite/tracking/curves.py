"""What a cell keeps of its learning rates and epochs beside the numbers of its row: curves, and how wide their top is.

A tag of MLflow holds 8,000 characters, so a curve is cut into pieces of one tag each (`suite.curve.0`, `suite.curve.1`, ...); an
empty piece ends it, so that a curve which became shorter leaves nothing of the longer one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from suite.config.hashing import canonical_json
from suite.record.cells import Cell, Trial

POINT = 1.0
"""How far below the best a score still counts as equally good: points of a score in percent, percent of a perplexity."""
POINTS_PER_TAG = 100
"""Three numbers of at most 25 characters each: far from MLflow's limit."""

Curve = list[list[Any]]


def study_fields(cell: Cell, definition: Any, *, higher_is_better: bool) -> dict[str, Any]:
    """The fields of a `CellSummary` that tell of its study: its curve, and what the driver decided about it."""
    curve = learning_rate_curve(cell)
    found = {
        "curve": curve,
        "lr_sensitivity_decades": sensitivity_decades(curve, higher_is_better=higher_is_better),
    }
    if definition is None:
        return found
    searched, decided = definition.searched(cell.key), definition.studies.get(cell.key, {})
    found |= {"chosen": definition.chosen.get(cell.arm.key)} | {
        key: decided.get(key) for key in ("extensions", "saved_trials")
    }
    return (
        found
        if searched is None
        else found | {"learning_rate_low": searched.low, "learning_rate_high": searched.high}
    )


def learning_rate_curve(cell: Cell) -> Curve:
    """`[learning rate, best validation score or null, status]` of every ended search trial, in the order of their numbers."""
    return [
        [t.spec.learning_rate, t.result.score, t.result.status.value]
        for t in cell.search
        if t.result is not None
    ]


def sensitivity_decades(curve: Curve, *, higher_is_better: bool) -> float | None:
    """Width, log10, of the unbroken run of tried learning rates around the best whose score is within a point of the best.

    Within a point: of a score in percent, at most 1.0 lower; of a perplexity, at most 1% higher. A trial without a score
    ends the run. What lies between and beyond the tried rates is not known, so the width is that of the known part; 0 if the
    best stands alone.

    Args:
        curve: As `learning_rate_curve`.

    Returns:
        None where fewer than two learning rates were tried, or none has a score.
    """
    scores: dict[float, float | None] = {}
    for rate, score, _ in curve:
        known = scores.get(rate)
        scores[rate] = (
            score
            if known is None
            else known
            if score is None
            else (max if higher_is_better else min)(known, score)
        )
    found = [s for s in scores.values() if s is not None]
    if len(scores) < 2 or not found:
        return None
    best = max(found) if higher_is_better else min(found)
    rates = sorted(scores)

    def good(rate: float) -> bool:
        score = scores[rate]
        return score is not None and (
            score >= best - POINT if higher_is_better else score <= best * (1 + POINT / 100)
        )

    at = next(i for i, rate in enumerate(rates) if scores[rate] == best)
    above, below = takewhile(good, rates[at:]), takewhile(good, reversed(rates[: at + 1]))
    return math.log10(max(above) / min(below))


def progress(runs: Sequence[Trial], *, higher_is_better: bool) -> Curve:
    """`[seed, energy, score]` for every epoch of the confirm runs whose validation score is the best of its run so far.

    Energy is that of the train phase from the run's start to this epoch's end, kWh; null once an epoch has none.
    """
    return [
        [t.spec.seed, *point]
        for t in runs
        if t.result is not None
        for point in _bests(t, higher_is_better=higher_is_better)
    ]


def _bests(run: Trial, *, higher_is_better: bool) -> Curve:
    assert run.result is not None
    points: Curve = []
    spent: float | None = 0.0
    for epoch in run.result.epochs:
        spent = None if spent is None or epoch.energy_kwh is None else spent + epoch.energy_kwh
        score, before = epoch.validation_score, points[-1][1] if points else None
        if before is None or (score > before if higher_is_better else score < before):
            points.append([spent, score])
    return points


def to_tags(name: str, curve: Curve) -> dict[str, str]:
    """A curve as tags, with the empty piece that ends it."""
    pieces = [curve[i : i + POINTS_PER_TAG] for i in range(0, len(curve), POINTS_PER_TAG)]
    return {f"suite.{name}.{i}": canonical_json(piece) for i, piece in enumerate([*pieces, []])}


def of_tags(name: str, tags: Mapping[str, str]) -> Curve:
    """A curve from the tags that `to_tags` made; empty where an earlier version wrote none.

    Raises:
        ValueError: A piece is not JSON.
    """
    curve: Curve = []
    if f"suite.{name}.0" not in tags:
        return curve
    while piece := json.loads(tags.get(f"suite.{name}.{len(curve) // POINTS_PER_TAG}", "[]")):
        curve += piece
        if len(piece) < POINTS_PER_TAG:
            break
    return curve
