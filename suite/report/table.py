"""A table of values with what each column means: the data of a figure, or a CSV file."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from suite.redact import printable, redact

Row = Mapping[str, Any]
R = TypeVar("R", bound=Row)
# What would end a cell or a line's text in Markdown, or begin a tag. The backslash and `&` come
# first: the others put them into the text.
ESCAPES = {
    "\\": "\\\\",
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    "|": "\\|",
    "`": "\\`",
    "[": "\\[",
    "*": "\\*",
    "~": "\\~",
    "$": "\\$",
}
# Within a word an underscore is one; elsewhere it may begin or end emphasis.
BARE_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
# A spreadsheet runs a cell that begins with one of these.
FORMULA_STARTS = ("=", "@", "+", "-", "\t", "\r")


def values_of(rows: Iterable[Row], key: str) -> list[Any]:
    """One column of some rows."""
    return [row[key] for row in rows]


def rows_where(rows: Iterable[R], key: str, value: object) -> list[R]:
    """The rows that have a value in a column."""
    return [row for row in rows if row[key] == value]


def rows_without(rows: Iterable[R], key: str, value: object) -> list[R]:
    """The rows that do not have a value in a column; one that is not known counts as another."""
    return [row for row in rows if row[key] != value]


def rows_with(rows: Iterable[R], key: str) -> list[R]:
    """The rows whose value in a column is known."""
    return [row for row in rows if row[key] is not None]


@functools.lru_cache(maxsize=2**16)
def clean(text: str) -> str:
    """Take secrets out of a text as `redact` does, and remember the answer.

    `redact` looks through the environment each time, and a page asks it ten thousand times, mostly
    for the same words.
    """
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
        """Write the table as CSV: a line of keys, and a line per row.

        A value that is not known is empty, one that is not plain is JSON. There are no secrets.
        """
        out = io.StringIO()
        # The csv module would end its lines with \r\n.
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow([csv_cell(row.get(key)) for key in self.columns])
        return out.getvalue()


def csv_cell(value: Any) -> Any:
    """A value as CSV holds it, which neither a spreadsheet nor a terminal runs."""
    if isinstance(value, (dict, list)):
        value = json.dumps(value)
    if not isinstance(value, str):
        return value
    # First, because a tab or a return in front makes a formula too.
    begins_formula = value.startswith(FORMULA_STARTS)
    shown = printable(clean(value))
    # A quote in front makes it text. Numbers are no strings here, so they keep their sign.
    if begins_formula or shown.startswith(FORMULA_STARTS):
        return f"'{shown}"
    return shown


@dataclass(frozen=True, slots=True)
class Column:
    """A column as a person sees it.

    Attributes:
        head: Its title.
        show: Makes the text of a row's cell.
        value: Gives what a cell is sorted by: a number or a text; None = not known.
        hint: What it means, in a line.
        number: Whether it holds numbers.
        extra: Whether the page's leaderboard shows it only when a reader asks for all columns.
    """

    head: str
    show: Callable[[Row], str]
    value: Callable[[Row], float | str | None]
    hint: str = ""
    number: bool = True
    extra: bool = False


def number(key: str, head: str, show: Callable[[Any], str], hint: str = "") -> Column:
    """A column of one number."""
    return Column(head, lambda row: show(row.get(key)), lambda row: row.get(key), hint)


def words(head: str, show: Callable[[Row], str], hint: str = "") -> Column:
    """A column of text."""
    return Column(head, show, show, hint, number=False)


def plain_words(key: str) -> Column:
    """A column of one text as it stands; its head is the key."""
    return words(key, lambda row: str(row[key]))


def without(columns: Iterable[Column], *heads: str) -> list[Column]:
    """The columns whose titles are none of these."""
    return [column for column in columns if column.head not in heads]


def markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Write the table in Markdown; all texts are escaped."""
    heads = [(column.head, column.number) for column in columns]
    return markdown_of(heads, ([column.show(row) for column in columns] for row in rows))


def markdown_of(heads: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown.

    Args:
        heads: The title of each column, and whether it holds numbers.
        rows: The cells of each row; all texts are escaped.
    """
    # The colon puts numbers to the right.
    rulers = ["--:" if number else "---" for _, number in heads]
    lines = [[escaped(head) for head, _ in heads], rulers]
    for row in rows:
        lines.append([escaped(cell) for cell in row])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """What others wrote, in Markdown: one line, no tags, table borders, escapes or secrets."""
    shown = printable(clean(" ".join(text.split())))
    for character, instead in ESCAPES.items():
        shown = shown.replace(character, instead)
    return BARE_UNDERSCORE.sub(r"\\_", shown)
