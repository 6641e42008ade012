"""The hardware that a trial ran on, for its provenance, without host or user names."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch


def hardware(api: Any = pynvml) -> dict[str, Any]:
    """Processor, memory, GPUs and platform of this host.

    Args:
        api: The NVML binding; unlike torch.cuda it makes no CUDA context.
    """
    gpus, why_none = _gpus(api)
    usable_cores = None
    if hasattr(os, "sched_getaffinity"):  # Linux; containers often may use fewer than there are
        usable_cores = len(os.sched_getaffinity(0))
    facts = {
        "cpu_model": _cpu_model(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable_cores,
        "memory_bytes": psutil.virtual_memory().total,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
    }
    if why_none:
        facts["gpus_missing"] = why_none
    return facts


def computes_on(device: str) -> str | None:
    """The model of what this process computes on: its own board, or the processor.

    A host may have boards of several models, of which `hardware` lists all.
    """
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return _cpu_model()


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip() or platform.processor() or None
    return platform.processor() or None


def _gpus(api: Any) -> tuple[list[dict[str, Any]], str | None]:
    """All boards of the host, or why NVML cannot list them."""
    try:
        api.nvmlInit()
        driver = api.nvmlSystemGetDriverVersion()
        gpus = []
        for index in range(api.nvmlDeviceGetCount()):
            handle = api.nvmlDeviceGetHandleByIndex(index)
            gpus.append(_gpu(api, handle) | {"driver": driver})
    except api.NVMLError as error:
        return [], f"NVML: {error}"
    return gpus, None


def _gpu(api: Any, handle: Any) -> dict[str, Any]:
    facts = {
        "name": api.nvmlDeviceGetName(handle),
        "memory_bytes": api.nvmlDeviceGetMemoryInfo(handle).total,
    }
    for key, question in (
        ("power_limit_w", "EnforcedPowerLimit"),
        ("tdp_w", "PowerManagementDefaultLimit"),
    ):
        try:
            facts[key] = getattr(api, f"nvmlDeviceGet{question}")(handle) / 1e3  # NVML says mW
        except api.NVMLError:
            facts[key] = None
    return facts
