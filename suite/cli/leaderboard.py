"""`suite leaderboard`: the answer, a row per cell and a mean row per arm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from suite.cli import complete, render
from suite.cli.options import (
    DEFAULT_HOME,
    Format,
    FormatOption,
    HomeOption,
    TrackingOption,
    existing_home,
)
from suite.cli.render import Column, Row, column

AXES = ("sweep", "backbone", "attention")


class Sort(StrEnum):
    """What the rows are ordered by, the best first."""

    SCORE = "score"
    ENERGY = "energy"
    MEMORY = "memory"
    TRAINABLE = "trainable"
    PRR = "prr"
    PEOP = "peop"


def leaderboard(
    home: HomeOption = DEFAULT_HOME,
    tracking_uri: TrackingOption = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=complete.sweeps_of_home, help="Only this sweep."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="T", autocompletion=complete.tasks, help="Only this task.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="M", autocompletion=complete.methods, help="Only this method."),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="V", autocompletion=complete.attention, help="Only this attention variant."
        ),
    ] = None,
    sort: Annotated[Sort, typer.Option(help="What comes first.")] = Sort.SCORE,
    target: Annotated[
        float,
        typer.Option(
            min=0.01, max=1.0, help="Share of full's validation score, for the energy to it."
        ),
    ] = 0.95,
    everything: Annotated[
        bool, typer.Option("--all", help="Rejected rows too, with the reason.")
    ] = False,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Test scores with their cost: a row per cell, and a mean row per arm over its tasks."""
    from suite.record.folder import Home
    from suite.tracking.store import resolve_uri

    elsewhere = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    uri = resolve_uri(Home(home if elsewhere else existing_home(home)), tracking_uri)
    show(
        uri,
        sort=sort,
        fmt=fmt,
        target=target,
        rejected=everything,
        sweep=sweep,
        task=task,
        method=method,
        attention=attention,
    )


def show(
    uri: str,
    *,
    sort: Sort = Sort.SCORE,
    fmt: Format,
    target: float = 0.95,
    rejected: bool = False,
    **only: str | None,
) -> None:
    """Print the leaderboard that the MLflow store at `uri` gives; `only` as the filters of `suite.tracking.leaderboard`."""
    from suite.tracking.query import leaderboard as query
    from suite.tracking.query import to_rows

    frame = query(uri, sort=sort.value, target_frac=target, rejected=rejected, **only)
    if hidden := frame.attrs["hidden"]:
        rows_are, them = ("row is", "it") if hidden == 1 else ("rows are", "them")
        typer.echo(f"{hidden} {rows_are} rejected; --all shows {them} with the reason", err=True)
    rows = to_rows(frame)
    render.render(
        rows,
        columns(rows),
        fmt,
        keys=list(frame.columns),
        title=", ".join(f"{k} {v}" for k, v in constant(rows).items()),
    )


def constant(rows: Sequence[Row]) -> dict[str, str]:
    """What is the same in every row, and so stands above the table instead of in it."""
    found = {key: {_axis(row, key) for row in rows} for key in AXES}
    return {key: values.pop() for key, values in found.items() if len(values) == 1}


