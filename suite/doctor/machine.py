"""Checks one machine's hardware and limits: GPUs, energy meters, memory, disk, files."""

from __future__ import annotations

import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pynvml

from suite.doctor.finding import Check, Finding, fail, ok, warn
from suite.files import nearest
from suite.plan.gpus import local_gpus
from suite.plan.preflight import MIN_FREE_BYTES

GIB = 2**30
# Below the least a check fails, below the little it warns; of a disk the least is what a run asks
# for. All of these limits are ours.
LEAST_MEMORY_BYTES = GIB
LITTLE_MEMORY_BYTES = 4 * GIB
LITTLE_DISK_BYTES = 10 * GIB
LEAST_SHM_BYTES = GIB // 8
LITTLE_SHM_BYTES = GIB
OPEN_FILES = 4096
BF16_SINCE = (8, 0)
"""Compute capability of the first GPUs that multiply bfloat16 (Ampere)."""
NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
"""Errors of NVML where there is no GPU; with any other there is one, in trouble."""


def machine_checks(home: Path) -> list[tuple[str, Check]]:
    """The checks of the machine that this process runs on.

    They make no CUDA context in this process.
    """
    return [
        ("gpus", gpus),
        ("torch", torch_build),
        ("energy", energy),
        ("memory", memory),
        ("disk", partial(disk, home)),
        ("shared memory", shared_memory),
        ("open files", open_files),
    ]


def gpus(api: Any = pynvml) -> list[Finding]:
    """List the GPUs and their driver, and check that torch can use them."""
    # Imported here, because it takes seconds, and `import suite.doctor` must be quick.
    import torch

    try:
        api.nvmlInit()
        handles = [api.nvmlDeviceGetHandleByIndex(i) for i in range(api.nvmlDeviceGetCount())]
        driver = api.nvmlSystemGetDriverVersion()
        # 12040 stands for CUDA 12.4.
        cuda = api.nvmlSystemGetCudaDriverVersion_v2()
    except api.NVMLError as why:
        if why.value in NO_DRIVER:
            found = f"none (NVML: {why}): trials train on the processor, over gloo"
            return [ok("gpus", found=found)]
        # Ray asks NVML for the GPUs as well, and sees none.
        remedy = "nvidia-smi shows the same; reboot or reload the driver, or restart the container"
        found = f"NVML: {why}; trials would train on the processor"
        return [fail("gpus", found=found, remedy=remedy)]
    names = ", ".join(sorted({str(api.nvmlDeviceGetName(handle)) for handle in handles})) or "none"
    seen = f"{len(handles)} ({names}), driver {driver}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    if not handles:
        return [ok("gpus", found=seen)]
    built_for = torch.version.cuda
    # Trials would silently train on the processor, beside idle GPUs.
    if built_for is None:
        found = f"{seen}, but this torch is built for processors only"
        return [fail("gpus", found=found, remedy="install a CUDA build of torch")]
    # A driver runs every CUDA of its own major version, and the older ones.
    if int(built_for.split(".")[0]) > cuda // 1000:
        found = f"{seen}, too old for torch's CUDA {built_for}"
        remedy = f"update the driver, or install a torch built for CUDA {cuda // 1000}"
        return [fail("gpus", found=found, remedy=remedy)]
    # NVML sees them all the same.
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return [ok("gpus", found=f"{seen}, hidden by CUDA_VISIBLE_DEVICES")]
    problem = local_gpus().problem
    if problem:
        found = f"{seen}, but torch cannot use them: {problem}"
        remedy = "nvidia-smi and dmesg say more; boards with NVSwitch need a running fabric manager"
        return [fail("gpus", found=found, remedy=remedy)]
    # The boards of one machine are taken to be alike.
    return [ok("gpus", found=seen), _bf16(api, handles[0])]


def _bf16(api: Any, handle: Any) -> Finding:
    capability = tuple(api.nvmlDeviceGetCudaComputeCapability(handle))
    text = f"compute capability {capability[0]}.{capability[1]}"
    if capability < BF16_SINCE:
        remedy = "leave training.precision at auto, which is fp32 there"
        return warn("bf16", found=f"{text}: no bfloat16", remedy=remedy)
    return ok("bf16", found=text)


def torch_build() -> Finding:
    """Check that this torch has the back end through which ranks talk on its device."""
    import torch
    import torch.distributed as dist

    there: list[str] = []
    # A torch without distributed lacks the two functions as well.
    if dist.is_available():
        if dist.is_gloo_available():
            there.append("gloo")
        if dist.is_nccl_available():
            there.append("nccl")
    collectives = " and ".join(there) or "no collectives"
    text = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {collectives}"
    needed = "gloo"
    if torch.version.cuda:
        needed = "nccl"
    if needed not in there:
        return fail("torch", found=text, remedy=f"install a torch with {needed}")
    return ok("torch", found=text)


