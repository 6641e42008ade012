"""A small real sweep under random faults, again and again, and what came out beside a sweep that was left alone.

    python -m benchmarks.chaos --kills 100 --seed 1
    python -m benchmarks.chaos --kills 10 --faults driver-killed,rank-killed
    python -m benchmarks.chaos --kills 300 --record chaos.jsonl   # cut it, and go on later
    python -m benchmarks.chaos --early-kills 400    # every 50 ms of a driver's first 20 s

Hosts are those of tests/cluster (network namespaces; root is needed): a head with the driver,
three workers with one CPU each, one with PostgreSQL and MLflow's server. Real Ray, ZeRO-3 on two
gloo ranks of two hosts, Optuna; a tiny random BERT and a generated task. The sweep is run in a new
home each time until enough faults have struck; each time all of it is compared with the
undisturbed one. Faults of the disk and the clock need gcc (benchmarks/shim.c), and early kills
neither root nor hosts (benchmarks/early_kills.py).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import shim
from benchmarks.faults import BY_SHIM, FAULTS, NotNowError
from benchmarks.fleet import Fleet, fleet
from suite.record.folder import Home
from suite.storage.identity import home_id
from tests.cluster.bed import why_not
from tests.cluster.processes import HostError
from tests.cluster.sweep_check import CELLS

SWEEP = (
    CELLS
    + """
name: chaos
search: {trials: 4, startup_trials: 2, edge_guard: {extensions: 0}, stop: null}
confirm: {seeds: [1, 2]}
limit: {train: 256, validation: 60, test: 60}
training: {epochs: 6, patience: null, batch_size: 16, max_length: 128}
resources: {workers: 2, cpus_per_worker: 1.0, placement: spread}
timeouts: {setup_s: 90, epoch_s: 30, collective_s: 20, placement_s: 600}
failures: {retries: 100}
"""
)
DISK_BYTES = 700 * 2**20
DEADLINE_S = 3600.0
EARLY = "early-kill"
ENOUGH = threading.Event()
LEADERBOARD = (
    "method",
    "task",
    "score_mean",
    "score_std",
    "seeds",
    "validation_score",
    "learning_rate",
    "search_trials",
    "status",
)


@dataclass
class Tally:
    """What the faults did.

    Attributes:
        recovery_s: By kind, seconds from each fault's end until the sweep's next epoch or result.
        problems: Whatever the suite promises not to happen.
    """

    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    struck: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    rerun: int = 0
    doubled: int = 0
    unequal: int = 0
    left_behind: int = 0
    rounds: int = 0
    starts: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return self.struck.total()

    def add(self, other: Tally) -> None:
        """Count what another one has counted."""
        self.struck.update(other.struck)
        for kind, times in other.recovery_s.items():
            self.recovery_s.setdefault(kind, []).extend(times)
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.problems += other.problems


COUNTS = ("lost", "rerun", "doubled", "unequal", "left_behind", "rounds", "starts")


class Record:
    """The tally of all rounds, in a file too, so that a later run goes on where one was ended.

    Args:
        path: Gets a line of JSON for each round; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.total = Tally()
        self._path = path
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                kept = json.loads(line)
                kept["struck"] = Counter(kept["struck"])
                self.total.add(Tally(**kept))

    def add(self, tally: Tally) -> None:
        """Count a round, and keep it."""
        self.total.add(tally)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(vars(tally)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="faults to strike")
    parser.add_argument("--seed", type=int, default=0, help="of kinds, times and victims")
    parser.add_argument(
        "--faults", default=",".join(FAULTS), help="kinds to draw from (default: all)"
    )
    parser.add_argument(
        "--early-kills", type=int, help="kill so many drivers in their first 20 s; nothing else"
    )
    parser.add_argument(
        "--record", type=Path, help="file of the rounds; --kills counts those that it has"
    )
    options = parser.parse_args()
    record = Record(options.record)
    if options.early_kills is not None:
        kill_early(options.early_kills, record)
        return
    kinds = known_kinds(options.faults)
    if reason := why_not():
        raise SystemExit(reason)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, enough)
    with (
        tempfile.TemporaryDirectory(prefix="suite-chaos-") as folder,
        fleet(Path(folder), SWEEP, disk_bytes=DISK_BYTES) as hosts,
    ):
        began = time.monotonic()
        alone = leave_alone(hosts)
        print(
            f"left alone: {len(alone.results)} trials in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        total = record.total
        # Another draw than that of the rounds that the record has
        chance = random.Random(f"{options.seed}:{total.rounds}")
        deck: list[str] = []
        while total.faults < options.kills and not ENOUGH.is_set():
            left = options.kills - total.faults
            tally = Tally()
            one_round(hosts, tally, chance, kinds, deck, number=total.rounds + 1, left=left)
            check(alone, Outcome.of(hosts), tally, where=hosts.home.name)
            record.add(tally)
        show(total, options.seed)
    if total.problems:
        raise SystemExit(1)


def known_kinds(text: str) -> list[str]:
    """The kinds of `--faults`.

    Raises:
        SystemExit: There is no such kind, or it cannot strike here.
    """
    kinds = text.split(",")
    if unknown := sorted(set(kinds) - set(FAULTS)):
        raise SystemExit(f"--faults: unknown {', '.join(unknown)}; known: {', '.join(FAULTS)}")
    reason = shim.why_not()
    if reason is not None and set(kinds) & set(BY_SHIM):
        raise SystemExit(f"--faults: {reason}; or leave out {', '.join(BY_SHIM)}")
    return kinds


def kill_early(kills: int, record: Record) -> None:
    from benchmarks.early_kills import early_kills

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, enough)
    folder = Path(tempfile.mkdtemp(prefix="suite-early-kills-"))
    early_kills(kills, folder, ENOUGH, record)
    total = record.total
    print(f"\n{total.struck[EARLY]} drivers killed in their first 20 s, each in a home of its own")
    say_totals(total)
    if total.problems:
        raise SystemExit(f"homes and logs are kept in {folder}")
    shutil.rmtree(folder)


