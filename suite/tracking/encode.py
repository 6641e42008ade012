"""One trial record as MLflow's metrics, parameters and tags. Times come from the record, never from the clock."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from suite.config.hashing import canonical_json, short_hash
from suite.record.result import Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.tracking.store import Point

NUMBERS = {
    *("score", "scores", "validation_score", "test_score", "best_epoch"),
    *("phases", "timing", "parameters", "checkpoint_bytes", "splits", "pretrain"),
}
"""Fields of a result whose numbers become metrics, under their dotted path: `phases.train.energy_kwh`."""


def trial_metrics(result: TrialResult) -> list[Point]:
    """The final numbers at the trial's end, and the training curve with the epoch as step."""
    return [*_final(result), *_curve(result)]


def _final(result: TrialResult) -> Iterator[Point]:
    for key, value in flatten(result.model_dump(mode="json", include=NUMBERS)):
        if is_number(value):
            yield Point(key, float(value), result.finished_at)


def _curve(result: TrialResult) -> Iterator[Point]:
    elapsed_s = 0.0
    for record in result.epochs:
        elapsed_s += record.seconds
        for key, value in flatten(record.model_dump(mode="json", exclude={"epoch"})):
            if is_number(value):
                yield Point(
                    f"epoch.{key}", float(value), result.started_at + elapsed_s, record.epoch
                )


def trial_params(spec: TrialSpec) -> dict[str, str]:
    """What was chosen: learning rate, replicate, architecture, training settings, limits."""
    chosen = spec.model_dump(
        mode="json", include={"learning_rate", "seed", "number", "world_size", "training", "limit"}
    )
    chosen["architecture"] = spec.arm.architecture
    if spec.arm.attention.options:
        chosen["attention"] = spec.arm.attention.options
    return {key: text(value) for key, value in flatten(chosen) if value is not None}


def identity_tags(spec: TrialSpec) -> dict[str, str]:
    """The names by which cells and trials alike are found and grouped."""
    return {
        "suite.cell": spec.cell,
        "suite.arm": spec.arm.key,
        "sweep": spec.sweep,
        "backbone": spec.arm.backbone.name,
        "attention": spec.arm.attention.name,
        "attention_options": canonical_json(spec.arm.attention.options),
        "method": spec.arm.method,
        "architecture": canonical_json(spec.arm.architecture),
        "task": spec.task.name,
    }


def trial_tags(spec: TrialSpec, result: TrialResult, folder: Path) -> dict[str, str]:
    """Identity, outcome and where the whole record lies."""
    tags = {
        **identity_tags(spec),
        "suite.trial": folder.name,
        "suite.folder": str(folder.resolve()),
        "suite.config": short_hash(spec.training.model_dump(mode="json")),
        "phase": spec.phase.value,
        "seed": str(spec.seed),
        "number": str(spec.number),
        "status": result.status.value,
    }
    tags |= {f"missing.{key}": reason for key, reason in result.missing.items()}
    if result.pretrain is not None:
        tags["pretrain.checkpoint"] = result.pretrain.checkpoint
    if result.failure is not None:
        tags |= {
            "failure.type": result.failure.type,
            "failure.message": result.failure.message,
            "failure.log": result.failure.log_path,
        }
    return tags


def trial_name(spec: TrialSpec) -> str:
    """`search 3` or `confirm seed 2`, as MLflow shows it under its cell."""
    return f"search {spec.number}" if spec.phase is Phase.SEARCH else f"confirm seed {spec.seed}"


def run_status(status: Status) -> str:
    return {Status.COMPLETED: "FINISHED", Status.PRUNED: "KILLED"}.get(status, "FAILED")


def result_digest(result: TrialResult) -> str:
    """Changes when a trial folder was removed and its trial run again: the hash of the trial itself does not."""
    return short_hash(result.model_dump(mode="json"))


def flatten(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings by dotted path; lists are leaves."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{at}.{key}" if at else str(key))
    else:
        yield at, value


def is_number(value: Any) -> bool:
    """A finite number: MLflow would store infinity as 1.8e308."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
