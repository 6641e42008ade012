"""Energy by every source: NVML's counter and power, READ's equation 16, RAPL, processor time; and the hardware it is spent on."""

from __future__ import annotations

import json
import random
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pynvml
import pytest
import torch

from suite.meters import LocalPhase, PhaseMeter, Unavailable, combine, hardware, nvml
from suite.meters.clock import Integral, Most
from suite.meters.energy import CpuTime, Rapl
from suite.meters.nvml import Gpu, GpuCounter, GpuUtilisation, gpu_sources
from suite.meters.phases import _open_sources

CPU = torch.device("cpu")
JOULES_PER_KWH = 3.6e6


class FakeNvml:
    """NVML with scripted answers: no test machine has every board there is. An answer that is an exception is raised."""

    NVMLError = pynvml.NVMLError

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "TotalEnergyConsumption": 5_000,
            "PowerUsage": 250_000,
            "PowerManagementDefaultLimit": 300_000,
            "EnforcedPowerLimit": 280_000,
            "UtilizationRates": SimpleNamespace(gpu=100),
            "MigMode": pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED),
            "VirtualizationMode": pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE,
            "ComputeRunningProcesses": ["us"],
            "HandleByUUID": "handle",
            "HandleByIndex": "handle",
            "Count": 1,
            "Name": "Fake 9000",
            "MemoryInfo": SimpleNamespace(total=1 << 30),
        } | answers

    def nvmlInit(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return "600.1"

    def __getattr__(self, name: str) -> Any:
        def answer(*_: Any) -> Any:
            value = self.answers[name.removeprefix("nvmlDeviceGet")]
            if isinstance(value, Exception):
                raise value
            return value

        return answer


NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def gpu_meter(api: FakeNvml, *, sample_read_energy: bool = False) -> PhaseMeter:
    sources, absent = gpu_sources(lambda: Gpu("GPU-a", api), sample_read_energy=sample_read_energy)
    meter = PhaseMeter(CPU, sources=sources)
    meter._absent.update(absent)
    return meter


# NVML


@pytest.fixture(autouse=True)
def _read_at_every_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's counter moves between two borders that are microseconds apart."""
    monkeypatch.setattr(nvml, "REST_S", 0.0)


def test_the_counter_is_asked_no_more_often_than_it_moves_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml, "REST_S", 0.2)
    asked = []

    class Counted(FakeNvml):
        def nvmlDeviceGetTotalEnergyConsumption(self, _handle: str) -> int:
            asked.append(self)
            return int(self.answers["TotalEnergyConsumption"])

    api = Counted()
    meter = gpu_meter(api)
    for _ in range(100):
        with meter.phase("step"):
            api.answers["TotalEnergyConsumption"] += 10
    with meter.phase("step"):
        time.sleep(0.2)
    # Once for the start, and then for every 0.2 s, of which a busy machine may take several.
    assert len(asked) < 20
    record, _ = combine([meter.local()])
    # The time between the phases, which is nobody's, gets its share.
    assert record["step"].energy_kwh == pytest.approx(1.0 / JOULES_PER_KWH, rel=0.05)


def test_energy_is_what_the_nvml_counter_moved_by_inside_the_phase() -> None:
    api = FakeNvml()
    meter = gpu_meter(api)
    api.answers["TotalEnergyConsumption"] = 9_000  # before the phase: nobody's
    with meter.phase("train"):
        api.answers["TotalEnergyConsumption"] = 45_000
    record, _ = combine([meter.local()])
    assert record["train"].energy_kwh == pytest.approx(36.0 / JOULES_PER_KWH, rel=1e-12)
    assert record["train"].energy_source == "nvml"


def test_a_counter_that_goes_back_makes_the_phase_null_and_only_it() -> None:
    api = FakeNvml()
    meter = gpu_meter(api)
    with meter.phase("train"):
        api.answers["TotalEnergyConsumption"] = 10
    with meter.phase("eval"):
        api.answers["TotalEnergyConsumption"] = 2_010
    record, missing = combine([meter.local()])
    assert record["train"].energy_kwh is None
    assert "driver was reloaded" in missing["phases.train.energy_kwh"]
    assert record["eval"].energy_kwh == pytest.approx(2.0 / JOULES_PER_KWH, rel=1e-12)


