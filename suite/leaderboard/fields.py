"""The one table of what a row of the leaderboard holds, from which every list of columns is made.

`Row` declares one field a line: its type, its unit, its title, how it averages over the tasks of an
arm, where it is shown, and what it means. From these lines come the frame with its column types,
mean rows, CSV and JSON, the file of rows, the columns of the report, MLflow's metrics of a cell,
and the list in docs/metrics.md. A number that `measure` makes from the results of a cell's trials
needs nothing more than its line (docs/adding.md).
"""

# ruff: noqa: RUF009  (the functions that the lines call make dataclass fields)
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from suite.leaderboard.measures import (
    CellResults,
    Measure,
    energy_of_runs,
    energy_source,
    from_scratch,
    frozen_dropout,
    loss_fall,
    loss_fall_p,
    machine,
    mean_of_runs,
    of_preparation,
    of_pretrain,
    of_search,
    parameter_count,
    peak_memory_bytes,
    precision,
    prepare_memory_bytes,
    prepare_missing,
    samples_per_s,
    train_memory_bytes,
    validation_score,
)
from suite.record.lm_eval import METRICS as LM_EVAL_METRICS
from suite.record.lm_eval import as_metrics
from suite.record.spec import cell_key

NOT_VERIFIABLE = "not verifiable here"
"""How `unverified` of a row begins."""
IMPORTED = f"{NOT_VERIFIABLE}: imported without its answers"
"""How it begins where the row came from a file."""


class Kind(Enum):
    """The type of a column; each value may be missing but the names."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    FLAG = "flag"
    JSON = "json"


class Average(Enum):
    """What stands on the mean row of an arm."""

    NOTHING = "nothing"
    """The field's default, because the value means nothing for several tasks."""
    SAME = "same"
    """The value of its first task: it is the same on all."""
    MEAN = "mean"
    """The mean over tasks, if every task has a value; an integer is rounded."""
    SCORE = "score"
    """The same mean, but only where more is better on all tasks or less is on all."""
    OWN = "own"
    """Something else, which `suite.leaderboard.table` says."""


@dataclass(frozen=True, slots=True)
class Field:
    """One line of the table.

    Attributes:
        name: Name of the attribute and the column; ends in its unit where it has one.
        kind: Its type.
        unit: `kWh`, `s`, `bytes`, `count`, `percent` (or the unit of the task's score), ...; empty
            where it has none.
        title: Head of the column for people.
        average: What the mean row of an arm shows.
        meaning: One sentence, or the part of one that follows a colon.
        hidden: Whether the row keeps it without showing it as a column.
        report: Whether the report's table has it.
        metric: Whether MLflow gets it as a metric of the cell's run.
        measure: Function that makes it from the results of the trials; None where
            `suite.leaderboard.row` makes it, or a comparison with other rows.
    """

    name: str
    kind: Kind
    unit: str
    title: str
    average: Average
    meaning: str
    hidden: bool
    report: bool
    metric: bool
    measure: Measure | None


def _column(
    kind: Kind,
    title: str = "",
    *,
    unit: str = "",
    average: Average = Average.NOTHING,
    meaning: str,
    default: Any = None,
    make: Callable[[], Any] | None = None,
    hidden: bool = False,
    report: bool = False,
    metric: bool = False,
    measure: Measure | None = None,
) -> Any:
    about = {
        "kind": kind,
        "unit": unit,
        "title": title,
        "average": average,
        "meaning": meaning,
        "hidden": hidden,
        "report": report,
        "metric": metric,
        "measure": measure,
    }
    # dataclasses refuse a mutable default, and one object for all rows would be a trap.
    if make is not None:
        return field(default_factory=make, metadata=about)
    return field(default=default, metadata=about)


def text(title: str = "", **about: Any) -> Any:
    """A line of words."""
    return _column(Kind.TEXT, title, **about)


def integer(title: str = "", *, metric: bool = True, **about: Any) -> Any:
    """A line of whole numbers."""
    return _column(Kind.INTEGER, title, metric=metric, **about)


def number(title: str = "", *, metric: bool = True, **about: Any) -> Any:
    """A line of numbers."""
    return _column(Kind.NUMBER, title, metric=metric, **about)


def flag(title: str = "", **about: Any) -> Any:
    """A line of yes and no."""
    return _column(Kind.FLAG, title, **about)


