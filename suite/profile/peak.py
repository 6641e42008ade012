"""How many floating-point operations per second a device could do: published for GPUs that are known, else measured."""

from __future__ import annotations

import torch

from suite.profile.clock import repeated
from suite.profile.estimate import DTYPES
from suite.profile.setting import Setting

DENSE_BF16 = {
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}
"""NVIDIA's data sheets: dense tensor-core BF16, without sparsity; the first name that a board's own holds."""
SIDE, SECONDS = 2048, 2.0


def peak_flops(setting: Setting) -> tuple[float, str]:
    """Operations per second of one device in the setting's precision, and where the number is from."""
    device = torch.device(setting.device)
    if device.type == "cuda" and setting.dtype == "bf16":
        name = torch.cuda.get_device_name()
        for part, flops in DENSE_BF16.items():
            if part in name:
                return flops, f"NVIDIA's data sheet, {part}, dense BF16"
    return measured_flops(setting), f"fastest product of two {SIDE} x {SIDE} matrices here, {setting.dtype}, {setting.rank_threads} threads"


def measured_flops(setting: Setting) -> float:
    """Of a product of two large square matrices, the fastest of a few."""
    device = torch.device(setting.device)
    before = torch.get_num_threads()
    torch.set_num_threads(setting.rank_threads)
    try:
        a = torch.randn(SIDE, SIDE, device=device).to(DTYPES[setting.dtype])
        return 2 * SIDE**3 / min(repeated(lambda: a @ a, device, budget_s=SECONDS))
    finally:
        torch.set_num_threads(before)
