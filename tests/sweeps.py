"""A small sweep on a task and data of its own, for tests of planning and running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from suite.config.sweep import SweepConfig
from suite.plan.cell_state import read_states
from suite.plan.plan import Plan
from suite.plan.queue import TrialQueue
from suite.plan.status import study_facts
from suite.record.folder import Home
from suite.record.result import Status, TrialResult
from suite.record.spec import TrialSpec
from tests.fake_trainer import score_of
from tests.tiny import tiny_choice

TASK = """
description: a toy
source: ours
data: {hub: toy/words}
inputs: [text]
label: {column: label, words: [low, high]}
text_to_text: "classify: {text}"
metrics: [accuracy]
splits: {rule: named, test: test}
"""


def toy_sweep(**changes: Any) -> SweepConfig:
    """Two cells (full and lora on one task) of five search trials and two seeds, three epochs each.

    No contest of architectures, no edge guard, no early end and no model of the curve in the choice
    unless asked for: budgets are what they say, and the best score is confirmed.
    """
    values: dict[str, Any] = {
        "name": "toy",
        "backbones": [tiny_choice("bert")],
        "methods": ["full", "lora"],
        "tasks": ["toy"],
        "architectures": "first",
        "confirm": {"seeds": [1, 2]},
        "training": {"epochs": 3, "batch_size": 8},
        "timeouts": {"setup_s": 60.0, "epoch_s": 30.0},
    }
    plain = {
        "edge_guard": {"extensions": 0},
        "stop": None,
        "per": "architecture",
        "choose": "best",
    }
    search = plain | changes.pop("search", {"trials": 5, "startup_trials": 3})
    # Two ranks a trial, so that one trial at a time has both CPUs of the tests' clusters.
    resources = {"workers": 2} | changes.pop("resources", {})
    return SweepConfig.model_validate(values | changes | {"search": search, "resources": resources})


@pytest.fixture
def toy_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the task `toy` known; returns a data root with its rows."""
    return make_roots(tmp_path, monkeypatch)


def make_roots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tasks = folder / "user" / "tasks"
    tasks.mkdir(parents=True)
    for name in ("toy", "toy2"):
        (tasks / f"{name}.yaml").write_text(TASK)
    monkeypatch.setenv("SUITE_PATH", str(folder / "user"))
    root = folder / "data" / "toy" / "words" / "default"
    root.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        pq.write_table(
            pa.table(
                {"text": [f"word {i}" for i in range(16)], "label": [i % 2 for i in range(16)]}
            ),
            root / f"{split}.parquet",
        )
    return folder / "data"


@contextmanager
def toy_cluster(folder: Path) -> Iterator[Path]:
    """A local Ray of two CPUs whose workers know the task `toy`, for as long as the block runs; gives the data root."""
    from suite.cluster.session import cluster  # Ray, which tests of planning do without

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        roots = make_roots(folder, patch)
        with cluster(None, threads=1):
            yield roots


def finish(
    home: Home, spec: TrialSpec, score: float | None, status: Status = Status.COMPLETED
) -> None:
    home.trial(spec).write_result(
        TrialResult(
            trial=spec.hash,
            status=status,
            score=score,
            validation_score=score,
            started_at=0.0,
            finished_at=1.0,
        )
    )


def decided(plan: Plan, home: Home) -> dict[str, dict[str, Any]]:
    """What is decided about the study of every cell."""
    return {key: study_facts(state) for key, state in read_states(plan, home).items()}


def chosen(plan: Plan, home: Home) -> dict[str, bool | None]:
    """By arm, whether it won its contest."""
    return {state.cell.arm.key: state.chosen for state in read_states(plan, home).values()}


def run_all(
    schedule: TrialQueue,
    home: Home,
    *,
    at_most: int = 10_000,
    score: Callable[[TrialSpec], float | None] | None = None,
) -> list[TrialSpec]:
    """Run trials one after another, each finished at once."""
    ran: list[TrialSpec] = []
    while len(ran) < at_most and (spec := schedule.next()) is not None:
        finish(home, spec, score(spec) if score is not None else score_of(spec, 3))
        schedule.ended(spec)
        ran.append(spec)
    return ran
