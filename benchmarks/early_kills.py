"""A sweep's driver, killed early: at each of many moments of its first 20 s, in a new home each time.

`python -m benchmarks.chaos --early-kills 400` kills 50 ms, 100 ms, ... 20 s after the start. The next
start is left alone. What it comes to is compared with a sweep that was never killed. One machine, no
root; MLflow is the home's own sqlite, whose tables are made in these seconds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.chaos import EARLY, LEADERBOARD, RUNS, Outcome, Record, Tally, check, untouched
from suite.record.folder import Home
from suite.storage.identity import home_id
from tests.cluster.sweep_check import curves, results

WINDOW_S = 20.0
DEADLINE_S = 1800.0
SWEEP = """
name: chaos
backbones:
  - {name: bert-base, tokenizer: bytes, config: {vocab_size: 384, hidden_size: 32, intermediate_size: 64, num_attention_heads: 4,
     num_hidden_layers: 2, max_position_embeddings: 128}}
methods: [bitfit]
tasks: [entailment]
search: {trials: 1, startup_trials: 1, edge_guard: {extensions: 0}, stop: null}
confirm: {seeds: [1]}
limit: {train: 32, validation: 20, test: 20}
training: {epochs: 1, patience: null, batch_size: 16, max_length: 128}
resources: {workers: 1, cpus_per_worker: 1.0}
"""
SUITE = [sys.executable, "-m", "suite"]


def early_kills(kills: int, folder: Path, stop: threading.Event, record: Record) -> None:
    """Kill so many drivers, evenly over the window.

    Args:
        kills: How many; 400 of them are 50 ms apart.
        folder: Empty; homes lie in it while they are needed.
        stop: Set when no more are wanted.
        record: Gets each kill; those that it has are not done again.
    """
    (folder / "chaos.yaml").write_text(SWEEP)
    alone, said = finish(folder / "alone")
    if alone is None:
        raise SystemExit(f"the undisturbed sweep did not end well:\n{said[-3000:]}")
    for number in range(record.total.struck[EARLY] + 1, kills + 1):
        if stop.is_set():
            break
        tally = Tally()
        after_s = WINDOW_S * number / kills
        home = folder / f"killed-{after_s * 1000:.0f}"
        kill_driver(home, after_s)
        before = untouched(home, {}, tally)
        tally.rounds += 1
        tally.struck[EARLY] += 1
        found, said = finish(home)
        untouched(home, before, tally)
        if found is None or "Traceback (most recent call last)" in said:
            tally.problems.append(f"killed after {after_s:.2f} s, then:\n{said[-2000:]}")
        if found is None:
            tally.unequal += 1
        else:
            check(alone, found, tally, where=home.name)
        record.add(tally)
        print(f"[{number}] killed after {after_s:.2f} s with {len(before)} trials done", flush=True)
        # Kept where something is wrong, for whoever looks into it.
        if not tally.problems:
            shutil.rmtree(home)


def kill_driver(home: Path, after_s: float) -> None:
    """Start the sweep and send SIGKILL to its driver, and to nothing else."""
    with start(home) as driver:
        try:
            driver.wait(after_s)
        except subprocess.TimeoutExpired:
            driver.kill()


def start(home: Path) -> subprocess.Popen[bytes]:
    command = [*SUITE, "run", str(home.parent / "chaos.yaml"), "--home", str(home)]
    with log_of(home).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def log_of(home: Path) -> Path:
    return home.with_suffix(".log")


def finish(home: Path) -> tuple[Outcome | None, str]:
    """Run the sweep to its end.

    Returns:
        What it left, None where the command did not end with code 0; and what it said.
    """
    began_s = time.monotonic()
    with start(home) as driver:
        try:
            code = driver.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            driver.kill()
            code = -1
    said = f"exit code {code} after {time.monotonic() - began_s:.0f} s\n"
    said += log_of(home).read_text(errors="replace")
    if code != 0:
        return None, said
    return outcome_of(home), said


def outcome_of(home: Path) -> Outcome:
    rows = json.loads(ask([*SUITE, "leaderboard", "--home", str(home), "--format", "json"]))
    store = f"sqlite:///{home}/mlflow.db"
    runs = json.loads(ask([sys.executable, "-c", RUNS, store, home_id(Home(home))]))
    board = []
    for row in rows:
        board.append({key: row[key] for key in LEADERBOARD})
    return Outcome(curves(results(home)), board, runs)


def ask(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
