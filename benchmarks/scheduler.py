"""1,000 GPUs and 10,000 trials through the real planner, schedule, searcher and Tune controller: where does the time go?

    python -m benchmarks.scheduler [--slots 1000] [--cells 1250] [--trial-s 600] [--sampler gp]
    python -m benchmarks.scheduler --real --slots 50 --cells 50 --trial-s 6      the same through Ray, in real time

Real in both: plan, schedule, proposals, trial folders, studies, Tune's controller with its actor manager. A trial sleeps, `--trial-s`
seconds on average, evenly drawn between a fifth and nine fifths of that, in three epochs. By default that is virtual time
(benchmarks/virtual.py). With `--real` there are placement groups, references and messages of a Ray node with as many logical GPUs; an
actor is a thread of a few host processes, because 1,000 processes want 100 GiB.

Each of the `--cells` cells has 8 trials: six learning rates (three evenly spread, three proposed) and two seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray
from ray.air.execution.resources import placement_group as acquired

from benchmarks.meter import Meter, memory
from benchmarks.virtual import Clock, Future, virtual_cluster
from suite.config.sweep import SweepConfig
from suite.plan.cell_state import read_states
from suite.plan.definition import read_plan
from suite.plan.queue import TrialQueue
from suite.plan.status import status
from suite.record.folder import Home
from suite.record.result import EpochRecord, Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.train.report import EpochReport
from suite.tune import driver
from suite.tune.driver import run_sweep
from suite.tune.group import RunSettings
from suite.tune.trainable import TrialTrainable

ROOT = Path(__file__).parents[1]
NAME = "scheduler"
TASKS, TRIALS, SEEDS, EPOCHS = 25, 6, (1, 2), 3
HOSTS = 4
RAY: dict[str, Any] = {
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "CRITICAL",
    "object_store_memory": 128 * 2**20,
    "runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
}
BERT = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=1000)
    parser.add_argument(
        "--cells", type=int, default=1250, help=f"a multiple of {TASKS}; 8 trials each"
    )
    parser.add_argument("--trial-s", type=float, default=600.0, help="mean length of a trial")
    parser.add_argument("--start-s", type=float, default=30.0, help="virtual: a group's start")
    parser.add_argument(
        "--reset-s",
        type=float,
        default=1.0,
        help="virtual: from one trial to the next on a warm group",
    )
    parser.add_argument(
        "--sync-s", type=float, default=0.005, help="virtual: a synced write of the driver"
    )
    parser.add_argument(
        "--wait-us",
        type=float,
        default=2.0,
        help="virtual: what ray.wait takes for each reference that it waits for",
    )
    parser.add_argument("--real", action="store_true", help="through Ray, in real time")
    parser.add_argument("--sampler", default="gp", choices=["gp", "tpe", "random"])
    parser.add_argument("--home", type=Path, help="kept; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tasks(Path(folder)):
        home = Home((options.home or Path(folder) / "home").resolve())
        print(
            json.dumps(
                (in_real_time if options.real else in_virtual_time)(home, options), indent=2
            ),
            flush=True,
        )
        print(json.dumps(reading(home), indent=2), flush=True)


@contextlib.contextmanager
def tasks(folder: Path) -> Iterator[None]:
    """Twenty-five tasks that differ in name alone, known to this process while the block runs."""
    text = (ROOT / "tasks" / "entailment.yaml").read_text()
    (folder / "tasks").mkdir(parents=True)
    for n in range(TASKS):
        (folder / "tasks" / f"entailment-{n:02d}.yaml").write_text(text)
    os.environ["SUITE_PATH"] = str(folder)
    try:
        yield
    finally:
        del os.environ["SUITE_PATH"]


def sweep(cells: int, sampler: str) -> SweepConfig:
    values: dict[str, Any] = {
        "name": NAME,
        "backbones": [
            {
                "name": "bert-base",
                "config": BERT | {"max_position_embeddings": 128},
                "tokenizer": "bytes",
            }
        ],
        "methods": [
            {"name": "lora", "architecture": {"rank": rank + 1}} for rank in range(cells // TASKS)
        ],
        "tasks": [f"entailment-{n:02d}" for n in range(TASKS)],
        "search": {
            "trials": TRIALS,
            "sampler": sampler,
            "stop": None,
            "edge_guard": {"extensions": 0},
        },
        "confirm": {"seeds": list(SEEDS)},
        "limit": {"train": 64, "validation": 32, "test": 32},
        "training": {"epochs": EPOCHS, "batch_size": 16, "max_length": 64},
        "resources": {
            "workers": 1,
            "gpus_per_worker": 1,
            "cpus_per_worker": 0.001,
        },  # Ray would start as many processes as processors
    }
    return SweepConfig.model_validate(values)


def length_s(spec: TrialSpec, mean_s: float) -> float:
    """How long a trial takes, by its hash."""
    return mean_s * random.Random(spec.hash).uniform(0.2, 1.8)


class Sleeper:
    """Stands in for a trial's group: the same calls, no ranks.

    Attributes:
        now_s, sleep: The clock, real or virtual.
    """

    now_s: Callable[[], float] = staticmethod(time.time)
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def __init__(self, settings: RunSettings) -> None:
        self.home = settings.workspace.home
        self.seconds_per_trial = float(settings.trainer)

    def start(self, specs: Sequence[TrialSpec]) -> int:
        (self.spec,) = specs  # no lanes
        self.done = 0
        self.epochs: list[EpochRecord] = []
        return 0

    def epoch(self) -> dict[str, EpochReport]:
        self.sleep(length_s(self.spec, self.seconds_per_trial) / EPOCHS)
        score = 90.0 - random.Random(self.spec.hash).uniform(0.0, 5.0) + self.done
        record = EpochRecord(
            epoch=self.done,
            step=self.done,
            train_loss=1.0,
            validation_score=score,
            validation_scores={"accuracy": score},
            learning_rate=self.spec.learning_rate,
            seconds=1.0,
        )
        self.done += 1
        self.epochs.append(record)
        return {self.spec.hash: EpochReport(record, self.done == EPOCHS)}

    def finish(self, trial: str, *, pruned: bool = False) -> TrialResult:
        score, test = self.epochs[-1].validation_score, self.spec.phase is Phase.CONFIRM
        result = TrialResult(
            trial=self.spec.hash,
            status=Status.COMPLETED,
            score=score,
            validation_score=score,
            test_score=score if test else None,
            best_epoch=self.done - 1,
            epochs=self.epochs,
            started_at=self.now_s() - length_s(self.spec, self.seconds_per_trial),
            finished_at=self.now_s(),
        )
        self.home.trial(self.spec).write_result(result)
        return result

    def close(self) -> None: ...


class SleepingTrainable(TrialTrainable):
    """The suite's own, but for the group."""

    def _ready_group(self) -> Any:
        if self._group is None:
            self._group = Sleeper(self._settings)  # type: ignore[assignment]
        if not self._started:
            self._epochs = self._group.start([lane.spec for lane in self._lanes])  # type: ignore[union-attr]
            self._started = True
        return self._group


