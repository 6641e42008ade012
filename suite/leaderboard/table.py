"""Turn rows into the leaderboard: comparisons, mean rows, order, filters, and the frame."""

from __future__ import annotations

import gc
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any, Unpack

from suite.config.hashing import canonical_json
from suite.config.reference import MEAN
from suite.errors import ConfigError, TrackingError, UnknownNameError
from suite.leaderboard.baselines import BOTH_DIRECTIONS, with_efficiency
from suite.leaderboard.choice import (
    LEAST_TARGET_FRAC,
    SORT_FIELDS,
    TARGET_FRAC,
    Choice,
    Sort,
    sort_of,
)
from suite.leaderboard.costs import MIXED, mean_reason, with_energy_to_target, with_selection_cost
from suite.leaderboard.fields import (
    COLUMNS,
    FIELDS,
    NOT_VERIFIABLE,
    Average,
    Kind,
    Row,
    averaged,
    of_kind,
    with_values,
)
from suite.leaderboard.learning import with_learning
from suite.leaderboard.measures import join, mean, mixes_energy, spread
from suite.leaderboard.ranks import ALONE, is_ranked, no_rank, tasks_of_mean, why_not_ranked
from suite.leaderboard.row import reference_fields
from suite.leaderboard.validity import judge_mean
from suite.plan.cell_state import CellStatus
from suite.record.looks import from_json as looks_from_json
from suite.record.looks import joint

if TYPE_CHECKING:
    import pandas as pd

