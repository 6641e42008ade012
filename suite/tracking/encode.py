"""Trials and cells as MLflow's metrics, parameters and tags.

Times come from the record, never from the clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.config.hashing import canonical_json, short_hash
from suite.leaderboard.fields import Row
from suite.leaderboard.names import Names, distinct, with_keys
from suite.record.result import EpochRecord, Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.tracking.notes import NOTE, trial_note
from suite.tracking.store import Point, RunRecord, key_name

RUN_FORMAT = 1
"""A number to raise when a trial's run is written in another way; the next sync of its cell then
replaces the run. `sweep_runs.FORMAT` must be raised with it, for cells that are up to date are not
looked at."""
RESULT = "suite.result"
"""The tag by which a later sync notices that a trial was run again. The run of a trial that has not
ended lacks it."""
CURVE = "epoch."
"""Names of the curve's metrics begin with this."""
REJECTED = "rejected"
"""The tag of a cell's run with the reasons, and the status that the leaderboard shows there."""
NO_METRICS: dict[str, Any] = {
    "schema_version": True,
    "epochs": True,  # a curve: its numbers have the epoch as their step
    "validity": True,
    "failure": True,
    "preparation": {"hardware", "world_size"},
    "frozen_states": {"hardware", "world_size"},
    "provenance": True,
    "started_at": True,
    "finished_at": True,
}
"""Fields of a result that describe the trial. The numbers of all other fields become metrics.

A measured number that joins the record is thus among MLflow's metrics without an edit here.
"""


def arm_names(rows: Iterable[Row]) -> dict[str, str]:
    """By key, the shortest name of each arm that no other arm of the rows has."""
    arms: dict[str, Names] = {}
    for row in rows:
        attention = row.attention
        if row.attention_options:
            attention += f" {canonical_json(row.attention_options)}"
        arms[row.arm] = Names(row.backbone, attention, row.method, row.architecture)
    return with_keys(dict(zip(arms, distinct(list(arms.values())), strict=True)))


def trial_name(spec: TrialSpec, arm: str) -> str:
    """The name of a trial's run: `lora / sst2 / search 3 / lr 2.1e-3`.

    Args:
        spec: The trial.
        arm: The name of its arm, as `arm_names` gives it.
    """
    which = f"confirm seed {spec.seed}"
    if spec.phase is Phase.SEARCH:
        which = f"search {spec.number}"
    digits, _, power = f"{spec.learning_rate:.2e}".partition("e")
    rate = f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{arm} / {spec.task.name} / {which} / lr {rate}"


def trial_record(
    begun: BegunTrial, result: TrialResult, epochs: Sequence[EpochRecord], *, start_s: float
) -> RunRecord:
    """The run of an ended trial.

    Args:
        begun: What is known of it since it began.
        result: What came out.
        epochs: Its training curve.
        start_s: When its run starts: `started_at` of the result, unless the run was begun before.
    """
    return RunRecord(
        name=begun.name,
        start_s=start_s,
        end_s=result.finished_at,
        status=run_status(result.status),
        tags=begun.tags | result_tags(result),
        metrics=[*final_metrics(result), *curve_metrics(epochs, start_s)],
        params=begun.params,
    )


@dataclass(frozen=True, slots=True)
class BegunTrial:
    """The part of a trial's run that is known when the trial begins.

    Args:
        spec: What the trial is to do.
        folder: Its folder.
        home: The id of the home.
        parent: The id of the run of the trial's cell.
        arm: The name of its arm, as `arm_names` gives it.
    """

    spec: TrialSpec
    folder: Path
    home: str
    parent: str
    arm: str

    @property
    def name(self) -> str:
        return trial_name(self.spec, self.arm)

    @property
    def params(self) -> dict[str, str]:
        return trial_params(self.spec)

    @property
    def tags(self) -> dict[str, str]:
        return spec_tags(self.spec, self.folder) | {
            "suite.kind": "trial",
            "suite.home": self.home,
            # MLflow's own tag: its pages show runs that have it below their parent.
            "mlflow.parentRunId": self.parent,
            NOTE: trial_note(self.spec),
        }


def final_metrics(result: TrialResult) -> list[Point]:
    """The numbers of a trial that has ended, at its end."""
    points: list[Point] = []
    # A number inside a field gets its path as its name: `phases.train.energy_kwh`.
    for key, value in flatten(result.model_dump(mode="json", exclude=NO_METRICS)):
        # Texts and missing values are left out; the tags `missing.*` say why a value is missing.
        if is_number(value):
            points.append(Point(key, float(value), result.finished_at))
    return points


