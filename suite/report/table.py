"""A table of values with what each column means: what stands behind a figure, and what a CSV file holds."""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suite.redact import redact

Row = Mapping[str, Any]


@functools.lru_cache(maxsize=2**16)
def clean(text: str) -> str:
    """`redact`, which looks through the environment each time: a page asks it ten thousand times, mostly for the same words."""
    return redact(text)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows, and their columns in order.

    Attributes:
        key: Name of its file.
        title: What it is, in a line.
        columns: By key, the meaning with its unit.
        rows: Plain values; None = not known.
    """

    key: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Row]

    def csv(self) -> str:
        """One line of keys, then one per row; empty where a value is not known, JSON where it is not plain, no secrets."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_plain(row.get(key)) for key in self.columns] for row in self.rows)
        return out.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        value = json.dumps(value)
    if not isinstance(value, str):
        return value
    shown = clean(value)
    return (
        f"'{shown}" if shown[:1] in ("=", "@", "+", "-", "\t", "\r") else shown
    )  # a spreadsheet would run it


@dataclass(frozen=True, slots=True)
class Column:
    """A column as a person sees it.

    Attributes:
        head: Its title.
        show: Text of a row's cell.
        value: What it is sorted by, None = not known; a text is sorted as such.
        hint: What it means, in a line.
    """

    head: str
    show: Callable[[Row], str]
    value: Callable[[Row], float | str | None]
    hint: str = ""
    number: bool = True


def number(key: str, head: str, show: Callable[[Any], str], hint: str = "") -> Column:
    """The column of one number."""
    return Column(head, lambda row: show(row.get(key)), lambda row: row.get(key), hint)


def words(head: str, show: Callable[[Row], str], hint: str = "") -> Column:
    """A column of text."""
    return Column(head, show, show, hint, number=False)


def markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The table in Markdown; what would end a cell or become a tag is escaped."""
    lines = [[escaped(c.head) for c in columns], [("--:" if c.number else "---") for c in columns]]
    lines += [[escaped(c.show(row)) for c in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """A text of others' in Markdown: one line, no tags, no table borders, no secrets."""
    shown = clean(" ".join(text.split()))
    for character, instead in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "\\|"),
        ("`", "\\`"),
        ("[", "\\["),
        ("*", "\\*"),
    ):
        shown = shown.replace(character, instead)
    return shown
