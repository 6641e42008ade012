"""The tables of a report: the leaderboard, every trial, failures, and the data of each figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from suite.config.reference import MEAN
from suite.leaderboard.fields import BY_NAME, FIELDS
from suite.report import values
from suite.report.chart import Chart
from suite.report.data import PARTLY_ESTIMATED, Report
from suite.report.table import (
    Column,
    Row,
    Table,
    number,
    plain_words,
    rows_where,
    rows_with,
    rows_without,
    values_of,
    words,
)

# Units that stand behind the meaning of a column; the others are in its words.
NAMED_UNITS = ("kWh", "bytes", "s", "1/s")


def _leaderboard_meanings() -> dict[str, str]:
    """What each column means: the fields of the leaderboard, with the arm's short name."""
    meanings = {"rank": BY_NAME["rank"].meaning, "arm": BY_NAME["arm"].meaning}
    meanings["label"] = "its short name"
    meanings["home"] = BY_NAME["home"].meaning
    for about in FIELDS:
        if about.report:
            meanings[about.name] = about.meaning
            if about.unit in NAMED_UNITS:
                meanings[about.name] += f", {about.unit}"
    return meanings


LEADERBOARD = _leaderboard_meanings()
TRIALS = {
    "trial": "hash, name of its folder",
    "arm": "key of the arm",
    "task": "task",
    "phase": "search or confirm",
    "number": "in its study; 0 for confirm runs",
    "seed": "0 in the search",
    "learning_rate": "",
    "batch_size": "rows a step",
    "status": "how it ended",
    "validation_score": "best epoch",
    "test_score": "of that epoch; confirm runs only",
    "best_epoch": "from 1",
    "train_s": "training phase, s",
    "energy_kwh": "training phase, kWh",
    "energy_source": "how it was measured; cpu-time-estimate is no measurement",
    "peak_memory_bytes": "allocated, training phase, largest rank, bytes",
    "prepare_s": "what its method prepares before the first step, by whichever trial, s",
    "prepare_energy_kwh": "the same, kWh",
    "samples_per_s": "training, 1/s",
}
FAILURES = {
    "trial": TRIALS["trial"],
    "arm": TRIALS["arm"],
    "task": TRIALS["task"],
    "phase": TRIALS["phase"],
    "number": TRIALS["number"],
    "seed": TRIALS["seed"],
    "learning_rate": TRIALS["learning_rate"],
    "batch_size": TRIALS["batch_size"],
    "status": "how the trial ended; attempt = it was tried again",
    "type": "of the error",
    "message": "what it said",
    "log": "file in the trial's folder",
}


def leaderboard(report: Report) -> Table:
    """The table of all rows of the leaderboard."""
    title = "All rows, rejected ones and architectures that were not chosen included"
    return Table("leaderboard", title, LEADERBOARD, report.labelled(report.rows))


def trials(report: Report) -> Table:
    """The table of every trial."""
    return Table("trials", "Every trial that was handed out", TRIALS, report.trials)


def failures(report: Report) -> Table:
    """The table of everything that went wrong."""
    title = "Attempts that ended without a result, and trials without a score"
    return Table("failures", title, FAILURES, report.failures)


def dictionary(tables: Sequence[Table]) -> Table:
    """A table that says what every column of every file means."""
    rows = []
    for table in tables:
        for key, meaning in table.columns.items():
            rows.append({"file": f"{table.key}.csv", "column": key, "meaning": meaning})
    columns = {"file": "", "column": "", "meaning": "with its unit"}
    return Table("columns", "What the columns of the other files mean", columns, rows)


def everything(report: Report, charts: Sequence[Chart]) -> list[Table]:
    """All tables; figures of one kind share a table, and the dictionary comes last."""
    by_key: dict[str, Table] = {}
    figures = [chart.table for chart in charts]
    for table in (leaderboard(report), trials(report), failures(report), *figures):
        if table.key in by_key:
            # One file for each kind of figure, not one for each task or cell.
            rows = [*by_key[table.key].rows, *table.rows]
            by_key[table.key] = replace(by_key[table.key], rows=rows)
        else:
            by_key[table.key] = table
    found = list(by_key.values())
    return [*found, dictionary(found)]


def leaderboard_columns(report: Report) -> list[Column]:
    """The columns of the leaderboard, the everyday ones first.

    What is the same or unknown in every row is left out.
    """
    rows = report.shown

    note = report.energy_note
    columns = [words("arm", report.label)]
    if any(row["rank"] or values.has_one_seed(row) for row in rows):
        hint = (
            "arms that no test tells apart share ranks; Holm's correction over all pairs of the"
            " arms that a sweep of one home plans on a backbone and task"
        )
        columns.append(Column("rank", values.rank, _rank_value, hint))
    columns.append(plain_words("task"))
    columns.append(
        Column(
            "score",
            values.mean_score,
            lambda row: row["score_mean"],
            "test score, mean over seeds ± standard deviation; ↓ = less is better",
        )
    )
    if rows_with(rows, "ci_low"):
        columns.append(
            Column(
                BY_NAME["ci_low"].title,
                values.interval,
                lambda row: row["ci_low"],
                "over seeds and test items",
            )
        )
    if any(values.shows_baseline(row) for row in rows):
        columns.append(
            Column(
                BY_NAME["constant_score"].title,
                values.baseline,
                lambda row: row["constant_score"],
                "best score of an answer that is the same for all items; shown where a row is not"
                " significantly better",
            )
        )
    if rows_with(rows, "reference_score"):
        # Only a sweep that carries a paper's numbers has these two.
        columns.append(_field("reference_score"))
        columns.append(number("difference", BY_NAME["difference"].title, values.signed))
    columns.append(
        Column(
            f"energy{note}",
            _energy_shown(note),
            lambda row: row["energy_kwh"],
            "training of one run, with what its method prepares first",
        )
    )
    columns.append(_field("peak_memory_bytes"))
    columns.append(_field("seeds"))
    return [*columns, *[replace(column, extra=True) for column in _extra_columns(report)]]


