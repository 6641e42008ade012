"""A table of text for a terminal: its columns, which of them fit, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suite.redact import printable

Row = Mapping[str, Any]
GAP = 3
"""Places between two columns: a letter takes one, and a Chinese one two."""
LEAST_PROSE = 24
"""Places that a column of sentences needs."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        head: Its title.
        show: Text of a row's cell.
        right: Aligned right, as numbers are.
        rank: Columns of a higher rank go first where a terminal is too narrow; 0 always stays.
        unit: Unit of all its cells, which stands in the head.
        wraps: Whether its cells are sentences, which a narrow terminal shows on several lines.
    """

    head: str
    show: Callable[[Row], str]
    right: bool = False
    rank: int = 0
    unit: str = ""
    wraps: bool = False


def make_table(cells: Sequence[Sequence[str]], columns: Sequence[Column], width: int) -> Any:
    """A rich table without markup, so that names print as they are; `width` in places."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # A rule under the head alone: this reads well in a terminal and in a log.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    widths = []
    least = []
    for at, c in enumerate(columns):
        texts = [line[at] for line in cells]
        widths.append(_width(c, texts))
        # A sentence makes room first: it may stand on as many lines as it has words.
        words = " ".join(texts).split() if c.wraps else texts
        least.append(_width(c, words))
    # Where not even the names fit, they are broken: nothing is cut off.
    fits = _line_width(least) <= width
    for c, needed in zip(columns, widths, strict=True):
        lines = _wrapped(c.head, needed)
        if c.unit:
            lines.append(c.unit)
        table.add_column(
            # A class of somebody's data is the head of a column.
            Text(printable("\n".join(lines))),
            justify="right" if c.right else "left",
            overflow="fold",
            # rich would take room from every column alike, and break words in all of them.
            no_wrap=fits and not c.wraps,
        )
    for line in cells:
        # Names and messages come from others' files too.
        table.add_row(*[Text(printable(cell)) for cell in line])
    return table


def fitting(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit side by side without a broken word.

    Columns of the highest rank are dropped first, and of one rank the later before the earlier.
    """
    widths = {}
    for c in columns:
        # By identity: a column's function has no equality to go by.
        widths[id(c)] = _width(c, [c.show(row) for row in rows])
    droppable = [c for c in columns if c.rank]
    # By place too, because columns are in the order in which people read them.
    droppable.sort(key=lambda c: (c.rank, columns.index(c)), reverse=True)
    shown = list(columns)
    for candidate in droppable:
        if _line_width([widths[id(c)] for c in shown]) <= width:
            break
        shown.remove(candidate)
    return shown


def _width(c: Column, cells: Sequence[str]) -> int:
    """Places that a column needs where no word of its head and no cell is broken."""
    needed = _places(c.unit)
    for word in c.head.split():
        needed = max(needed, _places(word))
    widest = max(map(_places, cells), default=0)
    if c.wraps:
        widest = min(widest, LEAST_PROSE)
    return max(needed, widest, 1)


def _wrapped(head: str, width: int) -> list[str]:
    """The lines of a head, none of whose words is wider than `width`."""
    lines: list[str] = []
    for word in head.split():
        if lines and _places(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _places(text: str) -> int:
    """How many places a terminal needs for a text, as it is printed."""
    # rich takes a while to import, and JSON does not need it.
    from rich.cells import cell_len

    return cell_len(printable(text))


def _line_width(widths: Sequence[int]) -> int:
    # A line begins and ends with a space, and has no gap behind its last column.
    return sum(widths) + GAP * (len(widths) - 1) + 2
