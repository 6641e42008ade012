"""What `training.precision: auto` means on a host."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from suite.config.training import Precision, TrainingConfig

CPU_INFO = Path("/proc/cpuinfo")
FAST_BF16 = {"amx_bf16", "avx512_bf16"}
"""Flags of x86 processors that multiply bf16 faster than fp32; others only emulate it."""


def precision_of(training: TrainingConfig, device: str) -> Precision:
    """What `training.precision` means on this host: "auto" depends on the device."""
    if training.precision != "auto":
        return training.precision
    if device == "cuda":
        return gpu_precision()
    if has_fast_bf16():
        return "bf16-autocast"
    return "fp32"


def precisions_of(training: TrainingConfig, device: str) -> list[Precision]:
    """What `training.precision` may mean on some other host, of which only the device is known."""
    if training.precision != "auto":
        return [training.precision]
    return ["fp32", "bf16" if device == "cuda" else "bf16-autocast"]


def gpu_precision() -> Literal["fp32", "bf16"]:
    """bf16, or fp32 where this host's GPU only emulates bf16 (before Ampere).

    A host without a GPU, which plans for workers that have one, answers bf16.
    """
    # Here, because a dry run without GPUs need not wait for torch.
    import torch

    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32"
    return "bf16"


def has_fast_bf16() -> bool:
    """Whether this host's processor multiplies matrices of bf16 in hardware."""
    try:
        text = CPU_INFO.read_text()
    # Only Linux has the file, and the processors of other systems have none of the flags.
    except OSError:
        return False
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() == "flags":
            return not FAST_BF16.isdisjoint(flags.split())
    return False
