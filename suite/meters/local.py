"""One rank's account of one phase: plain data that travels between ranks and into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from suite.meters.energy import Reading

MemoryField = Literal["allocated_bytes", "reserved_bytes", "rss_bytes"]


def of_attempt(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The accounts of a rank (`PhaseMeter.state`) with each device of the attempt that ends here named apart.

    Ranks that read one board at the same time are to be counted once, but the next attempt may give the board to another rank,
    and what it spends then is to be added.

    Args:
        number: Of the attempt, from 1.
    """

    def apart(by_device: Mapping[str, Any]) -> dict[str, Any]:
        return {
            device if "@" in device else f"{device}@{number}": spent
            for device, spent in by_device.items()
        }

    named = {}
    for name, phase in state.items():
        joules = {kind: apart(spent) for kind, spent in phase["joules"].items()}
        named[name] = {
            **phase,
            "joules": joules,
            **{key: apart(phase[key]) for key in ("gpu_processes", "host_cpu_s")},
        }
    return named


@dataclass(slots=True)
class LocalPhase:
    """What a phase has cost this rank so far, over all visits.

    Attributes:
        seconds: Wall clock.
        joules: By kind of energy source, then by device.
        covered_s: Seconds for which a kind of source gave readings; less than `seconds` means it has a hole.
        gpu_processes: Most compute processes seen at once, by GPU UUID.
        host_cpu_s: [this process', the host's] busy processor seconds, by host.
        memory: Peaks in bytes.
        missing: Kind of source, or memory field -> why it has a hole or is absent.
    """

    seconds: float = 0.0
    joules: dict[str, dict[str, float]] = field(default_factory=dict)
    covered_s: dict[str, float] = field(default_factory=dict)
    gpu_processes: dict[str, int] = field(default_factory=dict)
    host_cpu_s: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[MemoryField, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add_reading(self, kind: str, reading: Reading, seconds: float) -> None:
        """Account for `seconds` more of a source."""
        self.covered_s[kind] = self.covered_s.get(kind, 0.0) + seconds
        self.add_joules(kind, reading.joules)
        self._add_sharers(reading.gpu_processes, reading.host_cpu_s)

    def add_joules(self, kind: str, joules: Mapping[str, float], share_frac: float = 1.0) -> None:
        """Account for a share of what a source's devices spent."""
        by_device = self.joules.setdefault(kind, {})
        for device, spent in joules.items():
            by_device[device] = by_device.get(device, 0.0) + spent * share_frac

    def add_peak(self, name: MemoryField, size_bytes: int) -> None:
        """Keep the largest peak over all visits."""
        self.memory[name] = max(size_bytes, self.memory.get(name, 0))

    def merge(self, other: LocalPhase) -> None:
        """Add what another account of the same phase holds."""
        self.seconds += other.seconds
        for kind, joules in other.joules.items():
            self.add_reading(kind, Reading(joules), other.covered_s.get(kind, 0.0))
        self._add_sharers(other.gpu_processes, other.host_cpu_s)
        for name, peak in other.memory.items():
            self.add_peak(name, peak)
        self.missing = other.missing | self.missing

    def _add_sharers(
        self, gpu_processes: Mapping[str, int], host_cpu_s: Mapping[str, Sequence[float]]
    ) -> None:
        for gpu, count in gpu_processes.items():
            self.gpu_processes[gpu] = max(count, self.gpu_processes.get(gpu, 0))
        for host, (own_s, busy_s) in host_cpu_s.items():
            before = self.host_cpu_s.get(host, [0.0, 0.0])
            self.host_cpu_s[host] = [before[0] + own_s, before[1] + busy_s]
