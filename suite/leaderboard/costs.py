"""Compute the cost of the search behind a row, and its energy until it nears full fine-tuning.

They are computed when the leaderboard is read, for each home by itself. The search of architectures
that competed is added up before, as it takes their trials.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from suite.leaderboard.choice import TARGET_FRAC
from suite.leaderboard.fields import Row, with_values
from suite.leaderboard.measures import CellResults, mixes_energy
from suite.plan.cell_state import CellStatus

FULL = "full"
MIXED = "the energy of some confirm runs was measured, that of others estimated"


def selection_of(results: CellResults) -> dict[str, float | None]:
    """`selection_*` of a winner, whose search trials are those of all that competed.

    Frozen states that they share count once. Measured and estimated energy are not added.
    """
    return {
        "selection_trials": len(results.searched),
        "selection_s": results.of_search("seconds"),
        "selection_energy_kwh": results.of_search("energy_kwh"),
    }


def with_selection_cost(rows: Sequence[Row]) -> list[Row]:
    """The same rows with `selection_*`: what the search for their configuration cost on this task.

    That is the row's own study, and where architectures competed and this one won, the studies of
    all of them. An architecture that lost has none: its study is part of the winner's.
    """
    found = []
    for row in rows:
        # None means "no contest", or one that is still open. Where one has ended, the winner's row
        # holds the sum already.
        if row.chosen is None:
            row = with_values(
                row,
                selection_trials=row.search_trials,
                selection_s=row.search_s,
                selection_energy_kwh=row.search_energy_kwh,
            )
        found.append(row)
    return found


def with_energy_to_target(rows: Sequence[Row], target_frac: float = TARGET_FRAC) -> list[Row]:
    """The same rows with `energy_to_target_kwh`, or with the reason why they have none.

    The target is `target_frac` of the validation score of full fine-tuning's confirm runs with the
    same backbone and attention on the same task of the same sweep; where less is better, that score
    divided by `target_frac`. The energy is that of a run from scratch, with what its method
    prepares, up to the end of the first epoch that reaches the target. It is the mean over the
    confirm runs, and each of them must reach it.
    """
    full: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        # An architecture of full fine-tuning that lost its contest is no target.
        if row.method == FULL and row.chosen is not False:
            full[_conditions(row)].append(row)
    found = []
    for row in rows:
        found.append(_with_energy(row, full[_conditions(row)], target_frac))
    return found


def _conditions(row: Row) -> tuple[str, ...]:
    return row.home, row.sweep, row.conditions, row.task, row.precision or ""


def _with_energy(row: Row, full: Sequence[Row], target_frac: float) -> Row:
    try:
        # Both raise the reason for which there is no number.
        energy = _energy(row, _target(full, target_frac))
    except ValueError as reason:
        return with_values(row, energy_to_target_kwh=None, energy_to_target_missing=str(reason))
    return with_values(row, energy_to_target_kwh=energy, energy_to_target_missing=None)


def _target(full: Sequence[Row], target_frac: float) -> float:
    if not full:
        raise ValueError(
            "this sweep has no row of method full on the same backbone, attention and task, in the "
            "same precision"
        )
    if full[0].admitted is False:
        raise ValueError("the row of method full is rejected, and so is no target")
    if full[0].status == CellStatus.FAILED:
        raise ValueError("the row of method full failed, and so is no target")
    if len(full) > 1:
        raise ValueError(
            f"{len(full)} rows of this sweep are of method full, with different settings: "
            "the target is ambiguous"
        )
    score = full[0].validation_score
    if score is None:
        raise ValueError("method full has no validation score yet")
    # A share of a negative score would be a higher score, and so a harder target.
    if score <= 0:
        raise ValueError(
            f"the validation score of method full is {score:g}, of which no share can be taken"
        )
    # For a perplexity, nearly as good means a little higher.
    if full[0].higher_is_better is False:
        return score / target_frac
    return score * target_frac


def _energy(row: Row, target: float) -> float:
    """Mean energy of the confirm runs up to the target, kWh."""
    if not row.progress:
        raise ValueError("no confirm run has ended")
    # A run that ended before its first epoch has no point in `progress`. One that diverged later
    # has points and no score, and its cell fails only once the last seed has ended.
    with_points = {str(seed) for seed, _, _ in row.progress}
    if row.status == CellStatus.FAILED or not with_points <= row.seed_scores.keys():
        raise ValueError("a confirm run ended without a score")
    if mixes_energy(row.energy_source):
        raise ValueError(MIXED)
    spent: dict[int, float] = {}
    for seed, _, _ in row.progress:
        # A run has several epochs here, and its energy counts once.
        if seed not in spent:
            spent[seed] = _first_at(row, seed, target)
    return fmean(spent.values())


def _first_at(row: Row, seed: int, target: float) -> float:
    """The energy of a run up to its first epoch that reaches the target, kWh."""
    # `progress` is in the order of the epochs, so the first hit is the earliest.
    for other, energy, score in row.progress:
        reached = score >= target
        if row.higher_is_better is False:
            reached = score <= target
        if other == seed and reached:
            if energy is None:
                raise ValueError(f"the energy of the run with seed {seed} was not measured")
            return float(energy)
    raise ValueError(f"the run with seed {seed} never reaches a validation score of {target:.4g}")


def mean_reason(rows: Iterable[Row]) -> str | None:
    """Why a mean row has no energy to the target: the first reason of its tasks."""
    for row in rows:
        if row.energy_to_target_missing:
            return f"{row.task}: {row.energy_to_target_missing}"
    return None
