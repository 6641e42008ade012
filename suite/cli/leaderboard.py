"""`suite leaderboard`: the answer, a row per cell and a mean row per arm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from suite.cli import render
from suite.cli.options import DEFAULT_HOME, Format, FormatOption, HomeOption, TrackingOption, existing_home
from suite.cli.render import Column, Row, column

AXES = ("sweep", "backbone", "attention")


class Sort(StrEnum):
    """What the rows are ordered by, the best first."""

    SCORE = "score"
    ENERGY = "energy"
    MEMORY = "memory"
    TRAINABLE = "trainable"


def leaderboard(
    home: HomeOption = DEFAULT_HOME,
    tracking_uri: TrackingOption = None,
    sweep: Annotated[str | None, typer.Option(metavar="NAME", help="Only this sweep.")] = None,
    task: Annotated[str | None, typer.Option(metavar="T", help="Only this task.")] = None,
    method: Annotated[str | None, typer.Option(metavar="M", help="Only this method.")] = None,
    sort: Annotated[Sort, typer.Option(help="What comes first.")] = Sort.SCORE,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Test scores with their cost: a row per cell, and a mean row per arm over its tasks."""
    from suite.tracking.store import resolve_uri
    from suite.train.folder import Home

    elsewhere = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    uri = resolve_uri(Home(home if elsewhere else existing_home(home)), tracking_uri)
    show(uri, sweep=sweep, task=task, method=method, sort=sort, fmt=fmt)


def show(uri: str, *, sweep: str | None, task: str | None = None, method: str | None = None, sort: Sort = Sort.SCORE, fmt: Format) -> None:
    """Print the leaderboard that the MLflow store at `uri` gives."""
    from suite.tracking.table import leaderboard as query
    from suite.tracking.table import to_rows

    frame = query(tracking_uri=uri, sweep=sweep, task=task, method=method, sort=sort.value)
    rows = to_rows(frame)
    render.render(rows, columns(rows), fmt, keys=list(frame.columns), title=", ".join(f"{k} {v}" for k, v in constant(rows).items()))


def constant(rows: Sequence[Row]) -> dict[str, str]:
    """What is the same in every row, and so stands above the table instead of in it."""
    found = {key: {row[key] for row in rows} for key in AXES}
    return {key: str(values.pop()) for key, values in found.items() if len(values) == 1}


def columns(rows: Sequence[Row]) -> list[Column]:
    """What a person sees, in the order of reading; the highest rank goes first on a narrow terminal."""
    axes = [column(key) for key in AXES if key not in constant(rows)]
    several = len({(row["method"], str(row["architecture"])) for row in rows}) > len({row["method"] for row in rows})
    axes += [column("method"), *([column("architecture", show=_architecture)] if several else []), column("task")]
    return [
        *axes,
        Column("test score", _score, right=True),
        column("seeds", show=render.count, rank=5),
        column("validation_score", "validation", render.score, rank=3),
        Column("learning rate", _learning_rate, right=True, rank=2),
        column("trainable_parameters", "trained", render.count, rank=1),
        column("total_parameters", "parameters", render.count, rank=6),
        column("energy_kwh", "energy", render.energy, rank=1),
        column("energy_source", "measured by", rank=7),
        column("peak_memory_bytes", "memory", render.size, rank=1),
        column("train_s", "train time", render.duration, rank=4),
        column("samples_per_s", "samples/s", render.brief, rank=4),
        column("search_trials", "trials", render.count, rank=5),
        column("search_energy_kwh", "search energy", render.energy, rank=7),
        column("status"),
    ]


def _score(row: Row) -> str:
    mean, std = row["score_mean"], row["score_std"]
    return render.score(mean) + (f" ± {render.score(std)}" if std is not None else "")


def _learning_rate(row: Row) -> str:
    return render.brief(row["learning_rate"]) + (" (edge)" if row.get("edge") else "")


def _architecture(value: object) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else render.text(value)
