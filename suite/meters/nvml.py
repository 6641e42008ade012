"""Energy of a rank's GPU from NVML.

It comes from the counter of total energy, or from integrated power where there is none. READ's
utilisation x TDP is sampled beside it. All three are about a whole board: on a GPU that is virtual,
split by MIG, or shared with processes of others, they are not this trial's and stay null.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pynvml
import torch

from suite.meters.clock import Integral, Most, Unavailable
from suite.meters.energy import EnergySource, Reading
from suite.meters.record import READ

MIG_IS_ON = "MIG is on: NVML meters the whole board"
IS_SHARED = "the sweep shares the GPU among trials: NVML meters the whole board"
IS_VIRTUAL = "a virtual GPU: NVML meters the whole board"
REST_S = 0.05
"""How long a reading of the energy counter stands.

A reading takes 2.4 ms on an H100, whose counter moves ten times a second (docs/results/gpu.md).
"""


class Gpu:
    """One board as NVML sees it.

    Args:
        name: Its UUID ("GPU-...").
        api: The NVML binding.

    Raises:
        Unavailable: There is no driver, NVML does not know the board (a MIG slice has a UUID of its
            own), MIG is on, the GPU is virtual, or NVML does not list the board's processes.
    """

    def __init__(self, name: str, api: Any = pynvml) -> None:
        self.uuid = name
        self._api = api
        try:
            api.nvmlInit()
            self._handle = api.nvmlDeviceGetHandleByUUID(name)
        except api.NVMLError as error:
            raise Unavailable(f"NVML cannot open {name}: {error}") from error
        if self._mig_is_on():
            raise Unavailable(MIG_IS_ON)
        # The counters hold the work of other guests too.
        if self._is_virtual():
            raise Unavailable(IS_VIRTUAL)
        # Every reading asks this, so a board that cannot answer has no reading.
        self.processes()

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """The board behind a CUDA device."""
        # by UUID: CUDA_VISIBLE_DEVICES renumbers devices for CUDA and not for NVML
        return cls(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def ask(self, question: str) -> Any:
        """Call `nvmlDeviceGet<question>` for this board.

        Raises:
            Unavailable: The board or the driver cannot answer.
        """
        try:
            return getattr(self._api, f"nvmlDeviceGet{question}")(self._handle)
        except self._api.NVMLError as error:
            raise Unavailable(f"NVML {question}: {error}") from error

    def processes(self) -> int:
        """The number of processes that compute on this board."""
        return len(self.ask("ComputeRunningProcesses"))

    def _mig_is_on(self) -> bool:
        try:
            return bool(self.ask("MigMode")[0])
        except Unavailable:
            return False  # boards before Ampere do not know the question

    def _is_virtual(self) -> bool:
        try:
            mode = self.ask("VirtualizationMode")
        except Unavailable:
            return False  # a driver that does not know the question runs no virtual GPUs
        return bool(mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU)


class GpuSource(EnergySource):
    """A way to meter one board, which also looks who computes there, about once a second.

    Another's process may come and go between two borders of phases, and its energy is in the
    board's.
    """

    interval_s = 1.0

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._processes = Most(gpu.processes)

    def tick(self) -> None:
        self._processes.sample()

    def _reading(self, joules: float) -> Reading:
        """A reading with the most processes that were seen since the last one."""
        uuid = self._gpu.uuid
        return Reading({uuid: joules}, gpu_processes={uuid: self._processes.take()})


class GpuCounter(GpuSource):
    """NVML's total energy since the driver was loaded, in mJ.

    Volta and later boards have it, and refresh it every 20-100 ms. It is asked at most every
    `REST_S`, and stands still in between.
    """

    kind = "nvml"
    lags = True

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self._last_mj: int | None = self._read_mj()
        self._read_at_s = time.monotonic()

    def collect(self) -> Reading:
        now_s = time.monotonic()
        last_mj = self._last_mj
        if last_mj is not None and now_s - self._read_at_s < REST_S:
            return self._reading(0.0)
        # Where this reading fails, the next one must not be compared with the one before it.
        self._last_mj = None
        now_mj = self._read_mj()
        self._last_mj = now_mj
        self._read_at_s = now_s
        if last_mj is None:
            raise Unavailable("NVML's energy counter could not be read the last time")
        spent_mj = now_mj - last_mj
        # the counter starts at 0 when the driver is loaded
        if spent_mj < 0:
            raise Unavailable("NVML's energy counter went back: the driver was reloaded")
        return self._reading(spent_mj / 1e3)

    def _read_mj(self) -> int:
        return int(self._gpu.ask("TotalEnergyConsumption"))


class GpuPower(GpuSource):
    """Board power, sampled about every 0.1 s and integrated; for boards without the counter."""

    kind = "nvml-sampled"
    interval_s = 0.1

    def __init__(self, gpu: Gpu) -> None:
        gpu.ask("PowerUsage")  # fail here, not in the thread
        super().__init__(gpu)
        self._integral_ws = Integral(lambda: gpu.ask("PowerUsage") / 1e3)  # NVML says mW

    def tick(self) -> None:
        super().tick()
        self._integral_ws.sample()

    def collect(self) -> Reading:
        return self._reading(self._integral_ws.take())


class GpuUtilisation(GpuSource):
    """READ eq. 16 (arXiv 2305.15348): the integral of u/100 x p0.

    u is the utilisation in percent, and p0 the board's TDP: NVML's default power limit, which is
    the TDP as shipped. READ samples once a minute; here it is about once a second.
    """

    kind = READ

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self._tdp_w = gpu.ask("PowerManagementDefaultLimit") / 1e3
        self._percent_s = Integral(lambda: float(gpu.ask("UtilizationRates").gpu))

    def tick(self) -> None:
        super().tick()
        self._percent_s.sample()

    def collect(self) -> Reading:
        return self._reading(self._percent_s.take() / 100 * self._tdp_w)


def gpu_sources(
    open_gpu: Callable[[], Gpu], *, sample_read_energy: bool
) -> tuple[list[EnergySource], dict[str, str]]:
    """A board's energy sources: the counter, or the power where there is none; READ's sampling.

    Args:
        open_gpu: Opens the board, or raises `Unavailable`.
        sample_read_energy: Whether to sample READ's equation 16.

    Returns:
        The sources, and for each kind that is absent the reason.
    """
    try:
        gpu = open_gpu()
    except Unavailable as why:
        return [], {"nvml": str(why), GpuUtilisation.kind: str(why)}
    wanted: list[type[GpuCounter | GpuPower | GpuUtilisation]] = [
        GpuCounter,
        GpuPower,
        GpuUtilisation,
    ]
    sources: list[EnergySource] = []
    absent: dict[str, str] = {}
    if not sample_read_energy:
        absent[GpuUtilisation.kind] = "switched off"
    for kind in wanted:
        # power is for boards without the counter, which stands before it in the list
        if kind.kind in absent or (kind is GpuPower and sources):
            continue
        try:
            sources.append(kind(gpu))
        except Unavailable as why:
            absent[kind.kind] = str(why)
    return sources, absent


def visible_boards(api: Any = pynvml) -> list[str]:
    """The UUIDs of this host's boards that CUDA_VISIBLE_DEVICES leaves to this process.

    Raises:
        Unavailable: NVML does not answer, as where there is no driver.
    """
    names: list[str] = []
    try:
        api.nvmlInit()
        for index in range(api.nvmlDeviceGetCount()):
            names.append(api.nvmlDeviceGetUUID(api.nvmlDeviceGetHandleByIndex(index)))
    except api.NVMLError as error:
        raise Unavailable(f"NVML: {error}") from error
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return names
    visible = []
    for part in wanted.split(","):
        # A number, or a UUID, of which the beginning is enough.
        if part.strip().isdecimal():
            visible += names[int(part) : int(part) + 1]
        elif part.strip():
            visible += [name for name in names if name.startswith(part.strip())]
    return visible


def why_no_energy(api: Any = pynvml) -> str | None:
    """Why the energy of one of the visible boards cannot be metered; None where all can be.

    It makes no CUDA context.
    """
    try:
        names = visible_boards(api)
    except Unavailable as why:
        return str(why)
    for name in names:
        sources, absent = gpu_sources(partial(Gpu, name, api), sample_read_energy=False)
        if not sources:
            return "; ".join(why for kind, why in absent.items() if kind != GpuUtilisation.kind)
    return None
