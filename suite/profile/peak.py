"""What a device could do and what it draws when idle; asked in a process of its own, so that the parent never opens a GPU."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import psutil
import torch

from suite.meters import Unavailable, hardware, idle_watts
from suite.profile.clock import repeated
from suite.profile.estimate import DTYPES
from suite.profile.setting import Setting

DENSE_BF16 = {
    "B200": 2250e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989.4e12,
    "A100": 311.9e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
}
"""NVIDIA's data sheets: dense tensor-core BF16, without sparsity; the first name that stands as a word in a board's own."""
SIDES, SECONDS = {"cpu": 2048, "cuda": 8192}, 2.0
USABLE_FRAC = 0.95
"""Of free memory: what the estimate does not see (libraries, fragments) needs the rest."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the ranks will find.

    Attributes:
        free_bytes: Memory that one rank may fill.
        name: Of the board or processor.
        peak_flops: Operations per second of one rank's device in the setting's precision, and where the number is from.
        idle_watts: Of all boards that are used; None, and why.
    """

    free_bytes: int
    name: str
    peak_flops: float
    peak_source: str
    idle_watts: float | None
    idle_missing: str | None


def look(setting: Setting) -> Machine:
    """Ask the devices, before anything runs on them."""
    if setting.device == "cpu":
        return _look(setting)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_look, setting).result()


def _look(setting: Setting) -> Machine:
    boards = (
        [torch.device("cuda", i) for i in range(setting.ranks)]
        if setting.device == "cuda"
        else [torch.device("cpu")]
    )
    watts, why = None, None
    try:
        watts = sum(idle_watts(board) for board in boards)
    except Unavailable as unavailable:
        why = str(unavailable)
    name = (
        torch.cuda.get_device_name()
        if setting.device == "cuda"
        else str(hardware()["cpu_model"] or "CPU")
    )
    flops, source = peak_flops(setting, name)
    return Machine(free_bytes(setting), name, flops, source, watts, why)


def free_bytes(setting: Setting) -> int:
    """Memory that one rank may fill."""
    if setting.device == "cuda":
        return int(
            min(torch.cuda.mem_get_info(board)[0] for board in range(setting.ranks)) * USABLE_FRAC
        )
    return int(psutil.virtual_memory().available * USABLE_FRAC) // setting.ranks


def peak_flops(setting: Setting, name: str) -> tuple[float, str]:
    """Operations per second of one rank's device in the setting's precision, and where the number is from."""
    if setting.device == "cuda" and setting.dtype == "bf16":
        for part, flops in DENSE_BF16.items():
            if re.search(rf"\b{part}\b", name):
                return flops, f"NVIDIA's data sheet, {part}, dense BF16"
    side = SIDES[setting.device]
    threads = f", {setting.rank_threads} threads" if setting.device == "cpu" else ""
    return measured_flops(
        setting, side
    ), f"fastest product of two {side} x {side} matrices here, {setting.dtype}{threads}"


def measured_flops(setting: Setting, side: int) -> float:
    """Of a product of two large square matrices, the fastest of a few."""
    device = torch.device(setting.device)
    before = torch.get_num_threads()
    torch.set_num_threads(setting.rank_threads)
    try:
        a = torch.randn(side, side, device=device).to(DTYPES[setting.dtype])
        return 2 * side**3 / min(repeated(lambda: a @ a, device, budget_s=SECONDS))
    finally:
        torch.set_num_threads(before)
