"""What a device can do at most, and what it draws when idle.

A process of its own asks the GPUs, so that the parent never opens one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from suite.errors import ResourceError
from suite.meters import Unavailable, hardware, idle_watts
from suite.plan.partitioning import local_memory_bytes
from suite.profiling.clock import repeated
from suite.profiling.estimate import DTYPES
from suite.profiling.setting import Setting

# NVIDIA's data sheets: dense tensor-core BF16, without sparsity. The first name that is a word of
# the board's own name counts, so longer names stand before shorter ones.
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
# Rows of the square matrices whose product is timed, and for how long.
SIDES = {"cpu": 2048, "cuda": 8192}
SECONDS = 2.0
# The estimate does not see libraries and fragments: they need the rest of the free memory.
USABLE_FRAC = 0.95
PATIENCE_S = 300.0
"""How long the GPUs may take to answer: the process that asks them imports torch first."""
END_S = 10.0
"""How long that process may take to die, which one that waits for a driver does not do."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the ranks will find.

    Attributes:
        free_bytes: Memory that one rank may fill.
        name: Name of the board or processor.
        peak_flops: Operations per second of one rank's device in the setting's precision.
        peak_source: Where `peak_flops` comes from.
        idle_watts: Power of all boards that are used, when idle; None where it cannot be read.
        idle_missing: Why `idle_watts` is None.
    """

    free_bytes: int
    name: str
    peak_flops: float
    peak_source: str
    idle_watts: float | None
    idle_missing: str | None


def inspect_machine(setting: Setting) -> Machine:
    """Ask the devices, before anything runs on them.

    Raises:
        ResourceError: The GPUs do not answer.
    """
    if setting.device == "cpu":
        return _inspect_here(setting)
    # A forked process could not use CUDA once the parent has touched it.
    context = get_context("spawn")
    near_end, far_end = context.Pipe(duplex=False)
    process = context.Process(target=_inspect_there, args=(setting, far_end), daemon=True)
    process.start()
    far_end.close()  # otherwise the pipe would not end with the process
    try:
        if not near_end.poll(PATIENCE_S):
            raise ResourceError(
                f"--device cuda: the GPUs gave no answer within {PATIENCE_S:.0f} s; `nvidia-smi`"
                " shows whether they work"
            )
        machine: Machine = near_end.recv()
    except EOFError:
        raise ResourceError(
            "--device cuda: the process that asks the GPUs has died; its error stands above"
        ) from None
    finally:
        process.kill()
        process.join(END_S)
    return machine


def _inspect_there(setting: Setting, far_end: Connection) -> None:
    far_end.send(_inspect_here(setting))


def _inspect_here(setting: Setting) -> Machine:
    if setting.device == "cuda":
        boards = [torch.device("cuda", i) for i in range(setting.ranks)]
        name = torch.cuda.get_device_name()
    else:
        boards = [torch.device("cpu")]
        name = str(hardware()["cpu_model"] or "CPU")
    watts = None
    missing = None
    try:
        watts = sum(idle_watts(board) for board in boards)
    except Unavailable as unavailable:
        missing = str(unavailable)
    flops, source = peak_flops(setting, name)
    return Machine(
        free_bytes=free_bytes(setting),
        name=name,
        peak_flops=flops,
        peak_source=source,
        idle_watts=watts,
        idle_missing=missing,
    )


def free_bytes(setting: Setting) -> int:
    """Find how much memory one rank may fill, in bytes."""
    if setting.device == "cuda":
        # The fullest board decides: every rank needs as much.
        free = min(torch.cuda.mem_get_info(board)[0] for board in range(setting.ranks))
        return int(free * USABLE_FRAC)
    # Ranks on a CPU share its memory.
    return int(local_memory_bytes() * USABLE_FRAC) // setting.ranks


def peak_flops(setting: Setting, name: str) -> tuple[float, str]:
    """Find a device's operations per second in the setting's precision, and their source."""
    # A slice of a split board, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", has a part of its units.
    if setting.device == "cuda" and setting.dtype == "bf16" and " MIG " not in name:
        for board, flops in DENSE_BF16.items():
            # Whole words: "L4" must not match an L40S.
            if re.search(rf"\b{board}\b", name):
                return flops, f"NVIDIA's data sheet, {board}, dense BF16"
    side = SIDES[setting.device]
    source = f"fastest product of two {side} x {side} matrices here, {setting.dtype}"
    if setting.device == "cpu":
        source += f", {setting.rank_threads} threads"
    return measured_flops(setting, side), source


def measured_flops(setting: Setting, side: int) -> float:
    """Time a few products of two `side` x `side` matrices; operations per second of the fastest."""
    device = torch.device(setting.device)
    before = torch.get_num_threads()
    torch.set_num_threads(setting.rank_threads)
    try:
        matrix = torch.randn(side, side, device=device).to(DTYPES[setting.dtype])
        # The fastest, not the median: other processes only ever slow it down.
        times = repeated(lambda: matrix @ matrix, device, budget_s=SECONDS)
    finally:
        torch.set_num_threads(before)
    return 2 * side**3 / min(times)  # a multiply-add counts as two
