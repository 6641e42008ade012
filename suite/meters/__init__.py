"""Energy, memory and clocks of a training run; usable alone in any PyTorch script.

>>> meter = PhaseMeter(torch.device("cpu"))
>>> with meter.phase("train"):
...     for batch in batches:
...         with meter.probe(batch.numel()):
...             step(batch)
>>> records, missing = combine([meter.local()])
"""

from suite.meters.clock import Ticker, Unavailable, synchronise
from suite.meters.combine import combine
from suite.meters.energy import WATTS_PER_CORE, EnergySource
from suite.meters.hardware import hardware
from suite.meters.local import LocalPhase
from suite.meters.memory import TensorPeak, baseline_bytes, release_memory
from suite.meters.phases import PhaseMeter
from suite.meters.record import MemoryPeak, PhaseRecord

__all__ = [
    "WATTS_PER_CORE",
    "EnergySource",
    "LocalPhase",
    "MemoryPeak",
    "PhaseMeter",
    "PhaseRecord",
    "TensorPeak",
    "Ticker",
    "Unavailable",
    "baseline_bytes",
    "combine",
    "hardware",
    "release_memory",
    "synchronise",
]
