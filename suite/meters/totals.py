"""From every rank's account to one record per phase; what cannot be told is null, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from suite.meters.clock import Unavailable
from suite.meters.energy import JOULES_PER_KWH
from suite.meters.local import LocalPhase, MemoryField
from suite.meters.record import MemoryPeak, PhaseRecord

SOURCES = ("nvml", "nvml-sampled", "rapl", "cpu-time-estimate")
"""Best first. One source for all ranks and the whole phase: measured and estimated joules are not added up."""

READ = "read-eq16"

FOREIGN_CPU_FRAC, FOREIGN_CPU_S = 0.1, 0.5
"""Work of others that a host's RAPL counter may hold: share of the busy seconds, and an absolute slack for 10 ms ticks. Ours."""


def combine(
    per_rank: Sequence[dict[str, LocalPhase]],
) -> tuple[dict[str, PhaseRecord], dict[str, str]]:
    """Phase records over all ranks.

    Seconds are the slowest rank's. Energy is the sum over devices, each counted once however many ranks share it (they all read the same
    board); processor-time estimates are the sum over processes. Memory is the maximum and the sum over the ranks that visited the phase.

    Args:
        per_rank: `PhaseMeter.local()` of each rank.

    Returns:
        Records by phase; and for every null in them, `phases.<name>.<field>` -> why.
    """
    records: dict[str, PhaseRecord] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(name for rank in per_rank for name in rank):
        records[name], reasons = _combine_phase([rank[name] for rank in per_rank if name in rank])
        missing |= {f"phases.{name}.{where}": reason for where, reason in reasons.items()}
    return records, missing


def _combine_phase(parts: Sequence[LocalPhase]) -> tuple[PhaseRecord, dict[str, str]]:
    missing: dict[str, str] = {}
    read_energy_kwh = None
    energy_kwh, source, reason = phase_energy(parts)
    if energy_kwh is None:
        missing["energy_kwh"] = missing["energy_source"] = reason
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


def phase_energy(parts: Sequence[LocalPhase]) -> tuple[float | None, str | None, str]:
    """Energy in kWh, its source, and why better sources were passed over, from the accounts of some ranks."""
    reasons: list[str] = []
    for kind in SOURCES:
        if any(kind in part.joules or kind in part.missing for part in parts):
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
    devices = {device for part in parts for device in part.joules[kind]}
    joules = sum(max(part.joules[kind].get(device, 0.0) for part in parts) for device in devices)
    if joules <= 0 and kind != READ:  # no use of the GPU is a reading; no joules at all is not
        raise Unavailable(
            f"the counter did not move in {max(part.seconds for part in parts):.3g} s"
        )
    return joules / JOULES_PER_KWH


def _check_covered(kind: str, part: LocalPhase) -> None:
    covered_s = part.covered_s.get(kind, 0.0)
    if kind not in part.joules or covered_s < part.seconds * (1 - 1e-6):
        raise Unavailable(
            part.missing.get(kind, f"measured for {covered_s:.3g} of {part.seconds:.3g} s")
        )


def _check_gpus(parts: Sequence[LocalPhase]) -> None:
    """No more processes on a board than ranks of ours. Counted, not compared by pid: containers see pids of their own."""
    for gpu in {gpu for part in parts for gpu in part.gpu_processes}:
        ranks = sum(gpu in part.gpu_processes for part in parts)
        seen = max(part.gpu_processes.get(gpu, 0) for part in parts)
        if seen > ranks:
            raise Unavailable(f"{seen} processes compute on {gpu}, {ranks} of them this trial's")


def _check_hosts(parts: Sequence[LocalPhase]) -> None:
    """The processors of a host worked for these ranks, or nearly so."""
    for host in {host for part in parts for host in part.host_cpu_s}:
        shares = [part.host_cpu_s[host] for part in parts if host in part.host_cpu_s]
        busy_s = max(busy_s for _, busy_s in shares)
        foreign_s = busy_s - sum(own_s for own_s, _ in shares)
        if foreign_s > max(FOREIGN_CPU_S, FOREIGN_CPU_FRAC * busy_s):
            raise Unavailable(
                f"other work took {foreign_s / busy_s:.0%} of the host's busy processor time"
            )


def _memory(parts: Sequence[LocalPhase]) -> tuple[MemoryPeak, dict[str, str]]:
    values: dict[str, int] = {}
    missing: dict[str, str] = {}
    for name in get_args(MemoryField):
        peaks = [part.memory.get(name) for part in parts]
        stem = name.removesuffix("_bytes")
        if (reason := _first(part.missing.get(name) for part in parts)) or None in peaks:
            missing |= {
                f"memory.{stem}_{how}_bytes": reason or "not measured on every rank"
                for how in ("max", "sum")
            }
        else:
            known = [peak for peak in peaks if peak is not None]
            values |= {f"{stem}_max_bytes": max(known), f"{stem}_sum_bytes": sum(known)}
    return MemoryPeak(**values), missing


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason), None)
