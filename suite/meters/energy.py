"""Energy of a rank's processor: RAPL where it can be read, and processor time x watts per core.

Each source returns what was spent since it was last asked, by device, so that ranks which share a
device can count it once.
"""

from __future__ import annotations

import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import psutil

from suite.meters.clock import Unavailable
from suite.meters.record import ESTIMATE

JOULES_PER_KWH = 3.6e6

WATTS_PER_CORE = 4.0
"""Power of one busy core where nothing can be measured.

Ours: server processors of 2021-2023 have 280 W / 64 to 360 W / 96 cores of TDP.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was spent since the last reading.

    Attributes:
        joules: Energy by device.
        gpu_processes: Number of compute processes seen, by GPU UUID.
        host_cpu_s: Busy processor seconds of (this process, the whole host), by host.
    """

    joules: dict[str, float]
    gpu_processes: dict[str, int] = field(default_factory=dict)
    host_cpu_s: dict[str, tuple[float, float]] = field(default_factory=dict)


class EnergySource(ABC):
    """One way to measure energy.

    Attributes:
        kind: The label of its results.
        interval_s: How often `tick` must run; None = never.
        lags: Whether the counter is refreshed at intervals only, so that a counter that stands
            still says nothing about a short phase.
    """

    kind: ClassVar[str]
    interval_s: ClassVar[float | None] = None
    lags: ClassVar[bool] = False

    def tick(self) -> None:
        """Sample; a thread calls this while a phase is open."""
        return

    @abstractmethod
    def collect(self) -> Reading:
        """Return what was spent since the last call.

        Raises:
            Unavailable: It is not known; the next call starts afresh.
        """


class CpuTime(EnergySource):
    """Estimate: user + system seconds of all threads of this process x watts per core.

    Child processes are not in it.
    """

    kind = ESTIMATE

    def __init__(self, watts_per_core: float = WATTS_PER_CORE) -> None:
        self.watts_per_core = watts_per_core
        # no pid: containers of one host repeat them
        self._device = f"process-{uuid.uuid4().hex[:12]}"
        self._last_s = time.process_time()  # the time before this source is nobody's

    def collect(self) -> Reading:
        now_s = time.process_time()
        spent_s = now_s - self._last_s
        self._last_s = now_s
        return Reading({self._device: spent_s * self.watts_per_core})


def host_busy_s() -> float:
    """Seconds that all processors of this host have worked since boot, for anybody."""
    times = psutil.cpu_times()
    busy_s = 0.0
    for part in ("user", "nice", "system", "irq", "softirq", "steal"):
        busy_s += getattr(times, part, 0.0)  # not every system has every part
    return busy_s


class Rapl(EnergySource):
    """RAPL counters (running average power limit) of the processor packages, via Linux' powercap.

    They cover the whole host. DRAM and platform domains are left out: not every processor has them,
    and the platform domain contains the packages.

    Args:
        root: The powercap folder.
        busy_s: Returns the busy processor seconds of the host, which tell whether other work shares
            it.

    Raises:
        Unavailable: There is no package domain, or none that this user may read.
    """

    kind = "rapl"
    # a 65 kJ counter wraps in 3 minutes at 350 W, and two wraps between two reads look like one
    interval_s = 10.0

    def __init__(
        self, root: Path = Path("/sys/class/powercap"), busy_s: Callable[[], float] = host_busy_s
    ) -> None:
        self._packages = [_Package(zone) for zone in _package_zones(root)]
        self._busy_s = busy_s
        self._host = host_id()
        self._last_cpu_s = self._cpu_s()
        self._lock = threading.Lock()
        self._failure: Unavailable | None = None

    def tick(self) -> None:
        with self._lock:
            for package in self._packages:
                try:
                    package.update()
                except Unavailable as failure:
                    self._failure = failure  # kept for `collect`: a thread has nobody to tell

    def collect(self) -> Reading:
        self.tick()
        with self._lock:
            failure = self._failure
            self._failure = None
            joules = {}
            for package in self._packages:
                joules[f"{self._host}/{package.name}"] = package.take_j()
        own_s, busy_s = self._cpu_s()
        last_own_s, last_busy_s = self._last_cpu_s
        self._last_cpu_s = own_s, busy_s
        host_cpu_s = own_s - last_own_s, busy_s - last_busy_s
        if failure is not None:
            raise failure
        return Reading(joules, host_cpu_s={self._host: host_cpu_s})

    def _cpu_s(self) -> tuple[float, float]:
        return time.process_time(), self._busy_s()


class _Package:
    """One package's counter in microjoules, which wraps at its range."""

    def __init__(self, zone: Path) -> None:
        self.name = f"{zone.name}-{_read(zone / 'name')}"
        self._counter = zone / "energy_uj"
        self._range_uj = int(_read(zone / "max_energy_range_uj"))
        self._last_uj: int | None = int(_read(self._counter))
        self._pending_uj = 0

    def update(self) -> None:
        last_uj = self._last_uj
        # Where this reading fails, the next one must not be compared with the one before it.
        self._last_uj = None
        now_uj = int(_read(self._counter))
        self._last_uj = now_uj
        if last_uj is None:
            raise Unavailable(f"RAPL: {self._counter} could not be read the last time")
        self._pending_uj += now_uj - last_uj
        if now_uj < last_uj:  # the counter wrapped
            self._pending_uj += self._range_uj

    def take_j(self) -> float:
        taken_uj = self._pending_uj
        self._pending_uj = 0
        return taken_uj / 1e6  # microjoules


def _package_zones(root: Path) -> list[Path]:
    zones = []
    # AMD's processors have the same names here
    for zone in sorted(root.glob("intel-rapl:*")):
        if _read(zone / "name").startswith("package"):
            zones.append(zone)
    if not zones:
        raise Unavailable(f"no RAPL package domain under {root}")
    return zones


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise Unavailable(f"RAPL: cannot read {path}: {error.strerror}") from error


def host_id() -> str:
    """A random name that all processes of a host share until it reboots; it tells no host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"
