"""The power that a device draws while nothing runs.

It is reported beside energy, and never subtracted from it.
"""

from __future__ import annotations

import time

import torch

from suite.meters.clock import Unavailable, synchronise
from suite.meters.energy import JOULES_PER_KWH
from suite.meters.phases import PhaseMeter
from suite.meters.record import ESTIMATE, READ
from suite.meters.totals import combine


def idle_watts(device: torch.device, *, seconds: float = 2.0) -> float:
    """Mean power over a pause: a GPU's board, or the packages of a CPU.

    Args:
        device: The device; nothing else may use it meanwhile.
        seconds: Length of the pause; a counter that is refreshed every 0.1 s needs at least one
            second.

    Raises:
        Unavailable: No counter measures power here. An estimate from processor time says nothing
            about a pause.
    """
    meter = PhaseMeter(device, sample_read_energy=False)
    synchronise(device)
    with meter.phase("idle"):
        time.sleep(seconds)
    records, missing = combine([meter.local()])
    record = records["idle"]
    if record.energy_kwh is None or record.energy_source == ESTIMATE:
        reasons: dict[str, None] = {}  # without doubles, in their order
        for kind, why in meter.describe()["energy_sources_absent"].items():
            if kind != READ:
                reasons[why] = None
        for where, why in missing.items():
            if ".energy" in where:
                reasons[why] = None
        raise Unavailable(f"no counter measures power here: {'; '.join(reasons)}")
    return record.energy_kwh * JOULES_PER_KWH / record.seconds