def test_a_counter_that_fails_once_gives_its_energy_to_no_later_reading() -> None:
    api = FakeNvml()
    counter = GpuCounter(Gpu("GPU-a", api))
    api.answers["TotalEnergyConsumption"] = pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
    with pytest.raises(Unavailable, match="Timeout"):
        counter.collect()
    api.answers["TotalEnergyConsumption"] = 41_000
    with pytest.raises(Unavailable, match="could not be read the last time"):
        counter.collect()
    api.answers["TotalEnergyConsumption"] = 43_000
    assert counter.collect().joules == {"GPU-a": 2.0}


def test_a_counter_that_did_not_move_is_null_not_zero() -> None:
    meter = gpu_meter(FakeNvml())
    with meter.phase("checkpoint"):
        pass
    record, missing = combine([meter.local()])
    assert record["checkpoint"].energy_kwh is None
    assert "did not move" in missing["phases.checkpoint.energy_kwh"]


def test_a_phase_too_short_for_the_counter_gets_its_share_of_the_next_movement() -> None:
    api = FakeNvml()
    meter = gpu_meter(api)
    with meter.phase("checkpoint"):
        time.sleep(0.05)
    with meter.phase("train"):
        time.sleep(0.1)
        api.answers["TotalEnergyConsumption"] = 5_000 + 60_000
    record, _ = combine([meter.local()])
    seconds = {name: phase.seconds for name, phase in record.items()}
    kwh = {name: phase.energy_kwh for name, phase in record.items()}
    assert sum(kwh.values()) == pytest.approx(60 / JOULES_PER_KWH)
    assert kwh["checkpoint"] / kwh["train"] == pytest.approx(
        seconds["checkpoint"] / seconds["train"]
    )


def test_an_idle_board_has_a_read_energy_of_zero_which_is_a_reading() -> None:
    assert read_kwh([0], 1.0) == 0.0


def test_power_is_integrated_where_the_counter_is_not_supported() -> None:
    meter = gpu_meter(FakeNvml(TotalEnergyConsumption=NOT_SUPPORTED))
    with meter.phase("train"):
        time.sleep(0.3)
    record = combine([meter.local()])[0]["train"]
    assert record.energy_source == "nvml-sampled"
    # 250 W throughout; the integral runs from reading to reading, the clock from border to border: microseconds, 5 ms on a busy machine
    assert record.energy_kwh == pytest.approx(250 * record.seconds / JOULES_PER_KWH, rel=0.05)


def test_without_counter_and_power_energy_is_null_and_both_reasons_stand() -> None:
    meter = gpu_meter(FakeNvml(TotalEnergyConsumption=NOT_SUPPORTED, PowerUsage=NOT_SUPPORTED))
    with meter.phase("train"):
        pass
    record, missing = combine([meter.local()])
    assert record["train"].energy_kwh is None and record["train"].energy_source is None
    assert (
        "TotalEnergyConsumption" in missing["phases.train.energy_kwh"]
        and "PowerUsage" in missing["phases.train.energy_kwh"]
    )


@pytest.mark.parametrize(
    ("api", "reason"),
    [
        (FakeNvml(MigMode=(1, 1)), "MIG is on"),
        (
            FakeNvml(VirtualizationMode=pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU),
            "a virtual GPU",
        ),
        (
            FakeNvml(ComputeRunningProcesses=pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)),
            "NVML ComputeRunningProcesses",
        ),
        (FakeNvml(HandleByUUID=pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)), "cannot open GPU-a"),
    ],
)
def test_a_board_that_is_not_ours_alone_or_not_known_has_no_energy(
    api: FakeNvml, reason: str
) -> None:
    meter = gpu_meter(api, sample_read_energy=True)
    with meter.phase("train"):
        pass
    record, missing = combine([meter.local()])
    assert record["train"].energy_kwh is None and record["train"].read_energy_kwh is None
    assert (
        reason in missing["phases.train.energy_kwh"]
        and reason in missing["phases.train.read_energy_kwh"]
    )