class Host:
    """A process whose threads are trial actors."""

    def __init__(self) -> None:
        self._slots: dict[int, SleepingTrainable] = {}

    def call(
        self, slot: int, method: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        if method == "__init__":
            self._slots[slot] = SleepingTrainable(*arguments, **options)
            return None
        if method in ("__ray_ready__", "__ray_terminate__"):
            return None
        return getattr(self._slots[slot], method)(*arguments, **options)


class Slot:
    """What Tune takes for the handle of a trial's actor."""

    def __init__(self, host: Any, number: int, arguments: dict[str, Any]) -> None:
        self._host, self._number = host, number
        self._made = host.call.remote(number, "__init__", (), arguments)

    def __getattr__(self, method: str) -> Any:
        return _Method(self, method)


class _Method:
    def __init__(self, slot: Slot, name: str) -> None:
        self._slot, self._name = slot, name

    def remote(self, *arguments: Any, **options: Any) -> Any:
        if self._name == "__ray_ready__":
            return self._slot._made
        return self._slot._host.call.remote(self._slot._number, self._name, arguments, options)


@contextlib.contextmanager
def threads_for_actors(slots: int) -> Iterator[None]:
    """Tune's actors become threads of a few hosts, and their ranks sleep."""
    actor: Any = ray.remote(Host)
    hosts = [actor.options(num_cpus=0, max_concurrency=slots).remote() for _ in range(HOSTS)]
    made = 0

    class Maker:
        def remote(self, **arguments: Any) -> Slot:
            nonlocal made
            made += 1
            return Slot(hosts[made % HOSTS], made, arguments)

    kill, trainable = ray.kill, driver.TrialTrainable
    annotate = acquired.PlacementGroupAcquiredResources.annotate_remote_entities
    acquired.PlacementGroupAcquiredResources.annotate_remote_entities = lambda self, entities: [
        Maker()
    ]  # type: ignore[method-assign]
    ray.kill = lambda handle, **options: (
        None if isinstance(handle, Slot) else kill(handle, **options)
    )
    driver.TrialTrainable = SleepingTrainable  # type: ignore[misc]
    try:
        yield
    finally:
        ray.kill, driver.TrialTrainable = kill, trainable  # type: ignore[misc]
        acquired.PlacementGroupAcquiredResources.annotate_remote_entities = annotate  # type: ignore[method-assign]
        for host in hosts:
            ray.kill(host)


class VirtualSlot:
    """What Tune takes for the handle of a trial's actor, in virtual time."""

    def __init__(
        self, clock: Clock, options: argparse.Namespace, arguments: dict[str, Any]
    ) -> None:
        self._clock, self._options = clock, options
        self._made = Future(clock.now_s + options.start_s, lambda: self._make(arguments))

    def _make(self, arguments: dict[str, Any]) -> None:
        self._trainable = SleepingTrainable(**arguments)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(
            remote=lambda *arguments, **options: self._call(method, arguments, options)
        )

    def _call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Future:
        if method == "__ray_ready__":
            return self._made
        takes_s = {
            "train": lambda: length_s(self._trainable._spec, self._options.trial_s) / EPOCHS,
            "reset": lambda: self._options.reset_s,
        }
        due_s = self._clock.now_s + takes_s.get(method, lambda: 0.0)()
        return Future(
            due_s,
            lambda: (
                None
                if method == "__ray_terminate__"
                else getattr(self._trainable, method)(*arguments, **options)
            ),
        )


def in_virtual_time(home: Home, options: argparse.Namespace) -> dict[str, Any]:
    """The sweep on a calendar; the seconds in the result are virtual, but for processor seconds."""
    clock = Clock(options.sync_s)
    patches = [
        patch.object(Sleeper, "now_s", staticmethod(lambda: clock.now_s)),
        patch.object(Sleeper, "sleep", staticmethod(lambda seconds: None)),
        patch.object(driver, "TrialTrainable", SleepingTrainable),
        virtual_cluster(
            options.slots,
            clock,
            lambda **arguments: VirtualSlot(clock, options, arguments),
            wait_s=lambda n: n * options.wait_us / 1e6,
        ),
    ]
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        found = run(home, options, trial_s=options.trial_s)
    return {**found, "syncs": clock.syncs, "driver_cpu_s": clock.computed_s}


def in_real_time(home: Home, options: argparse.Namespace) -> dict[str, Any]:
    """The sweep through Ray."""
    ray.init(address="local", num_cpus=2, num_gpus=options.slots, **RAY)
    try:
        with threads_for_actors(options.slots):
            return run(home, options, trial_s=options.trial_s)
    finally:
        ray.shutdown()


def run(home: Home, options: argparse.Namespace, *, trial_s: float) -> dict[str, Any]:
    """The sweep, and what it took."""
    meter, config = Meter(), sweep(options.cells, options.sampler)
    with meter.running():
        outcome = run_sweep(config, home=home, listeners=[meter], trainer=str(trial_s))  # type: ignore[list-item]
    if not outcome.ok:
        raise SystemExit(f"the sweep did not end well: {outcome.reason or outcome.failed[:3]}")
    return {**shares(home, options), "cpu_s": dict(meter.cpu_s), "memory": memory(meter)}


def shares(home: Home, options: argparse.Namespace) -> dict[str, float]:
    """How much of the slots' time was slept through: in all, and between the time all are taken and the last hand-out."""
    results = [r for folder in home.trials() if (r := folder.result()) is not None]
    first, last = min(r.started_at for r in results), max(r.finished_at for r in results)
    starts = sorted(r.started_at for r in results)
    full, drained = starts[min(options.slots, len(starts)) - 1], starts[-1]
    return {
        "trials": len(results),
        "busy_share": busy(results, first, last, options.slots),
        "ramp_s": full - first,
        "busy_share_between": busy(results, full, drained, options.slots),
        "drain_s": last - drained,
        "makespan_s": last - first,
        "ideal_s": sum(r.finished_at - r.started_at for r in results) / options.slots,
    }


def busy(results: list[TrialResult], start: float, end: float, slots: int) -> float:
    within = (max(0.0, min(r.finished_at, end) - max(r.started_at, start)) for r in results)
    return sum(within) / (slots * (end - start)) if end > start else 0.0


def reading(home: Home) -> dict[str, float]:
    """What it takes to go on after a crash, and to look."""
    plan = read_plan(home, NAME)
    found = {}
    for name, read in {
        "resume": lambda: TrialQueue(plan, home, slots=1),
        "read_states": lambda: read_states(plan, home),
        "status": lambda: status(home, NAME),
    }.items():
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        read()
        found |= {
            f"{name}_s": time.perf_counter() - wall_s,
            f"{name}_cpu_s": time.process_time() - cpu_s,
        }
    return found


if __name__ == "__main__":
    from benchmarks import scheduler

    scheduler.main()  # of a class that is in `__main__` Ray makes copies, with copies of the clock
