"""An epoch that was left in the middle, because notice was given: what it takes to go on as if nothing had happened.

Beside the weights and Adam's moments these are the steps done, the losses added up so far, and the state of every random stream of
every rank. On the same number of ranks the rest of the epoch is then the same bit for bit; on another, dropout draws anew.
"""

from __future__ import annotations

import base64
import random
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from suite.train.process_group import gather_objects, lowest

MOST_STEPS, VOTE_EVERY_S = 10, 2.0


@dataclass(frozen=True, slots=True)
class Midway:
    """Where an epoch was left.

    Attributes:
        step: Steps of the epoch that are done.
        totals, halves: The losses added up by then, and those of the epoch's first half once it was over; by rank.
        streams: States of the random streams, by rank.
        before_s, before_kwh: What training had cost before the epoch.
    """

    step: int
    totals: list[float]
    halves: list[float]
    streams: list[dict[str, Any]]
    before_s: float
    before_kwh: float | None

    @classmethod
    def gather(
        cls,
        step: int,
        total: torch.Tensor,
        half: torch.Tensor,
        *,
        before_s: float,
        before_kwh: float | None,
    ) -> Midway:
        """As things stand on all ranks. Collective."""
        found = gather_objects((float(total), float(half), streams()))
        totals, halves, states = map(list, zip(*found, strict=True))
        return cls(step, totals, halves, states, before_s, before_kwh)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sums(self, rank: int, world_size: int) -> tuple[float, float]:
        """A rank's part of the losses so far: its own, or an equal share where there were more or fewer ranks."""
        if world_size == len(self.totals):
            return self.totals[rank], self.halves[rank]
        return sum(self.totals) / len(self.totals), sum(self.halves) / len(self.halves)

    def resume_streams(self, rank: int, world_size: int) -> None:
        """Set this rank's random streams to where they were; of another group they stay as they were seeded."""
        if world_size == len(self.streams):
            set_streams(self.streams[rank])


def streams() -> dict[str, Any]:
    """The state of this process's random streams, JSON-able."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    cuda = (
        torch.cuda.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized()
        else None
    )
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [legacy[0], legacy[1].tolist(), *legacy[2:]],
        "torch": _text(torch.get_rng_state()),
        "cuda": None if cuda is None else _text(cuda),
    }


def set_streams(state: dict[str, Any]) -> None:
    """Bring back what `streams` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


class Pace:
    """When the ranks next ask each other whether all is well: every `VOTE_EVERY_S` or so, at least every `MOST_STEPS` steps.

    What is decided in the ranks' own time would be decided differently on each; so the interval follows the slowest rank, for all.
    """

    def __init__(self, step: int) -> None:
        self._at, self._steps, self._since = step, 1, time.perf_counter()

    def is_due(self, step: int) -> bool:
        return step >= self._at

    def vote(self, step: int, *, finite: bool, stay: bool) -> tuple[bool, bool]:
        """Whether the loss is finite on all ranks, and whether nobody wants to leave. Collective."""
        elapsed_s = time.perf_counter() - self._since
        all_finite, all_stay, slowest = lowest(float(finite), float(stay), -elapsed_s)
        if slowest < 0:
            self._steps = max(1, min(MOST_STEPS, int(self._steps * VOTE_EVERY_S / -slowest)))
        self._at, self._since = step + self._steps, time.perf_counter()
        return bool(all_finite), bool(all_stay)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
