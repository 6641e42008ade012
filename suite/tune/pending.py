"""Trials that Tune has queued: what may not overtake them, and when the sweep gives up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ray.tune.experiment import Trial as TuneTrial

from suite.plan.queue import TrialQueue
from suite.plan.resources import Layout
from suite.record.spec import TrialSpec

HOLD_AFTER_S = 10.0
"""A trial whose room is free is placed within seconds; one that waits longer waits for room."""


class PendingTrials:
    """Watches the trials that were handed out and wait for room in the cluster.

    Args:
        queue: Its `held_for` is set to the size that nothing smaller may overtake.
        specs: The trials, by Tune's id; those side by side have one size.
        layout: One worker's resources, for the message.
        deadline_s: How long a trial may wait while nothing of the sweep runs. While something runs,
            its end makes room; and a trial that no longer fits in a shrunk cluster must not end
            those that do.
    """

    def __init__(
        self,
        queue: TrialQueue,
        specs: Mapping[str, Sequence[TrialSpec]],
        layout: Layout,
        *,
        deadline_s: float,
    ) -> None:
        self.queue = queue
        self.specs = specs
        self.layout = layout
        self.deadline_s = deadline_s
        self._pending_since: dict[str, float] = {}  # by Tune's id; seconds of a monotonic clock
        self._running_since: dict[str, float] = {}
        self._idle_since = 0.0

    def update(self, trials: Iterable[TuneTrial], now: float) -> str:
        """Take in how things stand `now`, in seconds of a monotonic clock.

        Returns why the sweep cannot go on, or nothing.
        """
        pending: dict[str, float] = {}
        running: dict[str, float] = {}
        for trial in trials:
            name = trial.trial_id
            if trial.status == TuneTrial.PENDING:
                pending[name] = self._pending_since.get(name, now)
            elif trial.status == TuneTrial.RUNNING:
                running[name] = self._running_since.get(name, now)
        self._pending_since = pending
        self._running_since = running
        if running:  # its end will make room, so waiting for it is no reason to give up
            self._idle_since = now
        blocked = [self._size(name) for name in pending if self._is_blocked(name, now)]
        self.queue.held_for = max(blocked, default=0)
        for name, since in pending.items():
            if now - max(since, self._idle_since) > self.deadline_s:
                return self._no_room_for(self._size(name))
        return ""

    def _is_blocked(self, name: str, now: float) -> bool:
        """Whether trials that started before it may be in its way.

        Once they have ended, whatever is in its way is not ours.
        """
        since = self._pending_since[name]
        capacity = self.queue.capacity
        if capacity is not None and self._size(name) > capacity.most:
            return False  # it could not start however many smaller trials were held back
        return (
            now - since >= HOLD_AFTER_S and min(self._running_since.values(), default=now) < since
        )

    def _size(self, name: str) -> int:
        return self.specs[name][0].world_size

    def _no_room_for(self, workers: int) -> str:
        worker = ", ".join(f"{amount:g} {name}" for name, amount in self.layout.bundle.items())
        return (
            f"the cluster had no room for {workers} workers of {worker}"
            f" within {self.deadline_s:g} s (timeouts.placement_s)"
        )