def mapping(title: str = "", **about: Any) -> Any:
    """A line of JSON objects."""
    # Missing is an empty mapping here, never None.
    return _column(Kind.JSON, title, make=dict, **about)


def listing(title: str = "", **about: Any) -> Any:
    """A line of JSON arrays."""
    return _column(Kind.JSON, title, make=list, **about)


# Without slots: `row_of` fills the dictionary of a row in one step.
@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell, or with the task `mean` one arm over its tasks.

    None means "not measured" or "not yet". The columns have the order of these lines.
    """

    # The names: what the row is about.
    backbone: str = text(
        "backbone", default="", average=Average.SAME, report=True, meaning="name of the backbone"
    )
    attention: str = text(
        "attention", default="", average=Average.SAME, report=True, meaning="attention variant"
    )
    method: str = text(
        "method", default="", average=Average.SAME, report=True, meaning="PETL method"
    )
    architecture: dict[str, Any] = mapping(
        "architecture", average=Average.SAME, report=True, meaning="settings of the method, JSON"
    )
    task: str = text(
        "task", default="", average=Average.OWN, report=True, meaning="task, or mean over all"
    )
    # The scores: what the confirm runs reached on test data, and the search on validation data.
    score_mean: float | None = number(
        "test score",
        unit="percent",
        average=Average.SCORE,
        report=True,
        meaning="test score, mean over seeds, in the unit of the task's metric",
    )
    score_std: float | None = number(
        unit="percent",
        average=Average.OWN,
        report=True,
        meaning="sample standard deviation (n - 1) over seeds; of a mean row, of the seeds' "
        "means over tasks; null for one seed",
    )
    seeds: int = integer(
        "seeds",
        unit="count",
        default=0,
        average=Average.OWN,
        report=True,
        meaning="confirm runs with a score; of a mean row, the fewest",
    )
    validation_score: float | None = number(
        "validation",
        unit="percent",
        average=Average.SCORE,
        report=True,
        measure=mean_of_runs(validation_score),
        meaning="validation score of a confirm run's best epoch, mean over seeds",
    )
    learning_rate: float | None = number(
        "learning rate",
        report=True,
        meaning="learning rate that validation chose",
    )
    # What the arm costs: parameters, energy, memory and time.
    trainable_parameters: int | None = integer(
        "trained",
        unit="count",
        average=Average.MEAN,
        report=True,
        measure=parameter_count("trainable"),
        meaning="parameters that train, the task's head included",
    )
    total_parameters: int | None = integer(
        "parameters",
        unit="count",
        average=Average.MEAN,
        report=True,
        measure=parameter_count("total"),
        meaning="all parameters",
    )
    energy_kwh: float | None = number(
        "energy",
        unit="kWh",
        average=Average.MEAN,
        report=True,
        measure=energy_of_runs(from_scratch("energy_kwh")),
        meaning="training of a confirm run with what its method prepares first, mean over seeds; "
        "null where one seed has none, or where that of some seeds was measured and of others "
        "estimated",
    )
    energy_source: str | None = text(
        "measured by",
        average=Average.OWN,
        report=True,
        measure=energy_source,
        meaning="how the energy was measured; cpu-time-estimate is no measurement",
    )
    peak_memory_bytes: int | None = integer(
        "memory",
        unit="bytes",
        average=Average.MEAN,
        report=True,
        measure=peak_memory_bytes,
        meaning="peak of allocated memory in training and preparation, largest rank of the largest "
        "run",
    )
    train_s: float | None = number(
        "train time",
        unit="s",
        average=Average.MEAN,
        report=True,
        measure=mean_of_runs(from_scratch("seconds")),
        meaning="training of a confirm run with what its method prepares first, mean over seeds",
    )
    samples_per_s: float | None = number(
        "samples/s",
        unit="1/s",
        average=Average.MEAN,
        report=True,
        measure=mean_of_runs(samples_per_s),
        meaning="training speed of a confirm run, mean over seeds",
    )
    # What its search cost, and where the cell stands.
    search_trials: int = integer(
        "trials",
        unit="count",
        default=0,
        average=Average.OWN,
        report=True,
        meaning="search trials that have ended, of this architecture",
    )
    search_energy_kwh: float | None = number(
        "search energy",
        unit="kWh",
        average=Average.MEAN,
        report=True,
        measure=of_search("energy_kwh"),
        meaning="energy of these trials, all phases; what they share counts once; null where "
        "some was measured and some estimated, here or in the confirm runs, and where a trial "
        "failed or ran out of memory, because such trials record no cost",
    )
    status: str = text(
        "status",
        default="searching",
        average=Average.OWN,
        report=True,
        meaning="searching, waiting, partial, done, failed or not chosen; as suite status says",
    )
    sweep: str = text("sweep", default="", average=Average.SAME, meaning="name of the sweep")
    arm: str = text("arm", default="", average=Average.SAME, report=True, meaning="key of the arm")
    edge: bool | None = flag(
        report=True,
        meaning="whether scores may still rise beyond an end of the range that was searched: those "
        "of the study, or the confirmed rate lies at an end; null where the rate is fixed or not "
        "known",
    )
    search_s: float | None = number(
        unit="s",
        average=Average.MEAN,
        measure=of_search("seconds"),
        meaning="duration of the search trials, all phases; what they share counts once; null "
        "where a trial failed or ran out of memory",
    )
    home: str = text(
        "home", default="", average=Average.SAME, meaning="id of the home that ran the sweep"
    )
    attention_options: dict[str, Any] = mapping(
        average=Average.SAME, report=True, meaning="options of the attention variant, JSON"
    )
    # The attention's own size, and the two metrics of the MHE paper that need it.
    attention_parameters: int | None = integer(
        "in attention",
        unit="count",
        average=Average.MEAN,
        measure=parameter_count("attention_parameters"),
        meaning="weights of the attention sublayers, before the method adds anything",
    )
    kv_bytes_per_token: int | None = integer(
        "KV/token",
        unit="bytes",
        average=Average.MEAN,
        measure=parameter_count("kv_bytes_per_token"),
        meaning="what the decoder's self-attention caches for a token, fp16; null for encoders",
    )
    # These compare rows, so they are made when the leaderboard is read and are never MLflow metrics
    # of one cell.
    prr: float | None = number(
        "PRR",
        unit="percent",
        metric=False,
        average=Average.OWN,
        report=True,
        meaning="performance retention ratio: share of multi-head attention's score",
    )
    prr_missing: str | None = text(average=Average.OWN, meaning="why there is no PRR")
    peop: float | None = number(
        "PEoP",
        metric=False,
        average=Average.OWN,
        report=True,
        meaning="performance elasticity of parameters, against single-head attention",
    )
    peop_missing: str | None = text(average=Average.OWN, meaning="why there is no PEoP")
    higher_is_better: bool | None = flag(
        default=True,
        average=Average.OWN,
        meaning="of the task's score; false for perplexity, null over tasks of both directions",
    )
    # What the pretrain run cost. It is not in `energy_kwh`, because rows may share the run.
    pretrain_energy_kwh: float | None = number(
        "pretrain energy",
        unit="kWh",
        average=Average.MEAN,
        measure=of_pretrain("energy_kwh"),
        meaning="train phase of the pretrain run behind the row's weights, which rows may share",
    )
    pretrain_s: float | None = number(
        "pretrain time",
        unit="s",
        average=Average.MEAN,
        measure=of_pretrain("train_s"),
        meaning="duration of that train phase",
    )
    pretrain_steps: int | None = integer(
        "pretrain steps",
        unit="count",
        average=Average.MEAN,
        measure=of_pretrain("steps"),
        meaning="optimizer steps of the pretrain run; null where there was none",
    )
    # What was decided about the study: its range, extensions and the contest.
    lr_sensitivity_decades: float | None = number(
        "good rates (decades)",
        unit="log10",
        average=Average.MEAN,
        meaning="width of the learning rates around the best that score within a point of it",
    )
    learning_rate_low: float | None = number(
        meaning="lower end of the range that was searched, extensions included"
    )
    learning_rate_high: float | None = number(
        meaning="upper end of the range that was searched, extensions included"
    )
    extensions: int | None = integer(
        unit="count", average=Average.MEAN, meaning="decades that the edge guard added to the range"
    )
    saved_trials: int | None = integer(
        unit="count",
        average=Average.MEAN,
        meaning="trials of the budget that the stop rule saved",
    )
    chosen: bool | None = flag(
        average=Average.SAME,
        meaning="whether this architecture won the contest of its method's; null where there was "
        "none, or not yet",
    )
    # What the choice of the architecture cost; this too compares rows.
    selection_trials: int | None = integer(
        "trials of all architectures",
        unit="count",
        metric=False,
        average=Average.MEAN,
        report=True,
        meaning="search trials of all architectures of the method that competed",
    )
    selection_s: float | None = number(
        unit="s",
        metric=False,
        average=Average.MEAN,
        meaning="duration of these trials, all phases; null where one failed or ran out of memory",
    )
    selection_energy_kwh: float | None = number(
        "their energy",
        unit="kWh",
        metric=False,
        average=Average.MEAN,
        report=True,
        meaning="energy of these trials, all phases; null where one failed or ran out of memory",
    )
    energy_to_target_kwh: float | None = number(
        "energy to target",
        unit="kWh",
        metric=False,
        average=Average.MEAN,
        meaning="energy_kwh up to the epoch that reaches a share of full fine-tuning's validation "
        "score, mean over confirm runs",
    )
    energy_to_target_missing: str | None = text(
        average=Average.OWN, meaning="why there is no energy to the target"
    )
    # What a paper printed, beside what this sweep measured.
    reference_score: float | None = number(
        "paper",
        unit="percent",
        metric=False,
        average=Average.OWN,
        report=True,
        meaning="score that a paper printed for the row",
    )
    reference_std: float | None = number(
        unit="percent", metric=False, average=Average.OWN, meaning="its deviation, if printed"
    )
    reference_source: str | None = text(average=Average.OWN, meaning="paper and table")
    difference: float | None = number(
        "ours - paper",
        unit="percent",
        metric=False,
        average=Average.OWN,
        report=True,
        meaning="score_mean - reference_score",
    )
    reference: dict[str, float] = mapping(
        average=Average.OWN, meaning="other numbers of the paper's line, as printed, JSON"
    )
    lm_eval: dict[str, dict[str, dict[str, float | int | None]]] = mapping(
        meaning="what lm-eval measured on the confirm runs: means and spreads by metric, JSON"
    )
    # How sure the score is: the rank and the interval. These need the answers of the runs.
    rank: str | None = text(
        "rank",
        average=Average.OWN,
        report=True,
        meaning="place among the finished rows of the sweep, backbone and task: from 1 + how many "
        "are shown better to all - how many are shown worse, with Holm's correction over all pairs "
        "of arms that the sweep plans there; null with one seed",
    )
    rank_missing: str | None = text(average=Average.OWN, meaning="why there is no rank")
    ci_low: float | None = number(
        "95% interval",
        unit="percent",
        average=Average.OWN,
        report=True,
        meaning="lower end of the 95% interval of score_mean over seeds and items",
    )
    ci_high: float | None = number(
        unit="percent",
        average=Average.OWN,
        report=True,
        meaning="upper end of the 95% interval",
    )
    ci_of: str | None = text(
        average=Average.OWN,
        report=True,
        meaning="what the interval is over: seeds x items, or items for one seed",
    )
    ci_missing: str | None = text(meaning="why there is no interval")
    # Whether the row may be believed.
    admitted: bool | None = flag(
        average=Average.OWN,
        report=True,
        meaning="false where a check of validity rejects the row; null = not known",
    )
    rejected: list[str] = listing(
        "rejected", average=Average.OWN, report=True, meaning="why it is rejected, JSON"
    )
    dirty: bool = flag(
        default=False,
        average=Average.OWN,
        meaning="whether an edited checkout made one of its runs",
    )
    own_code: str | None = text(
        average=Average.SAME,
        meaning="commit of the code that the backbone's checkpoint brought; null = it brought none",
    )
    constant_score: float | None = number(
        "constant-answer baseline",
        unit="percent",
        average=Average.SCORE,
        report=True,
        meaning="score of the best answer that is the same for every test item",
    )
    constant_p: float | None = number(
        report=True,
        meaning="p-value of score_mean being better than that by luck alone, one-sided; 1 where it "
        "is no better",
    )
    constant_missing: str | None = text(meaning="why there is no such score, or no p-value")
    # Made when the leaderboard is read, because the correction takes all rows of a family.
    constant_p_holm: float | None = number(
        metric=False,
        report=True,
        meaning="that p-value times test_looks, corrected (Holm) over the arms that the sweep "
        "plans on this backbone and task",
    )
    shown_to_learn: bool | None = flag(
        "shown to learn",
        report=True,
        meaning="whether constant_p_holm is below 0.05; false = not shown, which is no proof that "
        "the row did not learn",
    )
    loss_fall: float | None = number(
        report=True,
        measure=loss_fall,
        meaning="mean training loss of a confirm run's first epoch less that of its last (of a "
        "single epoch: its halves), mean over seeds",
    )
    loss_fall_p: float | None = number(
        report=True,
        measure=loss_fall_p,
        meaning="two-sided p-value of no change of the loss: Student t over seeds, not corrected",
    )
    precision: str | None = text(
        "precision",
        average=Average.OWN,
        measure=precision,
        meaning="what its runs computed in; rows of different precisions are not compared",
    )
    machine: str | None = text(
        "machine",
        average=Average.OWN,
        measure=machine,
        meaning="model of the processor or board that its confirm runs computed on; costs of "
        "different ones are not comparable",
    )
    # What the ranks could have shown.
    shown_difference: float | None = number(
        "tells apart",
        unit="percent",
        metric=False,
        average=Average.OWN,
        meaning="difference between two arms that the ranks show in 80% of cases, with these "
        "seeds; in the unit of the score",
    )
    seeds_for_point: int | None = integer(
        "seeds for 1 point",
        unit="count",
        metric=False,
        average=Average.OWN,
        meaning="seeds with which the ranks would show a difference of 1; null where the items "
        "hide it",
    )
    test_looks: int = integer(
        "test looks",
        unit="count",
        metric=False,
        default=0,
        average=Average.OWN,
        report=True,
        meaning="sets of confirm runs that a test score of the row was read from, by other seeds "
        "or another learning rate; p-values are multiplied by it",
    )
    looks_warning: str | None = text(
        average=Average.OWN, meaning="which sets, where there are several"
    )
    # What the search believed of the rate that it chose.
    search_best: float | None = number(
        "search's best",
        unit="percent",
        average=Average.SCORE,
        report=True,
        meaning="best validation score of all search trials; the best of noisy values, so too good "
        "on average",
    )
    # The part of a run's energy, time and memory that comes before its first step: Fisher passes.
    prepare_energy_kwh: float | None = number(
        "energy to prepare",
        unit="kWh",
        average=Average.MEAN,
        report=True,
        measure=energy_of_runs(of_preparation("energy_kwh")),
        meaning="part of energy_kwh before the first step, in full although runs share it: what "
        "the method prepares from training data, and the pass of frozen stacks whose states are "
        "kept; null where there is neither, or where one was measured and the other estimated",
    )
    prepare_s: float | None = number(
        "time to prepare",
        unit="s",
        average=Average.MEAN,
        report=True,
        measure=mean_of_runs(of_preparation("seconds")),
        meaning="the same part of train_s",
    )
    prepare_memory_bytes: int | None = integer(
        "memory to prepare",
        unit="bytes",
        average=Average.MEAN,
        measure=prepare_memory_bytes,
        meaning="peak of allocated memory before the first step, largest rank",
    )
    train_memory_bytes: int | None = integer(
        "memory to train",
        unit="bytes",
        average=Average.MEAN,
        measure=train_memory_bytes,
        meaning="peak of allocated memory in the train phase alone, largest rank of the largest "
        "run",
    )
    prepare_missing: str | None = text(
        measure=prepare_missing, meaning="why the energy to prepare is not known"
    )
    unverified: str | None = text(
        average=Average.OWN,
        meaning="why the score was not computed again from stored answers; null = it was",
    )
    batch_size: int | None = integer(
        "batch size",
        unit="examples",
        report=True,
        meaning="batch size that validation chose, or the sweep's",
    )
    frozen_dropout: str | None = text(
        "frozen dropout",
        average=Average.OWN,
        report=True,
        measure=frozen_dropout,
        meaning="off = its frozen stacks ran without dropout; no effect = that was asked for, but "
        "its method has gradients in the backbone; null = it was not asked for",
    )

    # What follows is kept with the row and shown nowhere as a column.
    rivals: str = text(
        default="",
        hidden=True,
        average=Average.SAME,
        meaning="the same for all cells that differ in their attention and its pretrain run only",
    )
    conditions: str = text(
        default="",
        hidden=True,
        average=Average.SAME,
        meaning="the same for all cells that differ in method, architecture and task only",
    )
    looks: dict[str, Any] = mapping(
        hidden=True,
        meaning="the sets behind test_looks: learning rate, batch size and seeds of each",
    )
    seed_scores: dict[str, float] = mapping(
        hidden=True, average=Average.OWN, meaning="test score by seed"
    )
    curve: list[list[Any]] = listing(
        hidden=True,
        meaning="learning rate, best validation score or null, status and batch size of every "
        "search trial",
    )
    progress: list[list[Any]] = listing(
        hidden=True,
        meaning="seed, energy so far in kWh and score of every epoch that was a run's best yet",
    )
    reference_mean: dict[str, Any] = mapping(
        hidden=True, meaning="what a paper printed for the mean over the arm's tasks"
    )
    planned_tasks: int = integer(
        unit="count",
        metric=False,
        hidden=True,
        default=0,
        average=Average.SAME,
        meaning="tasks of the sweep, over all of which the mean is; 0 = an earlier version's row",
    )
    planned_arms: int = integer(
        unit="count",
        metric=False,
        hidden=True,
        default=0,
        average=Average.SAME,
        meaning="arms of the sweep on this backbone and task, which the verdicts are corrected "
        "for; 0 = an earlier version's row",
    )
    ended_at: float | None = number(
        unit="s",
        hidden=True,
        meaning="when the last of its trials ended, those of seeds that the sweep no longer names "
        "among them, seconds since 1970",
    )
    mean_rank: dict[str, Any] = mapping(
        hidden=True,
        meaning="rank and interval of the arm's mean row, which every task's row carries",
    )
    ranked: str = text(default="", hidden=True, meaning="digest of the rows that the rank compares")
    mean_ranked: str = text(
        default="", hidden=True, meaning="digest of the rows that the mean row's rank compares"
    )
    digest: str = text(
        default="", hidden=True, meaning="digest of the files and settings that the row was made of"
    )

    @property
    def cell_key(self) -> str:
        """The name of the row's cell."""
        return cell_key(self.arm, self.task)


