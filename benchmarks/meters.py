"""What the meter costs and whether it is right: its own time beside a training step, and its energy beside other meters.

    python -m benchmarks.meters [--steps 200]

MiniLM's shape, batch 8 x 64 tokens, a plain training step. The overhead is what a phase around every step adds, as a ratio of medians of
alternating blocks. Energy is compared with a known load on a CPU (processor seconds that the kernel counts), with CodeCarbon on the same
block, and on a GPU with `nvidia-smi`'s power, sampled; each is skipped with the reason where it cannot be had.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from suite.meters import WATTS_PER_CORE, Meter
from suite.profiling.arms import choose
from suite.profiling.batches import training_batch
from suite.profiling.estimate import vocabulary_of

BLOCK = 10
JOULES_PER_KWH = 3.6e6
LIMIT = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="of each kind")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = training_step(device)
    bare, metered = alternating(step, device, rounds=max(2, options.steps // BLOCK))
    own_s = phase_seconds(device)
    ratios = [with_meter / without for without, with_meter in zip(bare, metered, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    step_s = statistics.median(bare) / BLOCK
    print(
        f"{device}: a step {step_s * 1000:.2f} ms; an empty phase {own_s * 1e6:.0f} us, {own_s / step_s:.2%} of it (limit {LIMIT:.0%})"
    )
    print(
        f"steps with a phase each / without: {middle:.4f} (middle half {low:.4f} - {high:.4f} of {len(ratios)} blocks)"
    )
    compare_with_load(step, device)
    compare_with_codecarbon(step, device)
    compare_with_nvidia_smi(step, device)
    if own_s / step_s > LIMIT:
        raise SystemExit(f"a phase takes more than {LIMIT:.0%} of a step")


def training_step(device: torch.device) -> Callable[[], None]:
    """Forward, backward and update of full fine-tuning, without DeepSpeed."""
    (arm,) = choose(["minilm"], ["full"], ["pretrained"])
    resolved = arm.resolve()
    model = arm.build(resolved).train().to(device)
    made = training_batch(resolved.family, vocabulary_of(model), rows=8, tokens=64, target=1)
    batch = {name: tensor.to(device) for name, tensor in made.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        step()
    return step


def alternating(
    step: Callable[[], None], device: torch.device, *, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of blocks of steps without and with a phase around each, in alternating order."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with Meter(device) as meter:
        for i in range(rounds):
            for wanted in (i % 2 == 0, i % 2 == 1):
                began_s = time.perf_counter()
                for _ in range(BLOCK):
                    if wanted:
                        with meter.phase("step"):
                            step()
                    else:
                        step()
                times[wanted].append(time.perf_counter() - began_s)
    return times[False], times[True]


def phase_seconds(device: torch.device) -> float:
    """Of entering and leaving a phase in which nothing happens, the median."""
    spent = []
    with Meter(device) as meter:
        for _ in range(500):
            began_s = time.perf_counter()
            with meter.phase("nothing"):
                pass
            spent.append(time.perf_counter() - began_s)
    return statistics.median(spent)


def metered(step: Callable[[], None], device: torch.device, *, seconds: float = 10.0) -> Meter:
    """A meter around steps for so long."""
    with Meter(device) as meter:
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            step()
    return meter


def compare_with_load(step: Callable[[], None], device: torch.device) -> None:
    if device.type != "cpu":
        return
    before = os.times()
    meter = metered(step, device)
    after = os.times()
    assert meter.energy_kwh is not None
    busy_s = after.user + after.system - before.user - before.system
    if meter.energy_source == "cpu-time-estimate":
        expected = busy_s * WATTS_PER_CORE / JOULES_PER_KWH
        print(
            f"known load: {busy_s:.2f} processor seconds of the kernel's count, meter / expected {meter.energy_kwh / expected:.4f}"
        )
    else:
        print(f"known load: skipped, the source is {meter.energy_source}")


def compare_with_codecarbon(step: Callable[[], None], device: torch.device) -> None:
    try:
        from codecarbon import OfflineEmissionsTracker
    except ImportError as error:
        print(f"codecarbon: skipped, {error}")
        return
    tracker = OfflineEmissionsTracker(
        country_iso_code="DEU", log_level="error", save_to_file=False, measure_power_secs=1
    )
    tracker.start()
    meter = metered(step, device)
    tracker.stop()
    found: Any = tracker.final_emissions_data
    other = found.gpu_energy if device.type == "cuda" else found.cpu_energy
    assert meter.energy_kwh is not None
    print(
        f"codecarbon: {other * 1e6:.1f} mWh ({'GPU' if device.type == 'cuda' else 'CPU, an estimate of the whole host from its load'}),"
    )
    print(
        f"            this meter {meter.energy_kwh * 1e6:.1f} mWh ({meter.energy_source}), ratio {meter.energy_kwh / other:.3f}"
    )


def compare_with_nvidia_smi(step: Callable[[], None], device: torch.device) -> None:
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        print(
            "nvidia-smi: skipped, no GPU here"
            if device.type != "cuda"
            else "nvidia-smi: skipped, not installed"
        )
        return
    watts: list[float] = []
    ended = threading.Event()
    query = [
        "nvidia-smi",
        "--query-gpu=power.draw.instant",
        "--format=csv,noheader,nounits",
        f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}",
    ]

    def sample() -> None:
        while not ended.is_set():
            watts.append(
                float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
            )

    thread = threading.Thread(target=sample)
    thread.start()
    meter = metered(step, device)
    ended.set()
    thread.join()
    print(
        f"nvidia-smi: {statistics.fmean(watts):.1f} W ({len(watts)} samples), this meter {meter.watts or 0:.1f} W ({meter.energy_source})"
    )


if __name__ == "__main__":
    main()
