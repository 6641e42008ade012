"""`suite leaderboard`: test scores and their cost, a row per cell and a mean row per arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Unpack

import typer

from suite.cli import complete, render
from suite.cli.options import (
    Format,
    FormatOption,
    HomeOption,
    OnlySweepOption,
    OnlyTaskOption,
    TrackingOption,
    home_to_read,
    split_names,
)
from suite.cli.render import Column, Row, column, put
from suite.config.names import DEFAULT_HOME
from suite.config.reference import MEAN
from suite.errors import UnknownNameError
from suite.leaderboard.choice import LEAST_TARGET_FRAC, TARGET_FRAC, Choice, Sort
from suite.report import values
from suite.report.names import architecture_of

AXES = ("sweep", "backbone", "attention")
DONE = "done"
NAMES = ("sweep", "home", "backbone", "attention", "method", "architecture", "task")
"""Fields that tell rows apart; `--columns` keeps them in CSV and JSON."""
MOST_LINES = 12
"""Lines below the table on what the ranks rest on."""


def leaderboard(
    home: HomeOption = DEFAULT_HOME,
    tracking_uri: TrackingOption = None,
    sweep: OnlySweepOption = None,
    task: OnlyTaskOption = None,
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
    sort: Annotated[Sort, typer.Option(help="Order of the rows, the best first.")] = Sort.SCORE,
    target: Annotated[
        float,
        typer.Option(
            min=LEAST_TARGET_FRAC,
            max=1.0,
            help="Share of full's validation score, for the energy to it.",
        ),
    ] = TARGET_FRAC,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Show rejected rows too, with the reason, and architectures that lost."
        ),
    ] = False,
    wide: Annotated[
        bool, typer.Option("--wide", help="Show every column, however narrow the terminal is.")
    ] = False,
    fields: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="NAME,...",
            autocompletion=complete.listed(complete.fields),
            help="Show these columns behind the names of the arm and task: rank,score_mean,train_s "
            "(docs/metrics.md lists all).",
        ),
    ] = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Show test scores with their cost: a row per cell, and a mean row per arm over its tasks."""
    # Neither `--help` nor another command waits for what reads the rows.
    from suite.record.folder import Home
    from suite.tracking.store import resolve_uri

    uri = resolve_uri(Home(home_to_read(home, tracking_uri)), tracking_uri)
    show(
        uri,
        sort=sort,
        fmt=fmt,
        target_frac=target,
        # Hidden by default: a rejected row beside the others reads like a result.
        rejected=everything,
        sweep=sweep,
        task=task,
        method=method,
        attention=attention,
        wide=wide,
        fields=_known_fields(fields),
    )


def _known_fields(given: str | None) -> list[str]:
    """The names that `--columns` lists.

    Raises:
        ConfigError: A name is none of a field.
    """
    from suite.leaderboard.fields import COLUMNS

    if given is None:
        return []
    names = split_names(given)
    for name in names:
        if name not in COLUMNS:
            raise UnknownNameError("column", name, COLUMNS, where="--columns")
    return names


def show(
    uri: str,
    *,
    fmt: Format,
    wide: bool = False,
    fields: Sequence[str] = (),
    sweep: str | None = None,
    **choice: Unpack[Choice],
) -> None:
    """Print the leaderboard that the MLflow store at `uri` holds.

    Args:
        uri: The store.
        fmt: How the rows are printed.
        wide: Show every column, however narrow the terminal is.
        fields: Names of the fields to show behind the names of the rows; none = the usual ones.
        sweep: Only this sweep; None = all.
        choice: Which rows are shown, in which order: the arguments of
            `suite.leaderboard.table.choose`. With `rejected`, architectures that lost too.
    """
    from suite.leaderboard.fields import COLUMNS
    from suite.leaderboard.table import plain
    from suite.tracking.query import chosen

    found = chosen(uri, sweep=sweep, **choice)
    if found.hidden == 1:
        put("1 row is rejected; --all shows it with the reason", err=True)
    # On stderr, because the table may be piped.
    elif found.hidden:
        put(f"{found.hidden} rows are rejected; --all shows them with the reason", err=True)
    rows = plain(found.rows)
    for row in rows:
        if row["looks_warning"] is not None and row["task"] != MEAN:
            name = f"{row['method']} on {row['task']}"
            put(f"warning: {name}: {row['looks_warning']}", err=True)
    everyone = rows
    if fmt.for_people and not choice.get("rejected"):
        rows = with_test_runs(rows)
    title = _title_of(rows)
    # A document has room for the words that a report has.
    short = fmt is Format.TABLE
    shown = columns(rows, among=everyone, short=short)
    if fields:
        shown = _name_columns(rows, everyone)
        # What the table always shows stands there once, also where it is asked for.
        there = {one.head for one in shown}
        for one in _chosen_columns(rows, fields, short=short):
            if one.head not in there:
                shown.append(one)
    keys: Sequence[str] = COLUMNS
    key = _key(rows, short=short)
    if fields and fmt in (Format.CSV, Format.JSON):
        keys = list(dict.fromkeys([*NAMES, *fields]))
        rows = [{name: row[name] for name in keys} for row in rows]
    render.render(rows, shown, fmt, keys=keys, title=title, wide=wide, key=key)
    # A program reads the same from the fields.
    if fmt.for_people:
        _say_what_ranks_rest_on(rows)


