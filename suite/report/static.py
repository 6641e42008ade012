"""Draw charts with matplotlib: for files and printed pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import singledispatch
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import MaxNLocator

from suite.files import replacing
from suite.report.chart import Axis, Bars, Chart, Heat, Points, Span, colour_of, hatch_of
from suite.report.table import clean

DPI = 120
GREY = "0.55"
# matplotlib's codes for the shapes and dashes of `suite.report.chart`.
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "cross": "P",
    "pentagon": "p",
    "star": "*",
    "hexagon": "h",
    "x": "x",
}
LINES: dict[str, Any] = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "longdash": (0, (8, 3)),
}
# One hue from light to dark: the order survives grey printing.
COLOUR_MAP = "Blues"
# Above this shade, black text cannot be read.
DARK_SHADE = 0.55
# Where a label may lie, the first places first: distances from its point, in points of the page,
# and directions in degrees.
DISTANCES = (6, 12, 20, 32, 48, 70)
DIRECTIONS = (90, 270, 0, 180, 45, 315, 135, 225, 20, 340, 160, 200)


def draw(charts: Sequence[Chart], columns: int = 4) -> Figure:
    """One figure with a panel per chart, each under its title."""
    width = min(len(charts), columns)
    height = -(-len(charts) // width)  # rounded up
    many = len(charts) > 2
    if many:
        size = (3.2 * width + 0.4, 2.6 * height + 0.3)
    else:
        tallest = max(chart.height for chart in charts)
        size = (7.2 * width, tallest / 88 + 0.4)  # inches; a chart's height is in pixels
    # Not through pyplot, which would keep every figure in memory.
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(height, width, squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place < len(charts):
            _panel(axis, charts[place], small=many)
        else:
            axis.set_axis_off()  # the last row may not be full
    labelled = [axis for axis in axes.flat if any(isinstance(t, Annotation) for t in axis.texts)]
    if labelled:
        # Settles the layout, which costs as much as drawing.
        figure.draw_without_rendering()
    for axis in labelled:
        _place_labels(axis)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write PNG. A reader sees the old file or the new one, never a part."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=DPI, format="png")


def plain(text: str) -> str:
    """Make a text that matplotlib shows as it is written, without secrets.

    Between two `$` matplotlib would read a formula, and fail where it is none.
    """
    return clean(text).replace("$", r"\$")


def _panel(axes: Axes, chart: Chart, *, small: bool) -> None:
    axes.set_title(plain(chart.title), fontsize="small" if small else "medium")
    for mark in chart.marks:
        _draw(mark, axes, chart)
    _scale_x(axes, chart.x)
    _scale_y(axes, chart.y)
    axes.tick_params(labelsize="x-small" if small else "small")
    axes.spines[["top", "right"]].set_visible(False)
    if chart.legend:
        axes.legend(
            frameon=False,
            fontsize="x-small",
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),  # below the axis and its title
            ncols=4,
        )


def _scale_x(axes: Axes, axis: Axis) -> None:
    axes.set_xlabel(plain(axis.title), fontsize="small")
    if axis.log:
        axes.set_xscale("log")
    if axis.whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axis.limits is not None:
        axes.set_xlim(*axis.limits)
    if axis.categories:
        axes.set_xticks(range(len(axis.categories)), _names(axis))
        axes.xaxis.tick_top()


def _scale_y(axes: Axes, axis: Axis) -> None:
    axes.set_ylabel(plain(axis.title), fontsize="small")
    if axis.limits is not None:
        axes.set_ylim(*axis.limits)
    if axis.categories:
        axes.set_yticks(range(len(axis.categories)), _names(axis))
        axes.set_ylim(len(axis.categories) - 0.5, -0.5)  # the first name at the top


def _names(axis: Axis) -> list[str]:
    return [plain(name) for name in axis.categories]


def _placed(items: Sequence[float | str], axis: Axis) -> list[float]:
    """Numbers as they are, names by their place on the axis."""
    placed = []
    for item in items:
        if isinstance(item, str):
            item = float(axis.categories.index(item))
        placed.append(item)
    return placed


@singledispatch
def _draw(mark: Any, axes: Axes, chart: Chart) -> None:
    raise TypeError(f"no such mark: {type(mark)}")


@_draw.register
def _points(mark: Points, axes: Axes, chart: Chart) -> None:
    x = _placed(mark.x, chart.x)
    y = _placed(mark.y, chart.y)
    colour = mark.colour(GREY)
    options: dict[str, Any] = {
        "color": colour,
        "linewidth": 1.2,
        "linestyle": "none",
        "zorder": 3,
        "label": plain(mark.name),
    }
    if mark.line:
        options["linestyle"] = LINES[mark.dash]
    if mark.marker:
        options["marker"] = MARKERS[mark.marker_shape]
        options["markersize"] = 7
        if mark.line:
            options["markersize"] = 4
        if mark.ring:
            options["markersize"] = 9
        if mark.ring or mark.hollow:
            options["markerfacecolor"] = "none"
    axes.plot(x, y, **options)
    _error_bars(mark, x, y, axes, colour)
    for i, label in enumerate(mark.labels):
        text = axes.annotate(
            plain(label),
            (x[i], y[i]),
            xytext=(0, DISTANCES[0]),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize="x-small",
            zorder=4,
            # A line to its point.
            arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.5, "shrinkA": 0, "shrinkB": 6},
        )
        # It gets its place once the layout is settled.
        text.set_in_layout(False)


def _place_labels(axes: Axes) -> None:
    """Move each label to where it covers no point, interval or other label, or the least of them.

    The layout must be settled, because places are measured in pixels.
    """
    scale = axes.figure.dpi / 72
    # Boxes as left, bottom, right and top.
    taken = []
    for line in axes.lines:
        # The caps of intervals are lines too, and have markers.
        if line.get_marker() != "None":
            for x, y in line.get_transform().transform(line.get_xydata()):
                taken.append((x - 4 * scale, y - 4 * scale, x + 4 * scale, y + 4 * scale))
    for bars in axes.collections:
        for path in bars.get_paths():
            taken.append(path.get_extents(bars.get_transform()).padded(scale).extents)
    for label in axes.texts:
        if not isinstance(label, Annotation):
            continue
        # Without the line to its point, which belongs to an annotation.
        size = np.array(Text.get_window_extent(label).size)
        point = axes.transData.transform(label.xy)
        assert label.arrow_patch is not None
        least = math.inf
        for far, degrees in product(DISTANCES, DIRECTIONS):
            turn = np.array((math.cos(math.radians(degrees)), math.sin(math.radians(degrees))))
            move = turn * (far * scale + size / 2)
            box = (*(point + move - size / 2), *(point + move + size / 2))
            # What lies outside the axes is as bad as what lies on something.
            cost = _overlaps(box, taken) + size.prod() - _overlaps(box, [axes.bbox.extents])
            if cost < least - 1e-6:
                least, best = cost, box
                label.set_position(tuple(move / scale))
                # A label beside its point needs no line to it.
                label.arrow_patch.set_visible(far > DISTANCES[0])
        taken.append(best)


def _overlaps(box: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """The area of a box that lies on others."""
    mine, theirs = np.array(box), np.reshape(others, (-1, 4))
    sides = np.minimum(mine[2:], theirs[:, 2:]) - np.maximum(mine[:2], theirs[:, :2])
    return float(sides.clip(0).prod(1).sum())


def _error_bars(
    mark: Points, x: Sequence[float], y: Sequence[float], axes: Axes, colour: str
) -> None:
    centres = y if mark.along == "y" else x
    known_x = []
    known_y = []
    below = []
    above = []
    for i, (low, high) in enumerate(zip(mark.low, mark.high, strict=True)):
        if low is None or high is None:
            continue
        known_x.append(x[i])
        known_y.append(y[i])
        # By a rounding error an interval may lie beside its mean; matplotlib refuses lengths
        # below 0.
        below.append(max(centres[i] - low, 0.0))
        above.append(max(high - centres[i], 0.0))
    if not known_x:
        return
    bars: dict[str, Any] = {f"{mark.along}err": [below, above]}
    axes.errorbar(
        known_x,
        known_y,
        # The points are drawn already; only their bars are missing.
        fmt="none",
        ecolor=colour,
        elinewidth=0.8,
        capsize=2,
        alpha=0.7,
        **bars,
    )


@_draw.register
def _bars(mark: Bars, axes: Axes, chart: Chart) -> None:
    """Draw stacked bars: each begins where the one before it ends."""
    starts = [0.0] * len(mark.x)
    # matplotlib does not stack by itself.
    for other in chart.marks:
        if other is mark:
            break
        if isinstance(other, Bars):
            starts = [start + length for start, length in zip(starts, other.x, strict=True)]
    axes.barh(
        _placed(mark.y, chart.y),
        list(mark.x),
        left=starts,
        height=0.62,
        label=plain(mark.name),
        color=colour_of(mark.style),
        hatch=hatch_of(mark.style) * 3,  # a repeated hatch is a denser one
        edgecolor="white",
        linewidth=0.4,
    )


@_draw.register
def _heat(mark: Heat, axes: Axes, chart: Chart) -> None:
    # numpy makes None to NaN, which is drawn as a gap.
    matrix = np.array(mark.shade, dtype=float)
    # The ends of the map are left out: white would look empty.
    axes.imshow(matrix, vmin=-0.05, vmax=1.15, cmap=colormaps[COLOUR_MAP], aspect="auto")
    for row, texts in enumerate(mark.texts):
        for column, text in enumerate(texts):
            colour = "black"
            if (mark.shade[row][column] or 0.0) > DARK_SHADE:
                colour = "white"
            axes.text(
                column,
                row,
                plain(text),
                ha="center",
                va="center",
                fontsize="small",
                color=colour,
            )


@_draw.register
def _span(mark: Span, axes: Axes, chart: Chart) -> None:
    # Behind everything else, so that it hides no point.
    axes.axvspan(mark.low, mark.high, color="0.94", zorder=0)
