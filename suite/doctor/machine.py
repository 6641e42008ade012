"""Checks one machine's hardware and limits: GPUs, energy meters, memory, disk, files, sockets."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pynvml

from suite.doctor.finding import Check, Finding, fail, ok, warn

GIB = 2**30
LEAST_MEMORY_BYTES, LITTLE_MEMORY_BYTES = GIB, 4 * GIB
LEAST_DISK_BYTES, LITTLE_DISK_BYTES = GIB // 4, 10 * GIB
LEAST_SHM_BYTES, LITTLE_SHM_BYTES = GIB // 8, GIB
OPEN_FILES = 4096
LONGEST_SOCKET = 107
"""Bytes of a unix socket's path (`sun_path` of Linux, without its end)."""
BF16_SINCE = (8, 0)
"""Compute capability of the first GPUs that multiply bfloat16 (Ampere)."""


def machine_checks(home: Path) -> list[tuple[str, Check]]:
    """The checks of the machine that this process runs on.

    They start nothing and make no CUDA context.
    """
    return [
        ("gpus", gpus),
        ("torch", torch_build),
        ("energy", energy),
        ("memory", memory),
        ("disk", partial(disk, home)),
        ("shared memory", shared_memory),
        ("open files", open_files),
        ("socket paths", socket_paths),
    ]


def gpus(api: Any = pynvml) -> list[Finding]:
    """Which GPUs and which driver there are, and whether torch can use them."""
    # Imported here, because it takes seconds, which `import suite.doctor` shall not.
    import torch

    try:
        api.nvmlInit()
        handles = [api.nvmlDeviceGetHandleByIndex(i) for i in range(api.nvmlDeviceGetCount())]
        driver, cuda = api.nvmlSystemGetDriverVersion(), api.nvmlSystemGetCudaDriverVersion_v2()
    except api.NVMLError as why:
        return [ok("gpus", found=f"none (NVML: {why}): trials train on the processor, over gloo")]
    names = ", ".join(sorted({str(api.nvmlDeviceGetName(h)) for h in handles})) or "none"
    seen = f"{len(handles)} ({names}), driver {driver}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    # Trials would silently train on the processor, beside idle GPUs.
    if handles and torch.version.cuda is None:
        return [
            fail(
                "gpus",
                found=f"{seen}, but this torch is built for processors only",
                remedy="install a CUDA build of torch",
            )
        ]
    if handles and int(str(torch.version.cuda).split(".")[0]) > cuda // 1000:
        remedy = f"update the driver, or install a torch built for CUDA {cuda // 1000}"
        return [
            fail(
                "gpus",
                found=f"{seen}, too old for torch's CUDA {torch.version.cuda}",
                remedy=remedy,
            )
        ]
    # The boards of one machine are taken to be alike.
    return [ok("gpus", found=seen), *(_bf16(api, h) for h in handles[:1])]


def _bf16(api: Any, handle: Any) -> Finding:
    capability = tuple(api.nvmlDeviceGetCudaComputeCapability(handle))
    text = f"compute capability {capability[0]}.{capability[1]}"
    if capability < BF16_SINCE:
        return warn(
            "bf16",
            found=f"{text}: no bfloat16",
            remedy="set training.precision: fp32 in sweeps for these GPUs",
        )
    return ok("bf16", found=text)


def torch_build() -> Finding:
    """Whether this torch was built with a back end for its device, through which ranks talk."""
    import torch
    import torch.distributed as dist

    names = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    there = [name for name, has in names.items() if dist.is_available() and has()]
    text = (
        f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, "
        f"{' and '.join(there) or 'no collectives'}"
    )
    needed = "nccl" if torch.version.cuda else "gloo"
    if needed not in there:
        return fail("torch", found=text, remedy=f"install a torch with {needed}")
    return ok("torch", found=text)


def energy(api: Any = pynvml, powercap: Path = Path("/sys/class/powercap")) -> list[Finding]:
    """What meters the energy of a trial here: each GPU's counter, else RAPL, else an estimate."""
    from suite.meters.clock import Unavailable
    from suite.meters.energy import WATTS_PER_CORE, Rapl

    boards = _boards(api)
    if boards:
        return [_board_energy(api, name) for name in boards]
    try:
        Rapl(powercap)
    except Unavailable as why:
        found = f"{why}: estimated as processor time x {WATTS_PER_CORE:g} W per core"
        remedy = (
            "as root: chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj; "
            "a virtual machine mostly has none"
        )
        return [warn("energy", found=found, remedy=remedy)]
    return [ok("energy", found="RAPL, of the whole host's processors")]


def _boards(api: Any) -> list[str]:
    try:
        api.nvmlInit()
        return [
            str(api.nvmlDeviceGetUUID(api.nvmlDeviceGetHandleByIndex(i)))
            for i in range(api.nvmlDeviceGetCount())
        ]
    except api.NVMLError:
        return []


