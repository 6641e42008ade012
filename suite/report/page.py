"""A report as one HTML page that needs nothing else: no network, no other file.

What others wrote (names, descriptions, errors) reaches the page through the template's escaping or as JSON without `<`, and the
page's own policy forbids it to fetch anything (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from suite import __version__
from suite.config.reference import MEAN
from suite.redact import redact
from suite.report import interactive, tables, values
from suite.report.answer import answer, facts
from suite.report.chart import COLOURS
from suite.report.content import MOST_ROWS, content
from suite.report.data import Report
from suite.report.names import Arm
from suite.report.table import Column, Row, Table, clean

PLOT_WIDTH, PLOT_HEIGHT = 132.0, 16.0


def page(report: Report, *, live: str = "") -> str:
    """The page as text.

    Args:
        report: As `suite.report.read` gives it.
        live: The version that it shows, where it is served by `suite.report.live`: then it asks for the newest, and reloads for another.
    """
    made = content(report)
    rows, columns = tables.shown_rows(report), tables.leaderboard_columns(report)
    return (
        _environment()
        .get_template("page.html")
        .render(
            made=made,
            report=report,
            version=__version__,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            live=live,
            answer=answer(report),
            facts=facts(report),
            board=_table(columns, rows[:MOST_ROWS], report),
            intervals=_intervals(report, rows),
            board_csv=tables.leaderboard(report),
            first_place=next((place for place in report.places if report.scored(place)), ""),
            places=[
                place
                for place in (MEAN, *report.tasks)
                if any(row["task"] == place for row in rows)
            ],
            trials_of=lambda arm: _table(
                tables.trial_columns(report),
                [t for t in report.trials if t["arm"] == arm.key],
                report,
            ),
            rows_of=lambda arm: _table(
                [c for c in columns if c.head not in ("arm", "architecture")],
                [r for r in report.rows if r["arm"] == arm.key],
                report,
            ),
            failures=_table(tables.failure_columns(report), report.failures[:MOST_ROWS], report),
            rejected=_table(tables.rejected_columns(report), tables.rejected_rows(report), report),
            plotly=Markup(interactive.library()),  # noqa: S704 - plotly's own file
            figures=[(chart, _inside_script(interactive.as_json(chart))) for chart in made.figures],
        )
    )


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("suite.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"data_link": data_link, "clean": clean}
    made.filters |= {
        "backbone": values.backbone,
        "attention": values.attention,
        "settings": values.settings,
    }
    made.globals["colours"] = COLOURS
    return made


def _inside_script(json_text: str) -> Markup:
    """JSON that can stand inside a script element whatever its texts are; secrets were taken out of these before they became JSON,
    where a quote or a letter of another alphabet is written in another way."""
    return Markup(json_text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704 - nothing is left to escape


def data_link(table: Table) -> str:
    """A table's CSV inside a link."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(table.csv().encode()).decode()


def _table(columns: Sequence[Column], rows: Sequence[Row], report: Report) -> dict[str, Any]:
    """What the template's table needs: heads, and of every row its arm and its cells as text and as what they are sorted by."""
    return {
        "columns": columns,
        "rows": [
            {
                "row": row,
                "arm": _arm(row, report),
                "cells": [(_shown(c, row), _key(c.value(row))) for c in columns],
            }
            for row in rows
        ],
    }


def _shown(column: Column, row: Row) -> str:
    return column.show(row) if column.number else clean(column.show(row))


def _arm(row: Row, report: Report) -> Arm | None:
    return report.arms.get(row.get("arm", ""))


def _key(value: float | str | None) -> str:
    """Empty, and so sorted last, where it is not known."""
    return "" if value is None else clean(value) if isinstance(value, str) else repr(float(value))


def _intervals(
    report: Report, rows: Sequence[Row]
) -> dict[tuple[str, str], dict[str, float | str]]:
    """By arm and task, where a row's score and its interval lie on the scale of its task: pixels of a small picture."""
    found: dict[tuple[str, str], dict[str, float | str]] = {}
    for task in (MEAN, *report.tasks):
        scored = [row for row in rows if row["task"] == task and row["score_mean"] is not None]
        ends = [
            value
            for row in scored
            for value in (row["score_mean"], row["ci_low"], row["ci_high"])
            if value is not None
        ]
        if not ends or min(ends) == max(ends):
            continue
        low, width = min(ends), max(ends) - min(ends)
        for row in scored:
            at = {
                key: 5 + (PLOT_WIDTH - 10) * (row[key] - low) / width
                for key in ("score_mean", "ci_low", "ci_high")
                if row[key] is not None
            }
            colour = COLOURS[report.arms[row["arm"]].style % len(COLOURS)]
            found[row["arm"], task] = {**at, "colour": colour}
    return found


def waiting_page(reason: str) -> str:
    """What is served while there is nothing to report yet."""
    return _environment().get_template("waiting.html").render(reason=redact(reason))
