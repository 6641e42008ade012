"""How long the leaderboard takes over 10,000 cells and 300,000 trial runs, in sqlite and in PostgreSQL.

    python benchmarks/leaderboard.py [--cells 10000] [--trials 30] [--written 50] [--lean] [--stores sqlite,postgresql]

The records are generated (times, scores and energies are drawn from their hash, as in the tests) and written by the same
writer as those of a sweep, cell by cell; only the trial folders are left out. With `--written` N, the first N sweeps (of 200
cells) are written so, and the others are copies of their rows made in the database; with `--lean` the copies lack metrics and
parameters, which no query of the leaderboard reads. PostgreSQL is a server of its own, started for this and removed (its
binaries must be here: Debian's `postgresql`). Then the leaderboard is asked for, whole and in parts: in this process (wall
clock, best and median of `--repeats`, and processor time of the best) and as `suite leaderboard --format json`, from the
start of the process to its end.
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
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sqlalchemy import text
from suite.tracking.ranks import KIND, Ranked
from suite.tracking.sql import COLUMNS, SqlStore
from suite.tracking.summary import ROW

from suite.config.sweep import AttentionChoice
from suite.record.cells import Trial
from suite.record.folder import Home
from suite.stats.ranks import Rank
from suite.storage.identity import home_id
from suite.tracking import leaderboard, open_store
from suite.tracking.store import RunRecord
from suite.tracking.writer import Syncer
from tests.records import START_S, make_result, make_spec
from tests.stores import postgres

SEEDS = (1, 2, 3)
METHODS = ("full", "lora", "read", "bitfit", "adapter")
HEADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TASKS_PER_SWEEP = 4
CELLS_PER_SWEEP = len(METHODS) * len(HEADS) * TASKS_PER_SWEEP
GOAL_S = {"sqlite": 5.0, "postgresql": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument(
        "--trials", type=int, default=30, help="per cell, three of them confirm runs"
    )
    parser.add_argument(
        "--written",
        type=int,
        default=10**6,
        help="sweeps that the writer writes; the rest are copies of them",
    )
    parser.add_argument("--lean", action="store_true", help="copies without metrics and parameters")
    parser.add_argument("--stores", default="sqlite,postgresql")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--keep", type=Path, help="a folder for the sqlite file, used again if it is there"
    )
    options = parser.parse_args()
    late = [store for store in options.stores.split(",") if not measure(store, options)]
    if late:
        raise SystemExit(f"over the goal: {', '.join(late)}")


def measure(kind: str, options: argparse.Namespace) -> bool:
    """Fill a store of this kind, ask it, print the table; whether the whole leaderboard came within its goal."""
    with ExitStack() as stack:
        folder = (
            Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if options.keep is None
            else options.keep
        )
        folder.mkdir(parents=True, exist_ok=True)
        uri = (
            f"sqlite:///{folder.resolve()}/mlflow.db"
            if kind == "sqlite"
            else stack.enter_context(postgres()).database("suite")
        )
        began = time.perf_counter()
        if not (kind == "sqlite" and (folder / "mlflow.db").exists()):
            fill(uri, folder, options)
        filled_s = time.perf_counter() - began
        store = open_store(uri, create=False)
        assert isinstance(store, SqlStore)
        (runs,), size = store._read("SELECT count(*) FROM runs")[0], database_bytes(store)
        print(f"\n{kind}: {runs:,} runs, {size / 2**30:.2f} GiB, filled in {filled_s:.0f} s\n")
        print(
            "| question | rows | best, s | of it processor, s | median, s | as a command, s |\n| --- | --: | --: | --: | --: | --: |"
        )
        medians = [ask(uri, question, only, options.repeats) for question, only in questions()]
    return medians[0] <= GOAL_S[kind]


def questions() -> list[tuple[str, dict[str, str]]]:
    return [
        ("everything", {}),
        ("one sweep", {"sweep": "sweep-0"}),
        ("one task of one sweep", {"sweep": "sweep-0", "task": "task-0"}),
    ]


def fill(uri: str, folder: Path, options: argparse.Namespace) -> None:
    """Cells and trials by the writer, then copies, then the ranks."""
    home, trials = Home(folder / "home"), options.trials
    store = open_store(uri)
    assert isinstance(store, SqlStore)
    syncer, sweeps = Syncer(home, store), -(-options.cells // CELLS_PER_SWEEP)
    cells = min(options.cells, options.written * CELLS_PER_SWEEP)
    began = last = time.perf_counter()
    for done, cell in enumerate(generated(home, cells, trials), start=1):
        syncer.write_cell(cell, "generated")
        if time.perf_counter() - last > 30:
            last = time.perf_counter()
            print(
                f"  {done:,} cells, {done * trials / (last - began):.0f} trials/s",
                file=sys.stderr,
                flush=True,
            )
    print(
        f"  {cells:,} cells, {cells * trials:,} trials by the writer: {cells * trials / (time.perf_counter() - began):.0f} trials/s"
    )
    for sweep in range(options.written, sweeps):
        copy_sweep(store, sweep % options.written, sweep, lean=options.lean)
    for name, experiment in store.experiments().items():
        store.write_runs(
            experiment, [ranks_of(name, task, home_id(home)) for task in [*task_names(), "mean"]]
        )
    for statement in ("ANALYZE runs", "ANALYZE tags"):
        store._write(lambda connection, s=statement: connection.exec_driver_sql(s))


def generated(home: Home, cells: int, trials: int) -> Iterator[list[Trial]]:
    """Cells of sweeps of `CELLS_PER_SWEEP`, each with its search and its confirm runs."""
    for number in range(cells):
        sweep, place = divmod(number, CELLS_PER_SWEEP)
        task, place = divmod(place, len(METHODS) * len(HEADS))
        method, heads = METHODS[place % len(METHODS)], HEADS[place // len(METHODS)]
        names = {
            "sweep": f"sweep-{sweep}",
            "attention": AttentionChoice(name="gqa", options={"groups": heads}),
        }
        names |= {"method": method, "task": task_names()[task]}
        search = [
            make_spec(**names, number=n, learning_rate=1e-5 * 1.2**n)
            for n in range(trials - len(SEEDS))
        ]
        results = [make_result(spec) for spec in search]
        best = max(range(len(search)), key=lambda n: results[n].score or 0.0)
        confirm = [
            make_spec(**names, seed=seed, learning_rate=search[best].learning_rate)
            for seed in SEEDS
        ]
        pairs = [
            *zip(search, results, strict=True),
            *((spec, make_result(spec)) for spec in confirm),
        ]
        yield [Trial(home.trial(spec.hash), spec, result) for spec, result in pairs]


def copy_sweep(store: SqlStore, old: int, new: int, *, lean: bool) -> None:
    """All runs of a sweep under another name: their ids begin with its number, and with a letter that no id of MLflow has."""
    ids = {
        "old": int(store.experiment(f"sweep-{old}")),
        "new": int(store.experiment(f"sweep-{new}")),
    }
    values = ids | {"prefix": f"x{new:03}", "sweep": f"sweep-{new}", "was": f"sweep-{old}"}
    renamed = {
        "run_uuid": "CAST(:prefix AS TEXT) || substr(run_uuid, 5)",
        "experiment_id": "CAST(:new AS INTEGER)",
    }
    for table in ["runs", "tags", *([] if lean else ["params", "metrics", "latest_metrics"])]:
        columns = {column: renamed.get(column, column) for column in COLUMNS[table]}
        if table == "tags":
            parent = "CAST(:prefix AS TEXT) || substr(value, 5)"
            row = "replace(value, CAST(:was AS TEXT), CAST(:sweep AS TEXT))"
            cases = {"sweep": "CAST(:sweep AS TEXT)", "mlflow.parentRunId": parent, ROW: row}
            whens = " ".join(f"WHEN '{key}' THEN {then}" for key, then in cases.items())
            columns["value"] = f"CASE key {whens} ELSE value END"
        source = (
            "experiment_id = :old"
            if table == "runs"
            else "run_uuid IN (SELECT run_uuid FROM runs WHERE experiment_id = :old)"
        )
        statement = f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(columns.values())} FROM {table} WHERE {source}"
        used = {key: value for key, value in values.items() if f":{key}" in statement}
        store._write(lambda connection, s=statement, v=used: connection.execute(text(s), v))


def task_names() -> list[str]:
    return [f"task-{n}" for n in range(TASKS_PER_SWEEP)]


def ranks_of(sweep: str, task: str, home: str) -> RunRecord:
    """A run of ranks, as of a sweep whose arms can be compared."""
    ranks: dict[str, Rank] = {
        f"arm-{n}": (n, n + 3) for n in range(1, len(METHODS) * len(HEADS) + 1)
    }
    names = {
        "sweep": sweep,
        "backbone": "tiny-bert",
        "task": task,
        "suite.kind": KIND,
        "suite.home": home,
        "suite.digest": "generated",
    }
    return RunRecord(
        f"ranks tiny-bert {task}",
        START_S,
        {**names, **Ranked(ranks).tags()},
        "FINISHED",
        START_S + 1,
    )


def database_bytes(store: SqlStore) -> int:
    query = "SELECT pg_database_size(current_database())"
    if store.engine.dialect.name == "sqlite":
        query = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    return int(store._read(query)[0][0])


def ask(uri: str, question: str, only: dict[str, str], repeats: int) -> float:
    """Print a line; returns the median of the seconds in this process."""
    rows, seconds = 0, []
    for _ in range(repeats):
        began, began_cpu = time.perf_counter(), time.process_time()
        rows = len(leaderboard(uri, rejected=True, **only))
        seconds.append((time.perf_counter() - began, time.process_time() - began_cpu))
    (best_s, cpu_s), median_s = min(seconds), statistics.median(wall_s for wall_s, _ in seconds)
    print(
        f"| {question} | {rows:,} | {best_s:.2f} | {cpu_s:.2f} | {median_s:.2f} ",
        end="",
        flush=True,
    )
    print(f"| {as_command(uri, only, rows):.2f} |", flush=True)
    return median_s


def as_command(uri: str, only: dict[str, str], rows: int) -> float:
    """Seconds of `suite leaderboard`, from its start to its end."""
    options = [item for key, value in only.items() for item in (f"--{key}", value)]
    began = time.perf_counter()
    shown = subprocess.run(
        [sys.executable, "-m", "suite", "leaderboard", "--all", "--format", "json", *options],
        env={**os.environ, "MLFLOW_TRACKING_URI": uri},
        stdout=subprocess.PIPE,
        check=True,
    )
    took_s = time.perf_counter() - began
    assert len(json.loads(shown.stdout)) == rows
    return took_s


if __name__ == "__main__":
    main()