FIELDS = tuple(Field(name=f.name, **f.metadata) for f in fields(Row))
NAMES = tuple(f.name for f in FIELDS)
COLUMNS = tuple(f.name for f in FIELDS if not f.hidden)
BY_NAME = {f.name: f for f in FIELDS}


def of_kind(*kinds: Kind) -> tuple[str, ...]:
    """Names of the columns of some types."""
    return tuple(f.name for f in FIELDS if f.kind in kinds and not f.hidden)


def averaged(*ways: Average) -> tuple[str, ...]:
    """Names of the fields that a mean row makes in one of these ways."""
    return tuple(f.name for f in FIELDS if f.average in ways)


def measured(results: CellResults) -> dict[str, Any]:
    """Everything of a row that is made from the results of its trials alone."""
    values: dict[str, Any] = {}
    for about in FIELDS:
        if about.measure is not None:
            values[about.name] = about.measure(results)
    return values


def metrics_of(row: Row) -> dict[str, float]:
    """The known numbers of a row, which MLflow gets as the metrics of its cell's run."""
    found: dict[str, float] = {}
    for about in FIELDS:
        value = getattr(row, about.name)
        # MLflow would store infinity as 1.8e308.
        if about.metric and value is not None and math.isfinite(value):
            found[about.name] = float(value)
    # lm-eval names its metrics by tasks of its own, which no table can list.
    return found | as_metrics(row.lm_eval)


def is_metric(name: str) -> bool:
    """Whether `metrics_of` gives a number of that name for some row."""
    if name.startswith(LM_EVAL_METRICS):
        return True
    return name in BY_NAME and BY_NAME[name].metric


def with_values(row: Row, **values: Any) -> Row:
    """A copy of a row with some other values.

    It does what `dataclasses.replace` does in a tenth of the time: a leaderboard of 10,000 rows
    needs it four times for each.
    """
    return row_of({**vars(row), **values})


def row_of(values: dict[str, Any]) -> Row:
    """Make a row from values for all its fields, without its slow constructor."""
    # The dataclass is frozen, so its own `__setattr__` would refuse.
    row = object.__new__(Row)
    object.__setattr__(row, "__dict__", values)
    return row
