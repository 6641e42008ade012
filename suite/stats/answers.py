"""What the confirm runs of a cell answered, item by item, read from their folders and held against their records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from suite.config.task import TaskConfig
from suite.config.task_files import own_score
from suite.errors import StatisticsError
from suite.metrics.items import Items, Statistic, statistic_of
from suite.record.cells import Trial

SCORE_TOLERANCE = 1e-6
"""Relative; sums over items in another order, and sacreBLEU's and rouge_score's own arithmetic, differ by far less."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The runs of one cell on the test split.

    Attributes:
        index: Names of the items, the same for all runs.
        runs: Answers by seed; golds and groups are the same for all.
        scores: What the task's score is, by seed.
    """

    task: TaskConfig
    index: tuple[str, ...]
    runs: dict[int, Items]
    scores: dict[int, float]

    def of(self, seeds: Sequence[int]) -> Answers:
        """Of these seeds only, in this order."""
        return replace(
            self, runs={s: self.runs[s] for s in seeds}, scores={s: self.scores[s] for s in seeds}
        )

    @property
    def items(self) -> Items:
        """Golds and groups (with the answers of one of the runs)."""
        return next(iter(self.runs.values()))


def headline_metrics(task: TaskConfig) -> list[str]:
    """The metrics whose mean is the task's score."""
    return [task.headline] if task.headline is not None else list(task.metrics)


def read_answers(confirmed: Sequence[Trial]) -> Answers:
    """Of all runs that have a score.

    Raises:
        StatisticsError: There is none; a file is absent or unreadable; the runs were asked different items, or the answers
            do not give the score that a run recorded.
    """
    runs = {
        t.spec.seed: t for t in confirmed if t.result is not None and t.result.score is not None
    }
    if not runs:
        raise StatisticsError("no confirm run has a score")
    task = next(iter(runs.values())).spec.task
    read = {seed: _read(trial) for seed, trial in sorted(runs.items())}
    (first, (index, items)), *rest = read.items()
    for seed, (other, found) in rest:
        if (index, items.golds, items.groups) != (other, found.golds, found.groups):
            raise StatisticsError(f"seeds {first} and {seed} were tested on different items")
    answers = Answers(
        task,
        index,
        {seed: found for seed, (_, found) in read.items()},
        {s: _score(t) for s, t in runs.items()},
    )
    _check_scores(answers)
    return answers.of(sorted(runs))


def _score(trial: Trial) -> float:
    assert trial.result is not None and trial.result.score is not None
    return trial.result.score


def _read(trial: Trial) -> tuple[tuple[str, ...], Items]:
    path = trial.folder.predictions("test")
    try:
        table = pq.read_table(path)
        gold, prediction = (name for name in table.column_names if name not in ("index", "group"))
    except (OSError, pa.ArrowException, ValueError) as error:
        reason = (
            "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        )
        raise StatisticsError(
            f"seed {trial.spec.seed}: {trial.folder.hash}/{path.name} {reason}"
        ) from None
    columns = {name: table[name].to_pylist() for name in table.column_names}
    return tuple(columns["index"]), Items(columns[prediction], columns[gold], columns.get("group"))


def _check_scores(answers: Answers) -> None:
    for seed, items in answers.runs.items():
        found, recorded = score_of(answers.task, items), answers.scores[seed]
        if not math.isclose(found, recorded, rel_tol=SCORE_TOLERANCE, abs_tol=SCORE_TOLERANCE):
            raise StatisticsError(
                f"seed {seed}: its answers score {found:.6g}, but its record says {recorded:.6g}"
            )


def score_of(task: TaskConfig, items: Items) -> float:
    """The task's score of these answers."""
    own = own_score(task)
    if own is not None:
        return task.score_of(own(items.predictions, items.golds))
    found = [float(statistic.score(statistic.rows(items).sum(0))) for statistic in statistics(task)]
    return math.fsum(found) / len(found)


def statistics(task: TaskConfig) -> list[Statistic]:
    """Of the metrics whose mean is the task's score.

    Raises:
        StatisticsError: One has none.
    """
    found = {name: statistic_of(task, name) for name in headline_metrics(task)}
    if None in found.values():
        raise StatisticsError(
            f"metrics {', '.join(name for name, s in found.items() if s is None)}: not known as sums over items"
        )
    return [statistic for statistic in found.values() if statistic is not None]
