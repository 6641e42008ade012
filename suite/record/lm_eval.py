"""Read and write `lm-eval.json`, which keeps beside a model what lm-eval measured on it.

An evaluation that stands in the file is not done again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from filelock import FileLock
from pydantic import Field, ValidationError

from suite.config.hashing import short_hash
from suite.errors import ConfigError
from suite.files import read_json, write_json
from suite.meters.record import Record

FILE = "lm-eval.json"
METRICS = "lm_eval."
"""Names of its numbers in MLflow begin with this."""
SCHEMA_VERSION = 1
LOCK_TIMEOUT_S = 60.0


class Score(Record):
    """A metric in lm-eval's own units (accuracies: 0 to 1) and its standard error.

    The error is over the questions, and None where lm-eval gives none.
    """

    value: float
    stderr: float | None = None


class TaskScores(Record):
    """The metrics of one task by name.

    A filter other than lm-eval's default is part of the name (`exact_match.strict-match`).
    """

    scores: dict[str, Score]
    samples: int
    shots: int | None = None
    version: str | None = None


class Settings(Record):
    """Everything beside the model that decides the numbers of an evaluation."""

    task: str
    shots: int | None = Field(None, description="as asked for; null = the task's own")
    limit: int | None = None
    max_length_tokens: int
    dtype: str
    seed: int
    definition: str | None = Field(
        None, description="digest of the folder that defines the task; null = lm-eval itself does"
    )
    lm_eval: str = Field(description="version")

    @property
    def key(self) -> str:
        # Every setting counts, so a new version of lm-eval measures anew beside the old numbers.
        return short_hash(self.model_dump(mode="json"))

    @property
    def name(self) -> str:
        """`gsm8k:5`, with `/limit-100` where not every question was asked."""
        name = self.task
        if self.shots is not None:
            name += f":{self.shots}"
        if self.limit is not None:
            name += f"/limit-{self.limit}"
        return name


class Evaluation(Record):
    """The evaluation of one model on a task, a group or a tag.

    For a group `total` is the aggregate, and `parts` are its tasks.
    """

    settings: Settings
    total: TaskScores
    parts: dict[str, TaskScores] = Field(default_factory=dict)
    missing: dict[str, str] = Field(
        default_factory=dict, description="metric -> why it has no number"
    )
    device: str
    batch_size: str
    seconds: float
    finished_at: float


class LmEvalRecord(Record):
    """The file: evaluations by their settings' key."""

    schema_version: int = SCHEMA_VERSION
    evaluations: dict[str, Evaluation] = Field(default_factory=dict)

    def only(self, keys: Set[str]) -> LmEvalRecord:
        """The evaluations under these settings, by their keys."""
        chosen = {key: e for key, e in self.evaluations.items() if key in keys}
        return LmEvalRecord(evaluations=chosen)


def read_record(folder: Path) -> LmEvalRecord:
    """What a folder holds; nothing where there is no file, or one that was cut.

    Raises:
        ConfigError: Another version of the suite wrote the file. To measure again would overwrite
            what it holds.
    """
    path = folder / FILE
    try:
        stored = read_json(path)
    # A cut file holds nothing to lose: what it held is measured again.
    except (FileNotFoundError, ValueError):
        return LmEvalRecord()
    return _checked(stored, source=str(path))


def merge_record(folder: Path, data: bytes) -> bool:
    """Add to a folder's file what another copy of it holds; of two results the later one stays.

    A copy that was cut, or that another version of the suite wrote, adds nothing.

    Args:
        folder: The folder.
        data: The bytes of the other copy.

    Returns:
        False where the folder has nothing to keep: no file that can be read.
    """
    try:
        if not read_record(folder).evaluations:
            return False
    except ConfigError:
        return False
    try:
        there = _checked(json.loads(data), source=FILE).evaluations
    except (ConfigError, ValueError):
        return True
    # Read again: another process may have added to it before this one had the lock.
    with FileLock(folder / f".{FILE}.lock", timeout=LOCK_TIMEOUT_S):
        here = read_record(folder).evaluations
        merged = dict(here)
        for key, evaluation in there.items():
            if key not in here or here[key].finished_at < evaluation.finished_at:
                merged[key] = evaluation
        if merged != here:
            record = LmEvalRecord(evaluations=merged)
            write_json(folder / FILE, record.model_dump(mode="json"))
    return True


