"""What `training.precision: auto` means on a host."""

from __future__ import annotations

from pathlib import Path

from suite.config.training import Precision, TrainingConfig

CPU_INFO = Path("/proc/cpuinfo")
FAST_BF16 = {"amx_bf16", "avx512_bf16"}
"""Flags of x86 processors that multiply bf16 faster than fp32; others only emulate it."""


def precision_of(training: TrainingConfig, device: str) -> Precision:
    """What `training.precision` means on this host: "auto" depends on the device."""
    if training.precision != "auto":
        return training.precision
    if device == "cuda":
        return "bf16"
    if has_fast_bf16():
        return "bf16-autocast"
    return "fp32"


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
