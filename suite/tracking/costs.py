"""What it took to get there: the cost of the search behind a row, and the energy until it was nearly as good as full fine-tuning.

Both compare rows, so they are computed when the leaderboard is read, for each home by itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from suite.tracking.summary import CellSummary, with_values

Row = tuple[CellSummary, str]
"""A cell and the home it was run in."""
TARGET_FRAC = 0.95
"""Share of full fine-tuning's best validation score that counts as nearly as good; ours."""
FULL = "full"


def with_selection_cost(rows: Sequence[Row]) -> list[Row]:
    """The same rows with `selection_*`: what was searched to find their configuration on this task.

    That is the row's own study, and where architectures competed and this one won, the studies of all of them. An
    architecture that did not win has none: its study is part of the winner's.
    """
    contests: dict[tuple[str, ...], list[CellSummary]] = defaultdict(list)
    for cell, home in rows:
        if cell.chosen is not None:
            contests[_contest(cell, home)].append(cell)
    return [
        (_with_cost(cell, contests[_contest(cell, home)] if cell.chosen else [cell]), home)
        for cell, home in rows
    ]


def _contest(cell: CellSummary, home: str) -> tuple[str, ...]:
    return home, cell.sweep, cell.conditions, cell.method, cell.task


def _with_cost(cell: CellSummary, studies: Sequence[CellSummary]) -> CellSummary:
    if cell.chosen is False:
        return cell
    return with_values(
        cell,
        selection_trials=sum(study.search_trials for study in studies),
        selection_s=_sum(study.search_s for study in studies),
        selection_energy_kwh=_sum(study.search_energy_kwh for study in studies),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """None where one is not known."""
    kept = list(values)
    return None if None in kept else math.fsum(v for v in kept if v is not None)


def with_energy_to_target(rows: Sequence[Row], target_frac: float = TARGET_FRAC) -> list[Row]:
    """The same rows with `energy_to_target_kwh`, or with the reason why they have none.

    The target is `target_frac` of the best validation score of full fine-tuning with the same backbone and attention on the
    same task of the same sweep; where less is better, that score divided by `target_frac`. The energy is that of the train
    phase up to the end of the first epoch that reaches it, the mean over the confirm runs, all of which must.
    """
    full: dict[tuple[str, ...], list[CellSummary]] = defaultdict(list)
    for cell, home in rows:
        if cell.method == FULL and cell.chosen is not False:
            full[_conditions(cell, home)].append(cell)
    return [
        (_with_energy(cell, full[_conditions(cell, home)], target_frac), home)
        for cell, home in rows
    ]


def _conditions(cell: CellSummary, home: str) -> tuple[str, ...]:
    return home, cell.sweep, cell.conditions, cell.task


def _with_energy(cell: CellSummary, full: Sequence[CellSummary], target_frac: float) -> CellSummary:
    try:
        return with_values(
            cell,
            energy_to_target_kwh=_energy(cell, _target(full, target_frac)),
            energy_to_target_missing=None,
        )
    except ValueError as reason:
        return with_values(cell, energy_to_target_kwh=None, energy_to_target_missing=str(reason))


def _target(full: Sequence[CellSummary], target_frac: float) -> float:
    if not full:
        raise ValueError(
            "this sweep has no row of method full on the same backbone, attention and task"
        )
    if full[0].admitted is False:
        raise ValueError("the row of method full is rejected, and so is no target")
    if len(full) > 1:
        raise ValueError(
            f"{len(full)} rows of this sweep are of method full, with different settings: the target is ambiguous"
        )
    score = full[0].validation_score
    if score is None:
        raise ValueError("method full has no validation score yet")
    if score <= 0:
        raise ValueError(
            f"the validation score of method full is {score:g}, of which no share can be taken"
        )
    return score / target_frac if full[0].higher_is_better is False else score * target_frac


def _energy(cell: CellSummary, target: float) -> float:
    """Mean energy of the confirm runs up to the target, kWh."""
    if not cell.progress:
        raise ValueError("no confirm run has ended")
    spent, less = [], cell.higher_is_better is False
    for seed in dict.fromkeys(seed for seed, _, _ in cell.progress):
        reached = [
            e
            for s, e, score in cell.progress
            if s == seed and (score <= target if less else score >= target)
        ]
        if not reached:
            raise ValueError(
                f"the run with seed {seed} never reaches a validation score of {target:.4g}"
            )
        if reached[0] is None:
            raise ValueError(f"the energy of the run with seed {seed} was not measured")
        spent.append(reached[0])
    return fmean(spent)


def mean_reason(cells: Iterable[CellSummary]) -> str | None:
    """Why a mean row has no energy to the target: the first of its tasks that has none."""
    return next(
        (
            f"{cell.task}: {cell.energy_to_target_missing}"
            for cell in cells
            if cell.energy_to_target_missing
        ),
        None,
    )
