"""`suite status`: where the sweeps of a home stand."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli import complete, render
from suite.cli.options import DEFAULT_HOME, Format, FormatOption, HomeOption
from suite.cli.render import Column, Row, column
from suite.errors import ConfigError

if TYPE_CHECKING:
    from suite.plan.status import CellReport, TrialFailure
    from suite.record.folder import Home

KEYS = (
    *(
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
    ),
    *("left", "total", "best_validation_score", "best_learning_rate", "failures", "pretrain"),
    *("pruned", "extensions", "saved_trials", "edge", "waits_for", "own_code", "workers"),
    *("chosen", "study"),
)


def status(
    home: HomeOption = DEFAULT_HOME,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=complete.sweeps_of_home, help="Only this sweep."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Jobs of a Ray cluster instead: http://HEAD:8265."),
    ] = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Per cell: trials done, running and left; failures with their cause and log. With --address: the sweeps on a cluster."""
    if address is not None:
        from suite.cli.submit import show_jobs

        return show_jobs(address, sweep=sweep, fmt=fmt)
    from suite.plan.definition import sweeps
    from suite.record.folder import Home

    place = Home(home)
    if sweep is not None:
        names = [sweep]
    else:
        names = sweeps(place)
    if not names:
        raise ConfigError(
            f"--home {home}: holds no sweep; expected a folder that `suite run` wrote to"
        )
    if fmt is Format.JSON:
        print(json.dumps([row for name in names for row in _rows(place, name)], indent=2))
    elif fmt is Format.CSV:
        render.render([row for name in names for row in _rows(place, name)], [], fmt, keys=KEYS)
    else:
        for name in names:
            _show(place, name, fmt)


def _show(home: Home, name: str, fmt: Format) -> None:
    from suite.plan.cell_state import CellStatus
    from suite.plan.status import driver

    rows = _rows(home, name)
    done = sum(r["search_done"] + r["confirm_done"] for r in rows)
    total = sum(r["total"] for r in rows)
    over = all(CellStatus(row["progress"]).is_over for row in rows)
    running = driver(home, name)
    state = "not running"
    if running is not None:
        state = f"running, {running}"
    elif over:
        state = "done"
    render.render(
        rows, _columns(rows), fmt, title=f"sweep {name}: {state}, {done} of {total} trials done"
    )
    _show_studies(rows)
    _show_pretrains(rows)
    failures = [(row, failure) for row in rows for failure in row["failures"]]
    if failures:
        print("\nwithout a score:")
        for row, failure in failures:
            print(
                f"  {row['method']} on {row['task']}, trial {failure['trial']}: {failure['status']}"
            )
            print(f"    {failure['type']}: {failure['message']}")
            print(f"    log: {failure['log_path']}")


def _show_studies(rows: list[dict[str, Any]]) -> None:
    """One line per cell whose study is more than its budget: extended, ended early, pruned, at the edge, in an open contest."""
    noted = [(row, row["notes"]) for row in rows if row["notes"]]
    if noted:
        print("\nstudies:")
    for row, notes in noted:
        if row["waits_for"]:
            architecture = f" {render.settings(row['architecture'])}"
        else:
            architecture = ""
        print(f"  {row['method']}{architecture} on {row['task']}: {'; '.join(notes)}")


def _show_pretrains(rows: list[dict[str, Any]]) -> None:
    """One line per pretrain run."""
    runs = {
        row["pretrain"]["checkpoint"]: (row, row["pretrain"])
        for row in rows
        if row["pretrain"] is not None
    }
    if runs:
        print("\npretrain runs:")
    for row, run in runs.values():
        if run["loss"] is not None:
            loss = f", loss {render.brief(run['loss'])}"
        else:
            loss = ""
        steps = f"{run['steps_done']:,} of {run['steps']:,} steps on {run['corpus']}"
        print(
            f"  {row['attention']} on {row['backbone']}, {run['checkpoint']}: {run['state']}, {steps}{loss}"
        )


def _rows(home: Home, name: str) -> list[dict[str, Any]]:
    from suite.plan.status import status

    return [{"sweep": name, **_row(cell)} for cell in status(home, name)]


def _row(cell: CellReport) -> dict[str, Any]:
    plain = {
        key: getattr(cell, key)
        for key in KEYS
        if key not in ("sweep", "progress", "failures", "pretrain")
    }
    if cell.pretrain is None:
        pretrain = None
    else:
        pretrain = asdict(cell.pretrain)
    return {
        **plain,
        "progress": cell.status.value,
        "failures": [_failure(f) for f in cell.failures],
        "pretrain": pretrain,
        "notes": cell.notes,
    }


def _failure(failure: TrialFailure) -> dict[str, str]:
    return {
        key: getattr(failure, key) for key in ("trial", "status", "type", "message", "log_path")
    }


def _columns(rows: list[dict[str, Any]]) -> list[Column]:
    axes = [
        column("backbone"),
        Column("attention", render.attention),
        column("workers", show=render.count),
    ]
    varying = [axis for axis in axes if len({axis.show(row) for row in rows}) > 1]
    return [
        *varying,
        column("method"),
        column("task"),
        column("progress"),
        Column(
            "done",
            lambda row: f"{row['search_done'] + row['confirm_done']}/{row['total']}",
            right=True,
        ),
        column("running", show=render.count),
        column("left", show=render.count),
        column("best_validation_score", "best validation", render.score),
        column("best_learning_rate", "learning rate", render.brief, rank=1),
        Column("failures", _count_failures, right=True),
    ]


def _count_failures(row: Row) -> str:
    if row["failures"]:
        return str(len(row["failures"]))
    return render.MISSING
