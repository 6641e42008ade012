"""A report as one HTML page that needs nothing else: no network, no other file.

What others wrote (names, descriptions, errors) reaches the page through the template's escaping, or
as JSON without `<`. The page's own policy forbids it to fetch anything (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from suite import __version__
from suite.config.reference import MEAN
from suite.redact import redact
from suite.report import interactive, tables, values
from suite.report.answer import COSTS, answer, comparable, described, facts, verdicts
from suite.report.chart import COLOURS, colour_of
from suite.report.charts import place
from suite.report.content import MOST_ROWS, content
from suite.report.data import Report
from suite.report.names import Arm
from suite.report.table import (
    Column,
    Row,
    Table,
    clean,
    rows_where,
    rows_with,
    values_of,
    without,
)

# The costs that a reader can limit: the unit by key in a row.
CHOICE_COSTS = {"peak_memory_bytes": "bytes", "energy_kwh": "kWh"}
# Pixels of the small picture of a score and its interval, and of the margin at its ends.
PLOT_WIDTH = 132.0
PLOT_MARGIN = 5


def page(report: Report, *, live: str = "") -> str:
    """Render the page as text.

    Args:
        report: What `suite.report.read` returned.
        live: The version that the page shows, where `suite.report.live` serves it. Then the page
            asks for the newest version, and reloads for another.
    """
    made = content(report)
    picture = None
    tradeoffs = {}
    for where, charts in made.tradeoffs.items():
        others = list(charts)
        if picture is None:
            # The first screen shows this one; the others have a section of their own.
            picture = others.pop(0)
        if others:
            tradeoffs[where] = others
    rows = report.shown
    columns = tables.leaderboard_columns(report)
    # An arm's own part says both in its heading.
    arm_columns = without(columns, "arm", "architecture")
    tasks = values_of(rows, "task")

    def rows_of(arm: Arm) -> dict[str, Any]:
        return prepared(arm_columns, rows_where(report.rows, "arm", arm.key), report)

    def trials_of(arm: Arm) -> dict[str, Any]:
        own = rows_where(report.trials, "arm", arm.key)
        return prepared(tables.trial_columns(report), own, report)

    template = environment().get_template("page.html")
    return template.render(
        made=made,
        report=report,
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        live=live,
        units=values.sizes_of_units(),
        answer=answer(report),
        verdicts=verdicts(report),
        picture=picture,
        tradeoffs=tradeoffs,
        choices=_inside_script(json.dumps(_choices(report))),
        limits=_limits(report),
        facts=facts(report),
        board=prepared(columns, rows[:MOST_ROWS], report),
        intervals=_intervals(report, rows),
        board_csv=tables.leaderboard(report),
        first_place=next((task for task in report.places if report.scored(task)), ""),
        places=[task for task in (MEAN, *report.tasks) if task in tasks],
        trials_of=trials_of,
        rows_of=rows_of,
        failures=prepared(tables.failure_columns(report), report.failures[:MOST_ROWS], report),
        rejected=prepared(tables.rejected_columns(report), tables.rejected_rows(report), report),
        plotly=Markup(interactive.library()),  # noqa: S704 - plotly's own file
        figures=[(chart, _inside_script(interactive.as_json(chart))) for chart in made.figures],
    )


@functools.cache
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("suite.report"),
        autoescape=True,
        undefined=StrictUndefined,  # a typo in a template is an error, not an empty text
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["data_link"] = data_link
    made.filters["clean"] = clean
    made.filters["backbone"] = values.backbone
    made.filters["attention"] = values.attention
    made.filters["flaw"] = values.flaw
    made.filters["settings"] = values.settings
    made.globals["colours"] = COLOURS
    return made


def _inside_script(json_text: str) -> Markup:
    """Make JSON safe to stand inside a script element, whatever its texts are.

    Secrets were taken out of the texts before: JSON writes a quote, or a letter of another
    alphabet, in another way, so they could not be found here.
    """
    # A text with `</script>` in it would end the element.
    safe = json_text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(safe)  # noqa: S704 - nothing is left to escape


def data_link(table: Table) -> str:
    """A table's CSV inside a link."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(table.csv().encode()).decode()


