"""Prints the same rows for a person (table), a document (md) or a program (json, csv)."""

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
from suite.redact import printable
from suite.report.table import csv_cell, escaped
from suite.report.values import (
    MISSING,
    attention,
    backbone,
    brief,
    count,
    duration,
    energy,
    learning_rate,
    number,
    score,
    settings,
    size,
    text,
)

__all__ = [
    "MISSING",
    "Column",
    "Row",
    "attention",
    "backbone",
    "brief",
    "column",
    "count",
    "duration",
    "energy",
    "fitting",
    "learning_rate",
    "make_table",
    "number",
    "render",
    "score",
    "settings",
    "size",
    "stdout_for_result",
    "text",
]

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
    """The column of one key of a row; its title is the key where `head` is None."""
    if head is None:
        head = key
    # Everything that is not shown as text is a number.
    is_number = show is not text
    return Column(head, lambda row: show(row.get(key)), right=is_number, rank=rank)


def render(
    rows: Sequence[Row],
    columns: Sequence[Column],
    fmt: Format,
    *,
    keys: Sequence[str] = (),
    title: str = "",
) -> None:
    """Print rows to stdout.

    Args:
        rows: Plain values; `json` and `csv` print all of them, unformatted.
        columns: What `table` and `md` show.
        fmt: The format.
        keys: CSV's columns, needed where there may be no row.
        title: Stands above a table or document.
    """
    # NaN is no JSON: `allow_nan=False` makes it an error here, not in the program that reads.
    if fmt is Format.JSON:
        print(json.dumps([dict(row) for row in rows], indent=2, allow_nan=False))
    elif fmt is Format.CSV:
        _csv(rows, keys, sys.stdout)
    elif fmt is Format.MD:
        _markdown(rows, columns, title)
    else:
        _table(rows, columns, title)


def _csv(rows: Sequence[Row], keys: Sequence[str], out: TextIO) -> None:
    if not keys:
        # Rows may have different keys; a dict keeps the order in which they come.
        found: dict[str, None] = {}
        for row in rows:
            found.update(dict.fromkeys(row))
        keys = list(found)
    # The csv module ends lines as on Windows unless it is told otherwise.
    writer = csv.DictWriter(out, fieldnames=list(keys), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        line = {}
        for key, value in row.items():
            line[key] = csv_cell(value)
        writer.writerow(line)


def _markdown(rows: Sequence[Row], columns: Sequence[Column], title: str) -> None:
    heads = []
    rules = []
    for c in columns:
        heads.append(escaped(c.head))
        rules.append("--:" if c.right else "---")
    lines = [heads, rules]
    for row in rows:
        lines.append([escaped(c.show(row)) for c in columns])
    if title:
        print(title + "\n")
    for line in lines:
        print("| " + " | ".join(line) + " |")


def _table(rows: Sequence[Row], columns: Sequence[Column], title: str) -> None:
    # rich takes a while to import, and JSON does not need it.
    from rich.console import Console

    # A pipe has no width: whoever reads it wants whole lines.
    width = None if sys.stdout.isatty() else 10_000
    console = Console(width=width, highlight=False)
    shown = list(columns)
    if sys.stdout.isatty():
        shown = fitting(rows, columns, console.width)
    cells = []
    for row in rows:
        cells.append([c.show(row) for c in shown])
    with console.capture() as captured:
        console.print(make_table(cells, shown))
    if title:
        print(title + "\n")
    for line in captured.get().splitlines():
        # rich fills lines with spaces, which a diff or a copy would carry along.
        if line.strip():
            print(line.rstrip())
    if len(shown) < len(columns):
        # Said on stderr: nobody should take what fits for all there is.
        hidden = ", ".join(c.head for c in columns if c not in shown)
        print(
            f"(the terminal is too narrow for: {hidden}; --format csv has everything)",
            file=sys.stderr,
        )


def make_table(cells: Sequence[Sequence[str]], columns: Sequence[Column]) -> Any:
    """A rich table without markup, so that names print as they are."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # A rule under the head alone: this reads well in a terminal and in a log.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for c in columns:
        table.add_column(c.head, justify="right" if c.right else "left", overflow="fold")
    for line in cells:
        # Names and messages come from others' files too.
        table.add_row(*[Text(printable(cell)) for cell in line])
    return table


def fitting(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit side by side.

    Columns of the highest rank are dropped first, and of one rank the later before the earlier.
    """
    widths = {}
    for c in columns:
        # By identity: a column's function has no equality to go by.
        texts = [c.head] + [c.show(row) for row in rows]
        widths[id(c)] = 2 + max(len(text) for text in texts)  # 2: the gap between columns
    droppable = [c for c in columns if c.rank]
    # By place too, because columns are in the order in which people read them.
    droppable.sort(key=lambda c: (c.rank, columns.index(c)), reverse=True)
    shown = list(columns)
    for candidate in droppable:
        if sum(widths[id(c)] for c in shown) <= width:
            break
        shown.remove(candidate)
    return shown


@contextmanager
def stdout_for_result() -> Iterator[None]:
    """Send what libraries and child processes print meanwhile to stderr: stdout is the result's."""
    # The file descriptor, not sys.stdout: child processes and C code write there too.
    sys.stdout.flush()
    # 1 and 2 are the process's stdout and stderr.
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