def enough(number: int, frame: object) -> None:
    """At the first signal: no more faults, the sweep under way ends, the table is printed. At the second: out."""
    if ENOUGH.is_set():
        sys.exit(128 + number)
    ENOUGH.set()


@dataclass
class Outcome:
    """What a sweep left: all that must not depend on what happened meanwhile."""

    results: dict[str, Any]
    board: list[dict[str, Any]]
    runs: list[str]

    @classmethod
    def of(cls, hosts: Fleet) -> Outcome:
        results = {folder.hash: folder.result() for folder in Home(hosts.home).trials()}
        curves = {
            trial: [(e.train_loss, e.validation_score) for e in result.epochs]
            for trial, result in results.items()
            if result is not None
        }
        place = f"--home {hosts.home} --tracking-uri {hosts.servers.uri}"
        hosts.servers.wait()
        hosts.head.run(f"suite sync {place}", timeout_s=300)
        board = json.loads(
            hosts.head.run(f"suite leaderboard {place} --format json", timeout_s=300).stdout
        )
        name = home_id(Home(hosts.home))
        mine = json.loads(
            hosts.head.run(["python", "-c", RUNS, hosts.servers.uri, name], timeout_s=300).stdout
        )
        return cls(
            curves,
            [{key: row[key] for key in LEADERBOARD} for row in board if row["home"] == name],
            mine,
        )