def _checked(stored: Any, *, source: str) -> LmEvalRecord:
    version = stored.get("schema_version") if isinstance(stored, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{source}: got schema version {version}, expected {SCHEMA_VERSION}; "
            "move it away to measure anew"
        )
    try:
        return LmEvalRecord.model_validate(stored)
    except ValidationError as error:
        raise ConfigError(
            f"{source}: not a record of lm-eval ({error.error_count()} errors); "
            "move it away to measure anew"
        ) from None


def check_folder(folder: Path) -> None:
    """Find out whether an evaluation can be stored in a folder, before one is made.

    Raises:
        OSError: It cannot, and says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Tried, because rights alone do not tell of a mount that is read-only.
    with tempfile.TemporaryFile(dir=folder):
        return


def add_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Put one evaluation into a folder's file, which it may share with another process."""
    folder.mkdir(parents=True, exist_ok=True)
    # Reading is under the lock too, or one of two processes would overwrite the other's numbers.
    with FileLock(folder / f".{FILE}.lock", timeout=LOCK_TIMEOUT_S):
        known = read_record(folder).evaluations
        record = LmEvalRecord(evaluations={**known, evaluation.settings.key: evaluation})
        write_json(folder / FILE, record.model_dump(mode="json"))


def over_seeds(
    records: Iterable[LmEvalRecord],
) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """The metrics over the seeds of a cell, by name of the evaluation and metric.

    Each has `mean`, `std`, `stderr` and the number of `seeds`. `std` is the sample deviation
    between seeds, None for one. `stderr` is the mean of what lm-eval states for each, which is
    about the questions and would not vanish with more seeds. A seed without the evaluation is
    left out.

    All numbers of a name are of equal settings: those that most seeds have, or of two with as many
    those that were measured last.
    """
    by_settings: dict[str, dict[str, list[Evaluation]]] = {}
    for record in records:
        for evaluation in record.evaluations.values():
            of_name = by_settings.setdefault(evaluation.settings.name, {})
            of_name.setdefault(evaluation.settings.key, []).append(evaluation)
    found = {}
    for name, of_name in sorted(by_settings.items()):
        found[name] = _metrics(max(of_name.values(), key=_seeds_then_end))
    return found


def _seeds_then_end(evaluations: Sequence[Evaluation]) -> tuple[int, float]:
    return len(evaluations), max(e.finished_at for e in evaluations)


def _metrics(evaluations: Sequence[Evaluation]) -> dict[str, dict[str, float | int | None]]:
    scores: dict[str, list[Score]] = {}
    for evaluation in evaluations:
        # Of a group the total counts; its parts stay in the file.
        for metric, score in evaluation.total.scores.items():
            scores.setdefault(metric, []).append(score)
    return {metric: _spread(values) for metric, values in scores.items()}


def _spread(scores: Sequence[Score]) -> dict[str, float | int | None]:
    values = []
    errors = []
    for score in scores:
        values.append(score.value)
        if score.stderr is not None:
            errors.append(score.stderr)
    std = None
    # `stdev` divides by n - 1 and needs two values.
    if len(values) > 1:
        std = stdev(values)
    stderr = None
    # A mean over some of the seeds would pass for one over all.
    if len(errors) == len(values):
        stderr = fmean(errors)
    return {"mean": fmean(values), "std": std, "stderr": stderr, "seeds": len(values)}


def as_metrics(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, float]:
    """The numbers of `over_seeds` under the names that MLflow shows.

    `lm_eval.gsm8k:5.exact_match.strict-match`, and the same with `_std` and `_stderr`, as far as
    there are numbers.
    """
    suffixes = {"mean": "", "std": "_std", "stderr": "_stderr"}
    found = {}
    for name, metrics in summary.items():
        for metric, numbers in metrics.items():
            for part, suffix in suffixes.items():
                # MLflow stores numbers only, so what is not known has no metric.
                if numbers[part] is not None:
                    found[f"{METRICS}{name}.{metric}{suffix}"] = float(numbers[part])
    return found
