"""What a figure shows, apart from what draws it: axes, marks and the table of its numbers.

`suite.report.interactive` draws a chart for the screen and `suite.report.static` for paper, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from suite.report.table import Table

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
"""Okabe and Ito's colours, which colour-blind readers tell apart, but black and yellow: one of them vanishes on dark, one on light
ground. Source: https://jfly.uni-koeln.de/color/ (Color Universal Design)."""
SHAPES = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "cross",
    "pentagon",
    "star",
    "hexagon",
)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
HATCHES = ("", "/", ".", "x", "-", "\\")
"""Colours, shapes and dashes have lengths without a common divisor: 315 arms look different from each other, also without colour."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Attributes:
        title: With its unit.
        log: Logarithmic; all values are above 0.
        categories: Names instead of numbers, in order; the first at the top of a y axis.
        whole: Ticks at whole numbers only.
        limits: What is shown at least, where figures are to be compared with each other.
    """

    title: str
    log: bool = False
    categories: tuple[str, ...] = ()
    whole: bool = False
    limits: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Points:
    """Points, joined by a line where `line` is set.

    Attributes:
        style: Its place in the palette; None = neutral grey.
        low: Lower ends of error bars, None where a point has none; `high` likewise.
        along: The axis along which error bars lie.
        labels: Written beside the points.
        details: Shown when a point is pointed at.
        ring: Large and empty, around other points.
        shape: Instead of the style's.
    """

    name: str
    x: Sequence[float | str]
    y: Sequence[float | str]
    style: int | None = None
    line: bool = False
    marker: bool = True
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    along: Literal["x", "y"] = "y"
    labels: Sequence[str] = ()
    details: Sequence[str] = ()
    hollow: bool = False
    ring: bool = False
    shape: str | None = None
    legend: bool = True


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars, stacked in the order of the marks."""

    name: str
    x: Sequence[float]
    y: Sequence[str]
    style: int
    details: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Heat:
    """A matrix: rows by y, columns by x.

    Attributes:
        shade: 0 (light) to 1 (dark); None = empty.
        texts: Written into the fields.
    """

    x: Sequence[str]
    y: Sequence[str]
    shade: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Span:
    """A shaded range of x."""

    low: float
    high: float


Mark: TypeAlias = Points | Bars | Heat | Span


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure.

    Attributes:
        key: Name of its files, and its id on a page.
        title: In a few words.
        text: What it shows and what is to be seen in it, for those who do not see it and for all others.
        table: The numbers behind it.
        height: Pixels on a page.
        legend: Whether the marks' names are listed.
    """

    key: str
    title: str
    text: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    table: Table
    height: int = 340
    legend: bool = True
