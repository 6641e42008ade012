"""Trials of different sizes share a cluster: who may start now. No Ray here, only numbers."""

from __future__ import annotations

from collections.abc import Iterable

from suite.plan.resources import Capacity


class Turn:
    """One look for the next trial: whoever fits may start, unless a larger one that waits would have to wait longer for it.

    Larger trials are asked for first; where one does not fit now, those smaller get only the room that it will leave: that of
    the cluster less its own. So smaller ones may follow one another beside it for ever, and yet it gets its turn.

    Args:
        capacity: Room in the cluster; None = for everyone.
        live: Sizes of the trials that were handed out. One that the cluster cannot hold (any more) takes no room.
        held_for: Size of one of them that found no room; nothing smaller may start.
    """

    def __init__(
        self, capacity: Capacity | None, live: Iterable[int], *, held_for: int = 0
    ) -> None:
        self.capacity, self.held_for = capacity, held_for
        self._live = list(live)
        self._placed = (
            self._live
            if capacity is None
            else [size for size in self._live if size <= capacity.most]
        )
        self._waiting = 0
        self._known: dict[int, bool] = {}

    def admits(self, workers: int) -> bool:
        """Whether a trial of this size may start. Where nothing runs, any may: it waits for the cluster to grow."""
        if workers not in self._known:
            self._known[workers] = not self._live or (
                workers >= self.held_for and self._fits(workers)
            )
        return self._known[workers]

    def wait(self, workers: int) -> None:
        """Take note of a trial that may not start yet; of one that the cluster cannot hold at all there is nothing to note."""
        if self.capacity is not None and self._waiting < workers <= self.capacity.most:
            self._waiting = workers
            self._known.clear()

    def order(self, workers: int) -> tuple[bool, int]:
        """Sorts trials: those that the cluster holds before those it does not, then the largest first."""
        return self.capacity is not None and workers > self.capacity.most, -workers

    def _fits(self, workers: int) -> bool:
        if self.capacity is None:
            return True
        smaller = [size for size in self._placed if size < self._waiting]
        beside = workers >= self._waiting or self.capacity.fits([*smaller, workers, self._waiting])
        return beside and self.capacity.fits([*self._placed, workers])