def test_a_board_that_a_sweep_shares_is_not_metered_whatever_nvml_lists() -> None:
    sources, absent = _open_sources(
        torch.device("cuda"), 4.0, sample_read_energy=True, shares_gpu=True
    )
    assert not sources
    assert set(absent) == {"nvml", "read-eq16"}
    assert "shares the GPU among trials" in absent["nvml"]


def test_another_process_on_the_board_makes_its_energy_null_even_if_it_leaves() -> None:
    api = FakeNvml()
    meter = gpu_meter(api)
    with meter.phase("train"):
        api.answers |= {"TotalEnergyConsumption": 9_000, "ComputeRunningProcesses": ["us", "them"]}
    with meter.phase("train"):
        api.answers |= {"TotalEnergyConsumption": 19_000, "ComputeRunningProcesses": ["us"]}
    record, missing = combine([meter.local()])
    assert record["train"].energy_kwh is None
    assert "2 processes compute on GPU-a, 1 of them" in missing["phases.train.energy_kwh"]


def test_a_process_that_comes_and_goes_within_a_phase_makes_its_energy_null(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml.GpuSource, "interval_s", 0.01)
    api = FakeNvml()
    meter = gpu_meter(api, sample_read_energy=True)
    with meter.phase("train"):
        api.answers["ComputeRunningProcesses"] = ["us", "them"]
        time.sleep(0.2)
        api.answers |= {"TotalEnergyConsumption": 9_000, "ComputeRunningProcesses": ["us"]}
    with meter.phase("test"):
        api.answers["TotalEnergyConsumption"] = 19_000
    record, missing = combine([meter.local()])
    assert record["train"].energy_kwh is None and record["train"].read_energy_kwh is None
    assert "2 processes compute on GPU-a" in missing["phases.train.energy_kwh"]
    assert record["test"].energy_kwh == pytest.approx(10 / JOULES_PER_KWH)


def test_a_count_of_processes_with_a_hole_is_none() -> None:
    answers = iter([1, Unavailable("gone"), 1, 2, 1])

    def gauge() -> int:
        value = next(answers)
        if isinstance(value, Unavailable):
            raise value
        return value

    most = Most(gauge)
    most.sample()
    most.sample()
    with pytest.raises(Unavailable, match="gone"):
        most.take()
    most.sample()
    assert most.take() == 2


def test_the_sampled_integral_of_a_square_wave_is_its_mean_times_the_time() -> None:
    draw = random.Random(0)
    now_s = [0.0]
    power = Integral(lambda: 100.0 if now_s[0] % 1.0 < 0.5 else 300.0, clock=lambda: now_s[0])
    power.sample()
    while now_s[0] < 20:
        now_s[0] += 0.1 * draw.uniform(0.5, 1.5)
        power.sample()
    # each of 40 edges is placed to within an interval: 200 W x 0.1 s x 0.3 x sqrt(40) = 38 J of 4000 J is one standard deviation
    assert power.take() == pytest.approx(200 * now_s[0], rel=0.03)


def test_a_failed_sample_is_a_hole_and_the_next_stretch_is_whole_again() -> None:
    now_s = [0.0]
    values = iter([10.0, Unavailable("gone"), 10.0, 10.0])

    def gauge() -> float:
        value = next(values)
        if isinstance(value, Unavailable):
            raise value
        return value

    integral = Integral(gauge, clock=lambda: now_s[0])
    integral.sample()
    integral.sample()
    with pytest.raises(Unavailable, match="gone"):
        integral.take()
    now_s[0] = 2.0
    assert integral.take() == 20.0


# READ's equation 16


def read_kwh(percents: list[float], hours: float) -> float | None:
    """Equation 16 over one rank per GPU at a constant utilisation, p0 = 300 W."""
    ranks = []
    for index, percent in enumerate(percents):
        now_s = [0.0]
        api = FakeNvml(UtilizationRates=SimpleNamespace(gpu=percent))
        integral = partial(Integral, clock=lambda now_s=now_s: now_s[0])
        with patch("suite.meters.nvml.Integral", integral):
            source = GpuUtilisation(Gpu(f"GPU-{index}", api))
        meter = PhaseMeter(CPU, sources=[source])
        with meter.phase("train"):
            now_s[0] = hours * 3600
        ranks.append(meter.local())
    return combine(ranks)[0]["train"].read_energy_kwh


