"""Tune's schedulers for trials of several sizes, and for a cluster that shrinks and grows."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler

from suite.config.sweep import ResourceConfig
from suite.config.training import batch_unit
from suite.plan.resources import Capacity, Layout
from suite.record.spec import TrialSpec
from suite.tune.searcher import SweepSearcher

LOOK_EVERY_S = 1.0


@functools.cache  # Tune keeps the request of every trial; this way they share one object a size
def placement_request(layout: Layout, workers: int) -> tune.PlacementGroupFactory:
    """One bundle for each worker, and an empty one for the trial's own process.

    The trial's process needs no resources and lives in a worker's bundle, so that it dies with its
    group.
    """
    bundles = [{}, *([layout.bundle] * workers)]
    return tune.PlacementGroupFactory(bundles, strategy=layout.strategy)


def fewer_workers(spec: TrialSpec, room: int, *, least: int) -> int | None:
    """The largest number of workers that fits in `room` and divides the batch.

    It is below the planned number and at least `least`; None = there is none.
    """
    most = min(room, spec.world_size - 1)
    for workers in range(most, least - 1, -1):
        if spec.training.batch_size % batch_unit(spec.training, workers) == 0:
            return workers
    return None


class WarmGroupScheduler(FIFOScheduler):
    """First in, first out; keeps a group until Tune has looked for the next trial of its size.

    By itself Tune ends the group of a trial that has ended if just then a trial of another size
    waits for its own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Callable[[], None]] = []

    def on_trial_complete(
        self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]
    ) -> None:
        warm, request = _warm_groups(tune_controller), trial.placement_group_factory
        warm.increase_max(request)
        self._kept.append(functools.partial(warm.decrease_max, request))

    def on_trial_remove(self, tune_controller: Any, trial: TuneTrial) -> None:
        # Tune counted this pending trial as one that will want a group of its size, and does not
        # take that back itself. Without this line a group of that size would be kept warm for good,
        # in the way of all other sizes.
        _warm_groups(tune_controller).decrease_max(trial.placement_group_factory)

    def choose_trial_to_run(self, tune_controller: Any) -> TuneTrial | None:
        while self._kept:
            self._kept.pop()()
        return super().choose_trial_to_run(tune_controller)


def _warm_groups(tune_controller: Any) -> Any:
    """How many ended groups of each size Tune keeps.

    Tune has no public way to say that a group will soon be needed again.
    """
    return tune_controller._actor_cache


class ElasticScheduler(WarmGroupScheduler):
    """Takes back a trial that waits too long for room; it is suggested again in a size that fits.

    An attempt that follows a failure asks for all workers again.

    Args:
        config: `min_workers` and `room_wait_s` are read.
        searcher: Takes trials back.
        free: Room that the cluster has left now.
    """

    def __init__(
        self, config: ResourceConfig, searcher: SweepSearcher, free: Callable[[], Capacity]
    ) -> None:
        super().__init__()
        assert config.min_workers is not None
        self.least = config.min_workers
        self.wait_s = config.room_wait_s
        self.searcher = searcher
        self.free = free
        self._pending_since: dict[str, float] = {}  # by Tune's id; seconds of a monotonic clock
        self._shrunk_since: dict[int, float] = {}  # by number of workers
        self._looked = 0.0

    def choose_trial_to_run(self, tune_controller: Any) -> TuneTrial | None:
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self.resize_pending(tune_controller, now)
        return super().choose_trial_to_run(tune_controller)

    def resize_pending(self, tune_controller: Any, now: float) -> None:
        """Take back each trial that has waited too long, if another number of workers fits.

        Args:
            tune_controller: What Tune shows a scheduler.
            now: Seconds of a monotonic clock.
        """
        since = self._pending_since
        self._pending_since = {}
        for trial in list(tune_controller.get_live_trials()):
            if trial.status != TuneTrial.PENDING:
                continue
            began = since.get(trial.trial_id, now)
            self._pending_since[trial.trial_id] = began
            # Trials side by side have one size.
            spec = self.searcher.specs[trial.trial_id][0]
            waited_s = now - min(began, self._too_large_since(spec.world_size, now))
            # A trial that is new here stays: Tune may not have asked the cluster for it yet.
            if began == now or waited_s < self.wait_s:
                continue
            workers = self._size_for(spec, asked=trial.config["workers"])
            if workers is not None:
                self.searcher.hand_back(trial.trial_id, workers=workers)
                tune_controller.stop_trial(trial)

    def _too_large_since(self, size: int, now: float) -> float:
        """Since when the cluster has been too small for trials of this size; `now` if it is not.

        So the trials that follow the first one need not wait the whole time again.
        """
        capacity = self.searcher.queue.capacity
        if capacity is None or size <= capacity.most:
            self._shrunk_since.pop(size, None)
            return now
        return self._shrunk_since.setdefault(size, now)

    def _size_for(self, spec: TrialSpec, *, asked: int) -> int | None:
        """The number of workers that a waiting trial should ask for; None = no other one."""
        room = self.free().most
        if room >= spec.world_size:
            workers: int | None = spec.world_size
        else:
            workers = fewer_workers(spec, room, least=self.least)
        if workers is None:
            return None
        # A trial that waits for few workers asks for more only where it can have all.
        better = workers < asked or asked < workers == spec.world_size
        return workers if better else None
