"""The figures of a report that follow a value along the learning rate or the epochs; one chart per cell, or per task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from suite.leaderboard.fields import Row
from suite.report import values
from suite.report.chart import Axis, Chart, Mark, Points, Span
from suite.report.charts import ARM_COLUMNS, score_axis
from suite.report.data import Report
from suite.report.names import distinct
from suite.report.table import Table

MOST_NAMES = 24
"""A legend of more would take more room than the lines; pointing at one tells its arm."""
RATE_COLUMNS = {
    "learning_rate": "as tried",
    "validation_score": "best of its epochs, unit of the task's metric",
    "status": "how the trial ended",
    "chosen": "confirmed with fresh seeds",
}


Limits = tuple[float, float]


def learning_rate_curve(cell: Row, label: str, limits: Limits | None = None) -> Chart:
    """Validation score over learning rate: the chosen one ringed, the searched range shaded, trials without a score as crosses.

    Args:
        cell: With its curve.
        label: Of its arm.
        limits: Of the score's axis; the same for all cells of a task, so that a tenth of a point does not look like a cliff.
    """
    scored = sorted((rate, score) for rate, score, _ in cell.curve if score is not None)
    failed = sorted(rate for rate, score, _ in cell.curve if score is None)
    best = [(rate, score) for rate, score in scored if rate == cell.learning_rate]
    marks: list[Mark] = []
    if (
        cell.learning_rate_low is not None
        and cell.learning_rate_high is not None
        and cell.learning_rate_low < cell.learning_rate_high
    ):
        marks.append(Span(cell.learning_rate_low, cell.learning_rate_high))
    marks.append(
        Points(
            "tried", [r for r, _ in scored], [s for _, s in scored], 0, line=True, shape="circle"
        )
    )
    marks.append(Points("chosen", [r for r, _ in best], [s for _, s in best], 1, ring=True))
    if failed:
        floor = limits[0] if limits is not None else min((s for _, s in scored), default=0.0)
        marks.append(Points("no score", failed, [floor] * len(failed), 1, shape="x"))
    names = {"arm": cell.arm, "label": label, "task": cell.task}
    table = Table(
        "learning-rates",
        "Learning rates tried",
        ARM_COLUMNS | RATE_COLUMNS,
        [
            {
                **names,
                **dict(zip(RATE_COLUMNS, (*point, point[0] == cell.learning_rate), strict=True)),
            }
            for point in cell.curve
        ],
    )
    title = f"{label} / {cell.task}{' (edge)' if cell.edge else ''}"
    y = Axis(
        "validation score" + ("" if cell.higher_is_better is not False else " (less is better)"),
        limits=limits,
    )
    said, x = _told(cell, len(scored), len(failed)), Axis("learning rate", log=True)
    return Chart(
        f"learning-rate-{cell.arm}-{cell.task}", title, said, x, y, marks, table, 230, legend=False
    )


def _told(cell: Row, scored: int, failed: int) -> str:
    said = f"{scored + failed} learning rates tried" + (
        f", {failed} of them without a score (crosses)" if failed else ""
    )
    if cell.learning_rate is not None:
        said += f"; chosen (ringed) {values.brief(cell.learning_rate)} with {values.score(cell.validation_score)} on validation"
    if cell.edge:
        said += ", at the end of the range: the best may lie beyond"
    if cell.lr_sensitivity_decades is not None:
        said += f"; rates within a point of the best span {cell.lr_sensitivity_decades:.2f} decades"
    return said + "."


def learning_rate_curves(
    report: Report, task: str | None = None, *, chosen: bool | None = None
) -> list[Chart]:
    """One per cell that was searched, by task and then by arm.

    Args:
        report: As read.
        task: None = all.
        chosen: True leaves out the architectures that lost their contest, False all others; None = all.
    """
    tasks = report.tasks if task is None else [task]
    cells = [
        (arm, report.cells.get((arm.key, name))) for name in tasks for arm in report.arms.values()
    ]
    searched = [(arm, cell) for arm, cell in cells if cell is not None and cell.curve]
    limits = {
        name: score_limits([cell for _, cell in searched if cell.task == name]) for name in tasks
    }
    wanted = [
        (arm, cell) for arm, cell in searched if chosen in (None, cell.status != "not chosen")
    ]
    return [learning_rate_curve(cell, arm.label, limits[cell.task]) for arm, cell in wanted]


def score_limits(cells: Sequence[Row]) -> Limits | None:
    """From the worst to the best score of all curves, and a little beyond; None without a score."""
    scores = [score for cell in cells for _, score, _ in cell.curve if score is not None]
    if not scores:
        return None
    margin = max(0.06 * (max(scores) - min(scores)), 0.005 * abs(max(scores)), 1e-9)
    return min(scores) - margin, max(scores) + margin


def of_cells(cells: Sequence[Row]) -> list[Chart]:
    """One per cell, of whatever sweeps they are; what all have in common is not in their titles."""
    labels = distinct(
        [(cell.backbone, cell.attention, cell.method, cell.architecture) for cell in cells]
    )
    limits = {
        task: score_limits([cell for cell in cells if cell.task == task])
        for task in {cell.task for cell in cells}
    }
    return [
        learning_rate_curve(cell, label, limits[cell.task])
        for cell, label in zip(cells, labels, strict=True)
    ]


def training_curves(report: Report, task: str) -> list[Chart]:
    """Training loss and validation score by epoch, of the confirm runs of each arm on a task: mean over seeds, with their range."""
    runs: dict[str, list[list[tuple[int, float, float]]]] = defaultdict(list)
    for trial in report.confirm_runs:
        if trial["task"] == task and trial["epochs"]:
            runs[trial["arm"]].append(trial["epochs"])
    if not runs:
        return []
    loss = _curve(
        report, task, runs, 1, "training loss", "train_loss", Axis(f"training loss, {task}")
    )
    return [
        loss,
        _curve(
            report,
            task,
            runs,
            2,
            "validation score",
            "validation_score",
            score_axis(report, task, "validation score"),
        ),
    ]


def _curve(
    report: Report,
    task: str,
    runs: dict[str, list[list[tuple[int, float, float]]]],
    at: int,
    what: str,
    key: str,
    y: Axis,
) -> Chart:
    rows: list[dict[str, Any]] = []
    found = []
    for arm in (report.arms[k] for k in report.arms if k in runs):
        by_epoch: dict[int, list[float]] = defaultdict(list)
        for run in runs[arm.key]:
            for point in run:
                by_epoch[point[0]].append(float(point[at]))
        epochs = sorted(by_epoch)
        mean, low, high = ([of(by_epoch[e]) for e in epochs] for of in (fmean, min, max))
        found.append((arm, epochs, mean, low, high))
        rows += [
            {
                "arm": arm.key,
                "label": arm.label,
                "task": task,
                "epoch": e,
                key: m,
                "lowest": lo,
                "highest": hi,
                "seeds": len(by_epoch[e]),
            }
            for e, m, lo, hi in zip(epochs, mean, low, high, strict=True)
        ]
    meanings = ARM_COLUMNS | {
        "epoch": "from 1",
        key: "mean over seeds",
        "lowest": "of the seeds",
        "highest": "of the seeds",
        "seeds": "runs",
    }
    table = Table(key.replace("_", "-"), f"{what.capitalize()} by epoch", meanings, rows)
    count = len({row["epoch"] for row in rows})
    said = f"{what.capitalize()} of the confirm runs of {len(found)} arms on {task} over {count} epoch{'s' if count > 1 else ''}: "
    said += "mean over seeds, bars from the lowest to the highest."
    title = f"{what.capitalize()}, {task}"
    if count > 1:
        lines = [
            Points(a.label, epochs, mean, a.style, line=True, low=low, high=high)
            for a, epochs, mean, low, high in found
        ]
        return Chart(
            f"{table.key}-{task}",
            title,
            said,
            Axis("epoch", whole=True),
            y,
            lines,
            table,
            legend=len(lines) <= MOST_NAMES,
        )
    names = tuple(arm.label for arm, *_ in found)
    points = [
        Points(a.label, mean, [a.label], a.style, low=low, high=high, along="x")
        for a, _, mean, low, high in found
    ]
    return Chart(
        f"{table.key}-{task}",
        title,
        said,
        y,
        Axis("", categories=names),
        points,
        table,
        110 + 26 * len(names),
        legend=False,
    )
