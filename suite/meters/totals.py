"""Combine the accounts of all ranks into one record per phase.

A number that is not known is null, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from suite.meters.clock import Unavailable
from suite.meters.energy import JOULES_PER_KWH
from suite.meters.local import LocalPhase, MemoryField
from suite.meters.record import ESTIMATE, READ, MemoryPeak, PhaseRecord

SOURCES = ("nvml", "nvml-sampled", "rapl", ESTIMATE)
"""Kinds of energy sources, the best first.

All ranks and the whole phase have one source: measured and estimated joules are not added up.
"""

FOREIGN_CPU_FRAC = 0.1
"""Share of a host's busy seconds that may be other work, where its RAPL counter counts. Ours."""

FOREIGN_CPU_S = 0.5
"""Seconds of other work that are always allowed: the kernel counts in ticks of 10 ms. Ours."""


def combine(
    per_rank: Sequence[dict[str, LocalPhase]],
) -> tuple[dict[str, PhaseRecord], dict[str, str]]:
    """Combine the accounts of all ranks.

    Seconds are those of the slowest rank. Energy is the sum over devices; a device counts once,
    however many ranks share it, because they all read the same board. Estimates from processor time
    are the sum over processes. Memory is the maximum and the sum over the ranks that visited the
    phase.

    Args:
        per_rank: `PhaseMeter.local()` of each rank.

    Returns:
        Records by phase; and the reason for every null in them, by `phases.<name>.<field>`.
    """
    by_phase: dict[str, list[LocalPhase]] = {}
    for rank in per_rank:
        for name, part in rank.items():
            by_phase.setdefault(name, []).append(part)
    records: dict[str, PhaseRecord] = {}
    missing: dict[str, str] = {}
    for name, parts in by_phase.items():
        records[name], reasons = _combine_phase(parts)
        for where, reason in reasons.items():
            missing[f"phases.{name}.{where}"] = reason
    return records, missing


def _combine_phase(parts: Sequence[LocalPhase]) -> tuple[PhaseRecord, dict[str, str]]:
    missing: dict[str, str] = {}
    read_energy_kwh = None
    energy_kwh, source, reason = _phase_energy(parts)
    if energy_kwh is None:
        missing["energy_kwh"] = reason
        missing["energy_source"] = reason
    elif source != "rapl" and any("rapl" in part.joules for part in parts):
        missing["energy_kwh[rapl]"] = reason  # it was read, and would have been better
    try:
        read_energy_kwh = _energy_kwh(READ, parts)
    except Unavailable as why:
        missing["read_energy_kwh"] = str(why)
    memory, reasons = _memory(parts)
    record = PhaseRecord(
        seconds=max(part.seconds for part in parts),
        energy_kwh=energy_kwh,
        energy_source=source,
        read_energy_kwh=read_energy_kwh,
        memory=memory,
    )
    return record, missing | reasons


def _phase_energy(parts: Sequence[LocalPhase]) -> tuple[float | None, str | None, str]:
    """Energy of the ranks' devices from the best source that covers them all.

    Returns:
        Energy in kWh, its source, and why better sources did not do.
    """
    reasons: list[str] = []
    for kind in SOURCES:
        if any(kind in part.joules or kind in part.missing for part in parts):
            # a kind that no rank has tried is no gap to report
            try:
                return _energy_kwh(kind, parts), kind, "; ".join(reasons)
            except Unavailable as why:
                reasons.append(f"{kind}: {why}")
    return None, None, "; ".join(reasons) or "no energy source"


def _energy_kwh(kind: str, parts: Sequence[LocalPhase]) -> float:
    for part in parts:
        _check_covered(kind, part)
    if kind == "rapl":
        _check_hosts(parts)
    else:
        _check_gpus(parts)
    by_device: dict[str, float] = {}
    for part in parts:
        for device, joules in part.joules[kind].items():
            # ranks that share a device read one counter, so the largest is what it spent
            by_device[device] = max(joules, by_device.get(device, 0.0))
    total = sum(by_device.values())
    # READ's utilisation may well be 0; a board or a processor always draws power
    if total <= 0 and kind != READ:
        seconds = max(part.seconds for part in parts)
        raise Unavailable(f"the counter did not move in {seconds:.3g} s")
    return total / JOULES_PER_KWH


def _check_covered(kind: str, part: LocalPhase) -> None:
    covered_s = part.covered_s.get(kind, 0.0)
    # the slack is for sums of floats in another order
    if kind not in part.joules or covered_s < part.seconds * (1 - 1e-6):
        raise Unavailable(
            part.missing.get(kind, f"measured for {covered_s:.3g} of {part.seconds:.3g} s")
        )


def _check_gpus(parts: Sequence[LocalPhase]) -> None:
    """Check that no board has more processes than ranks of ours.

    Counted, not compared by pid: containers see pids of their own.
    """
    ranks: Counter[str] = Counter()
    seen: dict[str, int] = {}
    for part in parts:
        for gpu, processes in part.gpu_processes.items():
            ranks[gpu] += 1
            seen[gpu] = max(processes, seen.get(gpu, 0))
    for gpu, processes in seen.items():
        if processes > ranks[gpu]:
            raise Unavailable(
                f"{processes} processes compute on {gpu}, {ranks[gpu]} of them this trial's"
            )


def _check_hosts(parts: Sequence[LocalPhase]) -> None:
    """Check that the processors of each host worked for these ranks, or nearly so."""
    own_s: dict[str, float] = {}
    busy_s: dict[str, float] = {}
    for part in parts:
        for host, (own, busy) in part.host_cpu_s.items():
            own_s[host] = own_s.get(host, 0.0) + own
            # all ranks of a host read the same busy seconds
            busy_s[host] = max(busy, busy_s.get(host, 0.0))
    for host, busy in busy_s.items():
        foreign_s = busy - own_s[host]
        if foreign_s > max(FOREIGN_CPU_S, FOREIGN_CPU_FRAC * busy):
            raise Unavailable(
                f"other work took {foreign_s / busy:.0%} of the host's busy processor time"
            )


def _memory(parts: Sequence[LocalPhase]) -> tuple[MemoryPeak, dict[str, str]]:
    values: dict[str, int] = {}
    missing: dict[str, str] = {}
    for name in get_args(MemoryField):
        stem = name.removesuffix("_bytes")
        peaks = [part.memory[name] for part in parts if name in part.memory]
        reasons = [part.missing[name] for part in parts if name in part.missing]
        if reasons or len(peaks) < len(parts):
            reason = reasons[0] if reasons else "not measured on every rank"
            missing[f"memory.{stem}_max_bytes"] = reason
            missing[f"memory.{stem}_sum_bytes"] = reason
        else:
            values[f"{stem}_max_bytes"] = max(peaks)
            values[f"{stem}_sum_bytes"] = sum(peaks)
    return MemoryPeak(**values), missing