def columns(rows: Sequence[Row]) -> list[Column]:
    """What a person sees, in the order of reading; the highest rank goes first on a narrow terminal."""
    from suite.stats.constant_baseline import beats_constant

    axes = [Column(key, partial(_axis, key=key)) for key in AXES if key not in constant(rows)]
    axes += [column("home")] if len({row["home"] for row in rows}) > 1 else []
    several = len({(row["method"], str(row["architecture"])) for row in rows}) > len(
        {row["method"] for row in rows}
    )
    axes += [
        column("method"),
        *([column("architecture", show=render.settings)] if several else []),
        column("task"),
    ]
    return [
        *([column("rank", rank=1)] if any(row["rank"] for row in rows) else []),
        *axes,
        Column("test score", _score, right=True),
        *(
            [Column("95% interval", _interval, right=True, rank=2)]
            if any(row["ci_low"] is not None for row in rows)
            else []
        ),
        *(
            [column("constant_score", "same answer", render.score, rank=2)]
            if any(beats_constant(row) is False for row in rows)
            else []
        ),
        *(_paper_columns() if any(row["reference_score"] is not None for row in rows) else []),
        column("seeds", show=render.count, rank=5),
        column("validation_score", "validation", render.score, rank=3),
        Column("learning rate", _learning_rate, right=True, rank=2),
        column("trainable_parameters", "trained", render.count, rank=1),
        column("total_parameters", "parameters", render.count, rank=6),
        *(_attention_columns() if any(row["attention"] != "pretrained" for row in rows) else []),
        column("energy_kwh", "energy", render.energy, rank=1),
        column("energy_source", "measured by", rank=7),
        column("peak_memory_bytes", "memory", render.size, rank=1),
        column("train_s", "train time", render.duration, rank=4),
        column("samples_per_s", "samples/s", render.brief, rank=4),
        column("search_trials", "trials", render.count, rank=5),
        column("search_energy_kwh", "search energy", render.energy, rank=7),
        *(_selection_columns() if any(row["chosen"] for row in rows) else []),
        *(
            _target_columns()
            if any(row["energy_to_target_kwh"] is not None for row in rows)
            else []
        ),
        *(
            _sensitivity_columns()
            if any(row["lr_sensitivity_decades"] is not None for row in rows)
            else []
        ),
        *(_pretrain_columns() if any(row["pretrain_steps"] is not None for row in rows) else []),
        Column("status", _status),
        *(
            [Column("rejected", lambda row: "; ".join(row["rejected"]))]
            if any(row["rejected"] for row in rows)
            else []
        ),
    ]


def _paper_columns() -> list[Column]:
    """What was printed, and how far above it our score is."""
    signed = Column(
        "difference",
        lambda row: render.MISSING if row["difference"] is None else f"{row['difference']:+.1f}",
        right=True,
    )
    return [column("reference_score", "paper", render.score), signed]


def _selection_columns() -> list[Column]:
    """What was searched over all architectures."""
    return [
        column("selection_trials", "trials of all architectures", render.count, rank=7),
        column("selection_energy_kwh", "their energy", render.energy, rank=7),
    ]


def _target_columns() -> list[Column]:
    return [column("energy_to_target_kwh", "energy to target", render.energy, rank=5)]


def _sensitivity_columns() -> list[Column]:
    return [column("lr_sensitivity_decades", "good rates (decades)", render.brief, rank=7)]


def _attention_columns() -> list[Column]:
    return [
        column("prr", "PRR", render.score, rank=1),
        column("peop", "PEoP", render.brief, rank=1),
        column("attention_parameters", "in attention", render.count, rank=3),
        column("kv_bytes_per_token", "KV/token", render.size, rank=3),
    ]


def _pretrain_columns() -> list[Column]:
    return [
        column("pretrain_steps", "pretrain steps", render.count, rank=6),
        column("pretrain_energy_kwh", "pretrain energy", render.energy, rank=6),
        column("pretrain_s", "pretrain time", render.duration, rank=7),
    ]


def _axis(row: Row, key: str) -> str:
    """What a row stands for on an axis; a backbone that ran code of its own says so."""
    if key == "backbone":
        return render.backbone(row)
    if key == "attention":
        return render.attention(row)
    return str(row[key])


def _status(row: Row) -> str:
    """`done (dirty)`: one of the runs was made by an edited checkout."""
    if row.get("dirty"):
        return f"{row['status']} (dirty)"
    return str(row["status"])


def _score(row: Row) -> str:
    """`83.1 ± 0.4`; an arrow marks scores of which less is better."""
    mean = row["score_mean"]
    std = row["score_std"]
    shown = render.score(mean) + (f" ± {render.score(std)}" if std is not None else "")
    if mean is not None and row["higher_is_better"] is False:
        return f"{shown} ↓"
    return shown


def _interval(row: Row) -> str:
    """`79.9 - 82.4`; a star where it is over items alone."""
    if row["ci_low"] is None:
        return render.MISSING
    return f"{render.score(row['ci_low'])} - {render.score(row['ci_high'])}{' *' if row['ci_of'] == 'items' else ''}"


def _learning_rate(row: Row) -> str:
    return render.brief(row["learning_rate"]) + (" (edge)" if row.get("edge") else "")
