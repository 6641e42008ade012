"""The meter for any script: phases that nest, several devices and processes, known loads, and what cannot be told."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from suite.meters import WATTS_PER_CORE, Meter, Unavailable, idle_watts
from suite.meters.energy import CpuTime, EnergySource, Rapl, Reading
from tests.ranks import on_ranks

JOULES_PER_KWH = 3.6e6
MIB = 2**20


class Scripted(EnergySource):
    """A board's counter that a test moves by hand."""

    kind = "nvml"

    def __init__(self, board: str) -> None:
        self.board = board
        self.pending = 0.0

    def collect(self) -> Reading:
        joules = self.pending
        self.pending = 0.0
        return Reading({self.board: joules})


def busy(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def test_a_known_load_costs_its_processor_seconds_times_the_watts() -> None:
    with Meter("cpu", sources=[[CpuTime()]]) as meter:
        busy(0.3)
        time.sleep(0.2)
    assert meter.energy_kwh == pytest.approx(
        0.3 * WATTS_PER_CORE / JOULES_PER_KWH, rel=0.05
    )  # the meter's own work is in it
    assert meter.energy_source == "cpu-time-estimate"
    assert meter.seconds >= 0.5
    assert meter.watts == pytest.approx(meter.energy_kwh * JOULES_PER_KWH / meter.seconds)


def test_an_outer_phase_contains_its_inner_ones_and_the_block_contains_all() -> None:
    board = Scripted("GPU-a")
    with Meter("cpu", sources=[[board]]) as meter:
        board.pending += 1
        with meter.phase("train"):
            board.pending += 2
            for _ in range(2):
                with meter.phase("forward"):
                    board.pending += 4
        with meter.phase("forward"):
            board.pending += 16
    joules = {
        path: (record.energy_kwh or 0.0) * JOULES_PER_KWH for path, record in meter.phases.items()
    }
    assert joules == {
        "train": pytest.approx(10),
        "train/forward": pytest.approx(8),
        "forward": pytest.approx(16),
    }
    assert meter.energy_kwh == pytest.approx(27 / JOULES_PER_KWH)
    assert meter["train"].seconds >= meter["train/forward"].seconds
    assert [line.split()[0] for line in meter.table().splitlines()] == [
        "phase",
        "(all)",
        "train",
        "train/forward",
        "forward",
    ]


def test_two_boards_of_a_process_add_up_and_each_counts_once() -> None:
    boards = [Scripted("GPU-a"), Scripted("GPU-b")]
    with Meter(["meta:0", "meta:1"], sources=[[boards[0]], [boards[1]]]) as meter:
        boards[0].pending = 3
        boards[1].pending = 5
    assert meter.energy_kwh == pytest.approx(8 / JOULES_PER_KWH)


def test_grams_of_carbon_need_a_grid() -> None:
    board = Scripted("GPU-a")
    with Meter("cpu", sources=[[board]], grid_g_per_kwh=400) as meter:
        board.pending = JOULES_PER_KWH / 2
    assert meter.co2e_g == pytest.approx(200)
    with Meter("cpu") as without:
        busy(0.01)
    assert without.co2e_g is None
    with pytest.raises(ValueError, match="grams of CO2e"):
        Meter("cpu", grid_g_per_kwh=-1)


def test_the_peak_of_tensors_is_kept_by_phase_when_it_is_watched() -> None:
    with Meter("cpu", watch_tensors=True) as meter:
        with meter.phase("large"):
            large = torch.zeros(8 * MIB, dtype=torch.uint8)
        del large
        with meter.phase("small"):
            torch.zeros(2 * MIB, dtype=torch.uint8)
    peaks = {path: record.memory.allocated_max_bytes for path, record in meter.phases.items()}
    assert peaks["large"] - peaks["small"] == 6 * MIB
    assert meter.memory.allocated_max_bytes == peaks["large"]
    assert meter.memory.reserved_max_bytes is None
    assert "caching allocator" in meter.missing["memory.reserved_max_bytes"]


def test_what_was_not_watched_is_null_with_the_reason() -> None:
    with Meter("cpu") as meter:
        busy(0.01)
    assert meter.memory.allocated_max_bytes is None
    assert meter.missing["memory.allocated_max_bytes"]
    assert meter.memory.rss_max_bytes is not None


def test_idle_power_is_measured_or_the_reason_is_there() -> None:
    try:
        Rapl()
    except Unavailable:
        with pytest.raises(Unavailable, match="no counter measures power here"):
            idle_watts(torch.device("cpu"), seconds=0.05)
        with Meter("cpu", idle_s=0.05) as meter:
            pass
        assert meter.idle_watts is None
        assert "no counter" in str(meter.idle_watts_missing)
    else:
        assert idle_watts(torch.device("cpu"), seconds=1.0) > 0


def test_a_meter_used_in_the_wrong_order_says_how() -> None:
    meter = Meter("cpu")
    with pytest.raises(RuntimeError, match="only inside the Meter"), meter.phase("train"):
        pass
    with meter, pytest.raises(RuntimeError, match="read the Meter after its `with`"):
        _ = meter.seconds
    with pytest.raises(RuntimeError, match="one block"), meter:
        pass
    with pytest.raises(RuntimeError, match="only inside"), meter.phase("late"):
        pass
    with pytest.raises(KeyError, match="phases"):
        _ = meter["evaluation"]
    with pytest.raises(ValueError, match="several different"):
        Meter(["cpu", "cpu"])
    with pytest.raises(ValueError, match="of a kind"):
        Meter(["cpu", "meta"])


def gathered(rank: int) -> dict[str, Any]:
    with Meter("cpu", sources=[[CpuTime()]]) as meter, meter.phase(f"rank-{rank}"):
        busy(0.1 * (rank + 1))
    alone = meter.energy_kwh
    meter.gather().gather()  # again: the same
    return {"alone": alone, "together": meter.energy_kwh, "phases": sorted(meter.phases)}


def test_the_processes_of_a_group_add_up_and_all_say_the_same() -> None:
    first, second = on_ranks(gathered)
    assert (
        first["together"] == second["together"] == pytest.approx(first["alone"] + second["alone"])
    )
    assert first["phases"] == second["phases"] == ["rank-0", "rank-1"]
