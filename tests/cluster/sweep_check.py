"""A small real sweep for the hosts, and whether two runs of it came to the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suite.record.folder import Home
from suite.record.result import TrialResult
from tests.cluster.bed import Bed

CELLS = """
backbones:
  - {name: bert-base, tokenizer: bytes, config: {vocab_size: 384, hidden_size: 32, intermediate_size: 64, num_attention_heads: 4,
     num_hidden_layers: 2, max_position_embeddings: 128}}
methods: [lora, read]
tasks: [entailment]
architectures: first
"""
"""Two cells, of which a trial takes seconds; the search trials of the second one train side by side."""
SWEEP = (
    CELLS
    + """
name: hosts
search: {trials: 2, startup_trials: 2, edge_guard: {extensions: 0}, stop: null}
confirm: {seeds: [1]}
limit: {train: 192, validation: 60, test: 60}
training: {epochs: 5, patience: null, batch_size: 16, max_length: 128}
resources: {workers: 2, cpus_per_worker: 1.0}
timeouts: {placement_s: 900.0, setup_s: 900.0, collective_s: 300.0}
"""
)
TRIALS = 2 * (2 + 1)
RANK = "ray::Rank"
COLUMNS = (
    "method",
    "task",
    "score_mean",
    "seeds",
    "validation_score",
    "learning_rate",
    "search_trials",
    "status",
)


def write_sweep(bed: Bed) -> Path:
    """The sweep's file, where all hosts see it."""
    path = bed.shared / "hosts.yaml"
    path.write_text(SWEEP)
    return path


def results(home: Path) -> dict[str, TrialResult]:
    """Finished trials by hash."""
    found = ((folder.hash, folder.result()) for folder in Home(home).trials())
    return {trial: result for trial, result in found if result is not None}


def assert_equal(home: Path, alone: Path, bed: Bed) -> None:
    """Two runs of the sweep: same trials, same curves bit for bit, same leaderboard, one MLflow run for each trial."""
    ours = results(home)
    theirs = results(alone)
    assert len(theirs) == TRIALS
    assert curves(ours) == curves(theirs)
    assert leaderboard(bed, home) == leaderboard(bed, alone)
    assert sorted(mlflow_trials(home)) == sorted(ours)


def curves(found: Mapping[str, TrialResult]) -> dict[str, list[tuple[float | None, float | None]]]:
    return {
        trial: [(epoch.train_loss, epoch.validation_score) for epoch in result.epochs]
        for trial, result in found.items()
    }


def leaderboard(bed: Bed, home: Path) -> list[dict[str, Any]]:
    """Rows as the command gives them, without what a clock measured."""
    printed = bed.laptop.run(
        ["suite", "leaderboard", "--home", str(home), "--format", "json"], timeout_s=200
    ).stdout
    rows = [{key: row[key] for key in COLUMNS} for row in json.loads(printed)]
    assert all(row["status"] == "done" for row in rows)
    return sorted(rows, key=lambda row: str(row["method"]))


def mlflow_trials(home: Path) -> list[str]:
    """Trial hashes of all trial runs, read with MLflow's own client."""
    from mlflow import MlflowClient

    client = MlflowClient(Home(home).tracking_uri)
    experiment = client.get_experiment_by_name("hosts")
    assert experiment is not None
    runs = client.search_runs(
        [experiment.experiment_id], "tags.`suite.kind` = 'trial'", max_results=1000
    )
    return [run.data.tags["suite.trial"] for run in runs]


def assert_nothing_left(bed: Bed) -> None:
    """No process of Ray and no shared memory on any host that is on."""
    for host in (host for host in bed.hosts.values() if host.is_on):
        assert not [
            line
            for line in host.run(["ps", "-eo", "args"]).stdout.splitlines()
            if "ray" in line.lower()
        ]
        assert not host.run(["ls", "/dev/shm"]).stdout
