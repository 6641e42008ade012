"""Draw charts with plotly: for the page, and for notebooks. The only import of plotly."""

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

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots
from plotly.utils import PlotlyJSONEncoder

from suite.report.chart import Axis, Bars, Chart, Heat, Mark, Points, Span, colour_of, hatch_of
from suite.report.table import clean

GREY = "#8a8a8a"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
# Labels of a logarithmic axis: more would run into each other in a panel of 240 pixels.
LEAST_TICKS = 3
MOST_TICKS = 5
# One hue from light to dark: the order survives grey printing.
SHADES = [[0.0, "#eef4fa"], [0.5, "#6baed6"], [1.0, "#08306b"]]


def plain(text: str) -> str:
    """Make a text that plotly shows as it is written, without secrets.

    Plotly would read `<b>`, `<a href>` and `&amp;` as HTML.
    """
    return html.escape(clean(text), quote=False)


def _plain(items: Sequence[Any]) -> list[Any]:
    shown = []
    for item in items:
        if isinstance(item, str):
            item = plain(item)
        shown.append(item)
    return shown


def draw(charts: Sequence[Chart], columns: int = 3) -> go.Figure:
    """One figure with a panel per chart."""
    if len(charts) == 1:
        return single(charts[0])
    width = min(len(charts), columns)
    height = -(-len(charts) // width)  # rounded up
    figure = make_subplots(
        height,
        width,
        subplot_titles=[plain(chart.title) for chart in charts],
        # Spacings are shares of the whole figure, so more panels need smaller ones.
        vertical_spacing=0.4 / height,
        horizontal_spacing=0.18 / width,
    )
    named: set[str] = set()
    for place, chart in enumerate(charts):
        row = place // width + 1
        column = place % width + 1
        for trace in traces(chart):
            # The panels share one legend, so each name stands in it once.
            new = trace.name not in named
            trace.showlegend = chart.legend and new
            named.add(str(trace.name))
            # A press on a name hides its traces in all panels.
            trace.legendgroup = trace.name
            figure.add_trace(trace, row, column)
        _add_spans(figure, chart, row=row, col=column)
        figure.update_xaxes(_axis(chart.x), row=row, col=column)
        figure.update_yaxes(_axis(chart.y, vertical=True), row=row, col=column)
    return figure.update_layout(
        height=260 * height + 80,
        font={"family": FONT, "size": 11},
        template="plotly_white",
        barmode="stack",
    )


def single(chart: Chart, *, template: str = "plotly_white") -> go.Figure:
    """A figure of one chart. Its title stands around it, in a caption."""
    # All at once: each later change makes plotly check the figure again.
    layout = {
        "template": template,
        "xaxis": _axis(chart.x),
        "yaxis": _axis(chart.y, vertical=True),
        "height": chart.height,
        "font": {"family": FONT, "size": 12},
        "margin": {"l": 8, "r": 12, "t": 14, "b": 8},
        "showlegend": chart.legend,
        "barmode": "stack",
        "bargap": 0.35,
        "hovermode": "closest",  # one point, not all points of the same x
        "legend": {
            "orientation": "h",
            "x": 0,
            "yanchor": "top",
            "font": {"size": 11},
            "traceorder": "normal",
            # 60 pixels below the plot: under the axis and its title.
            "yref": "paper",
            "y": -60 / max(chart.height - 60, 60),
        },
    }
    figure = go.Figure(traces(chart), layout=layout)
    _add_spans(figure, chart)
    return figure


@functools.cache
def library() -> str:
    """plotly.js as the package brings it, 5 MB of text."""
    return str(get_plotlyjs())


def as_json(chart: Chart) -> str:
    """What plotly.js draws a chart from, without a template's colours: a page has its own."""
    # Copying a template takes half of the time that a page takes.
    found = single(chart, template="none").to_plotly_json()
    found["layout"].pop("template", None)
    return json.dumps({"data": found["data"], "layout": found["layout"]}, cls=PlotlyJSONEncoder)


def traces(chart: Chart) -> list[Any]:
    """Plotly's traces of a chart's marks; spans are no traces.

    Labels lie above and below their points in turns, so that neighbours do not cover each other.
    """
    above = cycle(("top center", "bottom center"))
    found = []
    for mark in sorted(chart.marks, key=_left_end):
        if isinstance(mark, Span):
            continue
        trace = _trace(mark)
        if isinstance(mark, Points) and mark.labels:
            trace.textposition = next(above)
        found.append(trace)
    return found


def _left_end(mark: Mark) -> tuple[bool, float]:
    """A sort key that puts labelled points after all other marks, from left to right."""
    if isinstance(mark, Points) and mark.labels and mark.x and not isinstance(mark.x[0], str):
        return True, float(mark.x[0])
    return False, 0.0


@singledispatch
def _trace(mark: Any) -> Any:
    raise TypeError(f"no such mark: {type(mark)}")


@_trace.register
def _points(mark: Points) -> Any:
    modes = []
    if mark.line:
        modes.append("lines")
    if mark.marker:
        modes.append("markers")
    if mark.labels:
        modes.append("text")
    colour = mark.colour(GREY)
    marker: dict[str, Any] = {
        "color": colour,
        "symbol": mark.marker_shape,
        "size": 15 if mark.ring else 9,
        "line": {"width": 0, "color": colour},
    }
    if mark.hollow or mark.ring:
        marker["symbol"] += "-open"
        marker["line"]["width"] = 2
    return go.Scatter(
        x=_plain(mark.x),
        y=_plain(mark.y),
        name=plain(mark.name),
        mode="+".join(modes),
        marker=marker,
        line={"color": colour, "width": 1.6, "dash": mark.dash},
        text=_plain(mark.labels) or None,
        textfont={"size": 11},
        hovertext=_plain(mark.details) or None,
        hoverinfo="text" if mark.details else None,
        cliponaxis=False,  # names of points at the edge may lie outside of the plot
        **_error_bars(mark, colour),
    )


def _error_bars(mark: Points, colour: str) -> dict[str, Any]:
    if not any(end is not None for end in mark.low):
        return {}
    centres = mark.x
    if mark.along == "y":
        centres = mark.y
    # Plotly takes lengths; 0 draws nothing.
    below = [0.0] * len(centres)
    above = [0.0] * len(centres)
    for place, (low, centre, high) in enumerate(zip(mark.low, centres, mark.high, strict=True)):
        if low is not None:
            below[place] = float(centre) - low
        if high is not None:
            above[place] = high - float(centre)
    bars = {
        "type": "data",
        "array": above,
        "arrayminus": below,
        "symmetric": False,
        "color": colour,
        "thickness": 1.1,
        "width": 3,
    }
    return {f"error_{mark.along}": bars}


@_trace.register
def _bars(mark: Bars) -> Any:
    pattern = {
        "shape": hatch_of(mark.style),
        "fillmode": "overlay",
        "fgcolor": "#ffffff",
        "size": 7,
        "solidity": 0.28,
    }
    return go.Bar(
        x=_plain(mark.x),
        y=_plain(mark.y),
        name=plain(mark.name),
        orientation="h",
        marker={"color": colour_of(mark.style), "pattern": pattern},
        # `<extra>` would show the trace's name a second time.
        hovertemplate="%{y}<br>" + plain(mark.name) + ": %{x:.3g}<extra></extra>",
    )


@_trace.register
def _heat(mark: Heat) -> Any:
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
        # Gaps part neighbours of the same shade.
        xgap=2,
        ygap=2,
        hoverongaps=False,
    )


