"""Energy, memory and clocks of a training run; usable alone in any PyTorch script.

>>> with Meter() as meter:
...     train()
>>> meter.seconds, meter.energy_kwh, meter.energy_source, meter.watts
>>> meter.memory.allocated_max_bytes

The suite's own loop uses the parts: accounts of each phase, which survive checkpoints and are
combined over ranks.

>>> meter = PhaseMeter(torch.device("cpu"))
>>> with meter.phase("train"):
...     for batch in batches:
...         with meter.probe(batch.numel()):
...             step(batch)
>>> records, missing = combine([meter.local()])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from suite.meters.clock import Ticker, Unavailable, synchronise
    from suite.meters.energy import WATTS_PER_CORE, EnergySource
    from suite.meters.idle import idle_watts
    from suite.meters.local import LocalPhase, name_devices_by_attempt
    from suite.meters.machine import computes_on, hardware
    from suite.meters.memory import TensorPeak, baseline_bytes, release_memory
    from suite.meters.meter import Meter
    from suite.meters.nvml import why_no_energy
    from suite.meters.phases import PhaseMeter
    from suite.meters.record import MemoryPeak, PhaseRecord
    from suite.meters.totals import combine

# the module that each name comes from
_MODULES = {
    "WATTS_PER_CORE": "energy",
    "EnergySource": "energy",
    "LocalPhase": "local",
    "MemoryPeak": "record",
    "Meter": "meter",
    "PhaseMeter": "phases",
    "PhaseRecord": "record",
    "TensorPeak": "memory",
    "Ticker": "clock",
    "Unavailable": "clock",
    "baseline_bytes": "memory",
    "combine": "totals",
    "computes_on": "machine",
    "hardware": "machine",
    "idle_watts": "idle",
    "name_devices_by_attempt": "local",
    "release_memory": "memory",
    "synchronise": "clock",
    "why_no_energy": "nvml",
}

__all__ = [
    "WATTS_PER_CORE",
    "EnergySource",
    "LocalPhase",
    "MemoryPeak",
    "Meter",
    "PhaseMeter",
    "PhaseRecord",
    "TensorPeak",
    "Ticker",
    "Unavailable",
    "baseline_bytes",
    "combine",
    "computes_on",
    "hardware",
    "idle_watts",
    "name_devices_by_attempt",
    "release_memory",
    "synchronise",
    "why_no_energy",
]


def __getattr__(name: str) -> Any:
    """Import a meter when it is first used: reading records must not wait for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
