"""Seconds, energy and peak memory of a block of any PyTorch script.

>>> with Meter("cuda:0", grid_g_per_kwh=380) as meter:
...     with meter.phase("train"):
...         for batch in batches:
...             with meter.phase("forward"):
...                 loss = model(batch)
...             with meter.phase("backward"):
...                 loss.backward()
>>> meter.seconds, meter.energy_kwh, meter.energy_source, meter.watts, meter.co2e_g
>>> meter.memory.allocated_max_bytes
>>> meter["train/backward"].energy_kwh
>>> print(meter.table())
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

import torch

from suite.meters.clock import Unavailable
from suite.meters.energy import JOULES_PER_KWH, WATTS_PER_CORE, EnergySource
from suite.meters.idle import idle_watts
from suite.meters.local import LocalPhase
from suite.meters.phases import PhaseMeter
from suite.meters.record import MemoryPeak, PhaseRecord
from suite.meters.totals import combine

TOTAL = ""
"""The path of the whole block."""

Device = str | torch.device


class Meter:
    """Meters a block, and named phases inside it.

    Phases may nest; an outer phase contains its inner ones.

    Args:
        device: The device that computes, or all that this process drives. None = the current GPU,
            or the CPU where there is none.
        watch_tensors: Whether to count live tensors on a CPU, for the peak of allocated memory. It
            slows every operation, so that times are not typical. A GPU's allocator counts by
            itself.
        idle_s: Seconds before the block in which idle power is measured; 0 = it is not measured.
        grid_g_per_kwh: Grams of CO2 equivalent per kWh of the grid that feeds the machine, for
            `co2e_g`.
        watts_per_core: Power of a busy core, for the estimate where no counter can be read.
        sources: Energy sources instead of the devices' own, one list for each device.

    Raises:
        ValueError: The grid intensity is negative, or the devices repeat or are of several kinds.
    """

    def __init__(
        self,
        device: Device | Sequence[Device] | None = None,
        *,
        watch_tensors: bool = False,
        idle_s: float = 0.0,
        grid_g_per_kwh: float | None = None,
        watts_per_core: float = WATTS_PER_CORE,
        sources: Sequence[Sequence[EnergySource]] | None = None,
    ) -> None:
        if grid_g_per_kwh is not None and grid_g_per_kwh < 0:
            raise ValueError(
                f"grid_g_per_kwh {grid_g_per_kwh}: expected grams of CO2e per kWh, 0 or more"
            )
        self.devices = _devices(device)
        given: Sequence[Sequence[EnergySource] | None] = sources or [None] * len(self.devices)
        self._meters: list[PhaseMeter] = []
        for each, own in zip(self.devices, given, strict=True):
            meter = PhaseMeter(
                each,
                watts_per_core=watts_per_core,
                sources=own,
                watch_tensors=watch_tensors,
            )
            self._meters.append(meter)
        self._idle_s = idle_s
        self._grid = grid_g_per_kwh
        self._path: list[str] = []  # the open phases, from the outside in
        self._names: list[str] = []  # paths of all phases, in the order of their first visit
        self._own: list[dict[str, LocalPhase]] = []  # accounts of this process, one a device
        # all accounts that count, of other processes too after `gather`; None until the block ends
        self._accounts: list[dict[str, LocalPhase]] | None = None
        self._block = ExitStack()  # keeps the whole block open between __enter__ and __exit__
        self.idle_watts: float | None = None
        self.idle_watts_missing: str | None = None
        if not idle_s:
            self.idle_watts_missing = "not asked for (idle_s=0)"

    def __enter__(self) -> Self:
        if self._names:
            raise RuntimeError(
                "a Meter meters one block; make another for the next, or name phases inside it"
            )
        self._measure_idle()
        self._block.enter_context(self._inside(TOTAL))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._block.__exit__(kind, error, traceback)
        self._own = [meter.local() for meter in self._meters]
        _count_the_process_once(self._own)
        self._accounts = self._own

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Meter a block as phase `name`, inside the phase that is open; may be entered again."""
        if not self._names or self._accounts is not None:
            raise RuntimeError(
                f"phase {name!r}: only inside the Meter's block (`with Meter() as meter: ...`)"
            )
        if not name or "/" in name:
            raise ValueError(f"phase {name!r}: expected a name without '/'")
        self._path.append(name)
        try:
            with self._inside("/".join(self._path)):
                yield
        finally:
            self._path.pop()

    def gather(self) -> Self:
        """Combine what all processes of the process group metered; all of them must call it.

        Afterwards every process reports the same numbers: seconds are those of the slowest, and
        each board counts once.
        """
        self._ended()
        own = self._own
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # the second list is only a placeholder of the right length
            everyone: list[list[dict[str, LocalPhase]]] = [own] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, own)
            self._accounts = [account for accounts in everyone for account in accounts]
            names: dict[str, None] = {}  # processes may have entered other phases
            for account in self._accounts:
                names.update(dict.fromkeys(account))
            self._names = list(names)
        return self

    # ---- what it found ---------------------------------------------------------------------------

    def __getitem__(self, path: str) -> PhaseRecord:
        """Cost of a phase by its path (`train/forward`), with inner phases; "" is the whole block.

        Raises:
            KeyError: No such phase was entered.
        """
        return self._record(path)[0]

    @property
    def phases(self) -> dict[str, PhaseRecord]:
        """Every named phase by its path, inner phases included."""
        return {name: self[name] for name in self._names if name != TOTAL}

    @property
    def total(self) -> PhaseRecord:
        """The whole block."""
        return self[TOTAL]

    @property
    def missing(self) -> dict[str, str]:
        """The reason for every null of the whole block, by field."""
        return self._record(TOTAL)[1]

    @property
    def seconds(self) -> float:
        """Wall clock of the block."""
        return self.total.seconds

    @property
    def energy_kwh(self) -> float | None:
        """Energy of all devices; None where it is not known, with the reason in `missing`."""
        return self.total.energy_kwh

    @property
    def energy_source(self) -> str | None:
        """nvml, nvml-sampled, rapl, or cpu-time-estimate."""
        return self.total.energy_source

    @property
    def watts(self) -> float | None:
        """Mean power over the block."""
        energy_kwh = self.energy_kwh
        if energy_kwh is None:
            return None
        return energy_kwh * JOULES_PER_KWH / self.seconds

    @property
    def memory(self) -> MemoryPeak:
        """Peaks in bytes: allocated (tensors), reserved (the allocator's), rss (the process)."""
        return self.total.memory

    @property
    def co2e_g(self) -> float | None:
        """Grams of CO2 equivalent of `energy_kwh`; None without a grid intensity or energy."""
        energy_kwh = self.energy_kwh
        if energy_kwh is None or self._grid is None:
            return None
        return energy_kwh * self._grid

    def table(self) -> str:
        """All phases in plain text, one line each."""
        rows = [("phase", "seconds", "Wh", "source", "peak allocated MiB")]
        rows += [_cells(name, self[name]) for name in self._names]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    # ---- parts -----------------------------------------------------------------------------------

    @contextmanager
    def _inside(self, path: str) -> Iterator[None]:
        """Open the phase on every device."""
        if path not in self._names:
            self._names.append(path)
        with ExitStack() as stack:
            for meter in self._meters:
                stack.enter_context(meter.phase(path))
            yield

    def _ended(self) -> list[dict[str, LocalPhase]]:
        if self._accounts is None:
            raise RuntimeError("the block has not ended; read the Meter after its `with`")
        return self._accounts

    def _record(self, path: str) -> tuple[PhaseRecord, dict[str, str]]:
        accounts = self._ended()
        if path not in self._names:
            raise KeyError(f"{path!r}; phases: {', '.join(name for name in self._names if name)}")
        parts = []
        for account in accounts:
            part = _with_inner(account, path)
            if part is not None:  # another process may not have entered this phase
                parts.append({path: part})
        records, missing = combine(parts)
        reasons = {}
        for where, why in missing.items():
            reasons[where.removeprefix(f"phases.{path}.")] = why
        return records[path], reasons

    def _measure_idle(self) -> None:
        if not self._idle_s:
            return
        try:
            self.idle_watts = sum(
                idle_watts(device, seconds=self._idle_s) for device in self.devices
            )
        except Unavailable as why:
            self.idle_watts_missing = str(why)


