"""Charts drawn by matplotlib: for files and printed pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from suite.files import replacing
from suite.report.chart import (
    COLOURS,
    DASHES,
    HATCHES,
    SHAPES,
    Axis,
    Bars,
    Chart,
    Heat,
    Points,
    Span,
)
from suite.report.table import clean

DPI = 120
GREY = "0.55"
MARKERS = dict(zip((*SHAPES, "x"), ("o", "s", "D", "^", "v", "P", "p", "*", "h", "x"), strict=True))
LINES = dict(zip(DASHES, ("-", "--", ":", "-.", (0, (8, 3))), strict=True))
MAP = "Blues"


def draw(charts: Sequence[Chart], columns: int = 4) -> Figure:
    """One figure with a panel per chart, each under its title."""
    width = min(len(charts), columns)
    height = -(-len(charts) // width)
    many = len(charts) > 2
    size = (
        (3.2 * width + 0.4, 2.6 * height + 0.3)
        if many
        else (7.2 * width, max(c.height for c in charts) / 88 + 0.4)
    )
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(height, width, squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place < len(charts):
            _panel(axis, charts[place], small=many)
        else:
            axis.set_axis_off()
    return figure


def save(figure: Figure, path: Path) -> None:
    """As PNG; a reader sees the old file or the new one."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=DPI, format="png")


def plain(text: str) -> str:
    """A text of others' that matplotlib takes as it is: between two `$` it would read a formula, and fail at one that is none."""
    return clean(text).replace("$", r"\$")


def _panel(axes: Axes, chart: Chart, *, small: bool) -> None:
    axes.set_title(plain(chart.title), fontsize="small" if small else "medium")
    for mark in chart.marks:
        _draw(mark, axes, chart)
    _scale(axes, chart.x, "x")
    _scale(axes, chart.y, "y")
    axes.tick_params(labelsize="x-small" if small else "small")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if chart.legend:
        axes.legend(
            frameon=False,
            fontsize="x-small",
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=4,
        )


def _scale(axes: Axes, axis: Axis, which: str) -> None:
    title, scale, ticks = (
        (axes.set_xlabel, axes.set_xscale, axes.xaxis)
        if which == "x"
        else (axes.set_ylabel, axes.set_yscale, axes.yaxis)
    )
    title(plain(axis.title), fontsize="small")
    if axis.log:
        scale("log")
    if axis.whole:
        ticks.set_major_locator(MaxNLocator(integer=True))
    if axis.limits is not None:
        (axes.set_xlim if which == "x" else axes.set_ylim)(*axis.limits)
    if axis.categories:
        (axes.set_xticks if which == "x" else axes.set_yticks)(
            range(len(axis.categories)), [plain(name) for name in axis.categories]
        )
        if which == "y":
            axes.set_ylim(len(axis.categories) - 0.5, -0.5)
        else:
            axes.xaxis.tick_top()


def _placed(items: Sequence[float | str], axis: Axis) -> list[float]:
    """Numbers as they are, names by their place."""
    places = {name: float(n) for n, name in enumerate(axis.categories)}
    return [places[item] if isinstance(item, str) else item for item in items]


@singledispatch
def _draw(mark: Any, axes: Axes, chart: Chart) -> None:
    raise TypeError(f"no such mark: {type(mark)}")


@_draw.register
def _points(mark: Points, axes: Axes, chart: Chart) -> None:
    x, y, style = _placed(mark.x, chart.x), _placed(mark.y, chart.y), mark.style
    colour = GREY if style is None else COLOURS[style % len(COLOURS)]
    drawn: dict[str, Any] = {
        "color": colour,
        "label": plain(mark.name) if mark.legend else None,
        "linewidth": 1.2,
        "zorder": 3,
    }
    drawn["linestyle"] = (
        "none" if not mark.line else LINES["dot" if style is None else DASHES[style % len(DASHES)]]
    )
    if mark.marker:
        shape = mark.shape or ("circle" if mark.ring else SHAPES[(style or 0) % len(SHAPES)])
        drawn |= {"marker": MARKERS[shape], "markersize": 9 if mark.ring else 4 if mark.line else 7}
        drawn |= {"markerfacecolor": "none"} if mark.ring or mark.hollow else {}
    axes.plot(x, y, **drawn)
    _error_bars(mark, x, y, axes, colour)
    above = cycle((6, -12))
    for at, label in enumerate(mark.labels):
        higher = next(above) if len(mark.labels) > 1 else (6 if (style or 0) % 2 == 0 else -12)
        axes.annotate(
            plain(label),
            (x[at], y[at]),
            xytext=(0, higher),
            textcoords="offset points",
            ha="center",
            fontsize="x-small",
            zorder=4,
        )


def _error_bars(
    mark: Points, x: Sequence[float], y: Sequence[float], axes: Axes, colour: str
) -> None:
    centre = y if mark.along == "y" else x
    known = [n for n, end in enumerate(mark.low) if end is not None and mark.high[n] is not None]
    if not known:
        return
    ends = [
        [max(centre[n] - float(mark.low[n] or 0.0), 0.0) for n in known],
        [max(float(mark.high[n] or 0.0) - centre[n], 0.0) for n in known],
    ]
    bars: dict[str, Any] = {f"{mark.along}err": ends}
    axes.errorbar(
        [x[n] for n in known],
        [y[n] for n in known],
        fmt="none",
        ecolor=colour,
        elinewidth=0.8,
        capsize=2,
        alpha=0.7,
        **bars,
    )


@_draw.register
def _bars(mark: Bars, axes: Axes, chart: Chart) -> None:
    """On top of the bars before it."""
    before = [0.0] * len(mark.x)
    for other in chart.marks:
        if other is mark:
            break
        if isinstance(other, Bars):
            before = [a + b for a, b in zip(before, other.x, strict=True)]
    colour, hatch = COLOURS[mark.style % len(COLOURS)], HATCHES[mark.style % len(HATCHES)] * 3
    places = _placed(mark.y, chart.y)
    axes.barh(
        places,
        list(mark.x),
        left=before,
        height=0.62,
        label=plain(mark.name),
        color=colour,
        hatch=hatch,
        edgecolor="white",
        linewidth=0.4,
    )


@_draw.register
def _heat(mark: Heat, axes: Axes, chart: Chart) -> None:
    shade = [[float("nan") if value is None else value for value in line] for line in mark.shade]
    colours = colormaps[MAP]
    axes.imshow(shade, vmin=-0.05, vmax=1.15, cmap=colours, aspect="auto")
    for row, line in enumerate(mark.texts):
        for column, text in enumerate(line):
            dark = (mark.shade[row][column] or 0.0) > 0.55
            axes.text(
                column,
                row,
                plain(text),
                ha="center",
                va="center",
                fontsize="small",
                color="white" if dark else "black",
            )


@_draw.register
def _span(mark: Span, axes: Axes, chart: Chart) -> None:
    axes.axvspan(mark.low, mark.high, color="0.94", zorder=0)
