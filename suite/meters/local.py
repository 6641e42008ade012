"""One rank's account of one phase: plain data that travels between ranks and into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from suite.meters.energy import Reading

MemoryField = Literal["allocated_bytes", "reserved_bytes", "rss_bytes"]


def name_devices_by_attempt(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Add the number of the attempt that ends here to the devices in a rank's accounts.

    Ranks that read one board in the same attempt count it once. The next attempt may give the board
    to another rank, and what it spends then is added.

    Args:
        state: The accounts, as `PhaseMeter.state` returns them.
        number: Number of the attempt, from 1.
    """
    named = {}
    for name, phase in state.items():
        joules = {}
        for kind, spent in phase["joules"].items():
            joules[kind] = _with_number(spent, number)
        named[name] = {
            **phase,
            "joules": joules,
            "gpu_processes": _with_number(phase["gpu_processes"], number),
            "host_cpu_s": _with_number(phase["host_cpu_s"], number),
        }
    return named


def _with_number(by_device: Mapping[str, Any], number: int) -> dict[str, Any]:
    named = {}
    for device, spent in by_device.items():
        # a device with a number belongs to an earlier attempt, from which this one was resumed
        key = device if "@" in device else f"{device}@{number}"
        named[key] = spent
    return named


@dataclass(slots=True)
class LocalPhase:
    """What a phase has cost this rank so far, over all visits.

    Attributes:
        seconds: Wall clock.
        joules: Energy by kind of source, then by device.
        covered_s: Seconds for which a kind of source gave readings; where it is less than
            `seconds`, the source has a hole.
        gpu_processes: The most compute processes seen at once, by GPU UUID.
        host_cpu_s: Busy processor seconds of [this process, the host], by host.
        memory: Peaks in bytes.
        missing: Why a kind of source or a memory field has a hole or is absent.
    """

    seconds: float = 0.0
    joules: dict[str, dict[str, float]] = field(default_factory=dict)
    covered_s: dict[str, float] = field(default_factory=dict)
    gpu_processes: dict[str, int] = field(default_factory=dict)
    host_cpu_s: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[MemoryField, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add_reading(self, kind: str, reading: Reading, seconds: float) -> None:
        """Add a reading of a source, which covers `seconds`."""
        self.covered_s[kind] = self.covered_s.get(kind, 0.0) + seconds
        self.add_joules(kind, reading.joules)
        self._add_sharers(reading.gpu_processes, reading.host_cpu_s)

    def add_joules(self, kind: str, joules: Mapping[str, float], share_frac: float = 1.0) -> None:
        """Add a share of what a source's devices spent."""
        by_device = self.joules.setdefault(kind, {})
        for device, spent in joules.items():
            by_device[device] = by_device.get(device, 0.0) + spent * share_frac

    def add_peak(self, name: MemoryField, size_bytes: int) -> None:
        """Keep the largest peak over all visits."""
        # phases of a resumed trial keep the peak of all attempts
        self.memory[name] = max(size_bytes, self.memory.get(name, 0))

    def merge(self, other: LocalPhase) -> None:
        """Add another account of the same phase."""
        self.seconds += other.seconds
        for kind, joules in other.joules.items():
            self.add_reading(kind, Reading(joules), other.covered_s.get(kind, 0.0))
        self._add_sharers(other.gpu_processes, other.host_cpu_s)
        for name, peak in other.memory.items():
            self.add_peak(name, peak)
        self.missing = other.missing | self.missing  # the first reason stays

    def part(self, share_frac: float, whose: str) -> LocalPhase:
        """A share of the time and energy, for work that several trials did together.

        Args:
            share_frac: From 0 to 1.
            whose: Who gets it, for the reason why the share has no memory of its own.
        """
        found = LocalPhase(seconds=self.seconds * share_frac, missing=dict(self.missing))
        for kind, joules in self.joules.items():
            found.add_joules(kind, joules, share_frac)
            found.covered_s[kind] = self.covered_s.get(kind, 0.0) * share_frac
        found.gpu_processes = dict(self.gpu_processes)
        # Not divided: they only tell whether the host worked for all of them together, and the
        # seconds of other work that are allowed do not grow with the number of trials.
        found.host_cpu_s = {host: list(seconds) for host, seconds in self.host_cpu_s.items()}
        for name in get_args(MemoryField):
            found.missing[name] = f"trained as {whose}, whose memory is not told apart"
        return found

    def _add_sharers(
        self, gpu_processes: Mapping[str, int], host_cpu_s: Mapping[str, Sequence[float]]
    ) -> None:
        for gpu, count in gpu_processes.items():
            self.gpu_processes[gpu] = max(count, self.gpu_processes.get(gpu, 0))
        for host, (own_s, busy_s) in host_cpu_s.items():
            before = self.host_cpu_s.get(host, [0.0, 0.0])
            self.host_cpu_s[host] = [before[0] + own_s, before[1] + busy_s]
