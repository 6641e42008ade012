"""`suite curves`: every learning rate that was tried, what it gave, and which was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli import render
from suite.cli.options import (
    Format,
    FormatOption,
    HomeOption,
    OnlySweepOption,
    TrackingOption,
    home_to_read,
)
from suite.cli.render import Column, column
from suite.config.names import DEFAULT_HOME
from suite.errors import ConfigError, UnknownNameError
from suite.leaderboard import curves as curves_of
from suite.leaderboard.select import short_names

if TYPE_CHECKING:
    from suite.leaderboard.fields import Row


def curves(
    cell: Annotated[
        str | None,
        typer.Argument(
            metavar="CELL",
            help="ARM or ARM/TASK; an arm is METHOD, ATTENTION, ATTENTION/METHOD, "
            "BACKBONE/ATTENTION/METHOD, or a key.",
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    tracking_uri: TrackingOption = None,
    sweep: OnlySweepOption = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the curves too.")
    ] = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Show every learning rate that a cell's search tried, with its validation score."""
    # MLflow takes seconds to import, and `--help` must not wait for it.
    from suite.record.folder import Home
    from suite.tracking.rows import readable_rows, runs_with_rows
    from suite.tracking.store import open_store, resolve_uri

    # Checked before the store is read: that may take a while.
    if figure is not None and figure.suffix != ".png":
        raise ConfigError(f"--figure {figure}: expected a name that ends in .png")
    uri = resolve_uri(Home(home_to_read(home, tracking_uri)), tracking_uri)
    store = open_store(uri, create=False)
    cells = chosen(readable_rows(store, runs_with_rows(store, sweep)), cell)
    rows = []
    for one in cells:
        rows += points(one)
    render.render(rows, columns(cells), fmt)
    if figure is not None:
        from suite.report import static
        from suite.report.curves import of_cells

        static.save(static.draw(of_cells(cells)), figure)


def chosen(cells: Sequence[Row], given: str | None) -> list[Row]:
    """The cells that a name means; all cells if there is no name.

    Raises:
        UnknownNameError: No cell has this name.
    """
    found = []
    known: set[str] = set()
    for cell in cells:
        known |= names(cell)
        if given is None or _is_called(cell, given):
            found.append(cell)
    if not found:
        raise UnknownNameError("cell", str(given), known, where="CELL")
    return found


def _is_called(cell: Row, given: str) -> bool:
    # The start of a key is enough; an empty text is the start of every key and means none.
    is_start = given != "" and cell.cell_key.startswith(given)
    return is_start or given in names(cell)


def names(cell: Row) -> set[str]:
    """What a person may call a cell, or the arm that it belongs to."""
    found = set()
    for arm in (*short_names(cell.backbone, cell.attention, cell.method), cell.arm):
        found.add(arm)
        found.add(f"{arm}/{cell.task}")
    return found


def points(cell: Row) -> list[dict[str, Any]]:
    """One row per ended search trial and for the confirmed rate, by learning rate."""
    rows = []
    for point in sorted(curves_of.points(cell), key=lambda point: float(point["learning_rate"])):
        rows.append(
            {
                "sweep": cell.sweep,
                "home": cell.home,
                "backbone": cell.backbone,
                "attention": cell.attention,
                "attention_options": cell.attention_options,
                "method": cell.method,
                "architecture": cell.architecture,
                "task": cell.task,
                **point,
                "learning_rate_low": cell.learning_rate_low,
                "learning_rate_high": cell.learning_rate_high,
                "edge": cell.edge,
                "lr_sensitivity_decades": cell.lr_sensitivity_decades,
            }
        )
    return rows


def columns(cells: Sequence[Row]) -> list[Column]:
    """Columns of the table; a sweep, home or backbone that all cells share is left out."""
    varying = []
    # Imported results may hold the same sweep of two homes.
    for key in ("sweep", "home", "backbone"):
        if _varies(cells, key):
            varying.append(column(key, rank=1))
    sizes = []
    # A sweep may search the batch size too.
    if len({size for cell in cells for *_, size in cell.curve}) > 1:
        sizes.append(column("batch_size", "batch", rank=2))
    return [
        *varying,
        Column("attention", render.attention, rank=_rank(cells, "attention")),
        column("method"),
        column("architecture", show=render.settings, rank=5),
        column("task", rank=_rank(cells, "task")),
        column("learning_rate", "learning rate", render.brief),
        *sizes,
        column("validation_score", "validation", render.score),
        column("status", rank=3),
        Column("choice", _mark, rank=2),
    ]


def _varies(cells: Sequence[Row], key: str) -> bool:
    return len({getattr(cell, key) for cell in cells}) > 1


def _rank(cells: Sequence[Row], key: str) -> int:
    """How soon a narrow terminal drops a name: early where it tells no rows apart."""
    return 1 if _varies(cells, key) else 4


def _mark(row: render.Row) -> str:
    if not row["chosen"]:
        return ""
    # The best rate lies at the end of its range: a better one may lie beyond.
    if row["edge"]:
        return "chosen (edge)"
    return "chosen"
