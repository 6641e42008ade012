"""Energy of a rank's processor: RAPL where it can be read, and processor time x watts per core.

Each source hands over what was spent since it was last asked, by device, so that ranks which share a device can count it once.
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

JOULES_PER_KWH = 3.6e6

WATTS_PER_CORE = 4.0
"""Power of one busy core where nothing can be measured. Ours: server parts of 2021-2023 have 280 W / 64 to 360 W / 96 cores of TDP."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was spent since the last reading.

    Attributes:
        joules: By device.
        gpu_processes: Compute processes seen, by GPU UUID.
        host_cpu_s: (this process', the whole host's) busy processor seconds, by host.
    """

    joules: dict[str, float]
    gpu_processes: dict[str, int] = field(default_factory=dict)
    host_cpu_s: dict[str, tuple[float, float]] = field(default_factory=dict)


class EnergySource(ABC):
    """One way to know energy.

    Attributes:
        kind: Labels the result.
        interval_s: How often `tick` must run; None: never.
        lags: The counter is refreshed at intervals, so that standing still says nothing about a short phase.
    """

    kind: ClassVar[str]
    interval_s: ClassVar[float | None] = None
    lags: ClassVar[bool] = False

    def tick(self) -> None:
        """Called from a thread while a phase is open."""
        return

    @abstractmethod
    def collect(self) -> Reading:
        """What was spent since the last call.

        Raises:
            Unavailable: It is not known; the next call starts afresh.
        """


class CpuTime(EnergySource):
    """User + system seconds of all threads of this process x watts per core. An estimate; child processes are not in it."""

    kind = "cpu-time-estimate"

    def __init__(self, watts_per_core: float = WATTS_PER_CORE) -> None:
        self.watts_per_core = watts_per_core
        self._device = (
            f"process-{uuid.uuid4().hex[:12]}"  # pids repeat across containers of one host
        )
        self._last_s = time.process_time()

    def collect(self) -> Reading:
        now_s = time.process_time()
        spent_s, self._last_s = now_s - self._last_s, now_s
        return Reading({self._device: spent_s * self.watts_per_core})


def host_busy_s() -> float:
    """Seconds that all processors of this host have worked since boot, whoever for."""
    times = psutil.cpu_times()
    return float(
        sum(
            getattr(times, part, 0.0)
            for part in ("user", "nice", "system", "irq", "softirq", "steal")
        )
    )


class Rapl(EnergySource):
    """Running-average power limit counters of the processor packages, via Linux' powercap. Covers the whole host.

    DRAM and platform domains are left out: not every processor has them, and the platform domain contains the packages.

    Args:
        root: The powercap folder.
        busy_s: Busy processor seconds of the host, to tell whether other work shares it.

    Raises:
        Unavailable: No package domain, or none that this user may read.
    """

    kind = "rapl"
    interval_s = 10.0  # a 65 kJ counter wraps in 3 minutes at 350 W; one wrap between two reads is all that can be seen

    def __init__(
        self, root: Path = Path("/sys/class/powercap"), busy_s: Callable[[], float] = host_busy_s
    ) -> None:
        self._packages = [_Package(zone) for zone in _package_zones(root)]
        self._busy_s, self._host = busy_s, host_id()
        self._last_cpu_s = self._cpu_s()
        self._lock = threading.Lock()
        self._failure: Unavailable | None = None

    def tick(self) -> None:
        with self._lock:
            try:
                for package in self._packages:
                    package.update()
            except Unavailable as failure:
                self._failure = failure

    def collect(self) -> Reading:
        self.tick()
        with self._lock:
            failure, self._failure = self._failure, None
            joules = {
                f"{self._host}/{package.name}": package.take_j() for package in self._packages
            }
        now = self._cpu_s()
        host_cpu_s = now[0] - self._last_cpu_s[0], now[1] - self._last_cpu_s[1]
        self._last_cpu_s = now
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
        self._last_uj = int(_read(self._counter))
        self._pending_uj = 0

    def update(self) -> None:
        now_uj = int(_read(self._counter))
        self._pending_uj += (
            now_uj - self._last_uj + (self._range_uj if now_uj < self._last_uj else 0)
        )
        self._last_uj = now_uj

    def take_j(self) -> float:
        taken_uj, self._pending_uj = self._pending_uj, 0
        return taken_uj / 1e6


def _package_zones(root: Path) -> list[Path]:
    zones = [
        zone
        for zone in sorted(root.glob("intel-rapl:*"))
        if _read(zone / "name").startswith("package")
    ]
    if not zones:
        raise Unavailable(f"no RAPL package domain under {root}")
    return zones


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise Unavailable(f"RAPL: cannot read {path}: {error.strerror}") from error


def host_id() -> str:
    """The same for all processes of a host until it reboots, and no name of it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"
