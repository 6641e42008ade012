"""Phases and their clocks, and what the ranks' accounts become together."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

from suite.meters import LocalPhase, PhaseMeter, Ticker, combine
from suite.meters.energy import CpuTime, EnergySource, Reading

CPU = torch.device("cpu")
JOULES_PER_KWH = 3.6e6


class Scripted(EnergySource):
    """A counter that a test moves by hand."""

    kind = "nvml"

    def __init__(self) -> None:
        self.pending = 0.0

    def collect(self) -> Reading:
        joules = self.pending
        self.pending = 0.0
        return Reading({"GPU-a": joules})


def kwh(meter: PhaseMeter) -> float | None:
    """Energy of the phase `train` so far."""
    return combine([meter.local()])[0]["train"].energy_kwh


# phases


def test_the_inner_phase_is_not_part_of_the_outer_one() -> None:
    source = Scripted()
    meter = PhaseMeter(CPU, sources=[source])
    start_s = time.perf_counter()
    with meter.phase("train"):
        source.pending += 1
        with meter.phase("eval"):
            source.pending += 5
            time.sleep(0.05)
        source.pending += 2
    wall_s = time.perf_counter() - start_s
    record, _ = combine([meter.local()])
    assert record["train"].energy_kwh == pytest.approx(3 / JOULES_PER_KWH)
    assert record["eval"].energy_kwh == pytest.approx(5 / JOULES_PER_KWH)
    assert record["eval"].seconds >= 0.05
    assert record["train"].seconds + record["eval"].seconds <= wall_s


class LaggingCounter(Scripted):
    lags = True


def test_what_is_taken_is_charged_once_also_by_a_counter_that_lags() -> None:
    source = LaggingCounter()
    meter = PhaseMeter(CPU, sources=[source])
    with meter.phase("train"):
        first = meter.take()
    second = meter.take()
    with meter.phase("eval"):
        # The counter shows only now what training has cost.
        source.pending += 7
    third = meter.take()
    spent = 0.0
    for taken in (first, second, third):
        for phase in taken.values():
            spent += sum(phase.joules.get("nvml", {}).values())
    assert spent == pytest.approx(7)
    assert third["train"].joules["nvml"]["GPU-a"] > 0


def test_a_share_of_a_phase_adds_up_and_has_no_memory_of_its_own() -> None:
    source = Scripted()
    meter = PhaseMeter(CPU, sources=[source])
    with meter.phase("train"):
        source.pending += 6
    whole = meter.take()["train"]
    share = whole.part(1 / 3, "one of 3 lanes")
    assert share.joules["nvml"]["GPU-a"] == pytest.approx(2)
    assert share.seconds == pytest.approx(whole.seconds / 3)
    assert not share.memory and "one of 3 lanes" in share.missing["allocated_bytes"]


def test_visits_add_up_and_an_open_visit_counts_so_far() -> None:
    source = Scripted()
    meter = PhaseMeter(CPU, sources=[source])
    for _ in range(2):
        with meter.phase("train"):
            source.pending += 4
            time.sleep(0.02)
    assert meter.seconds("train") >= 0.04
    with meter.phase("train"):
        source.pending += 4
        assert kwh(meter) == pytest.approx(12 / JOULES_PER_KWH)
    assert kwh(meter) == pytest.approx(12 / JOULES_PER_KWH)
    assert meter.seconds("never") == 0


def test_a_ticker_ticks_until_it_is_stopped_and_can_start_again() -> None:
    ticked = threading.Event()
    ticker = Ticker(ticked.set, 0.01)
    for _ in range(2):
        ticked.clear()
        ticker.start()
        assert ticked.wait(5)
        ticker.stop()
        ticked.clear()
        assert not ticked.wait(0.05)
    ticker.stop()


def test_a_resumed_trial_adds_to_what_was_spent_before_the_cut() -> None:
    source = Scripted()
    first = PhaseMeter(CPU, sources=[source])
    with first.phase("train"):
        source.pending += 3
        with first.probe():
            torch.zeros(1000)
        saved = json.loads(json.dumps(first.state()))
    second = PhaseMeter(CPU, sources=[source])
    with second.phase("load"):
        second.load_state(saved)
    with second.phase("train"):
        source.pending += 4
    assert kwh(second) == pytest.approx(7 / JOULES_PER_KWH)
    assert second.seconds("train") > saved["train"]["seconds"]
    assert (
        second.local()["train"].memory["allocated_bytes"]
        == saved["train"]["memory"]["allocated_bytes"]
        >= 4000
    )


def test_accounts_survive_a_state_round_trip_unchanged() -> None:
    first = PhaseMeter(CPU)
    second = PhaseMeter(CPU)
    with first.phase("train"), first.phase("eval"):
        pass
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.local() == first.local()


# ranks together


def account(
    seconds: float,
    *,
    kind: str = "nvml",
    device: str = "GPU-a",
    joules: float = 36.0,
    processes: int = 1,
) -> LocalPhase:
    gpus = {device: processes} if kind == "nvml" else {}
    memory = {"allocated_bytes": int(joules), "reserved_bytes": 100, "rss_bytes": 7}
    return LocalPhase(seconds, {kind: {device: joules}}, {kind: seconds}, gpus, memory=memory)  # type: ignore[arg-type]


def test_a_gpu_shared_by_two_ranks_counts_once_and_two_gpus_twice() -> None:
    shared = [{"train": account(10, processes=2)}, {"train": account(12, processes=2)}]
    apart = [{"train": account(10)}, {"train": account(12, device="GPU-b")}]
    assert combine(shared)[0]["train"].energy_kwh == pytest.approx(1e-5)
    assert combine(apart)[0]["train"].energy_kwh == pytest.approx(2e-5)
    assert combine(apart)[0]["train"].seconds == 12


def test_estimates_of_processes_add_up() -> None:
    ranks = [
        {"train": account(10, kind="cpu-time-estimate", device=f"process-{rank}")}
        for rank in range(3)
    ]
    record = combine(ranks)[0]["train"]
    assert (record.energy_kwh, record.energy_source) == (pytest.approx(3e-5), "cpu-time-estimate")


def test_two_processor_meters_are_two_devices() -> None:
    devices = [next(iter(CpuTime().collect().joules)) for _ in range(2)]
    assert devices[0] != devices[1]


def test_memory_is_the_maximum_and_the_sum_over_ranks() -> None:
    memory = combine(
        [{"train": account(1, joules=36)}, {"train": account(1, device="GPU-b", joules=50)}]
    )[0]["train"].memory
    assert (
        memory.allocated_max_bytes,
        memory.allocated_sum_bytes,
        memory.reserved_sum_bytes,
        memory.rss_sum_bytes,
    ) == (50, 86, 200, 14)


def test_a_phase_with_a_hole_on_one_rank_has_no_energy() -> None:
    holed = account(12, device="GPU-b")
    holed.covered_s["nvml"] = 3.0
    record, missing = combine([{"train": account(10)}, {"train": holed}])
    assert record["train"].energy_kwh is None
    assert "measured for 3 of 12 s" in missing["phases.train.energy_kwh"]


def test_measured_and_estimated_joules_are_not_added_up() -> None:
    ranks = [
        {"train": account(10)},
        {"train": account(10, kind="cpu-time-estimate", device="process-1")},
    ]
    record, missing = combine(ranks)
    assert record["train"].energy_kwh is None and "phases.train.energy_kwh" in missing


def test_a_phase_that_one_rank_alone_visits_is_its_own() -> None:
    record, _ = combine([{"checkpoint": account(2)}, {}])
    assert record["checkpoint"].seconds == 2 and record["checkpoint"].energy_kwh == pytest.approx(
        1e-5
    )


def test_every_null_has_a_reason_and_every_reason_a_null() -> None:
    meter = PhaseMeter(CPU)
    with meter.phase("load"):
        pass
    records, missing = combine([meter.local()])
    nulls = {
        f"phases.load.{key}"
        for key, value in records["load"].model_dump(exclude={"memory"}).items()
        if value is None
    }
    nulls |= {
        f"phases.load.memory.{key}"
        for key, value in records["load"].memory.model_dump().items()
        if value is None
    }
    assert {key for key in missing if "[" not in key} == nulls
    assert all(missing.values())