RUNS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name("chaos")
only = f"tags.`suite.kind` = 'trial' and tags.`suite.home` = '{sys.argv[2]}'"
print(json.dumps([run.data.tags["suite.trial"] for run in client.search_runs([experiment.experiment_id], only, max_results=1000)]))
"""


def leave_alone(hosts: Fleet) -> Outcome:
    hosts.home = hosts.bed.shared / "alone"
    end = time.monotonic() + DEADLINE_S
    while not hosts.keep_running():
        if time.monotonic() > end or hosts.starts > 1:
            raise SystemExit(f"the undisturbed sweep did not end:\n{hosts.log.read_text()[-3000:]}")
        time.sleep(0.5)
    return Outcome.of(hosts)


def one_round(
    hosts: Fleet,
    tally: Tally,
    chance: random.Random,
    kinds: list[str],
    deck: list[str],
    *,
    number: int,
    left: int,
) -> None:
    """The sweep in a new home until it has ended, with at most `left` faults."""
    tally.rounds = 1
    hosts.home = hosts.bed.shared / f"round-{number}"
    hosts.driver = None
    hosts.starts = 0
    finished: dict[str, int] = {}
    waiting: list[tuple[str, float, int]] = []  # kind, when it had struck, how far the sweep was
    end, due = time.monotonic() + DEADLINE_S, time.monotonic() + chance.uniform(10, 40)
    while not hosts.keep_running():
        now = time.monotonic()
        if now > end:
            raise SystemExit(
                f"round {number} did not end within {DEADLINE_S:.0f} s:\n{hosts.log.read_text()[-5000:]}"
            )
        finished = untouched(hosts.home, finished, tally)
        reached = how_far(hosts.home)
        for kind, since, before in list(waiting):
            if reached > before:
                tally.recovery_s.setdefault(kind, []).append(now - since)
                waiting.remove((kind, since, before))
        if left and now > due and not ENOUGH.is_set():
            kind = draw(chance, kinds, deck)
            if said := strike(hosts, kind, chance):
                left -= 1
                tally.struck[kind] += 1
                waiting.append((kind, time.monotonic(), how_far(hosts.home)))
                print(f"[{left} left] round {number}: {said}", flush=True)
            due = time.monotonic() + (
                chance.uniform(0, 2) if chance.random() < 0.2 else chance.uniform(10, 40)
            )
        time.sleep(0.25)
    tally.starts += hosts.starts
    untouched(hosts.home, finished, tally)
    tidy(hosts, tally)


def draw(chance: random.Random, kinds: list[str], deck: list[str]) -> str:
    """Every kind once, shuffled, then again: a hundred faults hold each kind about equally often."""
    if not deck:
        deck[:] = chance.sample(kinds, len(kinds))
    return deck.pop()


def strike(hosts: Fleet, kind: str, chance: random.Random) -> str:
    """What was done, or nothing where there was nothing to strike."""
    try:
        return FAULTS[kind](hosts, chance)
    except NotNowError:
        return ""
    except HostError as error:
        log = hosts.log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"{kind} did not come to its end: {error}\n{log}") from error


def how_far(home: Path) -> int:
    """Grows with each epoch and each result."""
    return sum(path.stat().st_size for path in home.glob("trials/*/epochs.jsonl")) + sum(
        1 for _ in home.glob("trials/*/result.json")
    )


def untouched(home: Path, before: dict[str, int], tally: Tally) -> dict[str, int]:
    """No finished trial may vanish or be written again; when each was written (ns)."""
    now = {path.parent.name: path.stat().st_mtime_ns for path in home.glob("trials/*/result.json")}
    lost = [trial for trial in before if trial not in now]
    rerun = [trial for trial in before if trial in now and now[trial] != before[trial]]
    tally.lost += len(lost)
    tally.rerun += len(rerun)
    tally.problems += [f"{home.name}: {trial} is gone" for trial in lost] + [
        f"{home.name}: {trial} was written again" for trial in rerun
    ]
    return now


def tidy(hosts: Fleet, tally: Tally) -> None:
    """Nothing of the sweep is left on the hosts, shortly after its driver has ended."""
    end = time.monotonic() + 30
    while (left := remains(hosts)) and time.monotonic() < end:
        time.sleep(1)
    tally.left_behind += len(left)
    if "Traceback (most recent call last)" in hosts.log.read_text(errors="replace"):
        shutil.copy(
            hosts.log, kept := Path(tempfile.gettempdir()) / f"suite-chaos-{hosts.home.name}.log"
        )
        tally.problems.append(f"{hosts.home.name}: the driver printed a traceback: {kept}")
    tally.problems += [f"{hosts.home.name}: left behind: {what}" for what in left]


def remains(hosts: Fleet) -> list[str]:
    found = [f"rank {pid} on {name}" for name, pids in hosts.ranks().items() for pid in pids]
    for name in hosts.workers:
        files = hosts.bed.host(name).run("ls /dev/shm").stdout.split()
        found += [
            f"/dev/shm/{file} on {name}" for file in files if not file.startswith(("plasma", "ray"))
        ]
    return found


def check(alone: Outcome, found: Outcome, tally: Tally, *, where: str) -> None:
    """The same trials with the same curves, the same leaderboard, one MLflow run per trial."""
    missing, different = (
        sorted(set(alone.results) - set(found.results)),
        sorted(set(found.results) - set(alone.results)),
    )
    tally.lost += len(missing)
    tally.problems += [f"{where}: {trial} is missing" for trial in missing] + [
        f"{where}: {trial} is not of the sweep" for trial in different
    ]
    curves = [
        trial for trial, curve in alone.results.items() if found.results.get(trial, curve) != curve
    ]
    tally.problems += [f"{where}: the curve of {trial} differs" for trial in curves]
    if curves or different or alone.board != found.board:
        tally.unequal += 1
        tally.problems += (
            []
            if alone.board == found.board
            else [f"{where}: the leaderboards differ:\n{alone.board}\n{found.board}"]
        )
    doubled = len(found.runs) - len(set(found.runs))
    tally.doubled += doubled
    if sorted(found.runs) != sorted(alone.results):
        tally.problems.append(
            f"{where}: MLflow has {len(found.runs)} runs, {doubled} of them twice, for {len(alone.results)} trials"
        )


def show(tally: Tally, seed: int) -> None:
    print("\n| fault | struck | back to work after, median | at most |\n| --- | --: | --: | --: |")
    for kind in (*FAULTS, EARLY):
        struck = tally.struck[kind]
        times = tally.recovery_s.get(kind)
        if times:
            print(f"| {kind} | {struck} | {statistics.median(times):.0f} s | {max(times):.0f} s |")
        elif struck:
            print(f"| {kind} | {struck} | - | - |")
    print(f"\nseed {seed}: {tally.faults} faults in {tally.rounds} sweeps")
    print(f"{tally.starts} starts of the driver")
    say_totals(tally)


def say_totals(tally: Tally) -> None:
    print(
        f"trials lost {tally.lost}, rerun {tally.rerun}, doubled in MLflow {tally.doubled}; left behind {tally.left_behind}"
    )
    print(
        f"leaderboards and curves equal to the undisturbed sweep's: {tally.rounds - tally.unequal} of {tally.rounds}"
    )
    print("\n".join(tally.problems))


if __name__ == "__main__":
    main()