def _devices(given: Device | Sequence[Device] | None) -> list[torch.device]:
    if given is None:
        # "cuda" without a number is the current GPU; _numbered gives it its number
        given = "cuda" if torch.cuda.is_available() else "cpu"
    several: Iterable[Device] = [given] if isinstance(given, (str, torch.device)) else given
    devices = [_numbered(torch.device(each)) for each in several]
    repeats = len(set(devices)) < len(devices)
    kinds = {device.type for device in devices}
    if repeats or len(kinds) != 1:
        raise ValueError(
            f"device {given!r}: expected one device, or several different ones of a kind"
        )
    return devices


def _numbered(device: torch.device) -> torch.device:
    index: int | None = device.index  # torch's stub knows no device without a number
    if device.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _count_the_process_once(accounts: Sequence[dict[str, LocalPhase]]) -> None:
    """Give the largest resident set of a process to its first meter, and none to the others.

    All meters of a process read the same resident set, and reset its peak for one another.
    """
    for name, first in accounts[0].items():
        if "rss_bytes" in first.missing:
            continue
        peaks = [account[name].memory.get("rss_bytes") for account in accounts]
        known = [peak for peak in peaks if peak is not None]
        if known:
            first.memory["rss_bytes"] = max(known)
            for account in accounts[1:]:
                account[name].memory["rss_bytes"] = 0


def _with_inner(account: dict[str, LocalPhase], path: str) -> LocalPhase | None:
    """A phase's own account, merged with those of all phases inside it; None if there are none."""
    whole: LocalPhase | None = None
    for name, phase in account.items():
        if path in (TOTAL, name) or name.startswith(f"{path}/"):
            if whole is None:
                whole = LocalPhase()
            whole.merge(phase)
    return whole


def _cells(name: str, record: PhaseRecord) -> tuple[str, str, str, str, str]:
    energy = "-" if record.energy_kwh is None else f"{record.energy_kwh * 1000:.4g}"
    allocated = record.memory.allocated_max_bytes
    peak = "-" if allocated is None else f"{allocated / 2**20:.1f}"
    return name or "(all)", f"{record.seconds:.3f}", energy, record.energy_source or "-", peak