def energy(api: Any = pynvml, powercap: Path = Path("/sys/class/powercap")) -> list[Finding]:
    """Say what meters a trial's energy here: each GPU's counter, else RAPL, else an estimate."""
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
    """The UUIDs of the GPUs that a trial would see; none where NVML does not run."""
    from suite.meters.clock import Unavailable
    from suite.meters.nvml import visible_boards

    try:
        return visible_boards(api)
    except Unavailable:
        return []


def _board_energy(api: Any, name: str) -> Finding:
    from suite.meters.clock import Unavailable
    from suite.meters.nvml import IS_VIRTUAL, MIG_IS_ON, Gpu, GpuPower, gpu_sources

    def open_gpu() -> Gpu:
        return Gpu(name, api)

    short = name[:12]
    sources, absent = gpu_sources(open_gpu, sample_read_energy=False)
    if not sources:
        why = absent.get("nvml") or absent.get(GpuPower.kind) or "no meter"
        remedies = {
            MIG_IS_ON: "switch MIG off (nvidia-smi -mig 0)",
            IS_VIRTUAL: "use a whole board",
        }
        remedy = remedies.get(why, "this board or driver cannot meter it; nothing to do")
        return warn("energy", found=f"{short}: {why}; energy stays null", remedy=remedy)
    kind = sources[0].kind
    try:
        others = len(open_gpu().ask("ComputeRunningProcesses"))
    except Unavailable:
        others = 0
    # The board's counter would count their energy as the trial's.
    if others:
        found = f"{short}: {kind}, but {others} processes compute there now"
        return warn("energy", found=found, remedy="wait until the GPU is free")
    if kind == GpuPower.kind:
        found = f"{short}: no energy counter, power is sampled"
        return warn("energy", found=found, remedy="a GPU since Volta counts its energy")
    return ok("energy", found=f"{short}: NVML's energy counter")


def memory() -> Finding:
    """Check how much memory is free, within the container's limit where there is one."""
    from suite.plan.partitioning import container_limit

    host = psutil.virtual_memory()
    total = host.total
    free = host.available
    where = ""
    # `psutil` reports the host's memory, of which a container may have little.
    limit = container_limit()
    if limit is not None and limit[0] < total:
        total, used = limit
        free = min(free, total - used)
        where = " of the container"
    text = f"{_gib(free)} of {_gib(total)} free{where}"
    remedy = "end other processes, or train on a larger machine"
    return _judge(
        "memory", free, text, remedy, least=LEAST_MEMORY_BYTES, little=LITTLE_MEMORY_BYTES
    )


def disk(home: Path) -> Finding:
    """Check how much space is free on the disk that holds the home, or will hold it."""
    place = nearest(home)
    free = psutil.disk_usage(str(place)).free
    text = f"{_gib(free)} free at {place}"
    remedy = "free some space, or choose another --home"
    return _judge("disk", free, text, remedy, least=MIN_FREE_BYTES, little=LITTLE_DISK_BYTES)


def shared_memory(api: Any = pynvml) -> Finding:
    """Check how much of /dev/shm is free: Ray's object store and NCCL use it.

    Docker gives 64 MiB unless told otherwise.
    """
    # NCCL cannot do without, where ranks on two GPUs talk. Ray's object store goes to a disk.
    least = 0
    if len(_boards(api)) > 1:
        least = LEAST_SHM_BYTES
    place = "/dev/shm"  # noqa: S108 - looks at it only
    free = psutil.disk_usage(place).free
    text = f"{_gib(free)} free at {place}"
    remedy = "start the container with --shm-size=2g or more"
    return _judge("shared memory", free, text, remedy, least=least, little=LITTLE_SHM_BYTES)


def _judge(
    name: str, free_bytes: int, text: str, remedy: str, *, least: int, little: int
) -> Finding:
    if free_bytes < least:
        return fail(name, found=text, remedy=remedy)
    if free_bytes < little:
        return warn(name, found=text, remedy=remedy)
    return ok(name, found=text)


def unwritable(check: str, path: Path) -> Finding | None:
    """A finding if a file that sqlite or a journal writes cannot be made or written.

    Both the file and the folder around it are needed: a second file lies there meanwhile.

    Args:
        check: Name of the check.
        path: The file. It, and folders above it, need not be there: the first run makes them.
    """
    folder = nearest(path.parent)
    if not folder.is_dir():
        return fail(
            check,
            found=f"{path}: {folder} is a file, expected a folder",
            remedy="name another place",
        )
    for place in (nearest(path), folder):
        needed = os.W_OK
        if place.is_dir():
            needed |= os.X_OK
        if not os.access(place, needed):
            return fail(
                check,
                found=f"{path}: {place} cannot be written",
                remedy="name another place, or give this user the right to write there",
            )
    return None


def open_files() -> Finding:
    """Check how many files a process may open; each Ray process and connection takes a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {soft} per process"
    if soft >= OPEN_FILES:
        return ok("open files", found=text)
    remedy = "ulimit -n 65536 before ray start"
    # Only root may raise the hard limit.
    if hard < OPEN_FILES:
        remedy = "raise nofile in /etc/security/limits.conf"
    return warn("open files", found=text, remedy=remedy)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
