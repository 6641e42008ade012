"""Reads the answers that a cell's confirm runs gave to the test items, and checks their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.parquet as pq

from suite.config.task import TaskConfig
from suite.config.task_files import own_score
from suite.config.training import Precision
from suite.errors import ContradictionError, StatisticsError
from suite.metrics.items import Items, Statistic, statistic_of
from suite.record.cells import Trial
from suite.record.provenance import COMPARED_VERSIONS
from suite.record.result import TrialResult

SCORE_TOLERANCE = 1e-6
"""Relative. sacreBLEU and rouge_score sum in another order, which changes far less than this."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one cell's runs on the test split.

    Attributes:
        task: The task that all runs were tested on.
        index: Names of the items; all runs have the same ones.
        runs: Answers by seed; all seeds share golds and groups.
        scores: The task's score by seed.
        precision: What all runs computed in; None where they do not say.
        sweep: Its name.
        origin: What the runs were trained on and with, as far as they say: the SHA-256 of the
            `data`, and the version of each of `COMPARED_VERSIONS`.
    """

    task: TaskConfig
    index: tuple[str, ...]
    runs: dict[int, Items]
    scores: dict[int, float]
    precision: Precision | None = None
    sweep: str = ""
    origin: Mapping[str, str] = field(default_factory=dict)

    def with_seeds(self, seeds: Sequence[int]) -> Answers:
        """These answers for some seeds only, in the given order."""
        runs = {seed: self.runs[seed] for seed in seeds}
        scores = {seed: self.scores[seed] for seed in seeds}
        return replace(self, runs=runs, scores=scores)

    @property
    def items(self) -> Items:
        """One run's items, for their golds and groups."""
        return next(iter(self.runs.values()))


def headline_metrics(task: TaskConfig) -> list[str]:
    """The metrics whose mean is the task's score."""
    if task.headline is not None:
        return [task.headline]
    return list(task.metrics)


def read_answers(confirmed: Sequence[Trial]) -> Answers:
    """Read the answers of all confirm runs that have a score.

    Raises:
        StatisticsError: No run has a score; a file is absent or unreadable; the runs were tested on
            different items, or computed in different precisions.
        ContradictionError: A run's answers do not give the score that it recorded.
    """
    runs: dict[int, Items] = {}
    scores: dict[int, float] = {}
    precisions: set[Precision | None] = set()
    origin: dict[str, str] = {}
    index: tuple[str, ...] = ()
    first: Trial | None = None
    # in the order of seeds, so that sums over runs do not depend on when each ended
    for trial in sorted(confirmed, key=lambda trial: trial.spec.seed):
        if trial.result is None or trial.result.score is None:
            continue
        seed = trial.spec.seed
        found_index, items = _read_items(trial)
        if first is None:
            first = trial
            index = found_index
        else:
            expected = runs[first.spec.seed]
            same = (index, expected.golds, expected.groups) == (
                found_index,
                items.golds,
                items.groups,
            )
            if not same:
                raise StatisticsError(
                    f"seeds {first.spec.seed} and {seed} were tested on different items"
                )
        runs[seed] = items
        scores[seed] = trial.result.score
        precisions.add(trial.result.precision)
        # Seeds that disagree reject their row, so each fact may come from the first that says it.
        origin = _origin(trial.result) | origin
    if first is None:
        raise StatisticsError("no confirm run has a score")
    if len(precisions) > 1:
        named = ", ".join(sorted(map(str, precisions)))
        raise StatisticsError(f"its seeds computed in different precisions ({named})")
    answers = Answers(
        first.spec.task,
        index,
        runs,
        scores,
        precision=precisions.pop(),
        sweep=first.spec.sweep,
        origin=origin,
    )
    _check_scores(answers)
    return answers


def _origin(result: TrialResult) -> dict[str, str]:
    found = {}
    # Old records have none.
    if result.data_hash:
        found["data"] = result.data_hash
    versions = result.provenance.get("versions") or {}
    for package in COMPARED_VERSIONS:
        if versions.get(package) is not None:
            found[package] = str(versions[package])
    return found


def _read_items(trial: Trial) -> tuple[tuple[str, ...], Items]:
    """The names of a run's test items, and the items."""
    path = trial.folder.predictions("test")
    try:
        table = pq.read_table(path)
        # each kind of task names these two columns in its own words, in this order
        gold, prediction = (name for name in table.column_names if name not in ("index", "group"))
        columns = table.to_pydict()
        if "index" not in columns:
            raise ValueError("it lacks the column index")
        index = tuple(map(str, columns["index"]))
        groups = columns.get("group")
        if groups is not None:
            groups = list(map(str, groups))
    except (OSError, pa.ArrowException, ValueError) as error:
        reason = f"cannot be read: {error}"
        if isinstance(error, FileNotFoundError):
            reason = "is not there"
        raise StatisticsError(
            f"seed {trial.spec.seed}: {trial.folder.hash}/{path.name} {reason}"
        ) from None
    return index, Items(columns[prediction], columns[gold], groups)


def _check_scores(answers: Answers) -> None:
    """Check a record against its file of predictions: somebody may have copied or edited one."""
    for seed, items in answers.runs.items():
        try:
            found = score_of(answers.task, items)
        # Texts among numbers, fields without a value: the file is not what a trial writes.
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
            raise ContradictionError(
                f"seed {seed}: its answers cannot be scored: {error}"
            ) from None
        recorded = answers.scores[seed]
        if not math.isclose(found, recorded, rel_tol=SCORE_TOLERANCE, abs_tol=SCORE_TOLERANCE):
            raise ContradictionError(
                f"seed {seed}: its answers score {found:.6g}, but its record says {recorded:.6g}"
            )


def score_of(task: TaskConfig, items: Items) -> float:
    """The task's score for these answers."""
    own = own_score(task)
    if own is not None:
        return task.score_of(own(items.predictions, items.golds))
    scores = {}
    for name, statistic in zip(headline_metrics(task), statistics(task), strict=True):
        sums = statistic.rows(items).sum(0)
        scores[name] = float(statistic.score(sums))
    return task.score_of(scores)


def statistics(task: TaskConfig) -> list[Statistic]:
    """The statistics of the metrics whose mean is the task's score.

    Raises:
        StatisticsError: A metric cannot be computed from sums over items.
    """
    found: list[Statistic] = []
    unknown: list[str] = []
    for name in headline_metrics(task):
        statistic = statistic_of(task, name)
        if statistic is None:
            unknown.append(name)
        else:
            found.append(statistic)
    if unknown:
        raise StatisticsError(f"metrics {', '.join(unknown)}: not known as sums over items")
    return found
