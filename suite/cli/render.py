"""Prints the same rows for a person (table), a document (md) or a program (json, csv)."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from suite.cli.options import Format
from suite.redact import printable
from suite.report.table import csv_cell, escaped, markdown_of
from suite.report.text_table import Column, Row, fitting, make_table
from suite.report.values import (
    MISSING,
    attention,
    brief,
    count,
    duration,
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
    "brief",
    "column",
    "count",
    "duration",
    "number",
    "put",
    "render",
    "say",
    "score",
    "settings",
    "size",
    "stdout_for_result",
]


def column(
    key: str,
    head: str | None = None,
    show: Callable[[Any], str] = text,
    *,
    rank: int = 0,
    unit: str = "",
    wraps: bool = False,
) -> Column:
    """The column of one key of a row; its title is the key where `head` is None."""
    if head is None:
        head = key
    # Everything that is not shown as text is a number.
    is_number = show is not text
    return Column(head, lambda row: show(row.get(key)), is_number, rank, unit, wraps)


def render(
    rows: Sequence[Row],
    columns: Sequence[Column],
    fmt: Format,
    *,
    keys: Sequence[str] = (),
    title: str = "",
    wide: bool | None = None,
    key: Sequence[tuple[str, str]] = (),
) -> None:
    """Print rows to stdout.

    Args:
        rows: Plain values; `json` and `csv` print all of them, unformatted.
        columns: What `table` and `md` show.
        fmt: The format.
        keys: CSV's columns, needed where there may be no row.
        title: Stands above a table or document.
        wide: Show every column, however narrow the terminal is; None = the command cannot be asked.
        key: What marks mean, below a table or document: the column's head and a sentence each.
    """
    # NaN is no JSON: `allow_nan=False` makes it an error here, not in the program that reads.
    if fmt is Format.JSON:
        print(json.dumps([dict(row) for row in rows], indent=2, allow_nan=False))
    elif fmt is Format.CSV:
        _csv(rows, keys, sys.stdout)
    elif fmt is Format.MD:
        _markdown(rows, columns, title)
        _explain(columns, key)
    else:
        _table(rows, columns, title, wide=wide, key=key)


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
    heads = [(f"{c.head} ({c.unit})" if c.unit else c.head, c.right) for c in columns]
    if title:
        # Sweeps and arms are named there, as in the cells.
        for part in title.splitlines():
            put(escaped(part))
        put()
    print(markdown_of(heads, ([c.show(row) for c in columns] for row in rows)))


def _explain(shown: Sequence[Column], key: Sequence[tuple[str, str]]) -> None:
    """Print the sentences of a key whose columns are there."""
    heads = {c.head for c in shown}
    said = [sentence for head, sentence in key if head in heads]
    if said:
        print()
    for sentence in said:
        say(sentence)


def _table(
    rows: Sequence[Row],
    columns: Sequence[Column],
    title: str,
    *,
    wide: bool | None,
    key: Sequence[tuple[str, str]],
) -> None:
    # rich takes a while to import, and JSON does not need it.
    from rich.console import Console

    room = terminal_width()
    shown = list(columns)
    if room is not None and not wide:
        shown = fitting(rows, columns, room)
    cells = []
    for row in rows:
        cells.append([c.show(row) for c in shown])
    # A pipe has no width: whoever reads it wants whole lines.
    width = room
    if room is None or wide:
        width = 10_000
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(make_table(cells, shown, console.width))
    if title:
        say(title)
        print()
    for line in captured.get().splitlines():
        # rich fills lines with spaces, which a diff or a copy would carry along.
        if line.strip():
            print(line.rstrip())
    _explain(shown, key)
    hidden = [c for c in columns if c not in shown]
    if hidden:
        # Said on stderr: nobody should take what fits for all there is.
        heads = ", ".join(c.head for c in hidden)
        remedy = "--format csv has everything" if wide is None else "--wide shows them"
        say(f"(no room here for: {heads}; {remedy})", err=True)


def terminal_width() -> int | None:
    """Columns of the terminal; None for a pipe, unless `COLUMNS` asks for a width."""
    asked = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty() or (asked.isdecimal() and int(asked) > 0):
        # Takes `COLUMNS` where it is above 0, or else the terminal's own width.
        return shutil.get_terminal_size().columns
    return None


def put(text: object = "", *, err: bool = False) -> None:
    """Print what people read: a terminal obeys nothing in it, whoever wrote the names there."""
    print(printable(str(text)), file=sys.stderr if err else sys.stdout)


def say(line: str, *, err: bool = False) -> None:
    """Print a sentence; on a terminal it is broken between words."""
    width = terminal_width()
    if width is not None:
        # Names have hyphens, and a name that is broken cannot be copied.
        lines = []
        for part in printable(line).splitlines():
            lines += textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False)
        line = "\n".join(lines)
    put(line, err=err)


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
