"""Charts drawn by plotly: for the page, and for notebooks. The only import of plotly."""

# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
# plotly makes its classes when it is imported, and has no type information of them.

from __future__ import annotations

import functools
import html
import json
import math
from collections.abc import Sequence
from functools import singledispatch
from itertools import cycle
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots
from plotly.utils import PlotlyJSONEncoder

from suite.report.chart import (
    COLOURS,
    DASHES,
    HATCHES,
    SHAPES,
    Axis,
    Bars,
    Chart,
    Heat,
    Mark,
    Points,
    Span,
)
from suite.report.table import clean

GREY = "#8a8a8a"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
SHADES = [[0.0, "#eef4fa"], [0.5, "#6baed6"], [1.0, "#08306b"]]
"""One hue from light to dark: the order survives grey printing."""


def plain(text: str) -> str:
    """A text of others' that plotly shows as it was written, without secrets: it would read `<b>`, `<a href>` and `&amp;` as HTML."""
    return html.escape(clean(text), quote=False)


def _plain(items: Sequence[Any]) -> list[Any]:
    return [plain(item) if isinstance(item, str) else item for item in items]


def draw(charts: Sequence[Chart], columns: int = 3) -> go.Figure:
    """One figure with a panel per chart."""
    if len(charts) == 1:
        return single(charts[0])
    width = min(len(charts), columns)
    height = -(-len(charts) // width)
    figure = make_subplots(
        height,
        width,
        subplot_titles=[plain(c.title) for c in charts],
        vertical_spacing=0.4 / height,
        horizontal_spacing=0.18 / width,
    )
    named: set[str] = set()
    for place, chart in enumerate(charts):
        row, column = place // width + 1, place % width + 1
        for trace in traces(chart):
            trace.showlegend = bool(
                chart.legend and trace.showlegend is not False and trace.name not in named
            )
            named.add(str(trace.name))
            trace.legendgroup = trace.name
            figure.add_trace(trace, row, column)
        for span in (m for m in chart.marks if isinstance(m, Span)):
            figure.add_vrect(**_span(span), row=row, col=column)
        figure.update_xaxes(_axis(chart.x), row=row, col=column)
        figure.update_yaxes(_axis(chart.y, vertical=True), row=row, col=column)
    return figure.update_layout(
        height=260 * height + 80,
        font={"family": FONT, "size": 11},
        template="plotly_white",
        barmode="stack",
    )


def single(chart: Chart) -> go.Figure:
    """One chart as a figure of its own; its title stands around it, in a caption."""
    figure = go.Figure(traces(chart), layout={"template": "plotly_white"})
    for span in (m for m in chart.marks if isinstance(m, Span)):
        figure.add_vrect(**_span(span))
    figure.update_xaxes(_axis(chart.x)).update_yaxes(_axis(chart.y, vertical=True))
    return figure.update_layout(
        height=chart.height,
        font={"family": FONT, "size": 12},
        margin={"l": 8, "r": 12, "t": 14, "b": 8},
        showlegend=chart.legend,
        barmode="stack",
        bargap=0.35,
        hovermode="closest",
        legend={
            "orientation": "h",
            "x": 0,
            "yanchor": "top",
            "font": {"size": 11},
            "traceorder": "normal",
        }
        | _below(chart),
    )


@functools.cache
def library() -> str:
    """plotly.js as the package brings it, 5 MB of text."""
    return str(get_plotlyjs())


def as_json(chart: Chart) -> str:
    """What plotly.js draws a chart from, without the template's colours: a page has its own."""
    found = single(chart).to_plotly_json()
    found["layout"].pop("template", None)
    return json.dumps({"data": found["data"], "layout": found["layout"]}, cls=PlotlyJSONEncoder)


def _below(chart: Chart) -> dict[str, Any]:
    """The legend hangs below the axis and its title."""
    return {"yref": "paper", "y": -60 / max(chart.height - 60, 60)}


def traces(chart: Chart) -> list[Any]:
    """Plotly's traces of a chart's marks; names beside points lie above and below in turns, so that neighbours do not meet."""
    above = cycle(("top center", "bottom center"))
    marks = (
        sorted(chart.marks, key=_left)
        if any(isinstance(m, Points) and m.labels for m in chart.marks)
        else chart.marks
    )
    found = [_trace(mark, chart) for mark in marks if not isinstance(mark, Span)]
    for trace in found:
        if getattr(trace, "text", None) and trace.type == "scatter":
            trace.textposition = next(above)
    return found


def _left(mark: Mark) -> tuple[bool, float]:
    """Labelled points from left to right, after all others."""
    if isinstance(mark, Points) and mark.labels and mark.x and not isinstance(mark.x[0], str):
        return True, float(mark.x[0])
    return False, 0.0


@singledispatch
def _trace(mark: Any, chart: Chart) -> Any:
    raise TypeError(f"no such mark: {type(mark)}")


@_trace.register
def _points(mark: Points, chart: Chart) -> Any:
    modes = [
        word
        for word, wanted in (
            ("lines", mark.line),
            ("markers", mark.marker),
            ("text", bool(mark.labels)),
        )
        if wanted
    ]
    style = mark.style
    colour = GREY if style is None else COLOURS[style % len(COLOURS)]
    shape = mark.shape or ("circle" if mark.ring else SHAPES[(style or 0) % len(SHAPES)])
    marker: dict[str, Any] = {
        "color": colour,
        "symbol": shape + ("-open" if mark.hollow or mark.ring else ""),
        "size": 15 if mark.ring else 9,
    }
    marker["line"] = {"width": 2 if mark.hollow or mark.ring else 0, "color": colour}
    bars = _error_bars(mark, colour)
    return go.Scatter(
        x=_plain(mark.x),
        y=_plain(mark.y),
        name=plain(mark.name),
        mode="+".join(modes),
        marker=marker,
        line={
            "color": colour,
            "width": 1.6,
            "dash": "dot" if style is None else DASHES[style % len(DASHES)],
        },
        text=_plain(mark.labels) or None,
        textfont={"size": 11},
        hovertext=_plain(mark.details) or None,
        hoverinfo="text" if mark.details else None,
        showlegend=mark.legend,
        cliponaxis=False,
        **bars,
    )


def _error_bars(mark: Points, colour: str) -> dict[str, Any]:
    if not any(end is not None for end in mark.low):
        return {}
    centre = mark.y if mark.along == "y" else mark.x
    ends = [(lo, float(c), hi) for lo, c, hi in zip(mark.low, centre, mark.high, strict=True)]
    below = [0.0 if lo is None else c - lo for lo, c, _ in ends]
    above = [0.0 if hi is None else hi - c for _, c, hi in ends]
    bar = {
        "type": "data",
        "array": above,
        "arrayminus": below,
        "symmetric": False,
        "color": colour,
        "thickness": 1.1,
        "width": 3,
    }
    return {f"error_{mark.along}": bar}


@_trace.register
def _bars(mark: Bars, chart: Chart) -> Any:
    pattern = {
        "shape": HATCHES[mark.style % len(HATCHES)],
        "fillmode": "overlay",
        "fgcolor": "#ffffff",
        "size": 7,
        "solidity": 0.28,
    }
    marker = {"color": COLOURS[mark.style % len(COLOURS)], "pattern": pattern}
    hover = "%{y}<br>" + plain(mark.name) + ": %{x:.3g}<extra></extra>"
    return go.Bar(
        x=_plain(mark.x),
        y=_plain(mark.y),
        name=plain(mark.name),
        orientation="h",
        marker=marker,
        hovertemplate=hover,
    )


@_trace.register
def _heat(mark: Heat, chart: Chart) -> Any:
    return go.Heatmap(
        x=_plain(mark.x),
        y=_plain(mark.y),
        z=[list(line) for line in mark.shade],
        text=[_plain(line) for line in mark.texts],
        texttemplate="%{text}",
        hovertemplate="%{y}<br>%{x}: %{text}<extra></extra>",
        colorscale=SHADES,
        zmin=0.0,
        zmax=1.0,
        showscale=False,
        xgap=2,
        ygap=2,
        hoverongaps=False,
    )


def _span(mark: Span) -> dict[str, Any]:
    return {
        "x0": mark.low,
        "x1": mark.high,
        "fillcolor": "#888888",
        "opacity": 0.12,
        "line_width": 0,
        "layer": "below",
    }


def _axis(axis: Axis, *, vertical: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {
        "title": {"text": plain(axis.title), "standoff": 8},
        "automargin": True,
        "zeroline": False,
    }
    if axis.log:
        found |= {
            "type": "log",
            "dtick": 1,
            "exponentformat": "power",
            "minor": {"ticks": "outside"},
        }
    if axis.whole:
        found |= {"tickformat": "d", "nticks": 10}
    if axis.limits is not None:
        found["range"] = [math.log10(end) for end in axis.limits] if axis.log else list(axis.limits)
    if axis.categories:
        found |= {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": _plain(axis.categories),
            "showgrid": False,
        }
        found |= {"autorange": "reversed"} if vertical else {"side": "top"}
    return found
