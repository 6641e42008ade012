"""How long the leaderboard takes over 10,000 cells, and how fast trial runs are written.

    python benchmarks/leaderboard.py [--cells 10000] [--trials 1000] [--stores sqlite,postgresql,server]

The records are generated, as in the tests. First the rows of all cells, 200 to a sweep, are
published, and the leaderboard is asked for, whole and in parts: in this process (wall clock, best
and median of `--repeats`, and processor time of the best), and as `suite leaderboard`, from the
start of the process to its end. Then a home with `--trials` trials is synced into the same store:
what a rebuild costs. PostgreSQL and the MLflow server are processes of their own, started for this
and removed (PostgreSQL's binaries must be here: Debian's `postgresql`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from suite.leaderboard.collect import sweep_rows
from suite.leaderboard.fields import Row, with_values
from suite.record.folder import Home
from suite.tracking import leaderboard, open_store, sync
from suite.tracking.progress import Progress
from suite.tracking.store import Store
from suite.tracking.sweep_runs import SweepRuns
from tests.records import make_home
from tests.stores import mlflow_server, postgres

CELLS_PER_SWEEP = 200
TASKS = 4
GOAL_S = 2.0
QUESTIONS: dict[str, dict[str, str]] = {
    "everything": {},
    "one sweep": {"sweep": "sweep-0"},
    "one task of one sweep": {"sweep": "sweep-0", "task": "task-0"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--trials", type=int, default=1_000, help="to rebuild; 0 = none")
    parser.add_argument("--stores", default="sqlite,postgresql,server")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    late = []
    for kind in options.stores.split(","):
        if measure(kind, options) > GOAL_S:
            late.append(kind)
    if late:
        raise SystemExit(f"over the goal of {GOAL_S:.0f} s: {', '.join(late)}")


def measure(kind: str, options: argparse.Namespace) -> float:
    """Fill a store of this kind, and ask it; returns the median seconds of the whole leaderboard."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        uri = f"sqlite:///{folder}/mlflow.db"
        if kind == "postgresql":
            uri = stack.enter_context(postgres()).database("suite")
        elif kind == "server":
            uri = stack.enter_context(mlflow_server(folder, uri)).uri
        began_s = time.perf_counter()
        publish(open_store(uri), folder, options.cells)
        filled_s = time.perf_counter() - began_s
        print(f"\n{kind}: rows of {options.cells:,} cells published in {filled_s:.0f} s\n")
        print("| question | rows | best, s | of it processor s | median, s | as a command, s |")
        print("| --- | --: | --: | --: | --: | --: |")
        medians = []
        for question, only in QUESTIONS.items():
            medians.append(ask(uri, question, only, options.repeats))
        if options.trials:
            rebuild(uri, folder, options.trials)
    return medians[0]


def publish(store: Store, folder: Path, cells: int) -> None:
    """Rows of sweeps of `CELLS_PER_SWEEP` cells, made from the row of one real cell."""
    home = make_home(folder / "one", ["lora"], ["agreement"], trials=27)
    (row,) = sweep_rows(home, "demo")
    for number in range(-(-cells // CELLS_PER_SWEEP)):
        sweep = f"sweep-{number}"
        runs = SweepRuns(store, home=row.home, sweep=sweep, files=folder / "mlartifacts")
        runs.publish(rows_of(row, sweep, min(CELLS_PER_SWEEP, cells - number * CELLS_PER_SWEEP)))


def rows_of(row: Row, sweep: str, cells: int) -> Sequence[Row]:
    rows = []
    for number in range(cells):
        arm, task = divmod(number, TASKS)
        rows.append(
            with_values(
                replace(row),
                sweep=sweep,
                arm=f"tiny-bert.gqa-{arm}.lora",
                attention="gqa",
                attention_options={"groups": arm},
                task=f"task-{task}",
                score_mean=80 + number / cells,
            )
        )
    return rows


def ask(uri: str, question: str, only: dict[str, str], repeats: int) -> float:
    """Print a line; returns the median of the seconds in this process."""
    rows = 0
    seconds = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        began_cpu_s = time.process_time()
        rows = len(leaderboard(uri, rejected=True, **only))
        seconds.append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
    best_s, cpu_s = min(seconds)
    median_s = statistics.median(wall_s for wall_s, _ in seconds)
    whole_s = as_command(uri, only, rows)
    print(
        f"| {question} | {rows:,} | {best_s:.2f} | {cpu_s:.2f} | {median_s:.2f} | {whole_s:.2f} |",
        flush=True,
    )
    return median_s


def as_command(uri: str, only: dict[str, str], rows: int) -> float:
    """Seconds of `suite leaderboard`, from its start to its end."""
    options = []
    for key, value in only.items():
        options += [f"--{key}", value]
    began_s = time.perf_counter()
    shown = subprocess.run(
        [sys.executable, "-m", "suite", "leaderboard", "--all", "--format", "json", *options],
        env={**os.environ, "MLFLOW_TRACKING_URI": uri},
        stdout=subprocess.PIPE,
        check=True,
    )
    took_s = time.perf_counter() - began_s
    assert len(json.loads(shown.stdout)) == rows
    return took_s


def rebuild(uri: str, folder: Path, trials: int) -> None:
    """Sync a home that the store knows nothing of; each of its cells has ten trials."""
    tasks = [f"task-{number}" for number in range(-(-trials // 10))]
    home: Home = make_home(folder / "many", ["lora"], tasks, trials=7, sweep="many")
    began_s = time.perf_counter()
    began_cpu_s = time.process_time()
    progress = Progress()
    report = sync(home, tracking_uri=uri, step=progress)
    progress.close()
    took_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - began_cpu_s
    print(
        f"\nrebuild of {report.written:,} trial runs and {report.cells:,} cell runs: {took_s:.0f} s "
        f"({cpu_s:.0f} s of this processor), {report.written / took_s:.0f} trials/s"
    )


if __name__ == "__main__":
    main()