def _add_spans(figure: go.Figure, chart: Chart, **panel: int) -> None:
    """Shade the ranges of a chart, in the panel given by `row` and `col`."""
    for mark in chart.marks:
        if isinstance(mark, Span):
            figure.add_vrect(
                x0=mark.low,
                x1=mark.high,
                fillcolor="#888888",
                opacity=0.12,
                line_width=0,
                layer="below",
                **panel,
            )


def log_ticks(low: float, high: float) -> list[float]:
    """Two to `MOST_TICKS` round numbers between the ends of a logarithmic axis.

    plotly labels powers of ten alone or every digit: of a range within a decade it labels nothing,
    and of a wide one more than fits in a small panel.
    """
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    found: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        found = []
        for power in range(first, last + 1):
            for digit in digits:
                # Through text: 3 * 10.0**-4 is 0.00030000000000000003.
                tick = float(f"{digit}e{power}")
                if low <= tick <= high:
                    found.append(tick)
        if len(found) >= LEAST_TICKS:
            break
    step = -(-len(found) // MOST_TICKS)  # rounded up
    if len(found) < 2:
        return [low, high]
    return found[::step]


def _tick_texts(ticks: Sequence[float]) -> list[str]:
    """Labels in one notation: `0.1`, `1`, `10`, or `1e-5`, `1e-4`, `1e-3`."""
    if min(ticks) >= 0.01 and max(ticks) < 10_000:
        return [f"{tick:g}" for tick in ticks]
    return [np.format_float_scientific(tick, trim="-", exp_digits=1) for tick in ticks]


def _axis(axis: Axis, *, vertical: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {
        "title": {"text": plain(axis.title), "standoff": 8},
        "automargin": True,
        "zeroline": False,
    }
    if axis.log:
        found["type"] = "log"
        found["minor"] = {"ticks": "outside", "dtick": "D1"}
        if axis.limits is not None:
            ticks = log_ticks(*axis.limits)
            found["tickvals"] = ticks
            found["ticktext"] = _tick_texts(ticks)
    if axis.whole:
        found["tickformat"] = "d"
        found["nticks"] = 10
    if axis.limits is not None:
        found["range"] = list(axis.limits)
        if axis.log:  # plotly takes the exponents
            found["range"] = [math.log10(end) for end in axis.limits]
    if axis.categories:
        found["type"] = "category"
        found["categoryorder"] = "array"
        found["categoryarray"] = _plain(axis.categories)
        found["showgrid"] = False
        if vertical:
            found["autorange"] = "reversed"  # the first name at the top
        else:
            found["side"] = "top"
    return found
