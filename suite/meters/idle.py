"""What a device draws while nothing runs: reported beside energy, and never subtracted from it."""

from __future__ import annotations

import time

import torch

from suite.meters.clock import Unavailable, synchronise
from suite.meters.energy import JOULES_PER_KWH
from suite.meters.phases import PhaseMeter
from suite.meters.totals import combine

MEASURED = ("nvml", "nvml-sampled", "rapl")


def idle_watts(device: torch.device, *, seconds: float = 2.0) -> float:
    """Mean power over a pause; of a GPU the board's, of a CPU that of its packages.

    Args:
        device: Nothing else may use it meanwhile.
        seconds: Length of the pause; a counter that is refreshed every 0.1 s needs at least one.

    Raises:
        Unavailable: No counter measures power here. An estimate from processor time says nothing about a pause.
    """
    meter = PhaseMeter(device, sample_read_energy=False)
    synchronise(device)
    with meter.phase("idle"):
        time.sleep(seconds)
    records, missing = combine([meter.local()])
    record = records["idle"]
    if record.energy_kwh is None or record.energy_source not in MEASURED:
        raise Unavailable(f"no counter measures power here: {'; '.join(missing_energy(missing)) or record.energy_source}")
    return record.energy_kwh * JOULES_PER_KWH / record.seconds


def missing_energy(missing: dict[str, str]) -> list[str]:
    """The reasons among those that `combine` gives which concern energy, each once."""
    return list(dict.fromkeys(why for where, why in missing.items() if ".energy" in where))
