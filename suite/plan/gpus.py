"""What torch says of the GPUs of a host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from suite.config.sweep import SweepConfig
from suite.errors import ResourceError, end_of

ASK_S = 300.0
"""Time for a new Python to import torch and open every board.

A cold start from a disk that hosts share takes minutes.
"""
QUESTION = """
import json, torch
try:
    torch.cuda.init()
    boards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    answer = {
        "least_bytes": min(board.total_memory for board in boards),
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }
except (RuntimeError, AssertionError) as why:
    answer = {"problem": str(why)}
print(json.dumps(answer))
"""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one host, or of several.

    Attributes:
        least_bytes: Memory of the smallest; None = unknown.
        bf16: Whether they multiply bf16 in hardware; None = unknown.
        problem: Why torch cannot use them; "" where it can.
    """

    least_bytes: int | None = None
    bf16: bool | None = None
    problem: str = ""


def local_gpus() -> Gpus:
    """Ask this host's torch; that it does not answer is a problem, too.

    A process of its own asks, because a process that has asked may hold some of a GPU's memory,
    and the meter would count it among those that compute on the board.
    """
    command = [sys.executable, "-c", QUESTION]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Gpus(problem=f"it did not answer within {ASK_S:g} s")
    try:
        # Libraries may have printed before it.
        return Gpus(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        return Gpus(problem=end_of(done.stderr) or f"it ended with code {done.returncode}")


def usable(answers: Mapping[str, Gpus]) -> Gpus:
    """What holds for the GPUs of all hosts.

    Args:
        answers: By the host's name.

    Raises:
        ResourceError: A host's torch cannot use its GPUs, though Ray counts them.
    """
    for host, answer in answers.items():
        if answer.problem:
            raise ResourceError(
                f"{host}: torch cannot use its GPU: {answer.problem}; `suite doctor` there says"
                " more; resources.gpus_per_worker: 0 trains on processors"
            )
    found = answers.values()
    sizes = [answer.least_bytes for answer in found if answer.least_bytes is not None]
    have_bf16 = [answer.bf16 for answer in found if answer.bf16 is not None]
    return Gpus(min(sizes, default=None), all(have_bf16) if have_bf16 else None)


def missing_for_offload() -> list[str]:
    """What DeepSpeed builds its Adam for processors with, and this host has not on its PATH."""
    return [name for name in ("c++", "ninja") if shutil.which(name) is None]


def no_offload(missing: Sequence[str]) -> str:
    """Words for a host that lacks these."""
    return f"{' and '.join(missing)} not found: training.offload needs c++ and ninja on the PATH"


def as_computed(config: SweepConfig, gpus: Gpus) -> SweepConfig:
    """The sweep with the precision that `auto` comes to on these GPUs.

    What reads it need not ask torch, which would open a GPU in this process.
    """
    if config.training.precision != "auto" or gpus.bf16 is None:
        return config
    precision = "bf16" if gpus.bf16 else "fp32"
    training = config.training.model_copy(update={"precision": precision})
    return config.model_copy(update={"training": training})
