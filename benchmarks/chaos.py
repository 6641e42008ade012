"""Kill a real sweep and compare what comes out with a sweep that was left alone.

    python benchmarks/chaos.py driver        SIGKILL the driver at three random times, start it again each time
    python benchmarks/chaos.py rank          SIGKILL one worker rank after its trial's first committed epoch

Real Ray, ZeRO-3 on two gloo ranks, Optuna and MLflow; a tiny random BERT and a generated task, so that minutes suffice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from suite.train.folder import Home

SWEEP = """
name: chaos
backbones:
  - {name: bert-base, tokenizer: bytes, config: {vocab_size: 384, hidden_size: 32, intermediate_size: 64, num_attention_heads: 4,
     num_hidden_layers: 2, max_position_embeddings: 128}}
methods: [lora, bitfit]
tasks: [entailment]
search: {trials: 4, startup_trials: 2}
confirm: {seeds: [1, 2]}
limit: {train: 256, validation: 60, test: 60}
training: {epochs: 4, patience: null, batch_size: 16, max_length: 128}
resources: {workers: 2, cpus_per_worker: 1.0}
"""
TRIALS = 2 * (4 + 2)
DEADLINE_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["driver", "rank"])
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "chaos.yaml").write_text(SWEEP)
        began = time.monotonic()
        wait(start(root, "alone"))
        alone_s = time.monotonic() - began
        print(f"left alone: {finished(root, 'alone')} trials in {alone_s:.0f} s", flush=True)
        if options.what == "driver":
            kill_driver(root, alone_s, random.Random(options.seed))
        else:
            kill_rank(root)
        compare(root)


def start(root: Path, home: str) -> subprocess.Popen[str]:
    """The sweep's driver in a process session of its own."""
    command = [sys.executable, "-m", "suite", "run", str(root / "chaos.yaml"), "--home", str(root / home)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def wait(driver: subprocess.Popen[str]) -> None:
    out, _ = driver.communicate(timeout=DEADLINE_S)
    if driver.returncode:
        raise SystemExit(f"the driver ended with {driver.returncode}:\n{out}")


def kill_driver(root: Path, alone_s: float, chance: random.Random) -> None:
    """Three times: start, wait a random while, SIGKILL; then run to the end. No finished trial may be written again."""
    for attempt in range(1, 4):
        before = results(root, "killed")
        driver = start(root, "killed")
        pause_s = chance.uniform(0.2, 0.5) * alone_s
        time.sleep(pause_s)
        os.kill(driver.pid, signal.SIGKILL)
        driver.communicate()
        after = results(root, "killed")
        untouched(before, after)
        print(f"killed after {pause_s:.0f} s, time {attempt}: {len(before)} -> {len(after)} trials finished", flush=True)
        time.sleep(5)  # the ranks notice that their driver is gone
    before = results(root, "killed")
    wait(start(root, "killed"))
    untouched(before, results(root, "killed"))


def kill_rank(root: Path) -> None:
    """Wait for a committed epoch, SIGKILL rank 1, and see the trial go on from there."""
    driver = start(root, "killed")
    end = time.monotonic() + DEADLINE_S
    while not (markers := list((root / "killed" / "trials").glob("*/checkpoint/epoch-*/COMMIT.json"))):
        if time.monotonic() > end:
            raise SystemExit("no epoch was committed in time")
        time.sleep(0.01)
    folder = markers[0].parents[2]
    pid = int(re.findall(r"pid (\d+)", (folder / "rank1.log").read_text())[-1])
    os.kill(pid, signal.SIGKILL)
    wait(driver)
    result = json.loads((folder / "result.json").read_text())
    failure = json.loads((folder / "failure-0.json").read_text())
    print(f"rank 1 of {folder.name} killed: {failure['type']}; resumed from epoch {result['resumed_from_epochs']}, {result['status']}")
    if not result["resumed_from_epochs"]:
        raise SystemExit("the trial did not go on from its committed epoch")


def results(root: Path, home: str) -> dict[str, int]:
    """When each finished trial's result was written (ns)."""
    return {p.parent.name: p.stat().st_mtime_ns for p in (root / home / "trials").glob("*/result.json")}


def finished(root: Path, home: str) -> int:
    return len(results(root, home))


def untouched(before: dict[str, int], after: dict[str, int]) -> None:
    if any(after.get(trial) != written for trial, written in before.items()):
        raise SystemExit("a finished trial was lost or written again")


def compare(root: Path) -> None:
    """Same trials, same curves, same leaderboard scores, one MLflow run per trial."""
    alone, killed = (
        {folder.hash: folder.result() for folder in Home(root / home).trials() if folder.result() is not None}
        for home in ("alone", "killed")
    )
    if len(alone) != TRIALS or set(alone) != set(killed):
        raise SystemExit(f"{len(alone)} and {len(killed)} trials, {len(set(alone) & set(killed))} of them the same; expected {TRIALS}")
    for trial, result in alone.items():
        ours, theirs = ([(e.train_loss, e.validation_score) for e in r.epochs] for r in (result, killed[trial]))  # type: ignore[union-attr]
        if ours != theirs:
            raise SystemExit(f"{trial}: the curves differ:\n{ours}\n{theirs}")
    boards = [leaderboard(root, home) for home in ("alone", "killed")]
    if boards[0] != boards[1]:
        raise SystemExit(f"the leaderboards differ:\n{boards[0]}\n{boards[1]}")
    runs = mlflow_runs(root, "killed")
    if sorted(runs) != sorted(killed):
        raise SystemExit(f"MLflow has {len(runs)} trial runs, {len(set(runs))} distinct, for {len(killed)} trials")
    print(f"equal: {TRIALS} trials with the same curves, the same leaderboard scores, one MLflow run per trial")


def leaderboard(root: Path, home: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "suite", "leaderboard", "--home", str(root / home), "--format", "json"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    keys = ("method", "task", "score_mean", "score_std", "seeds", "validation_score", "learning_rate", "search_trials", "status")
    return [{key: row[key] for key in keys} for row in rows]


def mlflow_runs(root: Path, home: str) -> list[str]:
    """Trial hashes of all trial runs, read with MLflow's own client."""
    from mlflow import MlflowClient

    client = MlflowClient(Home(root / home).tracking_uri)
    experiment = client.get_experiment_by_name("chaos")
    found = client.search_runs([experiment.experiment_id], "tags.`suite.kind` = 'trial'", max_results=1000)
    return [run.data.tags["suite.trial"] for run in found]


if __name__ == "__main__":
    main()
