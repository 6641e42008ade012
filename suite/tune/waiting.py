"""Trials that were handed out and wait for room in the cluster: what may not overtake them, and when to give up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ray.tune.experiment import Trial as TuneTrial

from suite.plan.queue import TrialQueue
from suite.plan.resources import Layout
from suite.record.spec import TrialSpec

HOLD_AFTER_S = 10.0
"""A trial whose room was free is placed within seconds; one that waits longer waits for something."""


class Waiting:
    """Looks after the trials that Tune has queued.

    Args:
        schedule: Told the size that nothing smaller may overtake.
        specs: By Tune's id.
        layout: For the words of a reason.
        deadline_s: How long a trial may wait while nothing of the sweep runs. While something does, it makes room in the end; and
            a trial that outgrew its cluster must not end those that have not.
    """

    def __init__(
        self,
        schedule: TrialQueue,
        specs: Mapping[str, TrialSpec],
        layout: Layout,
        *,
        deadline_s: float,
    ) -> None:
        self.schedule, self.specs, self.layout, self.deadline_s = (
            schedule,
            specs,
            layout,
            deadline_s,
        )
        self._pending: dict[str, float] = {}
        self._running: dict[str, float] = {}
        self._idle_since = 0.0

    def look(self, trials: Iterable[TuneTrial], now: float) -> str:
        """Take in how things stand `now`, in seconds of a monotonic clock. Returns why the sweep cannot go on, or nothing."""
        states = {trial.trial_id: trial.status for trial in trials}
        self._pending = _since(
            self._pending, (i for i, state in states.items() if state == TuneTrial.PENDING), now
        )
        self._running = _since(
            self._running, (i for i, state in states.items() if state == TuneTrial.RUNNING), now
        )
        if self._running:
            self._idle_since = now
        self.schedule.held_for = max(
            (self.specs[i].world_size for i in self._pending if self._is_blocked(i, now)), default=0
        )
        late = [
            i
            for i, since in self._pending.items()
            if now - max(since, self._idle_since) > self.deadline_s
        ]
        return self._reason(self.specs[late[0]]) if late else ""

    def _is_blocked(self, trial: str, now: float) -> bool:
        """Whether trials that were there before may be in its way. Once they have ended, whatever is in its way is not ours."""
        since, capacity = self._pending[trial], self.schedule.capacity
        may_fit = capacity is None or self.specs[trial].world_size <= capacity.most
        return (
            may_fit
            and now - since >= HOLD_AFTER_S
            and any(started < since for started in self._running.values())
        )

    def _reason(self, spec: TrialSpec) -> str:
        need = f"{spec.world_size} workers of " + ", ".join(
            f"{amount:g} {name}" for name, amount in self.layout.bundle.items()
        )
        return f"the cluster had no room for {need} within {self.deadline_s:g} s (timeouts.placement_s)"


def _since(before: Mapping[str, float], now_so: Iterable[str], now: float) -> dict[str, float]:
    return {i: before.get(i, now) for i in now_so}
