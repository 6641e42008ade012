"""A report as one Markdown file with its figures beside it, for a repository or a wiki."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from suite.config.reference import MEAN
from suite.files import file_name
from suite.report import static, tables
from suite.report.answer import answer, facts
from suite.report.chart import Chart
from suite.report.content import Content, content
from suite.report.data import Report
from suite.report.table import Column, Row, escaped, markdown, rows_where, without

Figures = dict[str, list[Chart]]
MOST_TABLE_ROWS = 200
# Titles in the alternative text of a figure with many panels.
MOST_TITLES = 12


def figures(made: Content) -> Figures:
    """Charts by the name of the file that shows them; those that belong together share a file."""
    found: Figures = {}
    if made.paper is not None:
        found["paper"] = [made.paper]
    for place, charts in made.tradeoffs.items():
        found[f"score-cost-{place}"] = charts
    for chart in (made.heat, made.phases, made.search):
        if chart is not None:
            found[chart.key] = [chart]
    # All cells of a task share one file, and so one scale of scores.
    for task, charts in made.rates.items():
        found[f"learning-rates-{task}"] = [*charts, *made.lost.get(task, [])]
    for task in made.report.tasks:
        keys = (f"train-loss-{task}", f"validation-score-{task}")
        charts = [chart for chart in made.training if chart.key in keys]
        if charts:
            found[f"training-{task}"] = charts
    return found


def draw(report: Report, out: Path) -> dict[str, Path]:
    """Write every figure as PNG; returns the files by figure name."""
    paths = {}
    for name, charts in figures(content(report)).items():
        paths[name] = out / f"{file_name(f'{report.sweep}-{name}')}.png"
        static.save(static.draw(charts), paths[name])
    return paths


def document(report: Report, pictures: dict[str, Path]) -> str:
    """Write the report in Markdown; `pictures` lie beside it."""
    made = content(report)
    lines = [f"# {escaped(report.sweep)}", ""]
    for sentence in answer(report):
        lines.append(f"- **{escaped(sentence.head)}** {escaped(sentence.rest)}")
    for missing in report.missing:
        lines.append(f"- **Not finished:** {escaped(missing)}")
    for reason in report.unread_rows.values():
        lines.append(f"- **Rows were left out:** {escaped(reason)}")
    if report.spent_note:
        what = "partly an estimate"
        if report.estimated:
            what = "an estimate"
        lines += ["", f"Energy is {what} from processor time, not a measurement."]
    lines += _leaderboards(report)
    lines += _figures(figures(made), pictures)
    rejected = tables.rejected_rows(report)
    if rejected:
        lines += _section("Rejected", _cut(rejected, tables.rejected_columns(report)))
    if report.failures:
        lines += _section("Failures", _cut(report.failures, tables.failure_columns(report)))
    if report.pruned:
        lines += ["", report.pruned]
    # At the end: readers want the answer first, and look these up.
    lines += _section("What was run", [])
    for name, text in facts(report):
        lines.append(f"- **{name}**: {escaped(text)}")
    for left_out in made.left_out:
        lines += ["", left_out]
    return "\n".join([*lines, ""])


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *lines]


def _leaderboards(report: Report) -> list[str]:
    """A table for the mean over tasks, and one for each task."""
    rows = report.shown
    # The title of each table says which task it is.
    columns = without(tables.leaderboard_columns(report), "task")
    lines = []
    for place in (MEAN, *report.tasks):
        of_place = rows_where(rows, "task", place)
        if of_place:
            title = escaped(place)
            if place == MEAN:
                title = "Mean over tasks"
            lines += _section(title, _cut(of_place, columns))
    return lines


def _figures(charts: Figures, pictures: dict[str, Path]) -> list[str]:
    lines = ["", "## Figures"]
    for name, path in pictures.items():
        lines += ["", f"![{_alternative(charts[name])}]({path.name})", ""]
        # One text for all panels, because a text for each would fill a page.
        if len(charts[name]) > 2:
            lines.append(
                f"{len(charts[name])} cells: validation score by learning rate. The searched range"
                " is shaded, the chosen rate ringed, trials without a score are crosses. All cells"
                " of the task have one scale of scores."
            )
        else:
            lines.append(escaped(" ".join(chart.text for chart in charts[name])))
    return lines


def _cut(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """A table, and a sentence about the rows that it leaves out."""
    lines = [markdown(rows[:MOST_TABLE_ROWS], columns)]
    more = len(rows) - MOST_TABLE_ROWS
    if more > 0:
        lines += [
            "",
            f"Left out here: {more:,} rows; the CSV files have all (suite report --format csv).",
        ]
    return lines


def _alternative(charts: Sequence[Chart]) -> str:
    """What a figure shows, for readers who cannot see it."""
    titles = "; ".join(chart.title for chart in charts[:MOST_TITLES])
    if len(charts) > MOST_TITLES:
        titles += " and others"
    return escaped(titles).replace("]", "")  # it would end the text