def test_read_eq16_of_one_gpu_at_100_percent_for_an_hour_is_its_tdp() -> None:
    assert read_kwh([100], 1.0) == pytest.approx(0.3, rel=1e-9)


def test_read_eq16_sums_utilisation_over_gpus_and_takes_no_mean() -> None:
    assert read_kwh([100, 50], 2.0) == pytest.approx(0.9, rel=1e-9)


def test_read_eq16_is_null_with_a_reason_on_a_cpu() -> None:
    meter = PhaseMeter(CPU)
    with meter.phase("train"):
        pass
    record, missing = combine([meter.local()])
    assert record["train"].read_energy_kwh is None
    assert "GPU" in missing["phases.train.read_energy_kwh"]


# RAPL


def powercap(root: Path, **energy_uj: int) -> Path:
    """A powercap tree: packages by name; and domains that must not be counted."""
    zones = {
        f"intel-rapl:{i}": (name.replace("_", "-"), value)
        for i, (name, value) in enumerate(energy_uj.items())
    }
    for zone, (name, value) in (
        zones | {"intel-rapl:0:0": ("core", 7), "intel-rapl:9": ("psys", 7)}
    ).items():
        folder = root / zone
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in {
            "name": name,
            "energy_uj": value,
            "max_energy_range_uj": 1_000_000,
        }.items():
            (folder / file).write_text(f"{text}\n")
    return root


def test_rapl_sums_packages_and_leaves_core_and_platform_out(tmp_path: Path) -> None:
    rapl = Rapl(powercap(tmp_path, package_0=100_000, package_1=200_000))
    powercap(tmp_path, package_0=400_000, package_1=250_000)
    assert sum(rapl.collect().joules.values()) == pytest.approx(0.35)


def test_rapl_wraps_and_every_tick_sees_one_wrap(tmp_path: Path) -> None:
    rapl = Rapl(powercap(tmp_path, package_0=900_000))
    for value in (100_000, 50_000):  # +0.2 J, +0.95 J
        powercap(tmp_path, package_0=value)
        rapl.tick()
    assert sum(rapl.collect().joules.values()) == pytest.approx(1.15)
    assert sum(rapl.collect().joules.values()) == 0


def test_rapl_that_fails_once_gives_its_energy_to_no_later_reading(tmp_path: Path) -> None:
    rapl = Rapl(powercap(tmp_path, package_0=0, package_1=0))
    gone = tmp_path / "intel-rapl:0"
    powercap(tmp_path, package_0=300_000, package_1=400_000)
    gone.rename(tmp_path / "away")
    with pytest.raises(Unavailable, match="cannot read"):
        rapl.collect()
    (tmp_path / "away").rename(gone)
    with pytest.raises(Unavailable, match="could not be read the last time"):
        rapl.collect()
    powercap(tmp_path, package_0=310_000, package_1=420_000)
    assert sum(rapl.collect().joules.values()) == pytest.approx(0.03)


def test_rapl_that_is_absent_or_unreadable_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no RAPL package domain"):
        Rapl(tmp_path / "none")
    counter = powercap(tmp_path, package_0=1) / "intel-rapl:0" / "energy_uj"
    counter.unlink()
    counter.mkdir()  # unreadable for root too, unlike a mode
    with pytest.raises(Unavailable, match=r"cannot read .*energy_uj"):
        Rapl(tmp_path)


def rapl_rank(root: Path, *, host_busy_s: float) -> dict[str, LocalPhase]:
    """One rank that uses 0.2 s of a processor while its host is busy for `host_busy_s` and the package spends 0.5 J."""
    busy_s = [0.0]
    meter = PhaseMeter(
        CPU, sources=[CpuTime(10.0), Rapl(powercap(root, package_0=0), busy_s=lambda: busy_s[0])]
    )
    with meter.phase("train"):
        until_s = time.process_time() + 0.2
        while time.process_time() < until_s:
            pass
        busy_s[0] = host_busy_s
        powercap(root, package_0=500_000)
    return meter.local()


