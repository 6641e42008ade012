"""The leaderboard: one row per cell and one mean row per arm, read from MLflow's cell runs and nothing else."""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from suite.config.hashing import canonical_json
from suite.config.reference import MEAN
from suite.errors import TrackingError, UnknownNameError
from suite.leaderboard.validity import judge_mean
from suite.tracking.baselines import Row, with_efficiency
from suite.tracking.costs import (
    TARGET_FRAC,
    mean_reason,
    with_energy_to_target,
    with_selection_cost,
)
from suite.tracking.measures import join, mean
from suite.tracking.ranks import read_ranks, with_ranks
from suite.tracking.store import Store, StoredRun, open_store, without_password
from suite.tracking.summary import (
    FIELDS,
    NAMES,
    OWN_TAGS,
    ROW,
    STORED,
    CellSummary,
    from_row,
    from_tags,
)

COLUMNS = (
    *(
        "backbone",
        "attention",
        "method",
        "architecture",
        "task",
        "score_mean",
        "score_std",
        "seeds",
        "validation_score",
        "learning_rate",
    ),
    *(
        "trainable_parameters",
        "total_parameters",
        "energy_kwh",
        "energy_source",
        "peak_memory_bytes",
        "train_s",
        "samples_per_s",
    ),
    *("search_trials", "search_energy_kwh", "status"),
)
EXTRA = (
    *("sweep", "arm", "edge", "search_s", "home"),
    *(
        "attention_options",
        "attention_parameters",
        "kv_bytes_per_token",
        "prr",
        "prr_missing",
        "peop",
        "peop_missing",
    ),
    *("higher_is_better", "pretrain_energy_kwh", "pretrain_s", "pretrain_steps"),
    *(
        "lr_sensitivity_decades",
        "learning_rate_low",
        "learning_rate_high",
        "extensions",
        "saved_trials",
        "chosen",
    ),
    *(
        "selection_trials",
        "selection_s",
        "selection_energy_kwh",
        "energy_to_target_kwh",
        "energy_to_target_missing",
    ),
    *("reference_score", "reference_std", "reference_source", "difference", "reference"),
    "lm_eval",
    *("rank", "rank_missing", "ci_low", "ci_high", "ci_of", "ci_missing"),
    *("admitted", "rejected", "dirty", "own_code"),
    *("constant_score", "constant_p", "constant_missing"),
)
SORTS = {
    "score": "score_mean",
    "energy": "energy_kwh",
    "memory": "peak_memory_bytes",
    "trainable": "trainable_parameters",
    "prr": "prr",
    "peop": "peop",
}
INTEGERS = (
    *("seeds", "trainable_parameters", "total_parameters", "peak_memory_bytes", "search_trials"),
    *("attention_parameters", "kv_bytes_per_token", "pretrain_steps"),
    *("extensions", "saved_trials", "selection_trials"),
)
SCORES = ("score_mean", "score_std", "validation_score", "constant_score")
FLOATS = (
    *SCORES,
    *("learning_rate", "energy_kwh", "train_s", "samples_per_s", "search_energy_kwh", "search_s"),
    *("pretrain_energy_kwh", "pretrain_s"),
    *("lr_sensitivity_decades", "selection_s", "selection_energy_kwh", "energy_to_target_kwh"),
)
AVERAGED = (*FLOATS, *INTEGERS)
_averaged, _fields = attrgetter(*AVERAGED), attrgetter(*FIELDS)
"""All at once: a call for each would take as long as all the rest."""
JSON_TEXT = ("architecture", "attention_options", "reference", "lm_eval", "rejected")


def leaderboard(
    tracking_uri: str,
    *,
    sweep: str | None = None,
    task: str | None = None,
    method: str | None = None,
    attention: str | None = None,
    sort: str = "score",
    target_frac: float = TARGET_FRAC,
    rejected: bool = False,
) -> pd.DataFrame:
    """The results so far, one row per cell, and one per arm over its tasks (`task` = "mean") where it has several.

    A mean row averages every number over the arm's tasks, once each of them has one; its spread is that of the per-seed
    means over tasks; its `status` is the least finished. It is null where a task of the sweep is missing.

    Args:
        tracking_uri: MLflow store, e.g. `sqlite:////abs/runs/mlflow.db` or `http://host:5000`.
        sweep: Only this sweep; None = every sweep in the store.
        task: Only this task, or "mean".
        method: Only this method.
        attention: Only this attention variant; its baselines for PRR and PEoP are looked up all the same.
        rejected: Whether rows that are not admitted are there too; `attrs["hidden"]` of the table counts those that are not.
        target_frac: Share of full fine-tuning's validation score of which `energy_to_target_kwh` speaks.
        sort: Within each task: score, prr or peop (best first), energy, memory or trainable (least first); unknown values last.

    Returns:
        Columns `COLUMNS`, then `EXTRA` (`edge`: the learning rate lies at the end of its range). `architecture` and
        `attention_options` are JSON text; units are in the names; what is not known is NaN, NA or None.

    Raises:
        TrackingError: The store cannot be read, has no results, or none of that sweep, task, method or attention.

    Example:
        >>> leaderboard(tracking_uri="sqlite:////abs/runs/mlflow.db", sort="energy")  # doctest: +SKIP
    """
    if sort not in SORTS:
        raise TrackingError(str(UnknownNameError("sort key", sort, SORTS, where="--sort")))
    store = open_store(tracking_uri, create=False)
    with _without_collector():
        rows = _compared_rows(store, sweep, target_frac)
        for key, value in {"method": method, "attention": attention, "task": task}.items():
            rows = _having(rows, key, value)
        shown = rows if rejected else [row for row in rows if row[0].admitted is not False]
        if not shown:
            raise TrackingError(
                f"{len(rows)} rows, and all are rejected; --all shows them with the reason"
            )
        frame = to_frame(_sorted(shown, sort))
    frame.attrs["hidden"] = len(rows) - len(shown)
    return frame


