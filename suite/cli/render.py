"""Print rows for a person (table), a document (md) or a program (json, csv); the rows are the same for all."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from suite.cli.options import Format
from suite.report.values import (
    MISSING,
    attention,
    backbone,
    brief,
    count,
    duration,
    energy,
    score,
    settings,
    size,
    text,
)

__all__ = [
    "MISSING",
    "attention",
    "backbone",
    "brief",
    "count",
    "duration",
    "energy",
    "score",
    "settings",
    "size",
    "text",
]
__all__ += ["Column", "Row", "column", "fitting", "make_table", "render", "stdout_for_result"]

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        head: Its title.
        show: Text of a row's cell.
        right: Aligned right, as numbers are.
        rank: Columns of a higher rank go first where a terminal is too narrow; 0 always stays.
    """

    head: str
    show: Callable[[Row], str]
    right: bool = False
    rank: int = 0


def column(
    key: str, head: str | None = None, show: Callable[[Any], str] = text, *, rank: int = 0
) -> Column:
    """The column of one key."""
    return Column(
        key if head is None else head,
        lambda row: show(row.get(key)),
        right=show is not text,
        rank=rank,
    )


def render(
    rows: Sequence[Row],
    columns: Sequence[Column],
    fmt: Format,
    *,
    keys: Sequence[str] = (),
    title: str = "",
) -> None:
    """Print to stdout.

    Args:
        rows: Plain values; `json` and `csv` print all of them, unformatted.
        columns: What `table` and `md` show.
        fmt: How.
        keys: CSV's columns where there may be no row.
        title: Above a table or document.
    """
    if fmt is Format.JSON:
        print(json.dumps([dict(row) for row in rows], indent=2, allow_nan=False))
    elif fmt is Format.CSV:
        _csv(rows, keys or list(dict.fromkeys(key for row in rows for key in row)), sys.stdout)
    elif fmt is Format.MD:
        _markdown(rows, columns, title)
    else:
        _table(rows, columns, title)


def _csv(rows: Sequence[Row], keys: Sequence[str], out: TextIO) -> None:
    writer = csv.DictWriter(out, fieldnames=list(keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {k: json.dumps(v) if isinstance(v, (dict, list)) else v for k, v in row.items()}
        for row in rows
    )


def _markdown(rows: Sequence[Row], columns: Sequence[Column], title: str) -> None:
    lines = [[c.head for c in columns], [("--:" if c.right else "---") for c in columns]]
    lines += [[c.show(row).replace("|", "\\|") for c in columns] for row in rows]
    print(
        "\n".join(
            [*([title, ""] if title else []), *("| " + " | ".join(line) + " |" for line in lines)]
        )
    )


def _table(rows: Sequence[Row], columns: Sequence[Column], title: str) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
    shown = fitting(rows, columns, console.width) if sys.stdout.isatty() else list(columns)
    with console.capture() as captured:
        console.print(make_table([[c.show(row) for c in shown] for row in rows], shown))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    print("\n".join([*([title, ""] if title else []), *(line for line in lines if line)]))
    if len(shown) < len(columns):
        hidden = ", ".join(c.head for c in columns if c not in shown)
        print(
            f"(not shown, for want of width: {hidden}; --format csv has everything)",
            file=sys.stderr,
        )


def make_table(cells: Sequence[Sequence[str]], columns: Sequence[Column]) -> Any:
    """A rich table without markup, so that names print as they are."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for c in columns:
        table.add_column(c.head, justify="right" if c.right else "left", overflow="fold")
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    return table


def fitting(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit side by side; those of the highest rank are dropped first, the later before the earlier."""
    widths = {id(c): 2 + max([len(c.head), *(len(c.show(row)) for row in rows)]) for c in columns}
    shown = list(columns)
    for candidate in sorted(
        (c for c in columns if c.rank), key=lambda c: (c.rank, columns.index(c)), reverse=True
    ):
        if sum(widths[id(c)] for c in shown) <= width:
            break
        shown.remove(candidate)
    return shown


@contextmanager
def stdout_for_result() -> Iterator[None]:
    """Send everything that libraries and child processes print meanwhile to stderr, so that stdout holds the result alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
