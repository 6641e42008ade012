"""The tables of a report: the leaderboard, every trial, failures, and what is behind each figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from suite.config.reference import MEAN
from suite.leaderboard.fields import FIELDS
from suite.report import values
from suite.report.chart import Chart
from suite.report.data import Report
from suite.report.table import Column, Row, Table, number, words
from suite.stats.constant_baseline import beats_constant

CONSTANT = "score of the best answer that is the same for every test item; shown where a row is not shown to do better"
LEADERBOARD = {"label": "its short name"}
LEADERBOARD |= {about.name: about.meaning for about in FIELDS if about.report}
TRIALS = {
    "trial": "hash, name of its folder",
    "arm": "key of the arm",
    "task": "task",
    "phase": "search or confirm",
    "number": "in its study; 0 for confirm runs",
    "seed": "0 in the search",
    "learning_rate": "",
    "status": "how it ended",
    "validation_score": "best epoch",
    "test_score": "of that epoch; confirm runs only",
    "best_epoch": "from 1",
    "train_s": "training phase, s",
    "energy_kwh": "training phase, kWh",
    "energy_source": "how it was measured; cpu-time-estimate is no measurement",
    "peak_memory_bytes": "allocated, training phase, largest rank, bytes",
    "samples_per_s": "training, 1/s",
}
FAILURES = {
    **{
        key: TRIALS[key]
        for key in ("trial", "arm", "task", "phase", "number", "seed", "learning_rate")
    },
    "status": "how the trial ended; attempt = it was tried again",
    "type": "of the error",
    "message": "what it said",
    "log": "file in the trial's folder",
}


def leaderboard(report: Report) -> Table:
    rows = [{**row, "label": report.arms[row["arm"]].label} for row in report.rows]
    return Table(
        "leaderboard",
        "All rows, rejected ones and architectures that were not chosen included",
        LEADERBOARD,
        rows,
    )


def trials(report: Report) -> Table:
    return Table("trials", "Every trial that was handed out", TRIALS, report.trials)


def failures(report: Report) -> Table:
    return Table(
        "failures",
        "Attempts that ended without a result, and trials without a score",
        FAILURES,
        report.failures,
    )


def dictionary(tables: Sequence[Table]) -> Table:
    """What every column of every file means."""
    rows = [
        {"file": f"{t.key}.csv", "column": key, "meaning": meaning}
        for t in tables
        for key, meaning in t.columns.items()
    ]
    return Table(
        "columns",
        "What the columns of the other files mean",
        {"file": "", "column": "", "meaning": "with its unit"},
        rows,
    )


def everything(report: Report, charts: Sequence[Chart]) -> list[Table]:
    """All tables, those of one kind of figure as one, the dictionary last."""
    parts: dict[str, list[Table]] = {}
    for table in (
        leaderboard(report),
        trials(report),
        failures(report),
        *(chart.table for chart in charts),
    ):
        parts.setdefault(table.key, []).append(table)
    found = [
        replace(tables[0], rows=[row for table in tables for row in table.rows])
        for tables in parts.values()
    ]
    return [*found, dictionary(found)]


def shown_rows(report: Report) -> list[dict[str, Any]]:
    """Rows that a reader of the leaderboard wants: those that lost the contest of their architectures have their place elsewhere."""
    return [row for row in report.rows if row["status"] != "not chosen"]


def leaderboard_columns(report: Report) -> list[Column]:
    """What is the same or unknown in every row is left out."""
    rows = shown_rows(report)
    any_of = {
        key: any(row[key] is not None for row in rows)
        for key in ("rank", "ci_low", "reference_score", "kv_bytes_per_token")
    }
    note = report.energy_note
    paper = [
        number("reference_score", "paper", values.score, "as printed"),
        number("difference", "ours - paper", _signed),
    ]
    ratios = [
        number("prr", "PRR", values.score, "share of multi-head attention's score, percent"),
        number("peop", "PEoP", values.brief),
    ]
    mixed, competed = (
        note == ", partly estimated",
        any(arm.settings for arm in report.arms.values()),
    )
    return [
        words("arm", lambda row: report.arms[row["arm"]].label),
        *(
            [
                Column(
                    "rank",
                    _rank,
                    _rank_value,
                    "arms that a paired test cannot tell apart share ranks",
                )
            ]
            if any_of["rank"]
            else []
        ),
        words("task", lambda row: row["task"]),
        Column(
            "score",
            _score,
            lambda row: row["score_mean"],
            "test score, mean over seeds ± standard deviation; ↓ = less is better",
        ),
        *(
            [
                Column(
                    "95% interval",
                    _interval,
                    lambda row: row["ci_low"],
                    "over seeds and test items",
                )
            ]
            if any_of["ci_low"]
            else []
        ),
        *(
            [number("constant_score", "same answer", values.score, CONSTANT)]
            if any(beats_constant(row) is False for row in rows)
            else []
        ),
        *(paper if any_of["reference_score"] else []),
        Column(
            f"energy{note}",
            _energy if mixed else _plain_energy,
            lambda row: row["energy_kwh"],
            "training phase of one run",
        ),
        number(
            "peak_memory_bytes", "memory", values.size, "peak allocated in training, largest rank"
        ),
        number("trainable_parameters", "trained", values.count, "parameters, head included"),
        *(ratios if len({row["attention"] for row in rows}) > 1 else []),
        *(
            [number("kv_bytes_per_token", "KV/token", values.size, "cached per token, fp16")]
            if any_of["kv_bytes_per_token"]
            else []
        ),
        number("train_s", "train time", values.duration, "training phase of one run"),
        number("seeds", "seeds", values.count, "confirm runs"),
        *(
            [
                words(
                    "architecture",
                    lambda row: report.arms[row["arm"]].settings or values.MISSING,
                    "as chosen",
                )
            ]
            if competed
            else []
        ),
        Column(
            "learning rate",
            _learning_rate,
            lambda row: row["learning_rate"],
            "chosen; edge = at the end of the searched range",
        ),
        number("validation_score", "validation", values.score, "best of the search"),
        number("search_trials", "trials", values.count, "of its search"),
        Column(
            f"search energy{note}",
            lambda row: values.energy(row["search_energy_kwh"]),
            lambda row: row["search_energy_kwh"],
        ),
        words("status", _status),
    ]


def _rank(row: Row) -> str:
    return row["rank"] or values.MISSING


def _rank_value(row: Row) -> float | None:
    """By the upper end where the lower one is equal."""
    if not row["rank"]:
        return None
    low, _, high = str(row["rank"]).partition("-")
    return float(low) + float(high or low) / 1000


def _score(row: Row) -> str:
    shown = values.score(row["score_mean"]) + (
        f" ± {values.score(row['score_std'])}" if row["score_std"] is not None else ""
    )
    return (
        f"{shown} ↓"
        if row["score_mean"] is not None and row["higher_is_better"] is False
        else shown
    )


def _interval(row: Row) -> str:
    if row["ci_low"] is None:
        return values.MISSING
    return f"{values.score(row['ci_low'])} to {values.score(row['ci_high'])}{' (items only)' if row['ci_of'] == 'items' else ''}"


def _learning_rate(row: Row) -> str:
    return values.brief(row["learning_rate"]) + (" (edge)" if row["edge"] else "")


def _energy(row: Row) -> str:
    return _plain_energy(row) + (" est." if values.ESTIMATE in (row["energy_source"] or "") else "")


def _plain_energy(row: Row) -> str:
    return values.energy(row["energy_kwh"])


def _signed(value: float | None) -> str:
    return values.MISSING if value is None else f"{value:+.1f}"


def _status(row: Row) -> str:
    words_ = "rejected" if row["admitted"] is False else str(row["status"])
    return f"{words_} (dirty)" if row["dirty"] else words_


def trial_columns(report: Report) -> list[Column]:
    """Of one arm's trials."""
    note = report.energy_note
    return [
        words("task", lambda row: row["task"]),
        words("phase", lambda row: row["phase"]),
        number("number", "no.", values.count),
        number("seed", "seed", values.count),
        number("learning_rate", "learning rate", values.brief),
        words("status", lambda row: row["status"]),
        number("validation_score", "validation", values.score),
        number("test_score", "test", values.score),
        number("best_epoch", "best epoch", values.count),
        number("train_s", "train time", values.duration),
        number("energy_kwh", f"energy{note}", values.energy),
        number("peak_memory_bytes", "memory", values.size),
        words("trial", lambda row: row["trial"]),
    ]


def failure_columns(report: Report) -> list[Column]:
    return [
        words(
            "arm",
            lambda row: report.arms[row["arm"]].label if row["arm"] in report.arms else row["arm"],
        ),
        words("task", lambda row: row["task"]),
        words("phase", lambda row: row["phase"]),
        number("learning_rate", "learning rate", values.brief),
        words(
            "what",
            lambda row: (
                f"{row['status']}: {row['type']}" if row["type"] != row["status"] else row["status"]
            ),
        ),
        words("message", lambda row: row["message"]),
        words("trial", lambda row: row["trial"]),
    ]


def rejected_rows(report: Report) -> list[dict[str, Any]]:
    return [row for row in report.rows if row["admitted"] is False and row["task"] != MEAN]


def rejected_columns(report: Report) -> list[Column]:
    return [
        words("arm", lambda row: report.arms[row["arm"]].label),
        words("task", lambda row: row["task"]),
        Column("score", _score, lambda row: row["score_mean"]),
        words("reason", lambda row: "; ".join(row["rejected"])),
    ]
