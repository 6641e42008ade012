"""Trials that end early, and searches with two objectives; without Ray."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from suite.config.sweep import PrunerName
from suite.errors import ConfigError
from suite.meters import why_no_energy
from suite.meters.nvml import visible_boards
from suite.meters.record import MemoryPeak, PhaseRecord
from suite.plan import second_objective as front
from suite.plan.cell_state import CellStatus, read_states
from suite.plan.definition import store_definition
from suite.plan.plan import Plan, make_plan
from suite.plan.pruning import Pruning, is_weak
from suite.plan.queue import TrialQueue
from suite.plan.status import status
from suite.record.folder import Home
from suite.record.result import EpochRecord, Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.workspace import Workspace
from suite.tracking.encode import run_status
from suite.train.loop import Trainer
from tests.ports import free_port
from tests.records import cell_rows
from tests.sweeps import decided, finish, toy_roots, toy_sweep

__all__ = ["toy_roots"]
pytestmark = pytest.mark.usefixtures("toy_roots")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def planned(**changes: Any) -> Plan:
    return make_plan(toy_sweep(methods=["full"], **changes), where="toy.yaml")


def curve(home: Home, spec: TrialSpec, scores: list[float]) -> None:
    """Commit epochs."""
    folder = home.trial(spec)
    folder.write_spec(spec)
    for epoch, score in enumerate(scores, start=1):
        record = EpochRecord(
            epoch=epoch,
            step=epoch,
            train_loss=1.0,
            validation_score=score,
            validation_scores={},
            learning_rate=1e-3,
            seconds=1.0,
        )
        with (folder.path / "epochs.jsonl").open("a") as file:
            file.write(record.model_dump_json() + "\n")


def specs(count: int) -> list[TrialSpec]:
    plan = planned(training={"epochs": 16, "batch_size": 8})
    return [plan.search_spec(plan.cells[0], n, 1e-4 * (n + 1)) for n in range(count)]


def asked(
    home: Home, trials: list[TrialSpec], epochs: int, pruner: PrunerName, startup_trials: int = 2
) -> bool:
    """Whether the last one is ended after so many epochs."""
    return is_weak(
        trials[-1], epochs, [t.hash for t in trials[:-1]], home, Pruning(pruner, startup_trials)
    )


def test_the_median_ends_what_is_worse_than_half_of_the_completed_trials(home: Home) -> None:
    trials = specs(4)
    for spec, level in zip(trials, (60.0, 70.0, 80.0, 65.0), strict=True):
        curve(home, spec, [level, level + 1, level + 2])
    assert not asked(home, trials, 1, "median"), "nothing is completed"
    finish(home, trials[0], 62.0)
    assert not asked(home, trials, 1, "median"), "fewer than the startup trials"
    finish(home, trials[1], 72.0)
    finish(home, trials[2], 82.0)
    assert asked(home, trials, 1, "median") and asked(home, trials, 2, "median")
    good = [*trials[:3], specs(5)[4]]
    curve(home, good[-1], [75.0, 74.0])
    assert not asked(home, good, 2, "median"), "its best so far counts"


def test_a_pruned_or_failed_trial_is_no_yardstick_for_the_median(home: Home) -> None:
    trials = specs(3)
    for spec, level in zip(trials, (90.0, 90.0, 50.0), strict=True):
        curve(home, spec, [level])
    finish(home, trials[0], None, Status.PRUNED)
    finish(home, trials[1], None, Status.DIVERGED)
    assert not asked(home, trials, 1, "median", startup_trials=1)


def test_halving_asks_at_its_rungs_only_and_keeps_the_best_quarter(home: Home) -> None:
    trials = specs(6)
    for spec, level in zip(trials, (50.0, 60.0, 55.0, 70.0, 65.0, 80.0), strict=True):
        curve(home, spec, [level + 0.1 * epoch for epoch in range(8)])
    weak = [asked(home, trials[: n + 1], 1, "asha") for n in range(6)]
    assert weak == [False, False, True, False, True, False], "each is compared with those before it"
    assert [asked(home, trials[:5], epochs, "asha") for epochs in (2, 3)] == [False, False], (
        "between rungs nothing ends"
    )
    assert asked(home, trials[:5], 4, "asha") and not asked(home, trials, 4, "asha"), (
        "the next rung is four epochs"
    )


def test_a_trial_that_diverged_holds_no_place_in_a_rung(home: Home) -> None:
    trials = specs(3)
    for spec, level in zip(trials, (70.0, 60.0, 66.0), strict=True):
        curve(home, spec, [level])
    assert asked(home, trials[:2], 1, "asha"), "the first one may still win"
    finish(home, trials[0], None, Status.DIVERGED)
    assert not asked(home, trials[:2], 1, "asha")
    finish(home, trials[1], None, Status.PRUNED)
    assert not asked(home, trials, 1, "asha")
    assert asked(home, [trials[0], trials[2], trials[1]], 1, "asha")


def test_the_answer_depends_on_the_curves_alone_and_not_on_later_epochs(home: Home) -> None:
    trials = specs(3)
    curve(home, trials[0], [60.0, 61.0])
    curve(home, trials[1], [50.0, 99.0])
    first = asked(home, trials[:2], 1, "asha")
    curve(
        home, trials[1], [50.0, 99.0]
    )  # its lines again, as an attempt leaves them that was cut after an epoch
    assert first is asked(home, trials[:2], 1, "asha") is True


def test_perplexities_are_pruned_by_their_utility(home: Home) -> None:
    from suite.config.task import load_task

    trials = [spec.model_copy(update={"task": load_task("ptb")}) for spec in specs(2)]
    curve(home, trials[0], [100.0])
    curve(home, trials[1], [300.0])
    assert asked(home, trials, 1, "asha"), "a higher perplexity is worse"


def test_a_pruned_trial_teaches_the_sampler_and_is_never_chosen(home: Home) -> None:
    plan = planned(
        search={"trials": 4, "startup_trials": 2, "pruner": "asha"}, confirm={"seeds": [1]}
    )
    store_definition(plan, home)
    schedule = TrialQueue(plan, home, slots=1)
    while (spec := schedule.next()) is not None:
        if spec.phase is Phase.SEARCH and spec.number in (1, 3):
            result = TrialResult(
                trial=spec.hash,
                status=Status.PRUNED,
                score=None,
                validation_score=99.0,
                started_at=0.0,
                finished_at=1.0,
            )
            home.trial(spec).write_result(result)
        else:
            finish(home, spec, 50.0 + spec.number)
        schedule.ended(spec)
    (state,) = read_states(plan, home).values()
    best = state.best()
    assert best is not None and best.spec.number == 2 and state.status is CellStatus.DONE
    assert state.search[1].utility is None and state.search[1].feedback == 99.0
    (cell,) = status(home, "toy")
    assert (cell.pruned, cell.failures, cell.search_done) == (2, (), 4) and "2 pruned" in cell.notes
    (row,) = cell_rows(home, "toy")
    assert (row.status, row.search_best, row.search_trials) == ("done", 52.0, 4)
    assert run_status(Status.PRUNED) == "KILLED" and run_status(Status.FAILED) == "FAILED"


def test_the_trainer_records_a_pruned_trial(home: Home, tmp_path: Path) -> None:
    """One real epoch on a tiny encoder, then the end: a result without a score, with its best so far and its cost."""
    plan = make_plan(
        toy_sweep(methods=["full"], training={"epochs": 3, "batch_size": 8}),
        where="toy.yaml",
        world_size=1,
    )
    spec = plan.search_spec(plan.cells[0], 0, 1e-3)
    trainer = Trainer(Workspace(home, tmp_path / "data"), master_port=free_port())
    try:
        trainer.start(spec)
        record = trainer.epoch().record
        result = trainer.finish(pruned=True)
    finally:
        trainer.close()
    assert record is not None and result == home.trial(spec).result()
    assert (result.status, result.score, result.validation_score) == (
        Status.PRUNED,
        None,
        record.validation_score,
    )
    assert "pruned after epoch 1" in result.missing["score"] and result.phases["train"].seconds > 0
    assert not home.trial(spec).checkpoint.exists() or not any(
        home.trial(spec).checkpoint.iterdir()
    )


# ---- two objectives ------------------------------------------------------------------------------------------------------


def costly(
    home: Home,
    spec: TrialSpec,
    score: float,
    energy_kwh: float | None,
    missing: dict[str, str] | None = None,
    *,
    source: str = "nvml",
    processor: str = "EPYC",
) -> None:
    train = PhaseRecord(
        seconds=energy_kwh or 1.0,
        energy_kwh=energy_kwh,
        energy_source=source,
        memory=MemoryPeak(allocated_max_bytes=1000),
    )
    home.trial(spec).write_result(
        TrialResult(
            trial=spec.hash,
            status=Status.COMPLETED,
            score=score,
            validation_score=score,
            phases={"train": train},
            missing=missing or {},
            provenance={"device": "cpu", "hardware": {"cpu_model": processor, "gpus": []}},
            started_at=0.0,
            finished_at=1.0,
        )
    )


def trade_off(spec: TrialSpec) -> tuple[float, float]:
    """Score rises and energy rises with the learning rate, both on the log scale: every trial is on the front."""
    x = math.log10(spec.learning_rate) + 6.0
    return 50.0 + 10.0 * x, 1.0 + x


def run_costly(plan: Plan, home: Home) -> list[TrialSpec]:
    schedule = TrialQueue(plan, home, slots=1)
    ran = []
    while (spec := schedule.next()) is not None:
        costly(home, spec, *trade_off(spec))
        schedule.ended(spec)
        ran.append(spec)
    return ran


@pytest.mark.parametrize("sampler", ["gp", "tpe", "random"])
def test_a_search_with_two_objectives_keeps_its_front_and_confirms_the_best_score(
    home: Home, sampler: str
) -> None:
    plan = planned(
        search={
            "trials": 6,
            "startup_trials": 3,
            "sampler": sampler,
            "objective": ["score", "energy"],
        }
    )
    ran = run_costly(plan, home)
    search = [s for s in ran if s.phase is Phase.SEARCH]
    assert len({s.learning_rate for s in search}) == 6
    assert {s.learning_rate for s in ran if s.phase is Phase.CONFIRM} == {
        max(s.learning_rate for s in search)
    }
    (entry,) = decided(plan, home).values()
    expected = sorted(search, key=lambda s: s.learning_rate)
    assert [(p["number"], p["score"], p["energy"]) for p in entry["pareto"]] == [
        (s.number, *trade_off(s)) for s in expected
    ]
    again = [
        s.learning_rate
        for s in run_costly(plan, Home(home.path / "again"))
        if s.phase is Phase.SEARCH
    ]
    assert again == [s.learning_rate for s in search]


def test_the_second_objective_changes_what_is_proposed(home: Home) -> None:
    both = planned(search={"trials": 7, "startup_trials": 3, "objective": ["score", "energy"]})
    alone = planned(search={"trials": 7, "startup_trials": 3})
    rates = []
    for i, plan in enumerate((both, alone)):
        rates.append(
            [
                s.learning_rate
                for s in run_costly(plan, Home(home.path / str(i)))
                if s.phase is Phase.SEARCH
            ]
        )
    assert rates[0][:3] == rates[1][:3], "those of the start"
    assert not set(rates[0][3:]) & set(rates[1][3:])


def test_dominated_trials_are_not_on_the_front(home: Home) -> None:
    plan = planned(search={"trials": 4, "objective": ["score", "time"]})
    points = [(80.0, 3.0), (70.0, 2.0), (60.0, 2.5), (80.0, 4.0)]
    schedule = TrialQueue(plan, home, slots=1)
    for score, seconds in points:
        spec = schedule.next()
        assert spec is not None
        costly(home, spec, score, seconds)
        schedule.ended(spec)
    (entry,) = decided(plan, home).values()
    assert [(p["score"], p["time"]) for p in entry["pareto"]] == [(70.0, 2.0), (80.0, 3.0)]


def test_an_objective_without_a_value_is_told_with_its_reason(home: Home) -> None:
    plan = planned(search={"trials": 4, "objective": ["score", "energy"]})
    schedule = TrialQueue(plan, home, slots=1)
    spec = schedule.next()
    assert spec is not None
    costly(home, spec, 50.0, None, {"phases.train.energy_kwh": "nvml: MIG is on"})
    assert schedule.unmeasured(spec) is None, "not ended yet"
    schedule.ended(spec)
    why = schedule.unmeasured(spec)
    assert why is not None and "MIG is on" in why and spec.hash in why
    assert TrialQueue(plan, home, slots=1).unmeasured() == why, (
        "the next run says it again before it starts anything"
    )


@pytest.mark.parametrize(
    ("objective", "last", "first_source", "last_source"),
    [
        ("energy", ("cpu-time-estimate", "EPYC"), "nvml on EPYC", "cpu-time-estimate on EPYC"),
        ("energy", ("nvml", "Xeon"), "nvml on EPYC", "nvml on Xeon"),
        ("time", ("nvml", "Xeon"), "EPYC", "Xeon"),
    ],
)
def test_costs_of_two_meters_or_machines_have_no_common_front(
    home: Home, objective: str, last: tuple[str, str], first_source: str, last_source: str
) -> None:
    plan = planned(search={"trials": 4, "objective": ["score", objective]})
    schedule = TrialQueue(plan, home, slots=1)
    ran = []
    for source, processor in (("nvml", "EPYC"), ("nvml", "EPYC"), last):
        assert schedule.unmeasured() is None
        spec = schedule.next()
        assert spec is not None
        cost = 2.0 + len(ran)
        costly(home, spec, 48.0 + cost, cost, source=source, processor=processor)
        schedule.ended(spec)
        ran.append(spec)
    why = schedule.unmeasured(ran[-1])
    assert why is not None and why.startswith(f"search.objective: {objective} has two sources")
    assert f"{first_source} in trial {ran[0].hash} and {last_source} in trial {ran[2].hash}" in why
    assert TrialQueue(plan, home, slots=1).unmeasured() == why
    (entry,) = decided(plan, home).values()
    assert entry["pareto"] == []
    shutil.rmtree(home.trial(ran[2]).path)
    again = TrialQueue(plan, home, slots=1)
    assert again.unmeasured() is None and again.next() == ran[2], "it runs again"
    (entry,) = decided(plan, home).values()
    assert len(entry["pareto"]) == 2


def test_memory_and_time_are_read_of_the_train_phase(home: Home) -> None:
    (spec,) = specs(1)
    costly(home, spec, 50.0, 2.5)
    result = home.trial(spec).result()
    assert result is not None
    assert [front.cost(result, name) for name in ("energy", "memory", "time")] == [2.5, 1000.0, 2.5]


@dataclass
class FakeNvml:
    """One board that counts energy, or has none."""

    counter: bool
    boards: int = 1

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        if not self.boards:
            raise self.NVMLError("driver not loaded")

    def nvmlDeviceGetCount(self) -> int:
        return self.boards

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return 0

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        return (0, 0)

    def nvmlDeviceGetVirtualizationMode(self, handle: int) -> int:
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if not self.counter:
            raise self.NVMLError("not supported")
        return 5

    nvmlDeviceGetPowerUsage = nvmlDeviceGetTotalEnergyConsumption

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[str]:
        return []


def test_energy_of_boards_that_cannot_be_metered_is_known_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert why_no_energy(FakeNvml(counter=True)) is None
    assert "not supported" in str(why_no_energy(FakeNvml(counter=False)))
    assert "driver not loaded" in str(why_no_energy(FakeNvml(counter=True, boards=0)))
    energy = toy_sweep(search={"objective": ["score", "energy"]})
    seconds = toy_sweep(search={"objective": ["score", "time"]})
    front.check_measurable(energy, "cpu", here=True, where="x.yaml")
    front.check_measurable(seconds, "cuda", here=True, where="x.yaml")
    front.check_measurable(energy, "cuda", here=False, where="x.yaml")
    if not torch.cuda.is_available():
        with pytest.raises(
            ConfigError,
            match=r"x\.yaml: search\.objective: energy is not measured on this machine: NVML",
        ):
            front.check_measurable(energy, "cuda", here=True, where="x.yaml")


@pytest.mark.parametrize("one_at_a_time", [{}, {"concurrent_trials": 1}])
def test_energy_of_trials_that_share_a_gpu_is_no_objective(one_at_a_time: dict[str, int]) -> None:
    search = {"objective": ["score", "energy"]}
    shared = toy_sweep(search=search, resources={"gpus_per_worker": 0.5, **one_at_a_time})
    with pytest.raises(ConfigError, match=r"share a GPU is not measured .*gpus_per_worker: 0\.5"):
        front.check_measurable(shared, "cuda", here=False, where="x.yaml")


@pytest.mark.parametrize(
    ("visible", "boards"),
    [
        (None, ["GPU-0", "GPU-1"]),
        ("1", ["GPU-1"]),
        ("1,0", ["GPU-1", "GPU-0"]),
        ("GPU-1", ["GPU-1"]),
        ("", []),
        ("7", []),
    ],
)
def test_only_the_boards_that_a_process_sees_are_asked(
    visible: str | None, boards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_boards(FakeNvml(counter=True, boards=2)) == boards


def test_the_sweep_files_of_papers_use_their_whole_budget() -> None:
    """A paper's search had no rule that ends it early; where the rate is fixed there is no search."""
    from suite.config.sweep_files import load_sweep
    from suite.registry import yaml_names

    papers = {
        name: path
        for name, path in yaml_names("sweeps").items()
        if name.startswith(("mhe-", "wgqa-", "shared-", "read-"))
    }
    searched = []
    for name, path in papers.items():
        sweep = load_sweep(path)
        ranges = [method.learning_rate for method in sweep.methods]
        if not all(rate is not None and rate.fixed for rate in ranges):
            searched.append(name)
            assert sweep.search.stop is None, name
    assert searched == ["read-glue-t5-base", "read-glue-t5-large", "read-recurrence"]
