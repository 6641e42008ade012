"""Decide which trials may start now, where trials of different sizes share a cluster.

This file works on numbers alone and does not use Ray.
"""

from __future__ import annotations

from collections.abc import Iterable

from suite.plan.resources import Capacity


class Admission:
    """Says which sizes may start, during one search for the next trial.

    Whatever fits may start, unless a larger trial would have to wait longer for it. The caller asks
    for larger trials first. If one does not fit now, smaller trials get only the room that it will
    leave once it runs. So smaller trials may follow one another without end, and the larger one
    still starts as soon as the present ones have ended.

    Args:
        capacity: Room in the cluster; None = there is room for all.
        live: Sizes of the trials that are handed out. One that the cluster cannot hold (any more)
            takes no room.
        held_for: Size of one of them that found no room; nothing smaller may start.
    """

    def __init__(
        self, capacity: Capacity | None, live: Iterable[int], *, held_for: int = 0
    ) -> None:
        self.capacity = capacity
        self.held_for = held_for
        self._live = list(live)
        # A live trial that is too large for the cluster (a node has left it) holds no room that
        # another one could have.
        self._placed = [size for size in self._live if not self._is_too_large(size)]
        self._waiting = 0
        # Answers by size: thousands of cells ask about a handful of sizes.
        self._answers: dict[int, bool] = {}

    def admits(self, workers: int) -> bool:
        """Whether a trial of this size may start.

        Where nothing runs, any trial may: it waits for the cluster to grow.
        """
        if workers not in self._answers:
            if not self._live:
                self._answers[workers] = True
            else:
                # A smaller trial would take the room that the held one waits for.
                self._answers[workers] = workers >= self.held_for and self._fits(workers)
        return self._answers[workers]

    def wait(self, workers: int) -> None:
        """Take note of a trial that may not start yet, unless the cluster cannot hold it at all."""
        # The largest one decides, as it leaves the least room beside it. One that never fits would
        # hold the others back for ever.
        if self.capacity is not None and self._waiting < workers <= self.capacity.most:
            self._waiting = workers
            # Smaller trials have less room from now on.
            self._answers.clear()

    def sort_key(self, workers: int) -> tuple[bool, int]:
        """Sorts trials: first those that the cluster can hold, of these the largest."""
        return self._is_too_large(workers), -workers

    def _is_too_large(self, workers: int) -> bool:
        return self.capacity is not None and workers > self.capacity.most

    def _fits(self, workers: int) -> bool:
        if self.capacity is None:
            return True
        if workers < self._waiting:
            # The waiting trial starts after the live ones of its size or more. Only smaller ones
            # may run beside it.
            smaller = [size for size in self._placed if size < self._waiting]
            if not self.capacity.fits([*smaller, workers, self._waiting]):
                return False
        return self.capacity.fits([*self._placed, workers])