def _extra_columns(report: Report) -> list[Column]:
    """The columns of the leaderboard behind the everyday ones."""
    rows = report.shown
    note = report.spent_note
    columns = []
    if False in values_of(rows, "shown_to_learn"):
        columns.append(
            words(
                BY_NAME["shown_to_learn"].title,
                values.shown_to_learn,
                "significantly better than the constant-answer baseline by a paired test, corrected"
                " over the task's arms",
            )
        )
    columns.append(_field("trainable_parameters"))
    # Both compare attention variants: with one variant they say nothing.
    if len(set(values_of(rows, "attention"))) > 1:
        columns.append(_field("prr"))
        columns.append(_field("peop"))
    if rows_with(rows, "kv_bytes_per_token"):
        columns.append(_field("kv_bytes_per_token"))
    if values.on_several_machines(rows):
        columns.append(
            words(
                "machine",
                lambda row: values.text(row["machine"]),
                "time and energy compare between rows of one machine only",
            )
        )
    columns.append(_field("train_s"))
    if rows_with(rows, "prepare_s"):
        columns.append(_field("prepare_energy_kwh", note=note))
        columns.append(_field("prepare_s"))
        columns.append(_field("train_memory_bytes"))
    if any(row["test_looks"] > 1 for row in rows):
        columns.append(_field("test_looks"))
    if any(arm.settings for arm in report.arms.values()):
        columns.append(
            words(
                "architecture",
                lambda row: report.arms[row["arm"]].settings or values.MISSING,
                "as chosen",
            )
        )
    columns.append(
        Column(
            "learning rate",
            values.learning_rate,
            lambda row: row["learning_rate"],
            "chosen; edge = scores may still rise beyond the searched range",
        )
    )
    columns.append(_field("validation_score"))
    columns.append(_field("search_best"))
    columns.append(_field("search_trials"))
    columns.append(_field("search_energy_kwh", note=note))
    columns.append(words("status", values.status))
    return columns


def _field(name: str, *, note: str = "") -> Column:
    """The column of one number of the leaderboard's fields."""
    about = BY_NAME[name]
    return number(name, about.title + note, values.SHOW[about.unit], about.meaning)


def _rank_value(row: Row) -> float | None:
    """A sort key: the best place, and where these are equal the worst."""
    if not row["rank"]:
        return None
    best, worst = values.rank_bounds(row["rank"])
    # The worst place only decides between equal best ones while it stays below 1,000.
    return best + worst / 1000


def _energy(row: Row) -> str:
    return values.energy(row["energy_kwh"])


def _energy_or_estimate(row: Row) -> str:
    if row["energy_kwh"] is not None and values.is_estimate(row):
        return f"{_energy(row)} est."
    return _energy(row)


def _energy_shown(note: str) -> Callable[[Row], str]:
    """How an energy is shown below a head with this note."""
    # Where all rows are alike, the head says what is an estimate.
    if note == PARTLY_ESTIMATED:
        return _energy_or_estimate
    return _energy


def trial_columns(report: Report) -> list[Column]:
    """The columns of one arm's trials."""
    return [
        plain_words("task"),
        plain_words("phase"),
        number("number", "no.", values.count),
        number("seed", "seed", values.count),
        number("learning_rate", "learning rate", values.brief),
        plain_words("status"),
        number("validation_score", "validation", values.score),
        number("test_score", "test", values.score),
        number("best_epoch", "best epoch", values.count),
        number("train_s", "train time", values.duration),
        Column(
            f"energy{report.energy_note}",
            _energy_shown(report.energy_note),
            lambda row: row["energy_kwh"],
        ),
        number("peak_memory_bytes", "memory", values.size),
        plain_words("trial"),
    ]


def failure_columns(report: Report) -> list[Column]:
    """The columns of `Report.failures`."""

    def arm(row: Row) -> str:
        # A failed trial may be all that an arm has: then no row names it.
        if row["arm"] in report.arms:
            return report.label(row)
        return str(row["arm"])

    def what(row: Row) -> str:
        if row["type"] == row["status"]:
            return str(row["status"])
        return f"{row['status']}: {row['type']}"

    return [
        words("arm", arm),
        plain_words("task"),
        plain_words("phase"),
        number("learning_rate", "learning rate", values.brief),
        words("what", what),
        plain_words("message"),
        plain_words("trial"),
    ]


def rejected_rows(report: Report) -> list[dict[str, Any]]:
    """The rows that a check of validity rejects, without means."""
    return rows_without(rows_where(report.rows, "admitted", False), "task", MEAN)


def rejected_columns(report: Report) -> list[Column]:
    """The columns of `rejected_rows`."""
    return [
        words("arm", report.label),
        plain_words("task"),
        Column("score", values.mean_score, lambda row: row["score_mean"]),
        words("reason", lambda row: "; ".join(row["rejected"])),
    ]
