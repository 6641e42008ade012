"""`suite curves`: every learning rate that was tried, what it gave, and which was chosen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli import complete, render
from suite.cli.options import (
    DEFAULT_HOME,
    Format,
    FormatOption,
    HomeOption,
    TrackingOption,
    existing_home,
)
from suite.cli.render import Column, column
from suite.cli.select import short_names
from suite.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from suite.leaderboard.fields import Row


def curves(
    cell: Annotated[
        str | None,
        typer.Argument(
            metavar="[CELL]",
            help="ARM or ARM/TASK: METHOD, ATTENTION, ATTENTION/METHOD, BACKBONE/ATTENTION/METHOD, or a key.",
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    tracking_uri: TrackingOption = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=complete.sweeps_of_home, help="Only this sweep."
        ),
    ] = None,
    figure: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw them.")] = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """The learning-rate curve of every cell: validation score by learning rate, as far as it was searched."""
    from suite.record.folder import Home
    from suite.tracking.rows import read_rows
    from suite.tracking.store import open_store, resolve_uri

    if figure is not None and figure.suffix != ".png":
        raise ConfigError(f"--figure {figure}: expected a name that ends in .png")
    elsewhere = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    uri = resolve_uri(Home(home if elsewhere else existing_home(home)), tracking_uri)
    cells = chosen(read_rows(open_store(uri, create=False), sweep), cell)
    render.render([point for c in cells for point in points(c)], columns(cells), fmt)
    if figure is not None:
        from suite.report import static
        from suite.report.curves import of_cells

        static.save(static.draw(of_cells(cells)), figure)


def chosen(cells: Sequence[Row], given: str | None) -> list[Row]:
    """The cells that a name means; all without one.

    Raises:
        UnknownNameError: None.
    """
    found = [
        c
        for c in cells
        if given is None or given in names(c) or (given and f"{c.arm}/{c.task}".startswith(given))
    ]
    if not found:
        raise UnknownNameError(
            "cell", str(given), {name for c in cells for name in names(c)}, where="CELL"
        )
    return found


def names(cell: Row) -> set[str]:
    """What a person may call a cell, or the arm that it is of."""
    arms = (*short_names(cell.backbone, cell.attention, cell.method), cell.arm)
    return {name for arm in arms for name in (arm, f"{arm}/{cell.task}")}


def points(cell: Row) -> list[dict[str, Any]]:
    """One row per ended search trial, by learning rate."""
    common = {
        key: getattr(cell, key)
        for key in (
            "sweep",
            "backbone",
            "attention",
            "attention_options",
            "method",
            "architecture",
            "task",
        )
    }
    study = {
        key: getattr(cell, key)
        for key in ("learning_rate_low", "learning_rate_high", "edge", "lr_sensitivity_decades")
    }
    rows = [
        {
            **common,
            "learning_rate": rate,
            "validation_score": score,
            "status": status,
            "chosen": rate == cell.learning_rate,
            **study,
        }
        for rate, score, status in cell.curve
    ]
    return sorted(rows, key=lambda row: float(row["learning_rate"]))


def columns(cells: Sequence[Row]) -> list[Column]:
    """What is the same everywhere is left out."""
    varying = [key for key in ("sweep", "backbone") if len({getattr(c, key) for c in cells}) > 1]
    return [
        *(column(key) for key in varying),
        Column("attention", render.attention),
        column("method"),
        column("architecture", show=render.settings, rank=1),
        column("task"),
        column("learning_rate", "learning rate", render.brief),
        column("validation_score", "validation", render.score),
        column("status"),
        Column("", _mark),
    ]


def _mark(row: render.Row) -> str:
    if not row["chosen"]:
        return ""
    if row["edge"]:
        return "chosen (edge)"
    return "chosen"
