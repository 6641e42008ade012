"""The curves of trials that are still running, as far as the store has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from suite.record.result import EpochRecord
from suite.record.spec import TrialSpec
from suite.tracking.encode import CURVE
from suite.tracking.store import Store, StoredRun

COMPARED = ("train_loss", "validation_score", "seconds")
"""Numbers by which an epoch is told from the same epoch of another attempt."""
Curve = dict[int, tuple[float | None, ...]]
"""What is compared, by epoch."""


@dataclass(frozen=True, slots=True)
class LiveTrial:
    """A trial that this driver is running.

    Attributes:
        began_s: When it began, in seconds since 1970, as the driver saw it.
    """

    spec: TrialSpec
    began_s: float


class Curves:
    """Which epochs the store has of runs whose trial has not ended.

    It asks the store once for each run that another process has begun, and then remembers.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        # By the id of the run.
        self._known: dict[str, Curve] = {}

    def begun(self, run: StoredRun) -> None:
        """Note that a run was made just now, with no epoch."""
        self._known[run.id] = {}

    def missing(self, run: StoredRun, epochs: Sequence[EpochRecord]) -> set[int] | None:
        """The numbers of the epochs that a run lacks; None where it has those of another attempt.

        Metrics of a run cannot be replaced, so the caller replaces such a run.
        """
        known = self._known.get(run.id)
        if known is None:
            known = self._known[run.id] = self._stored(run)
        wanted = _curve(epochs)
        if not known.items() <= wanted.items():
            return None
        return wanted.keys() - known.keys()

    def logged(self, run: StoredRun, epoch: EpochRecord) -> None:
        """Note that the store has an epoch."""
        self._known[run.id] |= _curve([epoch])

    def forget(self, run: StoredRun) -> None:
        """Note that a run has ended, or was deleted."""
        self._known.pop(run.id, None)

    def _stored(self, run: StoredRun) -> Curve:
        histories = [self.store.history(run.id, f"{CURVE}{name}") for name in COMPARED]
        epochs: set[int] = set().union(*histories)
        return {epoch: tuple(found.get(epoch) for found in histories) for epoch in epochs}


def _curve(epochs: Iterable[EpochRecord]) -> Curve:
    found: Curve = {}
    for epoch in epochs:
        found[epoch.epoch] = tuple(getattr(epoch, name) for name in COMPARED)
    return found