@contextmanager
def _without_collector() -> Iterator[None]:
    """Ten thousand rows are half a million objects without a cycle: looking for one takes as long as all the rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _compared_rows(store: Store, sweep: str | None, target_frac: float) -> list[Row]:
    """Cells and means with everything that takes more than one row to know."""
    rows = with_selection_cost(read_rows(store, sweep, curves=False))
    rows = with_energy_to_target(rows, target_frac)
    rows = _with_efficiency([*rows, *mean_rows(rows)])
    return with_ranks(
        rows,
        read_ranks(
            store, [id_ for name, id_ in store.experiments().items() if sweep in (None, name)]
        ),
    )


def read_rows(store: Store, sweep: str | None = None, *, curves: bool = True) -> list[Row]:
    """Every cell of one or all sweeps in a store.

    Args:
        store: Any.
        sweep: None = all.
        curves: Whether the rows' `curve` is wanted: the learning rates that were tried are most of what is stored of a cell.

    Raises:
        TrackingError: There is none.
    """
    experiments = store.experiments()
    if sweep is not None and experiments and sweep not in experiments:
        raise TrackingError(
            str(UnknownNameError("sweep", sweep, experiments, where=without_password(store.uri)))
        )
    chosen = [id_ for name, id_ in experiments.items() if sweep in (None, name)]
    newest: dict[tuple[str, ...], Row] = {}
    for cell, home in _cells(store, chosen, curves=curves) if chosen else ():
        newest[cell.sweep, cell.arm, cell.task, home] = (cell, home)
    if not newest:
        raise TrackingError(
            f"no results yet in {without_password(store.uri)}; start with: suite run SWEEP.yaml, or suite sync for an existing home"
        )
    return [newest[key] for key in sorted(newest)]


def _cells(store: Store, experiments: Sequence[str], *, curves: bool) -> Iterator[Row]:
    """Of a cell that was written twice the latest comes last. A driver that is just creating one has not come to its revision yet."""

    def revision(run: StoredRun) -> int:
        return int(run.tags["suite.revision"])

    if not curves:
        runs = store.runs(experiments, {}, having="suite.revision", only=(ROW, "suite.revision"))
        if all(run.tags.get(ROW) for run in runs):
            yield from (from_row(run.tags) for run in sorted(runs, key=revision))
            return
    wanted = (
        *STORED,
        "suite.cell",
        "suite.home",
        "suite.revision",
        *(["suite.curve.*"] if curves else []),
    )
    runs = store.runs(experiments, {}, having="suite.revision", only=wanted)
    yield from (
        (from_tags(run.tags), run.tags.get("suite.home", "")) for run in sorted(runs, key=revision)
    )


def _with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """A rejected row is no baseline for others."""
    fit, unfit = (
        [row for row in rows if (row[0].admitted is not False) == good] for good in (True, False)
    )
    return [*with_efficiency(fit), *(with_efficiency([*fit, *unfit])[len(fit) :] if unfit else [])]


def _having(rows: list[Row], key: str, value: str | None) -> list[Row]:
    kept = [row for row in rows if value in (None, getattr(row[0], key))]
    if not kept:
        raise TrackingError(
            str(
                UnknownNameError(
                    key, str(value), {getattr(r[0], key) for r in rows}, where="in these results"
                )
            )
        )
    return kept


def mean_rows(rows: Sequence[Row]) -> list[Row]:
    """One row per arm that has more than one task, in the order of the arms."""
    tasks: dict[tuple[str, str], set[str]] = defaultdict(set)
    arms: dict[tuple[str, str, str], list[CellSummary]] = defaultdict(list)
    for cell, home in rows:
        tasks[cell.sweep, home].add(cell.task)
        arms[cell.sweep, home, cell.arm].append(cell)
    return [
        (_mean_cell(cells, complete=len(cells) == len(tasks[sweep, home])), home)
        for (sweep, home, _), cells in arms.items()
        if len(cells) > 1
    ]


def _mean_cell(cells: Sequence[CellSummary], *, complete: bool) -> CellSummary:
    """Every number averaged over the tasks; nothing but names where a task is missing, for it could not be compared."""
    first, directions = cells[0], {c.higher_is_better for c in cells}
    means = (
        dict(zip(AVERAGED, map(mean, zip(*map(_averaged, cells), strict=True)), strict=True))
        if complete
        else dict.fromkeys(AVERAGED)
    )
    numbers: dict[str, Any] = {
        key: round(value) if key in INTEGERS and value is not None else value
        for key, value in means.items()
    }
    if len(directions) > 1:  # the mean of an accuracy and a perplexity says nothing
        numbers |= dict.fromkeys(SCORES)
    by_seed = _seed_means(cells) if complete and len(directions) == 1 else {}
    numbers |= {
        "learning_rate": None,
        "score_std": stdev(by_seed.values()) if len(by_seed) > 1 else None,
    }
    numbers |= {
        "seeds": min(c.seeds for c in cells) if complete else 0,
        "search_trials": numbers["search_trials"] or 0,
    }
    names = {
        key: getattr(first, key)
        for key in (*NAMES, *OWN_TAGS, "rivals", "conditions", "chosen", "own_code")
    } | {"task": MEAN}
    numbers["higher_is_better"] = first.higher_is_better if len(directions) == 1 else None
    numbers |= {
        "reference": first.reference_mean,
        "energy_to_target_missing": mean_reason(cells) if complete else None,
    }
    numbers |= judge_mean({c.task: (c.admitted, c.rejected, c.dirty) for c in cells})
    source, status = (
        join(c.energy_source for c in cells),
        _least_finished([c.status for c in cells], complete),
    )
    return CellSummary(**names, status=status, energy_source=source, seed_scores=by_seed, **numbers)


def _seed_means(cells: Sequence[CellSummary]) -> dict[str, float]:
    """The mean over tasks by seed; empty unless every task has the same seeds."""
    seeds = cells[0].seed_scores.keys()
    if any(c.seed_scores.keys() != seeds for c in cells):
        return {}
    return {seed: fmean(c.seed_scores[seed] for c in cells) for seed in seeds}


def _least_finished(statuses: Sequence[str], complete: bool) -> str:
    if len(set(statuses)) == 1 and complete:
        return statuses[0]
    return "searching" if "searching" in statuses or not complete else "partial"


def _sorted(rows: Iterable[Row], sort: str) -> list[Row]:
    """By sweep and task (mean rows last), then the sort key; equal rows keep their order."""

    def place(row: Row) -> tuple[str, bool, str, bool, float]:
        cell = row[0]
        value = getattr(cell, SORTS[sort])
        most_first = sort in ("prr", "peop") or (
            sort == "score" and cell.higher_is_better is not False
        )
        return (
            cell.sweep,
            cell.task == MEAN,
            cell.task,
            value is None,
            0.0 if value is None else -value if most_first else value,
        )

    return sorted(rows, key=place)


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a table whose columns have one type each; nullable integers stay integers."""
    found = list(rows)
    cells = [cell for cell, _ in found]
    values: dict[str, Sequence[Any]] = dict(
        zip(FIELDS, zip(*map(_fields, cells), strict=True), strict=True)
    )
    values |= {
        key: [_json(value) for value in values[key]] for key in JSON_TEXT if key != "reference"
    }
    values |= _beside_the_paper(cells) | {"home": [home for _, home in found]}
    frame = pd.DataFrame({name: values[name] for name in (*COLUMNS, *EXTRA)})
    kinds = {
        **dict.fromkeys(INTEGERS, "Int64"),
        **dict.fromkeys((*FLOATS, "prr", "peop"), "float64"),
    }
    kinds |= dict.fromkeys(
        (
            "learning_rate_low",
            "learning_rate_high",
            "reference_score",
            "reference_std",
            "difference",
        ),
        "float64",
    )
    kinds |= dict.fromkeys(("ci_low", "ci_high", "constant_p"), "float64")
    kinds |= dict.fromkeys(("edge", "higher_is_better", "chosen", "admitted", "dirty"), "boolean")
    return frame.astype(kinds)


def _beside_the_paper(cells: Sequence[CellSummary]) -> dict[str, list[Any]]:
    """What a paper printed for each row, taken apart."""
    papers = [cell.reference for cell in cells]
    ours = [cell.score_mean for cell in cells]
    return {
        **{
            f"reference_{key}": [paper.get(key) for paper in papers]
            for key in ("score", "std", "source")
        },
        "difference": [
            None if s is None or not paper else s - paper["score"]
            for s, paper in zip(ours, papers, strict=True)
        ],
        "reference": [_json(paper.get("printed", {})) for paper in papers],
    }


def _json(value: Any) -> str:
    """Most are empty."""
    return canonical_json(value) if value else str(value)


def to_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as JSON-ready mappings: null for what is not known, integers as integers, JSON texts as mappings."""
    plain = frame.astype(object).where(frame.notna(), None)
    rows = [
        {str(key): value for key, value in row.items()} for row in plain.to_dict(orient="records")
    ]
    return [{**row, **{key: json.loads(row[key]) for key in JSON_TEXT}} for row in rows]
