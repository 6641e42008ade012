"""`suite status`: where the sweeps of a home stand."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli import render
from suite.cli.options import Format, FormatOption, HomeOption, OnlySweepOption, StorageOption
from suite.cli.render import Column, Row, column, put
from suite.config.names import DEFAULT_HOME
from suite.errors import ConfigError

if TYPE_CHECKING:
    from suite.plan.status import CellReport
    from suite.record.folder import Home

KEYS = (
    "sweep",
    "backbone",
    "attention",
    "attention_options",
    "method",
    "architecture",
    "task",
    "progress",
    "search_done",
    "confirm_done",
    "running",
    "left",
    "total",
    "best_validation_score",
    "best_learning_rate",
    "failures",
    "pretrain",
    "pruned",
    "extensions",
    "saved_trials",
    "edge",
    "waits_for",
    "own_code",
    "workers",
    "chosen",
    "study",
    "notes",
)
"""The columns of CSV, in their order."""


def status(
    home: HomeOption = DEFAULT_HOME,
    sweep: OnlySweepOption = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Show the jobs of this Ray cluster instead: http://HEAD:8265."
        ),
    ] = None,
    storage: StorageOption = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Show for each cell the trials done, running and left, and failures with cause and log.

    With --address it shows the sweeps on a cluster. With --storage it looks there for who runs a
    sweep; `suite sync --storage URL` brings what has finished.
    """
    if address is not None:
        # The cluster's client is not needed for a home on disk.
        from suite.cli.submit import show_jobs

        return show_jobs(address, sweep=sweep, fmt=fmt)
    from suite.plan.definition import sweeps
    from suite.plan.status import driver
    from suite.plan.status import status as reports
    from suite.record.cells import lost_specs
    from suite.record.folder import Home
    from suite.record.result import MEND_SPEC

    place = Home(home)
    names = sweeps(place)
    if sweep is not None:
        names = [sweep]
    # An empty answer would look like a home in which nothing has begun.
    if not names:
        raise ConfigError(
            f"--home {home}: holds no sweep; expected a folder that `suite run` wrote to"
        )
    lost = lost_specs(place)
    if lost:
        put(
            "\n".join(["warning: these finished trials are not counted below:", *lost, MEND_SPEC]),
            err=True,
        )
    # A table per sweep for a person, one list of rows for a program.
    if fmt.for_people:
        for name in names:
            _show(place, name, fmt, storage)
        return
    rows = []
    for name in names:
        running = driver(place, name, storage)
        rows += _rows(name, reports(place, name), runs=running is not None)
    if fmt is Format.JSON:
        print(json.dumps(rows, indent=2))
    else:
        render.render(rows, [], fmt, keys=KEYS)


def _show(home: Home, name: str, fmt: Format, storage: str | None) -> None:
    from suite.plan.cell_state import CellStatus
    from suite.plan.status import driver, joined
    from suite.plan.status import status as reports

    cells = reports(home, name)
    running = driver(home, name, storage)
    # A line for each contest: its architectures have one name and one budget.
    rows = _rows(name, joined(cells), runs=running is not None)
    done = 0
    total = 0
    over = True
    for row in rows:
        done += row["search_done"] + row["confirm_done"]
        total += row["total"]
        # A cell that gave up is over too, with fewer trials done than its total.
        over = over and CellStatus(row["progress"]).is_over
    state = "not running"
    # A driver may be at work on another machine that shares this home.
    if running is not None:
        state = f"running, {running}"
    elif over:
        state = "done"
    title = f"sweep {name}: {state}, {done} of {total} trials done"
    render.render(rows, _columns(rows), fmt, title=title)
    _show_studies(cells)
    _show_pretrains(rows)
    _show_failures(rows)


def _show_studies(cells: Sequence[CellReport]) -> None:
    """Print a line per cell whose study is not just its budget: extended, ended early, pruned."""
    said: dict[tuple[str | None, str], set[tuple[str, ...]]] = defaultdict(set)
    for cell in cells:
        said[cell.contest, cell.task].add(tuple(cell.notes))
    lines: dict[str, None] = {}
    for cell in cells:
        if not cell.notes:
            continue
        name = cell.method
        # One line is enough where all architectures say the same of a study that they may share.
        # What these count is each one's own.
        own = cell.waits_for or cell.pruned or cell.interrupted or cell.left_out
        if cell.contest is not None and (own or len(said[cell.contest, cell.task]) > 1):
            name += f" {render.settings(cell.architecture)}"
        lines[f"  {name} on {cell.task}: {'; '.join(cell.notes)}"] = None
    if lines:
        put("\nstudies:")
    for line in lines:
        put(line)


def _show_pretrains(rows: list[dict[str, Any]]) -> None:
    """Print a line per pretrain run."""
    seen: set[str] = set()  # cells share their pretrain runs
    for row in rows:
        run = row["pretrain"]
        if run is None or run["checkpoint"] in seen:
            continue
        if not seen:
            put("\npretrain runs:")
        seen.add(run["checkpoint"])
        how_far = f"{run['steps_done']:,} of {run['steps']:,} steps on {run['corpus']}"
        # Before its first evaluation a pretrain run has no loss.
        if run["loss"] is not None:
            how_far += f", loss {render.brief(run['loss'])}"
        name = f"{row['attention']} on {row['backbone']}, {run['checkpoint']}"
        put(f"  {name}: {run['state']}, {how_far}")


def _show_failures(rows: list[dict[str, Any]]) -> None:
    """Print every trial without a score, with its cause and its log."""
    if any(row["failures"] for row in rows):
        put("\nwithout a score:")
    for row in rows:
        for failure in row["failures"]:
            name = f"{row['method']} on {row['task']}, trial {failure['trial']}"
            put(f"  {name}: {failure['status']}")
            put(f"    {failure['type']}: {failure['message']}")
            put(f"    log: {failure['log_path']}")


def _rows(name: str, cells: Sequence[CellReport], *, runs: bool) -> list[dict[str, Any]]:
    rows = [{"sweep": name, **_row(cell)} for cell in cells]
    # Without a driver nothing runs: the next run takes up what was handed out.
    if not runs:
        for row in rows:
            row["left"] += row["running"]
            row["running"] = 0
    return rows


def _row(cell: CellReport) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key in KEYS:
        # These four are not plain attributes of a cell's report.
        if key not in ("sweep", "progress", "failures", "pretrain"):
            row[key] = getattr(cell, key)
    row["progress"] = cell.status.value
    row["failures"] = [asdict(failure) for failure in cell.failures]
    row["pretrain"] = None
    if cell.pretrain is not None:
        row["pretrain"] = asdict(cell.pretrain)
    return row


def _columns(rows: list[dict[str, Any]]) -> list[Column]:
    # Names that are the same in all rows would only take room.
    varying = []
    for axis in (
        column("backbone"),
        Column("attention", render.attention),
        column("workers", show=render.count),
    ):
        if len({axis.show(row) for row in rows}) > 1:
            varying.append(axis)
    return [
        *varying,
        column("method"),
        column("task"),
        column("progress"),
        Column("done", _done, right=True),
        column("best_validation_score", "best score", render.score, rank=1),
        column("running", show=render.count, rank=2),
        column("left", show=render.count, rank=2),
        column("best_learning_rate", "learning rate", render.brief, rank=3),
        Column("failures", _count_failures, right=True),
    ]


def _done(row: Row) -> str:
    return f"{row['search_done'] + row['confirm_done']}/{row['total']}"


def _count_failures(row: Row) -> str:
    if row["failures"]:
        return str(len(row["failures"]))
    return render.MISSING
