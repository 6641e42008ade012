"""What a figure shows, apart from what draws it: axes, marks and the table of its numbers.

`suite.report.interactive` draws a chart for the screen and `suite.report.static` for paper, so both
show the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from suite.report.table import Table

# The numbers of colours, shapes and dashes have no common divisor: 315 arms look different from
# each other, also without colour.
#
# Okabe and Ito's colours, which colour-blind readers tell apart, without black and yellow: black
# vanishes on a dark page, yellow on a light one.
# Source: https://jfly.uni-koeln.de/color/ (Color Universal Design).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
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
# Bars have no marker and no line: a hatch tells them apart without colour.
HATCHES = ("", "/", ".", "x", "-", "\\")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Attributes:
        title: Its title, with the unit.
        log: Whether an x axis is logarithmic; then all values are above 0.
        categories: Names instead of numbers, in order; the first is at the top of a y axis.
        whole: Whether the ticks of an x axis are at whole numbers only.
        limits: The range that is shown, so that figures can be compared with each other.
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
        style: Place in the palette; None = neutral grey.
        low, high: Ends of the error bars; None where a point has none.
        along: The axis along which error bars lie.
        labels: Written beside the points.
        details: Shown when a reader points at a point.
        hollow: Whether the points are drawn as outlines.
        ring: Whether the points are large and empty, to lie around other points.
        shape: A shape that replaces the style's.
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

    @property
    def marker_shape(self) -> str:
        """The marker's shape: `shape` where it is given, or else one of `SHAPES`."""
        if self.shape:
            return self.shape
        if self.ring:
            return "circle"
        return SHAPES[(self.style or 0) % len(SHAPES)]

    @property
    def dash(self) -> str:
        """The line's dash, one of `DASHES`."""
        if self.style is None:
            return "dot"
        return DASHES[self.style % len(DASHES)]

    def colour(self, grey: str) -> str:
        """The style's colour; `grey` where there is no style."""
        if self.style is None:
            return grey
        return colour_of(self.style)


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars, stacked in the order of the marks."""

    name: str
    x: Sequence[float]
    y: Sequence[str]
    style: int


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
        title: Its title, in a few words.
        text: What it shows and what to see in it, also for readers who cannot see it.
        table: The numbers behind it.
        height: Pixels on a page.
        legend: Whether the names of the marks are listed.
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


def colour_of(style: int) -> str:
    """The colour of a place in the palette."""
    return COLOURS[style % len(COLOURS)]


def hatch_of(style: int) -> str:
    """The hatch of a place in the palette."""
    return HATCHES[style % len(HATCHES)]
