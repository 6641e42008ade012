"""How many workers Tune asks the cluster for; with `resources.min_workers`, fewer where the cluster has shrunk."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler

from suite.config.sweep import ResourceConfig
from suite.plan.queue import TrialQueue
from suite.plan.resources import Capacity, Layout
from suite.record.spec import TrialSpec

LOOK_EVERY_S = 1.0


@functools.cache  # Tune keeps one for every trial
def request(layout: Layout, workers: int) -> tune.PlacementGroupFactory:
    """A bundle for each worker. The trial's own process needs none and lives in one of them, so that it dies with its group."""
    return tune.PlacementGroupFactory([{}, *([layout.bundle] * workers)], strategy=layout.strategy)


def fewer(spec: TrialSpec, free: int, *, least: int) -> int | None:
    """The largest number of workers below the planned one that `free` room holds and the batch divides by; None = there is none."""
    unit = spec.training.micro_batch_size or 1
    candidates = range(min(free, spec.world_size - 1), least - 1, -1)
    return next((n for n in candidates if spec.training.batch_size % (n * unit) == 0), None)


class Sizes(FIFOScheduler):
    """For trials of different sizes: keeps the group of a trial that has ended until there was a look for the next one of its size.

    By itself Tune would end it if just then a trial of another size is on its way to another group.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Any] = []

    def on_trial_complete(
        self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]
    ) -> None:
        self._kept.append(trial.placement_group_factory)
        tune_controller._actor_cache.increase_max(trial.placement_group_factory)

    def choose_trial_to_run(self, tune_controller: Any) -> TuneTrial | None:
        controller = _controller(tune_controller)
        while self._kept:
            controller._actor_cache.decrease_max(self._kept.pop())
        return super().choose_trial_to_run(tune_controller)


class Elastic(Sizes):
    """Gives a trial that has waited too long for all of its workers fewer of them; its next attempt asks for all again.

    Args:
        config: `min_workers` and `room_wait_s` are read.
        layout: One worker.
        schedule: Told how large a trial is now.
        specs: By Tune's id.
        free: What the cluster has free now.
    """

    def __init__(
        self,
        config: ResourceConfig,
        layout: Layout,
        schedule: TrialQueue,
        specs: Mapping[str, TrialSpec],
        free: Callable[[], Capacity],
    ) -> None:
        super().__init__()
        assert config.min_workers is not None
        self.least, self.wait_s = config.min_workers, config.room_wait_s
        self.layout, self.schedule, self.specs, self.free = layout, schedule, specs, free
        self._since: dict[str, float] = {}
        self._small_since: dict[int, float] = {}
        self._looked = 0.0

    def on_trial_error(self, tune_controller: Any, trial: TuneTrial) -> None:
        """Its attempt is over: the next one is to have all workers, if it can."""
        self._since.pop(trial.trial_id, None)

    def choose_trial_to_run(self, tune_controller: Any) -> TuneTrial | None:
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self._look(_controller(tune_controller), now)
        return super().choose_trial_to_run(tune_controller)

    def _look(self, controller: Any, now: float) -> None:
        pending = [
            trial for trial in controller.get_live_trials() if trial.status == TuneTrial.PENDING
        ]
        self._since = {
            t.trial_id: self._since[t.trial_id] for t in pending if t.trial_id in self._since
        }
        for trial in pending:
            spec = self.specs[trial.trial_id]
            if trial.trial_id not in self._since:
                self._since[trial.trial_id] = now
                self._resize(controller, trial, spec.world_size)
            elif now - self._waits_since(trial, spec, now) >= self.wait_s:
                self._fit_in(controller, trial, spec, now)

    def _waits_since(self, trial: TuneTrial, spec: TrialSpec, now: float) -> float:
        """When its wait began; where the cluster is too small for it, every such trial's began when it became so."""
        capacity, size = self.schedule.capacity, spec.world_size
        if capacity is not None and capacity.most < size:
            self._small_since.setdefault(size, now)
        else:
            self._small_since.pop(size, None)
        return min(self._since[trial.trial_id], self._small_since.get(size, now))

    def _fit_in(self, controller: Any, trial: TuneTrial, spec: TrialSpec, now: float) -> None:
        request_now: Any = trial.placement_group_factory  # which Tune declares to be None
        free, asked = self.free().most, len(request_now.bundles)
        workers = (
            spec.world_size if free >= spec.world_size else fewer(spec, free, least=self.least)
        )
        if workers is not None and (workers < asked or asked < workers == spec.world_size):
            self._since[trial.trial_id] = now
            self._resize(controller, trial, workers)

    def _resize(self, controller: Any, trial: TuneTrial, workers: int) -> None:
        """Queue a trial anew with another number of workers. Tune's own call serves trials that ran and were paused only."""
        old, new = trial.placement_group_factory, request(self.layout, workers)
        actor, manager = controller._trial_to_actor.get(trial), controller._actor_manager
        if old == new or (
            actor is not None and manager.is_actor_started(actor)
        ):  # or it found its room this very moment
            return
        if actor is not None:
            del controller._trial_to_actor[trial], controller._actor_to_trial[actor]
            manager.remove_actor(actor)
        if trial in controller._staged_trials:
            controller._staged_trials.remove(trial)
            controller._actor_cache.decrease_max(old)
        controller._resources_to_pending_trials[old].discard(trial)
        trial.update_resources(new)
        controller._resources_to_pending_trials[new].add(trial)
        if trial not in controller._pending_trials_list:
            controller._pending_trials_list.append(trial)
        self.schedule.resized(self.specs[trial.trial_id], workers)


def _controller(seen: Any) -> Any:
    """Tune's controller itself: what it shows a scheduler grumbles at calls beyond the scheduler's own."""
    return getattr(seen, "_tune_controller", seen)
