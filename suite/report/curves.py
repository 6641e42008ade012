"""The figures of a report that follow a value along the learning rate or the epochs.

There is one chart per cell, or per task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from suite.leaderboard.curves import CONFIRMED, points
from suite.leaderboard.fields import Row
from suite.leaderboard.names import distinct
from suite.plan.cell_state import CellStatus
from suite.report import values
from suite.report.chart import Axis, Chart, Mark, Points, Span
from suite.report.charts import ARM_COLUMNS, score_axis
from suite.report.data import Report
from suite.report.names import Arm, names_of
from suite.report.table import Table, rows_without, values_of

# A legend of more names would take more room than the lines. A reader points at a line instead.
MOST_NAMES = 24
RATE_COLUMNS = {
    "learning_rate": "as tried",
    "batch_size": "as tried, rows a step",
    "validation_score": "best of its epochs, unit of the task's metric",
    "status": "how the trial ended",
    "chosen": "confirmed with fresh seeds",
}
TRAINING_COLUMNS = {
    "lowest": "of the seeds",
    "highest": "of the seeds",
    "seeds": "runs",
}

Limits = tuple[float, float]
# Number, training loss and validation score of an epoch.
Epoch = tuple[int, float, float]


def learning_rate_curve(cell: Row, label: str, limits: Limits | None = None) -> Chart:
    """Validation score over learning rate.

    The chosen rate is ringed, the searched range is shaded, and trials without a score are
    crosses.

    Args:
        cell: A cell with its curve.
        label: Name of its arm.
        limits: Limits of the score's axis. They are the same for all cells of a task, so that a
            tenth of a point does not look like a cliff.
    """
    scored: dict[int | None, list[tuple[float, float]]] = {}
    chosen = []
    failed = []
    rows = []
    for point in points(cell):
        rate, score = point["learning_rate"], point["validation_score"]
        if score is None:
            failed.append(rate)
        else:
            # The line joins single search trials; a mean of confirm runs is none of them.
            if point["status"] != CONFIRMED:
                scored.setdefault(point["batch_size"], []).append((rate, score))
            if point["chosen"]:
                chosen.append((rate, score))
        rows.append({"arm": cell.arm, "label": label, "task": cell.task, **point})
    failed.sort()
    marks: list[Mark] = []
    # A fixed rate has a range without a width.
    low = cell.learning_rate_low
    high = cell.learning_rate_high
    if low is not None and high is not None and low < high:
        marks.append(Span(low, high))
    marks += _lines(scored)
    # After the points that were tried, so that the ring lies on top of them.
    marks.append(_rate_points("chosen", chosen, style=1, ring=True))
    if failed:
        # Crosses lie at the bottom of the plot: they have no score of their own.
        floor = min((score for points in scored.values() for _, score in points), default=0.0)
        if limits is not None:
            floor = limits[0]
        marks.append(_rate_points("no score", [(rate, floor) for rate in failed], 1, shape="x"))
    title = f"{label} / {cell.task}"
    if cell.edge:
        title += " (edge)"
    score_title = "validation score"
    if cell.higher_is_better is False:
        score_title += " (less is better)"
    return Chart(
        key=f"learning-rate-{cell.arm}-{cell.task}",
        title=title,
        text=_describe(cell, rows, chosen),
        x=Axis(
            "learning rate", log=True, limits=_rate_limits(cell, values_of(rows, "learning_rate"))
        ),
        y=Axis(score_title, limits=limits),
        marks=marks,
        table=Table("learning-rates", "Learning rates tried", ARM_COLUMNS | RATE_COLUMNS, rows),
        height=230,
        legend=len(scored) > 1,
    )


def _lines(scored: Mapping[int | None, Sequence[tuple[float, float]]]) -> list[Mark]:
    """A line over the rates for each batch size; the score need not be the same for two of them."""
    lines: list[Mark] = []
    for place, size in enumerate(sorted(scored, key=lambda size: size or 0)):
        name = "tried" if len(scored) == 1 else f"batch size {size}"
        # The second style is that of the ring.
        style = place + 1 if place else 0
        # Trials come in the order of the search; a line needs that of the rates.
        lines.append(_rate_points(name, sorted(scored[size]), style=style, line=True))
    return lines


def _rate_limits(cell: Row, tried: Sequence[float]) -> Limits | None:
    """Span the searched range and every rate that was tried, with a margin."""
    rates = [*tried]
    for end in (cell.learning_rate_low, cell.learning_rate_high):
        if end is not None:
            rates.append(end)
    if not rates:
        return None
    low = min(rates)
    high = max(rates)
    # A single rate still gets an axis with a length.
    margin = max((high / low) ** 0.06, 1.1)
    return low / margin, high * margin


def _rate_points(
    name: str, points: Sequence[tuple[float, float]], style: int, **options: Any
) -> Points:
    rates = []
    scores = []
    for rate, score in points:
        rates.append(rate)
        scores.append(score)
    return Points(name, rates, scores, style, **options)


def _describe(
    cell: Row, rows: Sequence[Mapping[str, Any]], chosen: Sequence[tuple[float, float]]
) -> str:
    # What was confirmed may be none that the search tried.
    tried = rows_without(rows, "status", CONFIRMED)
    rates = {row["learning_rate"] for row in tried}
    sizes = {row["batch_size"] for row in tried}
    failed = [row for row in tried if row["validation_score"] is None]
    said = f"{len(rates)} learning rate{'s' if len(rates) != 1 else ''} tried"
    if len(sizes) > 1:
        said += f" in {len(tried)} trials with {len(sizes)} batch sizes"
    if failed:
        said += f", {len(failed)} of them without a score (crosses)"
    if chosen:
        best = min if cell.higher_is_better is False else max
        rate, score = best(chosen, key=lambda point: point[1])
        size = ""
        if cell.batch_size is not None and sizes != {cell.batch_size}:
            size = f" at batches of {cell.batch_size}"
        said += f"; chosen (ringed) {values.brief(rate)}{size}"
        if len(tried) < len(rows):
            said += ", which no search trial tried,"
        said += f" with {values.score(score)} on validation"
        if len(tried) < len(rows):
            said += " (mean of its confirm runs)"
    if cell.edge:
        said += "; scores may still rise beyond the end of the range"
    if cell.lr_sensitivity_decades is not None:
        said += f"; rates within a point of the best span {cell.lr_sensitivity_decades:.2f} decades"
    return said + "."


def learning_rate_curves(
    report: Report, task: str | None = None, *, chosen: bool | None = None
) -> list[Chart]:
    """One chart per cell that was searched, by task and then by arm.

    Args:
        report: What `suite.report.read` returned.
        task: A task; None = all.
        chosen: True leaves out the architectures that lost their contest, False all others;
            None = all.
    """
    tasks = report.tasks
    if task is not None:
        tasks = [task]
    found = []
    for name in tasks:
        searched = []
        for arm in report.arms.values():
            cell = report.cells.get((arm.key, name))
            if cell is not None and cell.curve:
                searched.append((arm, cell))
        # Taken over all cells, so that the chosen ones and the others have one scale.
        limits = score_limits([cell for _, cell in searched])
        for arm, cell in searched:
            if chosen is None or chosen == (cell.status != CellStatus.NOT_CHOSEN):
                found.append(learning_rate_curve(cell, arm.label, limits))
    return found


def score_limits(cells: Sequence[Row]) -> Limits | None:
    """Span all curves from the worst to the best score, with a margin; None without a score."""
    scores = []
    for cell in cells:
        for point in points(cell):
            if point["validation_score"] is not None:
                scores.append(point["validation_score"])
    if not scores:
        return None
    low = min(scores)
    high = max(scores)
    # Never 0: an axis needs a length where all scores are equal.
    margin = max(0.06 * (high - low), 0.005 * abs(high), 1e-9)
    return low - margin, high + margin


def of_cells(cells: Sequence[Row]) -> list[Chart]:
    """Draw one chart per cell; the cells may be of several sweeps and homes.

    The titles leave out what all cells have in common.
    """
    names = []
    by_task: dict[str, list[Row]] = defaultdict(list)
    for cell in cells:
        names.append(names_of(vars(cell)))
        by_task[cell.task].append(cell)
    limits = {}
    for task, found in by_task.items():
        limits[task] = score_limits(found)
    several_sweeps = len({cell.sweep for cell in cells}) > 1
    several_homes = len({cell.home for cell in cells}) > 1
    charts = []
    for cell, label in zip(cells, distinct(names), strict=True):
        if several_sweeps:
            label = f"{cell.sweep}:{label}"
        if several_homes:
            label += f" @ {cell.home}"
        charts.append(learning_rate_curve(cell, label, limits[cell.task]))
    return charts


def training_curves(report: Report, task: str) -> list[Chart]:
    """Training loss and validation score by epoch, of the confirm runs of each arm on a task.

    They are means over seeds, with their range.
    """
    runs: dict[str, list[list[Epoch]]] = defaultdict(list)
    for trial in report.confirm_runs:
        if trial["task"] == task and trial["epochs"]:
            runs[trial["arm"]].append(trial["epochs"])
    if not runs:
        return []
    losses: dict[str, list[tuple[int, float]]] = {}
    scores: dict[str, list[tuple[int, float]]] = {}
    # The order of the arms, and so of the legend, is that of all figures.
    for key in report.arms:
        if key in runs:
            losses[key] = []
            scores[key] = []
            for run in runs[key]:
                for number, loss, score in run:
                    losses[key].append((number, loss))
                    scores[key].append((number, score))
    return [
        _by_epoch(report, task, losses, "train_loss", Axis(f"training loss, {task}")),
        _by_epoch(
            report, task, scores, "validation_score", score_axis(report, task, "validation score")
        ),
    ]


# What the quantities of `_by_epoch` are called.
QUANTITIES = {"train_loss": "Training loss", "validation_score": "Validation score"}


def _by_epoch(
    report: Report, task: str, points: dict[str, list[tuple[int, float]]], key: str, y: Axis
) -> Chart:
    """A chart of one quantity.

    Args:
        points: By arm, epoch and value of every epoch of every run.
        key: The quantity's key in the table.
        y: The quantity's axis.
    """
    what = QUANTITIES[key]
    rows: list[dict[str, Any]] = []
    by_arm: list[tuple[Arm, list[dict[str, Any]]]] = []
    for arm_key, found in points.items():
        arm = report.arms[arm_key]
        own = _epoch_rows(found, key)
        for row in own:
            # In place: the marks below and the table read the same dictionaries.
            row |= {"arm": arm.key, "label": arm.label, "task": task}
        rows += own
        by_arm.append((arm, own))
    epochs = len(set(values_of(rows, "epoch")))
    plural = ""
    if epochs > 1:
        plural = "s"
    columns = ARM_COLUMNS | {"epoch": "from 1", key: "mean over seeds"} | TRAINING_COLUMNS
    table = Table(key.replace("_", "-"), f"{what} by epoch", columns, rows)
    marks = []
    for arm, own in by_arm:
        mean = values_of(own, key)
        low = values_of(own, "lowest")
        high = values_of(own, "highest")
        if epochs > 1:
            numbers = values_of(own, "epoch")
            marks.append(Points(arm.label, numbers, mean, arm.style, line=True, low=low, high=high))
        else:
            marks.append(
                Points(arm.label, mean, [arm.label], arm.style, low=low, high=high, along="x")
            )
    text = (
        f"{what} of the confirm runs of {len(by_arm)} arms on {task} over {epochs} epoch{plural}:"
        " mean over seeds, bars from the lowest to the highest."
    )
    if epochs > 1:
        return Chart(
            key=f"{table.key}-{task}",
            title=f"{what}, {task}",
            text=text,
            x=Axis("epoch", whole=True),
            y=y,
            marks=marks,
            table=table,
            legend=len(marks) <= MOST_NAMES,
        )
    # A line of one point shows nothing: the arms lie below each other instead.
    names = tuple(arm.label for arm, _ in by_arm)
    return Chart(
        key=f"{table.key}-{task}",
        title=f"{what}, {task}",
        text=text,
        x=y,
        y=Axis("", categories=names),
        marks=marks,
        table=table,
        height=110 + 26 * len(names),
        legend=False,
    )


def _epoch_rows(points: Sequence[tuple[int, float]], key: str) -> list[dict[str, Any]]:
    """Mean and range over seeds, with one row for each epoch."""
    by_epoch: dict[int, list[float]] = defaultdict(list)
    for number, value in points:
        by_epoch[number].append(float(value))
    rows = []
    for number in sorted(by_epoch):
        # Every epoch counts its own seeds: runs need not have the same number of epochs.
        seeds = by_epoch[number]
        rows.append(
            {
                "epoch": number,
                key: fmean(seeds),
                "lowest": min(seeds),
                "highest": max(seeds),
                "seeds": len(seeds),
            }
        )
    return rows