def test_rapl_of_a_host_that_works_for_us_alone_is_the_energy(tmp_path: Path) -> None:
    record = combine([rapl_rank(tmp_path, host_busy_s=0.25)])[0]["train"]
    assert (record.energy_source, record.energy_kwh) == (
        "rapl",
        pytest.approx(0.5 / JOULES_PER_KWH),
    )


def test_rapl_of_a_shared_host_gives_way_for_lanes_as_for_one_trial(tmp_path: Path) -> None:
    # 1.8 s of other work are less than 0.5 s for each of four lanes.
    whole = rapl_rank(tmp_path, host_busy_s=2.0)["train"]
    record, missing = combine([{"train": whole.part(1 / 4, "one of 4 lanes")}])
    assert record["train"].energy_source == "cpu-time-estimate"
    assert "other work took" in missing["phases.train.energy_kwh[rapl]"]


def test_rapl_of_a_shared_host_gives_way_to_the_estimate_and_says_why(tmp_path: Path) -> None:
    record, missing = combine([rapl_rank(tmp_path, host_busy_s=2.4)])
    assert record["train"].energy_source == "cpu-time-estimate"
    # 0.2 s at 10 W; the process also reads and writes a few files: under 0.1 s more
    assert 2.0 <= record["train"].energy_kwh * JOULES_PER_KWH < 3.0
    assert "other work took 9" in missing["phases.train.energy_kwh[rapl]"]


def test_rapl_of_one_host_counts_once_for_its_ranks_and_their_work_is_ours(tmp_path: Path) -> None:
    ranks = [rapl_rank(tmp_path, host_busy_s=0.5), rapl_rank(tmp_path, host_busy_s=0.5)]
    record = combine(ranks)[0]["train"]
    assert (record.energy_source, record.energy_kwh) == (
        "rapl",
        pytest.approx(0.5 / JOULES_PER_KWH),
    )


# processor time


def test_the_estimate_is_processor_seconds_of_all_threads_times_watts() -> None:
    def work() -> None:
        until_s = time.thread_time() + 0.15
        while time.thread_time() < until_s:
            pass

    meter = PhaseMeter(CPU, watts_per_core=10.0, sources=[CpuTime(10.0)])
    before_s = time.process_time()
    with meter.phase("train"):
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        for thread in threads:
            thread.join()
    train = combine([meter.local()])[0]["train"]
    joules = (train.energy_kwh or 0) * JOULES_PER_KWH
    assert (
        0.3 * 10 <= joules <= (time.process_time() - before_s) * 10
    )  # sleeping is free, both threads are in


def test_a_phase_that_fails_is_closed_and_its_thread_ends() -> None:
    meter = gpu_meter(FakeNvml(), sample_read_energy=True)

    def meter_threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "suite-meter"]

    def fail() -> None:
        assert meter_threads()
        raise OSError

    with pytest.raises(OSError), meter.phase("train"):  # noqa: PT011 (what is raised does not matter)
        fail()
    assert meter_threads() == []
    seconds = meter.seconds("train")
    time.sleep(0.02)
    assert meter.seconds("train") == seconds


# hardware


def test_hardware_lists_boards_and_names_no_host() -> None:
    facts = hardware(FakeNvml(EnforcedPowerLimit=NOT_SUPPORTED))
    assert facts["gpus"] == [
        {
            "name": "Fake 9000",
            "memory_bytes": 1 << 30,
            "power_limit_w": None,
            "tdp_w": 300.0,
            "driver": "600.1",
        }
    ]
    assert facts["memory_bytes"] > 0 and facts["logical_cores"] > 0
    json.dumps(facts)


def test_hardware_without_a_driver_says_why_there_are_no_boards() -> None:
    facts = hardware(FakeNvml(Count=pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)))
    assert facts["gpus"] == [] and "Uninitialized" in facts["gpus_missing"]
