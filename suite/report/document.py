"""A report as one Markdown file with its figures beside it, for a repository or a wiki."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from suite.config.reference import MEAN
from suite.report import static, tables
from suite.report.answer import answer, facts
from suite.report.chart import Chart
from suite.report.content import Content, content
from suite.report.data import Report
from suite.report.table import Column, Row, escaped, markdown

Figures = dict[str, list[Chart]]
MOST_TABLE_ROWS = 200


def figures(made: Content) -> Figures:
    """Charts by the name of the file that shows them; those that belong together share one."""
    found: Figures = {"paper": [made.paper] if made.paper else []}
    found |= {f"score-cost-{place}": charts for place, charts in made.tradeoffs.items()}
    found |= {
        chart.key: [chart] for chart in (made.heat, made.phases, made.search) if chart is not None
    }
    found |= {
        f"learning-rates-{task}": [*charts, *made.lost.get(task, [])]
        for task, charts in made.rates.items()
    }
    for task in made.report.tasks:
        found[f"training-{task}"] = [
            chart
            for chart in made.training
            if chart.key in (f"train-loss-{task}", f"validation-score-{task}")
        ]
    return {name: charts for name, charts in found.items() if charts}


def draw(report: Report, out: Path, prefix: str) -> dict[str, Path]:
    """Every figure as PNG, by name."""
    paths = {}
    for name, charts in figures(content(report)).items():
        paths[name] = out / f"{prefix}{file_name(name)}.png"
        static.save(static.draw(charts), paths[name])
    return paths


def file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def document(report: Report, pictures: dict[str, Path]) -> str:
    """The report in Markdown; `pictures` lie beside it."""
    made = content(report)
    charts = figures(made)
    parts = [
        f"# {escaped(report.sweep)}",
        "",
        *(f"- **{escaped(s.head)}** {escaped(s.rest)}" for s in answer(report)),
    ]
    parts += [f"- **Not finished:** {escaped(said)}" for said in report.missing]
    if report.energy_note:
        parts += [
            "",
            f"Energy is {'an estimate' if report.estimated else 'partly an estimate'} from processor time, not a measurement.",
        ]
    rows, columns = tables.shown_rows(report), tables.leaderboard_columns(report)
    for place in (MEAN, *report.tasks):
        if of_place := [row for row in rows if row["task"] == place]:
            shown = [column for column in columns if column.head != "task"]
            parts += [
                "",
                f"## {'Mean over tasks' if place == MEAN else escaped(place)}",
                "",
                *_cut(of_place, shown),
            ]
    parts += ["", "## Figures"]
    for name, path in pictures.items():
        parts += ["", f"![{_alternative(charts[name])}]({path.name})", ""]
        parts += (
            [escaped(" ".join(chart.text for chart in charts[name]))]
            if len(charts[name]) <= 2
            else [_many(charts[name])]
        )
    for title, found, heads in (
        ("Rejected", tables.rejected_rows(report), tables.rejected_columns(report)),
        ("Failures", report.failures, tables.failure_columns(report)),
    ):
        parts += ["", f"## {title}", "", *_cut(found, heads)] if found else []
    parts += ["", report.pruned] if report.pruned else []
    parts += [
        "",
        "## What was run",
        "",
        *(f"- **{name}**: {escaped(text)}" for name, text in facts(report)),
    ]
    return "\n".join([*parts, *(f"\n{said}" for said in made.left_out), ""])


def _cut(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """A table, and what it leaves out."""
    more = len(rows) - MOST_TABLE_ROWS
    left = (
        ["", f"Left out here: {more:,} rows; the CSV files have all (suite report --format csv)."]
        if more > 0
        else []
    )
    return [markdown(rows[:MOST_TABLE_ROWS], columns), *left]


def _alternative(charts: list[Chart]) -> str:
    return escaped(
        "; ".join(chart.title for chart in charts[:12])
        + (" and others" if len(charts) > 12 else "")
    ).replace("]", "")


def _many(charts: list[Chart]) -> str:
    return (
        f"{len(charts)} cells: validation score by learning rate. The searched range is shaded, the chosen rate ringed, trials without a "
        "score are crosses. All cells of the task have one scale of scores."
    )
