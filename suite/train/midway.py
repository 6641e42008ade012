"""Leave an epoch in the middle, and go on with it later as if nothing had happened.

Beside the weights and Adam's moments this takes the steps done, the losses added up so far, and the
state of every random stream of every rank. On the same number of ranks the rest of the epoch is
then the same bit for bit. On another number dropout draws anew.
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from suite.train.process_group import gather_objects, lowest

MOST_STEPS = 10
VOTE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Midway:
    """Where an epoch was left.

    Attributes:
        step: Steps of the epoch that are done.
        totals: Sum of the losses of these steps, by rank.
        halves: Sum of the losses of the epoch's first half, by rank; 0 until it is over.
        streams: States of the random streams, by rank.
        before_s, before_kwh, before_source: What training had cost before the epoch, and which
            source counted the energy.
    """

    step: int
    totals: list[float]
    halves: list[float]
    streams: list[dict[str, Any]]
    before_s: float
    before_kwh: float | None
    before_source: str | None = None

    @classmethod
    def gather(
        cls,
        step: int,
        total: torch.Tensor,
        half: torch.Tensor,
        *,
        before_s: float,
        before_kwh: float | None,
        before_source: str | None,
    ) -> Midway:
        """Gather from all ranks where they leave the epoch. Collective."""
        totals = []
        halves = []
        states = []
        for rank_total, rank_half, rank_streams in gather_objects(
            (float(total), float(half), streams())
        ):
            totals.append(rank_total)
            halves.append(rank_half)
            states.append(rank_streams)
        return cls(step, totals, halves, states, before_s, before_kwh, before_source)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sums(self, rank: int, world_size: int) -> tuple[float, float]:
        """Return a rank's sums: its own, or the mean of all if the number of ranks changed."""
        if world_size == len(self.totals):
            return self.totals[rank], self.halves[rank]
        # The epoch's loss is a mean over ranks, so the mean of the parts keeps it.
        return sum(self.totals) / len(self.totals), sum(self.halves) / len(self.halves)

    def resume_streams(self, rank: int, world_size: int) -> None:
        """Set this rank's random streams to where they were.

        If the number of ranks changed, they stay as they were seeded.
        """
        if world_size == len(self.streams):
            set_streams(self.streams[rank])


def streams() -> dict[str, Any]:
    """The state of this process's random streams, JSON-able."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    cuda: str | None = None
    # Asking a GPU that nothing uses yet would set up its context.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = _text(torch.cuda.get_rng_state())
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [legacy[0], legacy[1].tolist(), *legacy[2:]],
        "torch": _text(torch.get_rng_state()),
        "cuda": cuda,
    }


def set_streams(state: dict[str, Any]) -> None:
    """Bring back what `streams` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    # JSON has made a list of the array.
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


class Pace:
    """Decides when the ranks next ask each other whether all is well.

    They do so every `VOTE_EVERY_S` or so, and at least every `MOST_STEPS` steps. By its own clock
    each rank would choose another step, so all take the interval that suits the slowest one.
    """

    def __init__(self, step: int) -> None:
        self._at = step
        self._steps = 1
        self._since = time.perf_counter()

    def is_due(self, step: int) -> bool:
        return step >= self._at

    def vote(self, step: int, *, finite: Sequence[bool], stay: bool) -> tuple[list[bool], bool]:
        """Say of each loss whether it is finite on all ranks, and whether all stay. Collective."""
        elapsed_s = time.perf_counter() - self._since
        *all_finite, all_stay, slowest = lowest(*map(float, finite), float(stay), -elapsed_s)
        # The lowest of the negative times is the longest time.
        if slowest < 0:
            self._steps = max(1, min(MOST_STEPS, int(self._steps * VOTE_EVERY_S / -slowest)))
        self._at = step + self._steps
        self._since = time.perf_counter()
        return [bool(value) for value in all_finite], bool(all_stay)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    # Copied, because torch wants memory that it may write to.
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