def curve_metrics(epochs: Iterable[EpochRecord], start_s: float) -> list[Point]:
    """The training curve from its first epoch on, with the epoch as step.

    Args:
        epochs: In their order.
        start_s: When the run starts.
    """
    points: list[Point] = []
    # A record of an epoch holds how long it took, not when it ended.
    elapsed_s = 0.0
    for epoch in epochs:
        elapsed_s += epoch.seconds
        for key, value in flatten(epoch.model_dump(mode="json", exclude={"epoch"})):
            if is_number(value):
                points.append(
                    Point(f"{CURVE}{key}", float(value), start_s + elapsed_s, epoch.epoch)
                )
    return points


def trial_params(spec: TrialSpec) -> dict[str, str]:
    """What a trial is, and its choices: learning rate, seed, architecture, training, limits."""
    chosen = spec.model_dump(
        mode="json", include={"learning_rate", "seed", "number", "world_size", "training", "limit"}
    )
    chosen["architecture"] = spec.arm.architecture
    if spec.arm.attention.options:
        chosen["attention"] = spec.arm.attention.options
    # MLflow compares runs by parameters, and groups its charts by them.
    params = {
        "backbone": spec.arm.backbone.name,
        "attention": spec.arm.attention.name,
        "method": spec.arm.method,
        "task": spec.task.name,
        "phase": spec.phase.value,
    }
    for key, value in flatten(chosen):
        if value is not None:
            # MLflow keeps parameters as text; JSON keeps `true` and lists readable in any language.
            params[key] = value if isinstance(value, str) else json.dumps(value)
    return params


def spec_tags(spec: TrialSpec, folder: Path) -> dict[str, str]:
    """The names of the trial, and where its whole record lies."""
    return {
        "suite.cell": spec.cell,
        "sweep": spec.sweep,
        "backbone": spec.arm.backbone.name,
        "attention": spec.arm.attention.name,
        "attention_options": canonical_json(spec.arm.attention.options),
        "method": spec.arm.method,
        "architecture": canonical_json(spec.arm.architecture),
        "task": spec.task.name,
        "suite.trial": folder.name,
        # The way back from MLflow to the whole record, of which the store has only a part.
        "suite.folder": str(folder.resolve()),
        # One short value by which people can group runs with equal training settings.
        "suite.config": short_hash(spec.training.model_dump(mode="json")),
        "phase": spec.phase.value,
        "seed": str(spec.seed),
        "number": str(spec.number),
    }


def result_tags(result: TrialResult) -> dict[str, str]:
    """The outcome of a trial."""
    tags = {RESULT: run_digest(result), "status": result.status.value}
    for key, reason in result.missing.items():
        tags[key_name(f"missing.{key}")] = reason
    if result.pretrain is not None:
        tags["pretrain.checkpoint"] = result.pretrain.checkpoint
    if result.failure is not None:
        tags["failure.type"] = result.failure.type
        tags["failure.message"] = result.failure.message
        tags["failure.log"] = result.failure.log_path
    return tags


def run_status(status: Status) -> str:
    """A trial's status in MLflow's words."""
    # MLflow has no state for a pruned trial; KILLED says that it was ended on purpose.
    return {Status.COMPLETED: "FINISHED", Status.PRUNED: "KILLED"}.get(status, "FAILED")


def result_digest(result: TrialResult) -> str:
    """A hash that changes when a trial is run again, while the hash of the trial stays."""
    return short_hash(result.model_dump(mode="json"))


def run_digest(result: TrialResult) -> str:
    """`result_digest`, for a run that is to be written again in another `RUN_FORMAT` too."""
    return f"{result_digest(result)}.{RUN_FORMAT}"


def cell_tags(row: Row) -> dict[str, str]:
    """Names of a cell: those of its trials, and the key of its arm."""
    return {
        "suite.cell": row.cell_key,
        "suite.arm": row.arm,
        "sweep": row.sweep,
        "backbone": row.backbone,
        "attention": row.attention,
        "attention_options": canonical_json(row.attention_options),
        "method": row.method,
        "architecture": canonical_json(row.architecture),
        "task": row.task,
    }


def outcome_tags(row: Row, before: Mapping[str, str]) -> dict[str, str]:
    """Where a cell stands, and why it is no result where it was rejected.

    Args:
        row: The row of the cell.
        before: The tags that its run has.
    """
    tags = {"status": row.status}
    # None = not checked, which is no reason to reject.
    if row.admitted is False:
        tags["status"] = REJECTED
    reasons = "; ".join(row.rejected)
    # A tag stays until it gets another value.
    if reasons or REJECTED in before:
        tags[REJECTED] = reasons
    return tags


def flatten(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings with their dotted paths; lists are leaves."""
    # MLflow's keys are flat, so nested names are joined by dots.
    if not isinstance(value, Mapping):
        yield at, value
        return
    for key, inner in value.items():
        yield from flatten(inner, f"{at}.{key}" if at else str(key))


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; MLflow would store infinity as 1.8e308."""
    # To Python `True` is an integer, but a flag is no measurement.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
