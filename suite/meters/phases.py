"""What each phase of a trial costs one rank: seconds, energy, peak memory.

At every border between phases the device is synchronised, and every counter is read once. What the
counters moved by belongs to the innermost phase that was open. So phases add up without gaps or
overlaps, and an inner phase is not part of the outer one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import torch

from suite.meters.clock import Ticker, Unavailable, synchronise
from suite.meters.energy import WATTS_PER_CORE, CpuTime, EnergySource, Rapl, Reading
from suite.meters.local import LocalPhase
from suite.meters.memory import CudaPeak, ResidentPeak, TensorPeak
from suite.meters.nvml import IS_SHARED, Gpu, gpu_sources
from suite.meters.record import READ


class PhaseMeter:
    """The meter of one rank for one trial.

    Args:
        device: The device that the rank computes on: a GPU is metered, otherwise the processor.
        watts_per_core: Power of a busy core, for the estimate where no counter can be read.
        sample_read_energy: Whether to sample READ's equation 16 too (GPU only).
        sources: Energy sources instead of the device's own.
        shares_gpu: Whether other trials compute on the GPU, so that its energy is nobody's.
        watch_tensors: Whether to watch the tensors' peak on a CPU all the time, and not in `probe`
            alone. It slows every operation.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        watts_per_core: float = WATTS_PER_CORE,
        sample_read_energy: bool = True,
        sources: Sequence[EnergySource] | None = None,
        shares_gpu: bool = False,
        watch_tensors: bool = False,
    ) -> None:
        self.device = device
        self.watts_per_core = watts_per_core
        self._absent: dict[str, str] = {}
        if sources is None:
            self._sources, self._absent = _open_sources(
                device,
                watts_per_core,
                sample_read_energy=sample_read_energy,
                shares_gpu=shares_gpu,
            )
        else:
            self._sources = list(sources)
        self._tickers = []
        for source in self._sources:
            if source.interval_s is not None:
                self._tickers.append(Ticker(source.tick, source.interval_s))
        self._resident = ResidentPeak()
        self._cuda = CudaPeak(device) if device.type == "cuda" else None
        self._phases: dict[str, LocalPhase] = {}
        self._open: list[str] = []  # names of the open phases, from the outside in
        self._tensors = TensorPeak()  # entered by `probe` for single steps
        self._watched = TensorPeak() if watch_tensors and device.type == "cpu" else None
        self._probing = False
        # by phase: the number of watched steps, and the largest sizes of them
        self._probes: dict[str, tuple[int, tuple[int, ...]]] = {}
        # by kind of source: (phase, seconds) of each stretch in which a lagging counter stood still
        self._still: dict[str, list[tuple[LocalPhase | None, float]]] = {}
        self._last_s = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Meter a block as phase `name`; may be entered again, and inside another phase."""
        synchronise(self.device)
        if self._watched is not None and not self._open:
            self._watched.stale = True
            self._watched.__enter__()
        self._border()
        self._open.append(name)
        self._tensors.stale = True  # the phase may have made tensors that no probe has seen
        self._phases.setdefault(name, LocalPhase(missing=dict(self._absent)))
        if len(self._open) == 1:
            for ticker in self._tickers:
                ticker.start()
        try:
            yield
        finally:
            try:
                synchronise(self.device)
                self._border()
            finally:  # also where the device is lost and synchronise raises
                self._open.pop()
                if not self._open:
                    for ticker in self._tickers:
                        ticker.stop()
                    if self._watched is not None:
                        self._watched.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def probe(self, *sizes: int) -> Iterator[bool]:
        """Watch the tensors' peak on a CPU during one step, if it can raise the phase's peak.

        Watching slows a step, so only a few are watched: the first two of a phase (the optimizer's
        state appears in the first), and then every step that is larger than all before. Among n
        shuffled batches these are about ln(n), and which they are depends on the sizes alone. On a
        GPU the allocator keeps the peak, and this does nothing.

        Args:
            sizes: What the step's memory grows with, each in a unit of its own, as the tokens of
                the longest input and of the longest answer. A step is larger than those before if
                one of them is. None at all = watch in any case.

        Yields:
            Whether this step is watched, which makes its time untypical.
        """
        if not self._wants_probe(sizes):
            yield False
            return
        phase = self._phases[self._open[-1]]
        self._settle()
        self._probing = True
        try:
            with self._tensors:
                # finding the live tensors is our cost, not the phase's
                self._settle(to_nobody=True)
                yield True
        finally:
            self._probing = False
            phase.add_peak("allocated_bytes", self._tensors.peak_bytes)

    def seconds(self, name: str) -> float:
        """Wall clock of a phase on this rank so far; 0 if it was never entered."""
        self._settle()
        return self._phases[name].seconds if name in self._phases else 0.0

    def local(self) -> dict[str, LocalPhase]:
        """A copy of this rank's accounts by phase, for `combine`."""
        self._settle()
        phases = copy.deepcopy(self._phases)  # the meter goes on counting in its own
        for phase in phases.values():
            self._explain_memory(phase)
        return phases

    def take(self) -> dict[str, LocalPhase]:
        """Hand over the accounts by phase; the meter begins new ones, also for open phases."""
        self._settle()
        taken = self._phases
        self._phases = {}
        for name in self._open:
            self._phases[name] = LocalPhase(missing=dict(self._absent))
        self._follow(taken)
        return taken

    def hand_over(self, name: str, *, late_to: str) -> LocalPhase:
        """Hand over the account of a phase that is not open any more, and forget it.

        Args:
            name: The phase.
            late_to: The phase that gets what a lagging counter shows of it later.
        """
        self._settle()
        account = self._phases.pop(name)
        self._explain_memory(account)
        self._follow({late_to: account})
        return account

    def _follow(self, taken: Mapping[str, LocalPhase]) -> None:
        """Let what a lagging counter has yet to show go to the new accounts."""
        names = {id(phase): name for name, phase in taken.items()}
        for kind, stretches in self._still.items():
            followed: list[tuple[LocalPhase | None, float]] = []
            for owner, seconds in stretches:
                name = names.get(id(owner))
                if name is not None:
                    owner = self._phases.setdefault(name, LocalPhase(missing=dict(self._absent)))
                followed.append((owner, seconds))
            self._still[kind] = followed

    def state(self) -> dict[str, Any]:
        """The accounts in JSON's types, for a checkpoint; each rank keeps its own."""
        self._settle()
        return {name: asdict(phase) for name, phase in self._phases.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Add what an earlier process spent on this trial, before it was interrupted."""
        for name, saved in state.items():
            self._phases.setdefault(name, LocalPhase()).merge(LocalPhase(**copy.deepcopy(saved)))

    def describe(self) -> dict[str, Any]:
        """How this rank measures, for provenance."""
        return {
            "energy_sources": [source.kind for source in self._sources],
            "energy_sources_absent": dict(self._absent),
            "watts_per_core": self.watts_per_core,
        }

    def _border(self) -> None:
        """Give everything since the last border to the innermost open phase, and start afresh.

        Without an open phase it belongs to nobody.
        """
        self._settle()
        phase = self._phases[self._open[-1]] if self._open else None
        if self._cuda is not None:
            if phase is not None:
                phase.add_peak("allocated_bytes", self._cuda.allocated_bytes())
                phase.add_peak("reserved_bytes", self._cuda.reserved_bytes())
            self._cuda.reset()  # the next phase has a peak of its own
        if self._watched is not None:
            if phase is not None:
                phase.add_peak("allocated_bytes", self._watched.peak_bytes)
            self._watched.peak_bytes = self._watched.live_bytes  # what TensorPeak has for a reset
        try:
            if phase is not None and "rss_bytes" not in phase.missing:
                phase.add_peak("rss_bytes", self._resident.read_bytes())
            self._resident.reset()
        except Unavailable as why:
            # without a reset no phase's peak is its own, earlier ones' neither
            self._absent.setdefault("rss_bytes", str(why))
            for known in self._phases.values():
                known.missing.setdefault("rss_bytes", str(why))

    def _settle(self, *, to_nobody: bool = False) -> None:
        """Give time and energy since the last call to the innermost open phase, or to nobody."""
        phase = None
        if self._open and not to_nobody:
            phase = self._phases[self._open[-1]]
        now_s = time.perf_counter()
        passed_s = now_s - self._last_s
        self._last_s = now_s
        if phase is not None:
            phase.seconds += passed_s
        for source in self._sources:
            try:
                self._account(source, source.collect(), phase, passed_s)
            except Unavailable as why:
                self._still.pop(source.kind, None)
                if phase is not None:
                    phase.missing.setdefault(source.kind, str(why))

    def _account(
        self, source: EnergySource, reading: Reading, phase: LocalPhase | None, passed_s: float
    ) -> None:
        """Give a reading to the phase.

        A lagging counter may have stood still in the stretches just before; what it has moved by is
        shared among them and this one, by their time.
        """
        if phase is not None:
            without_joules = Reading({}, reading.gpu_processes, reading.host_cpu_s)
            phase.add_reading(source.kind, without_joules, passed_s)
        stretches = self._still.setdefault(source.kind, [])
        moved = any(reading.joules.values())
        if phase is not None or moved:
            stretches.append((phase, max(passed_s, 1e-9)))  # never 0: it is divided by the sum
        if moved or not source.lags:
            total_s = sum(seconds for _, seconds in stretches)
            for owner, seconds in stretches:
                if owner is not None:
                    owner.add_joules(source.kind, reading.joules, seconds / total_s)
            stretches.clear()

    def _wants_probe(self, sizes: tuple[int, ...]) -> bool:
        if self.device.type != "cpu" or not self._open:
            return False
        if self._probing or self._watched is not None:  # the step is watched already
            return False
        name = self._open[-1]
        count, largest = self._probes.get(name, (0, ()))
        grown = tuple(max(pair) for pair in zip_longest(sizes, largest, fillvalue=0))
        if sizes and count >= 2 and grown == largest:
            return False
        # the first step ran without the optimizer's state, so a later one of its size needs more
        if count > 0:
            largest = grown
        self._probes[name] = count + 1, largest
        return True

    def _explain_memory(self, phase: LocalPhase) -> None:
        if self.device.type != "cpu":
            return
        phase.missing.setdefault("reserved_bytes", "a CPU has no caching allocator")
        if "allocated_bytes" not in phase.memory:
            phase.missing.setdefault(
                "allocated_bytes",
                "no step of this phase was watched (Meter(watch_tensors=True), PhaseMeter.probe)",
            )


def _open_sources(
    device: torch.device, watts_per_core: float, *, sample_read_energy: bool, shares_gpu: bool
) -> tuple[list[EnergySource], dict[str, str]]:
    """The device's energy sources, and for each kind that is absent the reason."""
    if device.type == "cuda":

        def open_gpu() -> Gpu:
            # NVML's list of processes would tell, too, but some containers hide it.
            if shares_gpu:
                raise Unavailable(IS_SHARED)
            return Gpu.of(device)

        return gpu_sources(open_gpu, sample_read_energy=sample_read_energy)
    absent = {READ: "READ's equation 16 is defined for GPUs (utilisation x TDP)"}
    sources: list[EnergySource] = [CpuTime(watts_per_core)]
    try:
        sources.append(Rapl())
    except Unavailable as why:
        absent["rapl"] = str(why)
    return sources, absent
