"""Virtual time for Tune's controller: what the driver computes takes the time that it takes, waiting takes none.

The controller, its actor manager and everything of the suite's run as they are, in one thread. In the place of Ray's futures stand
entries of a calendar: where the controller would wait for one, the clock jumps to the earliest. So a cluster of 1,000 slots and
a sweep of days fit into one process, and the share of slot time that is busy comes out as if the machine did nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray
from ray.air.execution._internal import actor_manager, event_manager
from ray.air.execution.resources.request import AcquiredResources, ResourceRequest
from ray.air.execution.resources.resource_manager import ResourceManager
from ray.train._internal import storage
from ray.tune.execution import tune_controller
from ray.tune.experiment import trial as tune_trial

from suite.tune import callback, driver, leave_notice


class Clock:
    """Seconds of this thread's processor, less what belongs to workers, plus what was waited.

    Args:
        sync_s: What a synced write of the driver takes; the real one is left out, because the disk is not only ours.
    """

    def __init__(self, sync_s: float) -> None:
        self.sync_s, self.syncs = sync_s, 0
        self._began_s = time.thread_time()
        self._waited_s = self._foreign_s = 0.0

    @property
    def now_s(self) -> float:
        return self.computed_s + self._waited_s + self.syncs * self.sync_s

    @property
    def computed_s(self) -> float:
        """The driver's own processor seconds."""
        return time.thread_time() - self._began_s - self._foreign_s

    def jump(self, to_s: float) -> None:
        self._waited_s += max(0.0, to_s - self.now_s)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What runs here belongs to a worker: it takes no time of the driver's."""
        began_s, syncs = time.thread_time(), self.syncs
        try:
            yield
        finally:
            self._foreign_s += time.thread_time() - began_s
            self.syncs = syncs

    def sync(self, handle: int) -> None:
        """Stands in for `os.fsync`."""
        self.syncs += 1


class Future:
    """The result of a worker's call, there from `due_s` on."""

    def __init__(self, due_s: float, call: Callable[[], Any]) -> None:
        self.due_s, self._call, self._result = due_s, call, None
        self._done = False

    def get(self, clock: Clock) -> Any:
        if not self._done:
            with clock.elsewhere():
                self._result, self._done = self._call(), True
        return self._result


class Slots(ResourceManager):
    """So many trials at a time; each request is for one slot."""

    def __init__(self, slots: int, make: Callable[..., Any]) -> None:
        self.free, self._make = slots, make

    def request_resources(self, resource_request: ResourceRequest) -> None: ...

    def cancel_resource_request(self, resource_request: ResourceRequest) -> None: ...

    def has_resources_ready(self, resource_request: ResourceRequest) -> bool:
        return self.free > 0

    def acquire_resources(self, resource_request: ResourceRequest) -> Taken:
        self.free -= 1
        return Taken(resource_request, self._make)

    def free_resources(self, acquired_resource: AcquiredResources) -> None:
        self.free += 1

    def get_resource_futures(self) -> list[Any]:
        return []

    def update_state(self) -> None: ...

    def clear(self) -> None: ...


class Taken(AcquiredResources):
    """A slot; what Tune starts in it is made by `make(**arguments)`."""

    def __init__(self, request: ResourceRequest, make: Callable[..., Any]) -> None:
        super().__init__(request)
        self._made = SimpleNamespace(remote=make)

    def annotate_remote_entities(self, entities: Any) -> Any:
        return [self._made for _ in entities]

    def _annotate_remote_entity(self, entity: Any, bundle: Any, bundle_index: int) -> Any:
        return self._made


@contextmanager
def virtual_cluster(
    slots: int, clock: Clock, make: Callable[..., Any], *, wait_s: Callable[[int], float]
) -> Iterator[None]:
    """Tune's controller on a calendar; Ray is not started.

    Args:
        slots: GPUs, one to a trial.
        clock: Passes while the driver computes.
        make: Makes what Tune takes for the handle of a trial's actor; its methods return a `Future`.
        wait_s: What `ray.wait` takes for so many references.
    """
    nodes = [{"CPU": float(slots), "GPU": float(slots)}]

    def wait(
        futures: list[Future], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Future], list[Future]]:
        assert num_returns == 1
        clock.jump(clock.now_s + wait_s(len(futures)))
        if not futures:
            clock.jump(clock.now_s + (timeout or 0.0))
            return [], []
        first = min(futures, key=lambda future: future.due_s)
        clock.jump(first.due_s)
        return [first], []

    stand_in = SimpleNamespace(
        wait=wait,
        get=lambda future: future.get(clock),
        kill=lambda actor: None,
        remote=lambda cls: cls,
        actor=ray.actor,
        ObjectRef=Future,
    )
    with ExitStack() as stack:
        for module in (actor_manager, event_manager, tune_trial):
            stack.enter_context(patch.object(module, "ray", stand_in))
        stack.enter_context(
            patch.object(
                tune_controller, "PlacementGroupResourceManager", lambda: Slots(slots, make)
            )
        )
        stack.enter_context(
            patch.object(driver, "cluster", lambda *arguments, **options: nullcontext(nodes))
        )
        stack.enter_context(patch.object(callback, "cluster_nodes", lambda: nodes))
        stack.enter_context(patch.object(driver, "check_home_is_shared", lambda *arguments: None))
        stack.enter_context(patch.object(ray, "cluster_resources", lambda: nodes[0]))
        context = SimpleNamespace(get_job_id=lambda: "virtual", get_node_id=lambda: "virtual")
        stack.enter_context(patch.object(ray, "get_runtime_context", lambda: context))
        folder = stack.enter_context(TemporaryDirectory())
        stack.enter_context(patch.object(storage, "_get_ray_train_session_dir", lambda: folder))
        # words between driver and trials: none are said
        stack.enter_context(patch.object(leave_notice.LeaveNotice, "reason", lambda *arguments: ""))
        stack.enter_context(
            patch.object(leave_notice.LeaveNotice, "catch_sigterm", lambda self: None)
        )
        stack.enter_context(patch.object(os, "fsync", clock.sync))
        stack.enter_context(
            patch.dict(os.environ, {"TUNE_DISABLE_AUTO_INIT": "1", "RAY_CHDIR_TO_TRIAL_DIR": "0"})
        )
        yield