FRAME_TYPES = {Kind.INTEGER: "Int64", Kind.NUMBER: "float64", Kind.FLAG: "boolean"}
AVERAGED = averaged(Average.MEAN, Average.SCORE)
_averaged = attrgetter(*AVERAGED)
_columns = attrgetter(*COLUMNS)
"""These two read all columns of a row at once; a call for each would double the time of a table."""
# Whatever an arm does on several tasks, its pretrain run is one, with one source.
ENERGIES = tuple(
    field.name
    for field in FIELDS
    if field.unit == "kWh" and field.name in AVERAGED and field.name != "pretrain_energy_kwh"
)
"""What a mean row lacks where the energy of some tasks was measured and that of others estimated.
"""
JSON_COLUMNS = of_kind(Kind.JSON)
NUMBER_COLUMNS = of_kind(Kind.NUMBER)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The rows of a leaderboard in the order in which they are shown.

    Attributes:
        rows: Rows of cells, and the mean rows of arms.
        hidden: How many rejected rows are left out.
    """

    rows: list[Row]
    hidden: int


def choose(
    rows: Sequence[Row],
    *,
    task: str | None = None,
    method: str | None = None,
    attention: str | None = None,
    sort: str = Sort.SCORE,
    target_frac: float = TARGET_FRAC,
    rejected: bool = False,
) -> Chosen:
    """The leaderboard of some rows: one row per cell, and a mean row per arm with several tasks.

    The task of a mean row is "mean".

    A mean row averages every number over the arm's tasks, once each of them has one; its spread is
    that of the per-seed means over tasks; its `status` is the least finished, and `failed` where a
    task failed and none is open. It is null where a task of the sweep is missing, and its scores
    are where one failed.

    Args:
        rows: Rows of any sweeps and homes; of each sweep of a home all of them, or PRR and the like
            lack their baselines.
        task: Show only this task, or "mean".
        method: Show only this method.
        attention: Show only this attention variant; its baselines for PRR and PEoP are looked up
            all the same.
        sort: Order within each task: score, prr or peop (best first), energy, memory or trainable
            (least first); unknown values come last.
        target_frac: Share of full fine-tuning's validation score that is the target of
            `energy_to_target_kwh`.
        rejected: Whether to show rejected rows too.

    Raises:
        TrackingError: Nothing of that task, method or attention is there, or all of it is rejected.
        UnknownNameError: `sort` is no sort key.
        ConfigError: `target_frac` is no share from 0.01 to 1.
    """
    order = sort_of(sort)
    if not LEAST_TARGET_FRAC <= target_frac <= 1:
        raise ConfigError(
            f"target_frac: got {target_frac!r}, expected a share from {LEAST_TARGET_FRAC} to 1"
        )
    with _without_collector():
        # The filters come after the comparisons, because they may drop a row's baseline.
        found = compare(rows, target_frac)
        for key, value in {"method": method, "attention": attention, "task": task}.items():
            found = having(found, key, value)
        shown = found
        if not rejected:
            shown = [row for row in found if row.admitted is not False]
        if not shown:
            raise TrackingError(
                f"{len(found)} rows, and all are rejected; --all shows them with the reason"
            )
        return Chosen(in_order(shown, order), hidden=len(found) - len(shown))


def leaderboard_of(rows: Sequence[Row], **choice: Unpack[Choice]) -> pd.DataFrame:
    """The rows that `choose` gives as a table.

    Returns:
        The columns of `suite.leaderboard.fields`; mappings and lists are JSON text; what is not
        known is NaN, NA or None. `attrs["hidden"]` counts the rejected rows that are left out.

    Raises:
        TrackingError: As `choose`.
        UnknownNameError: As `choose`.
    """
    chosen = choose(rows, **choice)
    with _without_collector():
        frame = to_frame(chosen.rows)
    # Whoever shows the frame says how many rows it leaves out.
    frame.attrs["hidden"] = chosen.hidden
    return frame


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch the garbage collector off for a while.

    10,000 rows are half a million objects without a cycle, and it would look through all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compare(rows: Sequence[Row], target_frac: float = TARGET_FRAC) -> list[Row]:
    """Cells and means, with everything that takes more than one row to know.

    Args:
        rows: Rows as they are stored; of each sweep of a home all of them.
        target_frac: The same as for `choose`.
    """
    # One order for all that follows, whichever store the rows come from.
    found = sorted(rows, key=lambda row: (row.sweep, row.arm, row.task, row.home))
    found = with_learning(found)
    # Costs before mean rows, which average them; PRR and PEoP after, as a mean row's are ratios of
    # its means.
    found = with_energy_to_target(with_selection_cost(found), target_frac)
    return with_efficiency([*found, *mean_rows(found)])


def having(rows: list[Row], key: str, value: str | None) -> list[Row]:
    """The rows with this value of a field; None takes all.

    Raises:
        TrackingError: There is none; the message names the values that there are.
    """
    if value is None:
        return rows
    kept = [row for row in rows if getattr(row, key) == value]
    if not kept:
        known = {getattr(row, key) for row in rows}
        raise TrackingError(str(UnknownNameError(key, value, known, where="in these results")))
    return kept


def mean_rows(rows: Sequence[Row]) -> list[Row]:
    """One row per arm that has more than one task, in the order of the arms."""
    sweeps: dict[tuple[str, str], list[Row]] = defaultdict(list)
    arms: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        sweeps[row.sweep, row.home].append(row)
        arms[row.sweep, row.home, row.arm].append(row)
    tasks = {sweep: tasks_of_mean(members) for sweep, members in sweeps.items()}
    found = []
    for (sweep, home, _), members in arms.items():
        if len(members) > 1:
            found.append(_mean_row(members, complete=len(members) == tasks[sweep, home]))
    return found


def _mean_row(rows: Sequence[Row], *, complete: bool) -> Row:
    """The row of an arm with every number averaged over the tasks.

    Where a task is missing it holds nothing but names, because its numbers could not be compared.
    """
    first = rows[0]
    values: dict[str, Any] = {}
    for name in averaged(Average.SAME):
        values[name] = getattr(first, name)
    by_seed: dict[str, float] = {}
    one_direction = len({row.higher_is_better for row in rows}) == 1
    values["higher_is_better"] = first.higher_is_better
    if complete:
        values |= _averages(rows)
        values["seeds"] = min(row.seeds for row in rows)
        values["search_trials"] = round(fmean(row.search_trials for row in rows))
        values["energy_to_target_missing"] = mean_reason(rows)
    source = join(row.energy_source for row in rows)
    # A mean of measured and estimated energy would be neither.
    if mixes_energy(source):
        values |= dict.fromkeys(ENERGIES)
        values["energy_to_target_missing"] = MIXED
    failed = any(row.status == CellStatus.FAILED for row in rows)
    # Without all of these there is no mean score, so there is no spread of one.
    if complete and one_direction and not failed:
        by_seed = _seed_means(rows)
    # The mean of an accuracy and a perplexity says nothing.
    if not one_direction:
        values["higher_is_better"] = None
    # Nor does one in which a task counts by the seeds that survived.
    if not one_direction or failed:
        values |= dict.fromkeys(averaged(Average.SCORE))
    reasons = {row.task: (row.admitted, row.rejected, row.dirty) for row in rows}
    mean_row = Row(
        **values,
        **_looks(rows),
        unverified=_unverified(rows),
        task=MEAN,
        score_std=spread(by_seed.values()),
        seed_scores=by_seed,
        energy_source=source,
        precision=join(row.precision for row in rows),
        machine=join(row.machine for row in rows),
        frozen_dropout=join(row.frozen_dropout for row in rows),
        status=_least_finished([row.status for row in rows], complete=complete),
        **reference_fields(first.reference_mean, values.get("score_mean")),
        **judge_mean(reasons),
    )
    rank = _stored_rank(mean_row, first.mean_rank, one_direction=one_direction)
    return with_values(mean_row, **rank)


def _looks(rows: Sequence[Row]) -> dict[str, Any]:
    """How often the test scores behind a mean were looked at, and the warnings of its tasks."""
    most = max(row.test_looks for row in rows)
    # With one look at each row there is nothing to put together, which takes long for many rows.
    if most < 2:
        return {"test_looks": most}
    warnings = [f"{row.task}: {row.looks_warning}" for row in rows if row.looks_warning]
    looks = joint(looks_from_json(row.looks) for row in rows)
    return {"test_looks": looks, "looks_warning": "; ".join(warnings)}


def _unverified(rows: Sequence[Row]) -> str | None:
    """The tasks of an arm whose scores were not computed again."""
    tasks = [row.task for row in rows if row.unverified is not None]
    if not tasks:
        return None
    return f"{NOT_VERIFIABLE}: {', '.join(tasks)}"


def _averages(rows: Sequence[Row]) -> dict[str, Any]:
    """The means of all numbers that have one."""
    values: dict[str, Any] = {}
    columns = zip(*map(_averaged, rows), strict=True)
    integers = of_kind(Kind.INTEGER)
    for name, column in zip(AVERAGED, columns, strict=True):
        value = mean(column)
        # The column holds integers, and half a trial means nothing to a reader.
        if value is not None and name in integers:
            value = round(value)
        values[name] = value
    return values


def _seed_means(rows: Sequence[Row]) -> dict[str, float]:
    """The mean over tasks by seed; empty unless every task has the same seeds."""
    seeds = rows[0].seed_scores.keys()
    for row in rows:
        # A mean over different tasks for each seed would not be a spread over seeds.
        if row.seed_scores.keys() != seeds:
            return {}
    means = {}
    for seed in seeds:
        means[seed] = fmean(row.seed_scores[seed] for row in rows)
    return means


def _least_finished(statuses: Sequence[str], *, complete: bool) -> str:
    if len(set(statuses)) == 1 and complete:
        return statuses[0]
    # An arm that lacks a task has not begun to search there.
    if CellStatus.SEARCHING in statuses or not complete:
        return CellStatus.SEARCHING.value
    # A word that this version does not know counts as open.
    over = {status.value for status in CellStatus if status.is_over}
    if CellStatus.FAILED in statuses and over.issuperset(statuses):
        return CellStatus.FAILED.value
    return CellStatus.PARTIAL.value


def _stored_rank(mean_row: Row, stored: dict[str, Any], *, one_direction: bool) -> dict[str, Any]:
    """The rank of a mean row, as the rows of its tasks carry it, or why it has none."""
    if not is_ranked(mean_row):
        return no_rank(why_not_ranked(mean_row))
    if not one_direction:
        return no_rank(BOTH_DIRECTIONS)
    return stored or no_rank(ALONE)


def in_order(rows: Iterable[Row], sort: Sort) -> list[Row]:
    """Rows by sweep, task (mean rows last) and sort key; equal rows keep their order."""

    def place(row: Row) -> tuple[str, bool, str, bool, float]:
        value = getattr(row, SORT_FIELDS[sort])
        most_first = sort in (Sort.PRR, Sort.PEOP)
        if sort is Sort.SCORE:
            most_first = row.higher_is_better is not False
        key = value or 0.0
        if most_first:
            key = -key
        # False sorts before True: mean rows come last, and so do unknown values.
        return row.sweep, row.task == MEAN, row.task, value is None, key

    return sorted(rows, key=place)


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a table whose columns have one type each; nullable integers stay integers."""
    # Most of a second to import; `suite leaderboard` prints its rows without a frame.
    import pandas as pd

    lines = list(map(_columns, rows))
    values: dict[str, Sequence[Any]] = dict.fromkeys(COLUMNS, ())
    # `zip` of no lines gives no columns, and the frame needs all of them.
    if lines:
        values = dict(zip(COLUMNS, zip(*lines, strict=True), strict=True))
    for name in JSON_COLUMNS:
        values[name] = [_json(value) for value in values[name]]
    types: dict[str, str] = {}
    # "Int64" and "boolean" are pandas' nullable types: with "int64" one missing value would turn
    # the column to floats.
    for kind, frame_type in FRAME_TYPES.items():
        types |= dict.fromkeys(of_kind(kind), frame_type)
    return pd.DataFrame(values).astype(types)


def _json(value: Any) -> str:
    """The value as JSON text."""
    # Most mappings are empty, and for these `str` is quicker.
    if not value:
        return str(value)
    return canonical_json(value)


def plain(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows as `to_rows` gives them, without a frame between."""
    found = []
    for row in rows:
        values = dict(zip(COLUMNS, _columns(row), strict=True))
        for name in JSON_COLUMNS:
            values[name] = json.loads(_json(values[name]))
        for name in NUMBER_COLUMNS:
            # A frame holds no other number for "not known", so NaN means that here too.
            if values[name] is not None and math.isnan(values[name]):
                values[name] = None
        found.append(values)
    return found


def to_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as mappings that are ready for JSON.

    What is not known is null, integers stay integers, and JSON text becomes mappings again.
    """
    # Only a column of objects can hold None; in others it becomes NaN again.
    plain = frame.astype(object).where(frame.notna(), None)
    rows = []
    for line in plain.to_dict(orient="records"):
        row = {}
        for key, value in line.items():
            if key in JSON_COLUMNS:
                value = json.loads(value)
            row[str(key)] = value
        rows.append(row)
    return rows