def _title_of(rows: Sequence[Row]) -> str:
    """What is the same in all rows, and the seeds of their scores."""
    parts = [f"{axis} {value}" for axis, value in constant(rows).items()]
    # A row without a score has no test runs yet, or none by design.
    seeds = {row["seeds"] for row in rows if row["score_mean"] is not None}
    # Every score needs its number of seeds; the column with them is often hidden.
    if len(seeds) == 1:
        parts.append(f"seeds: {seeds.pop()}")
    elif seeds:
        parts.append(f"seeds: {min(seeds)} to {max(seeds)}")
    return ", ".join(parts)


def with_test_runs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without architectures that lost their contest, and say how many these are.

    They have no test score, so that they are no answer to a question about methods.
    """
    from suite.plan.cell_state import CellStatus

    kept = [row for row in rows if row["status"] != CellStatus.NOT_CHOSEN]
    lost = len(rows) - len(kept)
    if lost == 1:
        put("1 architecture lost its contest; --all shows it", err=True)
    elif lost:
        put(f"{lost} architectures lost their contests; --all shows them", err=True)
    return kept


def _say_what_ranks_rest_on(rows: Sequence[Row]) -> None:
    """Say on stderr, by task, what the ranks could tell apart, or why one seed gives none."""
    from suite.stats.power import sentence_of

    several_homes = len({row["home"] for row in rows}) > 1
    said: dict[str, None] = {}
    for row in rows:
        sweep = row["sweep"]
        # Ranks compare the rows of one home.
        if several_homes:
            sweep += f" in home {row['home']}"
        where = f"{sweep}, {row['backbone']}, {row['task']}"
        # Ranks that could show no difference: scores do not vary, or the items are too few.
        if row["rank"] is not None and row["shown_difference"] is not None:
            words = sentence_of(row)
            said[f"ranks of {where}: {words} (Holm over all pairs of its arms)"] = None
        elif values.has_one_seed(row):
            said[f"{where}: {row['rank_missing']}"] = None
    for line in list(said)[:MOST_LINES]:
        render.say(line, err=True)
    if len(said) > MOST_LINES:
        put(f"and {len(said) - MOST_LINES} more places; --sweep shows fewer", err=True)


def constant(rows: Sequence[Row]) -> dict[str, str]:
    """Axes with the same value in every row: they stand above the table instead of in it."""
    found = {}
    for key in AXES:
        given = {_axis(row, key) for row in rows}
        if len(given) == 1:
            found[key] = given.pop()
    return found


def columns(rows: Sequence[Row], *, among: Sequence[Row] = (), short: bool = False) -> list[Column]:
    """Columns of the table, in the order of reading; one without any value is left out.

    Args:
        rows: The rows to show.
        among: These and the ones that are hidden, from which the names tell them apart.
        short: Write marks instead of some words, because a terminal is narrow.
    """
    shown = [*_name_columns(rows, among or rows), *_score_columns(rows, short=short)]
    # What a choice rests on stands in front: it fits 80 columns.
    for name, rank in NUMBERS.items():
        # A column that few sweeps have needs a reason to be there, others always show.
        reason = ONLY_WITH.get(name)
        if reason is None or any(reason(row) for row in rows):
            shown.append(_number(name, rank, rows))
    # A rejected row has its reasons in a column of their own.
    if any(values.status(row) not in (DONE, values.REJECTED) for row in rows):
        shown.append(Column("status", values.status, rank=1))
    if any(row["rejected"] for row in rows):
        shown.append(Column("rejected", lambda row: "; ".join(row["rejected"]), wraps=True))
    return shown


def _chosen_columns(rows: Sequence[Row], names: Sequence[str], *, short: bool) -> list[Column]:
    """The columns of some fields, each as the usual table shows it."""
    special = {
        "rank": Column("rank", partial(values.rank, short=short)),
        "score_mean": Column(_title("score_mean"), values.mean_score, right=True),
        "ci_low": Column(_title("ci_low"), partial(values.interval, short=short), right=True),
        "status": Column("status", values.status),
    }
    return [special.get(name) or _number(name, 0, rows) for name in names]


def _key(rows: Sequence[Row], *, short: bool) -> list[tuple[str, str]]:
    """What the marks of a table mean: the head of the column that has them, and a sentence."""
    found = []
    if short and any(row.get("ci_of") == "items" for row in rows):
        said = f"*: the interval is {values.ITEMS_ONLY}, as there is one seed"
        found.append((_title("ci_low"), said))
    if any(row.get("edge") for row in rows):
        said = "edge: scores may still rise beyond an end of the range that was searched"
        found.append((_title("learning_rate"), said))
    baseline = _title("constant_score")
    said = (
        f"{baseline}: the best score of an answer that is the same for all items, as the most "
        "common class is; shown where a row is not significantly better"
    )
    found.append((baseline, said))
    if values.on_several_machines(rows):
        said = "machine: time and energy compare between rows of one machine only"
        found.append((_title("machine"), said))
    if any(values.is_estimate(row) for row in rows if row.get("energy_source")):
        said = "energy: an estimate from processor time, where no counter can be read"
        found.append((_title("energy_kwh"), said))
    return found


def _name_columns(rows: Sequence[Row], among: Sequence[Row]) -> list[Column]:
    """The columns that tell the rows apart, and from those of `among`."""
    shown = []
    same = constant(rows)
    for key in AXES:
        if key not in same:
            shown.append(Column(key, partial(_axis, key=key)))
    # Imported results may hold the same sweep of two homes.
    if len({row["home"] for row in rows}) > 1:
        shown.append(column("home"))
    shown.append(column("method"))
    methods = {row["method"] for row in among}
    # An architecture has a column only where a method comes with several.
    arms = {(row["method"], str(row["architecture"])) for row in among}
    if len(arms) > len(methods):
        shown.append(Column("architecture", architecture_of(among)))
    shown.append(column("task"))
    if values.on_several_machines(rows):
        shown.append(column("machine", rank=1))
    return shown


def _score_columns(rows: Sequence[Row], *, short: bool) -> list[Column]:
    """The test score, its rank, and the scores to compare it with."""
    shown = [Column(_title("score_mean"), values.mean_score, right=True)]
    if any(row["ci_low"] is not None for row in rows):
        interval = partial(values.interval, short=short)
        shown.append(Column(_title("ci_low"), interval, right=True, rank=1))
    if any(row["rank"] or values.has_one_seed(row) for row in rows):
        shown.append(Column("rank", partial(values.rank, short=short), rank=1))
    # The baseline is worth a look only where a row fails to beat it.
    if any(values.shows_baseline(row) for row in rows):
        shown.append(Column(_title("constant_score"), values.baseline, right=True, rank=3))
    if any(row["reference_score"] is not None for row in rows):
        shown.append(_number("reference_score", 0, rows))
        shown.append(_number("difference", 0, rows))
    return shown


def _has(name: str) -> Callable[[Row], bool]:
    return lambda row: row[name] is not None


def _is_not_shown_to_learn(row: Row) -> bool:
    return row["shown_to_learn"] is False


def _was_looked_at_again(row: Row) -> bool:
    return bool(row["test_looks"] > 1)


def _has_new_attention(row: Row) -> bool:
    return bool(row["attention"] != "pretrained")


def _was_chosen(row: Row) -> bool:
    return bool(row["chosen"])


NUMBERS = {
    "energy_kwh": 2,
    "peak_memory_bytes": 2,
    "train_s": 4,
    "trainable_parameters": 3,
    "shown_to_learn": 6,
    "seeds": 5,
    "test_looks": 3,
    "prr": 3,
    "peop": 3,
    "learning_rate": 4,
    "validation_score": 5,
    "search_best": 8,
    "total_parameters": 7,
    "attention_parameters": 5,
    "kv_bytes_per_token": 5,
    "energy_source": 8,
    "frozen_dropout": 4,
    "prepare_energy_kwh": 7,
    "prepare_s": 7,
    "prepare_memory_bytes": 8,
    "train_memory_bytes": 8,
    "samples_per_s": 5,
    "search_trials": 6,
    "search_energy_kwh": 6,
    "selection_trials": 8,
    "selection_energy_kwh": 8,
    "energy_to_target_kwh": 6,
    "lr_sensitivity_decades": 8,
    "pretrain_steps": 7,
    "pretrain_energy_kwh": 7,
    "pretrain_s": 8,
}
"""Columns by name, in the order of reading; a narrow terminal drops the highest rank first."""
ONLY_WITH: dict[str, Callable[[Row], bool]] = {
    "shown_to_learn": _is_not_shown_to_learn,
    "test_looks": _was_looked_at_again,
    # These measure a new attention against the pretrained one, which has none of them.
    "prr": _has_new_attention,
    "peop": _has_new_attention,
    "attention_parameters": _has_new_attention,
    "kv_bytes_per_token": _has_new_attention,
    # What a contest of architectures cost; most sweeps have none.
    "selection_trials": _was_chosen,
    "selection_energy_kwh": _was_chosen,
    "search_best": _has("search_best"),
    "frozen_dropout": _has("frozen_dropout"),
    # Few methods prepare anything before they train.
    "prepare_energy_kwh": _has("prepare_s"),
    "prepare_s": _has("prepare_s"),
    "prepare_memory_bytes": _has("prepare_s"),
    # Where nothing is prepared it is the same as the peak.
    "train_memory_bytes": _has("prepare_s"),
    "energy_to_target_kwh": _has("energy_to_target_kwh"),
    "lr_sensitivity_decades": _has("lr_sensitivity_decades"),
    # Few sweeps have a pretrain stage; the three columns come and go together.
    "pretrain_steps": _has("pretrain_steps"),
    "pretrain_energy_kwh": _has("pretrain_steps"),
    "pretrain_s": _has("pretrain_steps"),
}
"""A column is shown where one of the rows fulfils this."""


def _title(name: str) -> str:
    from suite.leaderboard.fields import BY_NAME

    return BY_NAME[name].title or name


def _number(name: str, rank: int, rows: Sequence[Row]) -> Column:
    """A column as the table of fields describes it."""
    from suite.leaderboard.fields import BY_NAME, Kind

    about = BY_NAME[name]
    head = _title(name)
    # These say more than their number or their flag.
    if name == "learning_rate":
        return Column(head, values.learning_rate, right=True, rank=rank)
    if name == "shown_to_learn":
        return Column(head, values.shown_to_learn, rank=rank)
    if name == "difference":
        return column(name, head, values.signed, rank=rank)
    # One unit for a column, so that its numbers can be compared at a glance.
    if about.unit in ("kWh", "bytes"):
        scale = _scale(name, rows)
        return column(name, head, scale.show, rank=rank, unit=scale.unit)
    # Text stands left, numbers right.
    if about.kind in (Kind.INTEGER, Kind.NUMBER):
        return column(name, head, values.SHOW.get(about.unit, values.brief), rank=rank)
    if about.kind is Kind.JSON:
        return column(name, head, values.settings, rank=rank)
    return column(name, head, rank=rank)


def _scale(name: str, rows: Sequence[Row]) -> values.Scale:
    """The unit of a column; all energies of a table have that of the runs' energy."""
    from suite.leaderboard.fields import BY_NAME

    unit = BY_NAME[name].unit
    amounts = [row.get(name) for row in rows]
    if unit == "kWh" and any(row.get("energy_kwh") for row in rows):
        amounts = [row["energy_kwh"] for row in rows]
    return values.scale_of(unit, amounts)


def _axis(row: Row, key: str) -> str:
    """The value of a row on an axis; a backbone that ran code of its own says so."""
    if key == "backbone":
        return values.backbone(row)
    if key == "attention":
        return values.attention(row)
    return str(row[key])
