"""Seconds, energy and peak memory of a block of any PyTorch script.

>>> with Meter("cuda:0", grid_g_per_kwh=380) as meter:
...     with meter.phase("train"):
...         for batch in batches:
...             with meter.phase("forward"):
...                 loss = model(batch)
...             with meter.phase("backward"):
...                 loss.backward()
>>> meter.seconds, meter.energy_kwh, meter.energy_source, meter.watts, meter.memory.allocated_max_bytes, meter.co2e_g
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
    """Meters a block, and named phases inside it, which may nest; an outer phase contains its inner ones.

    Args:
        device: What computes: one device, or all that this process drives. None: the current GPU, else the CPU.
        watch_tensors: On a CPU, count live tensors for the peak of allocated memory. It slows every operation, so that times are not
            typical; a GPU's allocator counts by itself.
        idle_s: Measure idle power for so long before the block; 0: do not.
        grid_g_per_kwh: Grams of CO2 equivalent per kWh of the grid that feeds the machine, for `co2e_g`.
        watts_per_core: Power of a busy core, for the estimate where no counter can be read.
        read_energy: Also sample READ's equation 16 (arXiv 2305.15348): utilisation x TDP. GPUs only.
        sources: Energy sources in place of the devices' own, one list for each device.
    """

    def __init__(
        self,
        device: Device | Sequence[Device] | None = None,
        *,
        watch_tensors: bool = False,
        idle_s: float = 0.0,
        grid_g_per_kwh: float | None = None,
        watts_per_core: float = WATTS_PER_CORE,
        read_energy: bool = True,
        sources: Sequence[Sequence[EnergySource]] | None = None,
    ) -> None:
        if grid_g_per_kwh is not None and grid_g_per_kwh < 0:
            raise ValueError(
                f"grid_g_per_kwh {grid_g_per_kwh}: expected grams of CO2e per kWh, 0 or more"
            )
        self.devices = _devices(device)
        given: Sequence[Sequence[EnergySource] | None] = sources or [None] * len(self.devices)
        self._meters = [
            PhaseMeter(
                each,
                watts_per_core=watts_per_core,
                sample_read_energy=read_energy,
                sources=own,
                watch_tensors=watch_tensors,
            )
            for each, own in zip(self.devices, given, strict=True)
        ]
        self._idle_s, self._grid = idle_s, grid_g_per_kwh
        self._path: list[str] = []
        self._names: list[str] = []
        self._own: list[dict[str, LocalPhase]] = []
        self._accounts: list[dict[str, LocalPhase]] | None = None
        self._block = ExitStack()
        self.idle_watts: float | None = None
        self.idle_watts_missing: str | None = None if idle_s else "not asked for (idle_s=0)"

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
        """Meter what happens inside as `name`, within the phase that is open; may be entered again."""
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
        """Put together what all processes of the default process group metered: seconds of the slowest, each board once. Collective.

        Afterwards every process reports the same numbers.
        """
        self._ended()
        own = self._own
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            everyone: list[list[dict[str, LocalPhase]]] = [own] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, own)
            self._accounts = [account for accounts in everyone for account in accounts]
            self._names = list(
                dict.fromkeys(name for account in self._accounts for name in account)
            )
        return self

    # ---- what it found --------------------------------------------------------------------------------------------

    def __getitem__(self, path: str) -> PhaseRecord:
        """Cost of a phase by its path (`train/forward`), inner phases included; "" is the whole block.

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
        """For every null of the whole block: why."""
        return self._record(TOTAL)[1]

    @property
    def seconds(self) -> float:
        """Wall clock of the block."""
        return self.total.seconds

    @property
    def energy_kwh(self) -> float | None:
        """Energy of all devices; None where it cannot be told, with the reason in `missing`."""
        return self.total.energy_kwh

    @property
    def energy_source(self) -> str | None:
        """nvml, nvml-sampled, rapl, or cpu-time-estimate."""
        return self.total.energy_source

    @property
    def watts(self) -> float | None:
        """Mean power over the block."""
        energy_kwh = self.energy_kwh
        return None if energy_kwh is None else energy_kwh * JOULES_PER_KWH / self.seconds

    @property
    def memory(self) -> MemoryPeak:
        """Peaks in bytes by kind: allocated (tensors), reserved (the allocator's), rss (the process)."""
        return self.total.memory

    @property
    def co2e_g(self) -> float | None:
        """Grams of CO2 equivalent of `energy_kwh`; None without a grid intensity or energy."""
        energy_kwh = self.energy_kwh
        return None if energy_kwh is None or self._grid is None else energy_kwh * self._grid

    def table(self) -> str:
        """All phases in plain text, a line each."""
        rows = [("phase", "seconds", "Wh", "source", "peak allocated MiB")]
        rows += [_line(name, self[name]) for name in self._names]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    # ---- parts ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _inside(self, path: str) -> Iterator[None]:
        """The phase on every device."""
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
        parts = [_with_inner(account, path) for account in self._ended()]
        if path not in self._names:
            raise KeyError(f"{path!r}; phases: {', '.join(name for name in self._names if name)}")
        records, missing = combine([{path: part} for part in parts if part is not None])
        return records[path], {
            where.removeprefix(f"phases.{path}."): why for where, why in missing.items()
        }

    def _measure_idle(self) -> None:
        if self._idle_s:
            try:
                self.idle_watts = sum(
                    idle_watts(device, seconds=self._idle_s) for device in self.devices
                )
            except Unavailable as why:
                self.idle_watts_missing = str(why)


def _devices(given: Device | Sequence[Device] | None) -> list[torch.device]:
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    several: Iterable[Device] = [given] if isinstance(given, (str, torch.device)) else given
    devices = [_numbered(torch.device(each)) for each in several]
    if not devices or len(set(devices)) < len(devices) or len({d.type for d in devices}) > 1:
        raise ValueError(
            f"device {given!r}: expected one device, or several different ones of a kind"
        )
    return devices


def _numbered(device: torch.device) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device.type == "cuda" and device.index is None
        else device
    )


def _count_the_process_once(accounts: Sequence[dict[str, LocalPhase]]) -> None:
    """All meters of a process read the same resident set, and reset its peak for one another: the largest belongs to the first."""
    for name, first in accounts[0].items():
        peaks = [account[name].memory.get("rss_bytes") for account in accounts]
        if (
            known := [peak for peak in peaks if peak is not None]
        ) and "rss_bytes" not in first.missing:
            first.memory["rss_bytes"] = max(known)
            for account in accounts[1:]:
                account[name].memory["rss_bytes"] = 0


def _with_inner(account: dict[str, LocalPhase], path: str) -> LocalPhase | None:
    """A phase's own account with those of all phases inside it."""
    inside = [
        phase
        for name, phase in account.items()
        if path in (TOTAL, name) or name.startswith(f"{path}/")
    ]
    if not inside:
        return None
    whole = LocalPhase()
    for phase in inside:
        whole.merge(phase)
    return whole


def _line(name: str, record: PhaseRecord) -> tuple[str, str, str, str, str]:
    energy = "-" if record.energy_kwh is None else f"{record.energy_kwh * 1000:.4g}"
    allocated = record.memory.allocated_max_bytes
    peak = "-" if allocated is None else f"{allocated / 2**20:.1f}"
    return name or "(all)", f"{record.seconds:.3f}", energy, record.energy_source or "-", peak
