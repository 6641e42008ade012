"""The leaderboard of an MLflow store: read from the files of rows in it, and from nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from suite.leaderboard.choice import TARGET_FRAC, Choice, Sort, sort_of
from suite.leaderboard.fields import Row
from suite.leaderboard.table import Chosen, choose, leaderboard_of
from suite.tracking.kept_runs import note, recall, state_of
from suite.tracking.rows import readable_rows, runs_with_rows
from suite.tracking.store import Store, open_store, sqlite_path

if TYPE_CHECKING:
    import pandas as pd


def leaderboard(
    tracking_uri: str,
    *,
    sweep: str | None = None,
    task: str | None = None,
    method: str | None = None,
    attention: str | None = None,
    sort: str = Sort.SCORE,
    target_frac: float = TARGET_FRAC,
    rejected: bool = False,
) -> pd.DataFrame:
    """The results so far: one row per cell, and one per arm over its tasks where it has several.

    Args:
        tracking_uri: MLflow store, e.g. `sqlite:////abs/runs/mlflow.db` or `http://host:5000`.
        sweep: Only this sweep; None = every sweep in the store.
        task: Only this task; `suite.leaderboard.table.choose` describes this argument and
            those after it.
        method: Only this method.
        attention: Only this attention variant.
        sort: What orders the rows of a task.
        target_frac: Share of full fine-tuning's validation score, for the energy to it.
        rejected: Whether rejected rows are there too.

    Returns:
        The table that `suite.leaderboard.table.leaderboard_of` makes. A sweep whose file of rows
        cannot be read is left out, with a warning in the log.

    Raises:
        TrackingError: The store or all of its files of rows cannot be read, or it has no results,
            or none of that sweep, task, method or attention.
        UnknownNameError: `sort` is no sort key.

    Example:
        >>> uri = "sqlite:////abs/runs/mlflow.db"
        >>> leaderboard(tracking_uri=uri, sort="energy")  # doctest: +SKIP
    """
    return leaderboard_of(
        _rows(tracking_uri, sweep, sort),
        task=task,
        method=method,
        attention=attention,
        sort=sort,
        target_frac=target_frac,
        rejected=rejected,
    )


def chosen(tracking_uri: str, *, sweep: str | None = None, **choice: Unpack[Choice]) -> Chosen:
    """The rows of `leaderboard`, without a frame, which takes longer to import than to fill.

    Raises:
        TrackingError: As `leaderboard`.
        UnknownNameError: As `leaderboard`.
    """
    return choose(_rows(tracking_uri, sweep, choice.get("sort", Sort.SCORE)), **choice)


def _rows(tracking_uri: str, sweep: str | None, sort: str) -> list[Row]:
    # Before the store is opened, so that a typing mistake is known at once.
    sort_of(sort)
    path = sqlite_path(tracking_uri)
    if path is not None:
        kept = [run for run in recall(path) if sweep in (None, run.tags["sweep"])]
        if kept:
            # Not opened: its files are on this disk, and MLflow is not needed to read them.
            return readable_rows(Store(tracking_uri), kept)
    # A reader makes no tables: a wrong path must not leave an empty database behind.
    store = open_store(tracking_uri, create=False)
    if path is None:
        return readable_rows(store, runs_with_rows(store, sweep))
    # Opening it may have merged what a writer left in sqlite's log.
    before = state_of(path)
    runs = runs_with_rows(store, sweep)
    if sweep is None:
        note(path, before, runs)
    return readable_rows(store, runs)
