"""What torch says of the GPUs of a host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from suite.config.sweep import SweepConfig
from suite.errors import ResourceError

ASK_S = 60.0
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
        bf16: Whether they multiply bf16 in hardware.
        problem: Why torch cannot use them; "" where it can.
    """

    least_bytes: int | None = None
    bf16: bool = True
    problem: str = ""


def local_gpus() -> Gpus:
    """Ask this host's torch; what it does not say in time is unknown.

    A process of its own asks, because a process that has asked holds some of a GPU's memory.
    """
    command = [sys.executable, "-c", QUESTION]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=ASK_S, check=True
        )
        # Libraries may have printed before it.
        return Gpus(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return Gpus()


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
    return Gpus(min(sizes, default=None), all(answer.bf16 for answer in found))


def missing_for_offload() -> list[str]:
    """What DeepSpeed builds its Adam for processors with, and this host has not on its PATH."""
    return [name for name in ("c++", "ninja") if shutil.which(name) is None]


def no_offload(missing: Sequence[str]) -> str:
    """Words for a host that lacks these."""
    return f"{' and '.join(missing)} not found: training.offload needs c++ and ninja on the PATH"


def as_computed(config: SweepConfig, gpus: Gpus) -> SweepConfig:
    """The sweep with the precision that `auto` comes to on these GPUs."""
    if config.training.precision != "auto" or gpus.bf16:
        return config
    training = config.training.model_copy(update={"precision": "fp32"})
    return config.model_copy(update={"training": training})