def prepared(columns: Sequence[Column], rows: Sequence[Row], report: Report) -> dict[str, Any]:
    """The columns of a table, and for every row its arm and its cells, as the template needs them.

    A cell is its text and the value that it is sorted by.
    """
    lines = []
    for row in rows:
        cells = []
        for column in columns:
            text = column.show(row)
            if not column.number:
                # Numbers hold no secrets, and most cells are numbers.
                text = clean(text)
            cells.append((text, _sort_key(column.value(row))))
        arm = report.arms.get(row.get("arm", ""))
        lines.append({"row": row, "arm": arm, "cells": cells})
    return {"columns": columns, "rows": lines}


def _sort_key(value: float | str | None) -> str:
    """A cell's value for the page's script; empty, and so sorted last, where it is not known."""
    if value is None:
        return ""
    if isinstance(value, str):
        return clean(value)
    return repr(float(value))  # all digits, so that equal texts can still be sorted


def _limits(report: Report) -> list[dict[str, Any]]:
    """The limits that a reader can set for a choice: key of the cost, word, unit and its size.

    The page compares the rows of one place by their costs, so these must be comparable.
    """
    found = []
    for key, unit in CHOICE_COSTS.items():
        by_place = []
        for task in report.places:
            admitted = report.admitted(task)
            if report.on_one_scale(task, admitted):
                by_place.append(rows_with(admitted, key))
        known = values_of(chain.from_iterable(by_place), key)
        if known and all(comparable(rows, key) for rows in by_place if rows):
            scale = values.scale_of(unit, known)
            about = {"key": key, "word": COSTS[key], "unit": scale.unit, "size": scale.size}
            found.append(about)
    return found


def _choices(report: Report) -> list[dict[str, Any]]:
    """The rows among which the page's script looks for the best within a reader's limits."""
    found = []
    for task in report.places:
        # Nobody should choose a row that a check of validity rejects, or of which runs failed.
        admitted = report.admitted(task)
        if not report.on_one_scale(task, admitted):
            continue
        for row in admitted:
            choice = {
                "task": task,
                "where": clean(place(report, task)),
                "arm": clean(report.label(row)),
                "said": described(row),
                "score": row["score_mean"],
                "higher": row["higher_is_better"] is not False,
            }
            for key, unit in CHOICE_COSTS.items():
                choice[key] = row[key]
                choice[f"{key}_shown"] = values.SHOW[unit](row[key])
            found.append(choice)
    return found


def _intervals(
    report: Report, rows: Sequence[Row]
) -> dict[tuple[str, str], dict[str, float | str]]:
    """By arm and task, the small picture of a score and its interval.

    It holds the colour, and the pixels of both on one scale per task.
    """
    keys = ("score_mean", "ci_low", "ci_high")
    found: dict[tuple[str, str], dict[str, float | str]] = {}
    for task in (MEAN, *report.tasks):
        ends = []
        scored = []
        for row in rows_where(rows, "task", task):
            if row["score_mean"] is not None:
                scored.append(row)
                for key in keys:
                    if row[key] is not None:
                        ends.append(row[key])
        # A scale needs a length.
        if not ends or min(ends) == max(ends):
            continue
        low = min(ends)
        width = max(ends) - low
        for row in scored:
            picture: dict[str, float | str] = {}
            for key in keys:
                if row[key] is not None:
                    share = (row[key] - low) / width
                    picture[key] = PLOT_MARGIN + (PLOT_WIDTH - 2 * PLOT_MARGIN) * share
            picture["colour"] = colour_of(report.arms[row["arm"]].style)
            found[row["arm"], task] = picture
    return found


def waiting_page(reason: str) -> str:
    """The page while there is nothing to report yet."""
    return environment().get_template("waiting.html").render(reason=redact(reason))