def _board_energy(api: Any, name: str) -> Finding:
    from suite.meters.clock import Unavailable
    from suite.meters.nvml import Gpu, GpuPower, gpu_sources

    def open_gpu() -> Gpu:
        return Gpu(name, api)

    short = name[:12]
    # Other guests' work is in these counters.
    if _is_virtual(api, name):
        return warn(
            "energy",
            found=f"{short}: a virtual GPU: its counters are the whole board's",
            remedy="use a whole board",
        )
    sources, absent = gpu_sources(open_gpu, sample_read_energy=False)
    if not sources:
        why = absent.get("nvml") or absent.get(GpuPower.kind) or "no meter"
        return warn(
            "energy",
            found=f"{short}: {why}; energy stays null",
            remedy="switch MIG off (nvidia-smi -mig 0)",
        )
    kind = sources[0].kind
    try:
        others = len(open_gpu().ask("ComputeRunningProcesses"))
    except Unavailable:
        others = 0
    # The board's counter would count their energy as the trial's.
    if others:
        return warn(
            "energy",
            found=f"{short}: {kind}, but {others} processes compute there now",
            remedy="wait until the GPU is free",
        )
    if kind == GpuPower.kind:
        return warn(
            "energy",
            found=f"{short}: no energy counter, power is sampled",
            remedy="a GPU since Volta counts its energy",
        )
    return ok("energy", found=f"{short}: NVML's energy counter")


def _is_virtual(api: Any, name: str) -> bool:
    try:
        mode = api.nvmlDeviceGetVirtualizationMode(api.nvmlDeviceGetHandleByUUID(name))
    except api.NVMLError:
        return False
    return bool(mode == api.NVML_GPU_VIRTUALIZATION_MODE_VGPU)


def memory() -> Finding:
    """How much memory is free, within the container's limit where there is one."""
    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    # `psutil` reports the host's memory, of which a container may have little.
    limit = container_limit()
    where = ""
    if limit is not None and limit[0] < total:
        total, free, where = limit[0], min(free, limit[0] - limit[1]), " of the container"
    text = f"{_gib(free)} of {_gib(total)} free{where}"
    remedy = "end other processes, or train on a larger machine"
    if free < LEAST_MEMORY_BYTES:
        return fail("memory", found=text, remedy=remedy)
    return (
        warn("memory", found=text, remedy=remedy)
        if free < LITTLE_MEMORY_BYTES
        else ok("memory", found=text)
    )


def container_limit(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """The limit and the use of this process' control group (version 2), in bytes.

    None = there is no limit.
    """
    try:
        limit, used = (
            (root / "memory.max").read_text().strip(),
            (root / "memory.current").read_text().strip(),
        )
    except OSError:
        return None
    return None if limit == "max" else (int(limit), int(used))


def disk(home: Path) -> Finding:
    """How much space is free where the home is, or will be."""
    return _room(
        "disk",
        nearest(home),
        LEAST_DISK_BYTES,
        LITTLE_DISK_BYTES,
        "free some space, or choose another --home",
    )


def shared_memory() -> Finding:
    """How much of /dev/shm is free, which Ray's object store and NCCL use.

    Docker gives 64 MiB unless told otherwise.
    """
    return _room(
        "shared memory",
        Path("/dev/shm"),  # noqa: S108 - looks at it only
        LEAST_SHM_BYTES,
        LITTLE_SHM_BYTES,
        "start the container with --shm-size=2g or more",
    )


def _room(name: str, path: Path, least: int, little: int, remedy: str) -> Finding:
    free = psutil.disk_usage(str(path)).free
    text = f"{_gib(free)} free at {path}"
    if free < least:
        return fail(name, found=text, remedy=remedy)
    return warn(name, found=text, remedy=remedy) if free < little else ok(name, found=text)


def nearest(path: Path) -> Path:
    """`path`, or the folder above it that exists."""
    path = path.resolve()
    # The root always exists.
    return next(p for p in (path, *path.parents) if p.exists())


def open_files() -> Finding:
    """How many files a process may open; each Ray process and connection takes a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {soft} per process"
    if soft >= OPEN_FILES:
        return ok("open files", found=text)
    raised = (
        "ulimit -n 65536 before ray start"
        if hard >= OPEN_FILES
        else "raise nofile in /etc/security/limits.conf"
    )
    return warn("open files", found=text, remedy=raised)


def socket_paths(environment: Callable[[str], str | None] = os.environ.get) -> Finding:
    """Whether the paths of Ray's sockets, below its temporary folder, are short enough."""
    base = environment("RAY_TMPDIR") or environment("TMPDIR") or "/tmp"  # noqa: S108 - looks at it only
    # 2**22 is the largest process number of Linux, and so the longest.
    longest = f"{base}/ray/session_2026-01-01_00-00-00_000000_{2**22}/sockets/plasma_store"
    text = f"{len(longest)} bytes below {base}, {LONGEST_SOCKET} are possible"
    if len(longest) > LONGEST_SOCKET:
        return fail("socket paths", found=text, remedy="set RAY_TMPDIR to a short folder, as /tmp")
    return ok("socket paths", found=text)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
