"""Word that a trial must leave its hosts soon: from the driver, the host's operator, or Ray.

A trial's own process is busy waiting for its ranks, so that no call reaches it. It asks here while
it waits.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RaySystemError

from suite.cluster.session import draining_nodes

ASK_EVERY_S = 2.0
NAMESPACE = "suite"
HEAD_IS_AWAY = (RaySystemError, GetTimeoutError, ConnectionError, TimeoutError, RuntimeError)


class _Request:
    """An actor that does nothing: the request is that an actor of the sweep's name exists."""


def ask_to_leave(scratch: str) -> Any:
    """Have every trial of a sweep write a checkpoint and leave.

    The request stands for as long as the returned handle is kept and the driver's process
    lives, so that a later run of the sweep never finds it.
    """
    actor: Any = ray.remote(num_cpus=0)(_Request)
    return actor.options(name=_name(scratch), namespace=NAMESPACE).remote()


def _was_asked(scratch: str) -> bool:
    try:
        ray.get_actor(_name(scratch), namespace=NAMESPACE)
    except ValueError:  # there is no such actor
        return False
    return True


def _name(scratch: str) -> str:
    return f"leave {scratch}"


@dataclass(slots=True)
class LeaveNotice:
    """Tells the process of one trial, while it waits for its ranks, whether they are to leave.

    Attributes:
        scratch: The scratch folder of its sweep, which no other sweep of the cluster has.
        by_driver: Whether the driver asked: this run of the sweep will not try the trial again.
    """

    scratch: str
    by_driver: bool = False
    _got_sigterm: bool = False
    _asked_at: float = 0.0

    def catch_sigterm(self) -> None:
        """Take SIGTERM for a notice.

        Ray's own handler would end the process at once, and its ranks with it.
        """
        # Python delivers signals to the main thread, and only that one may set handlers.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        self._got_sigterm = True

    def reason(self, nodes: Iterable[str]) -> str:
        """Why the ranks on these nodes are to leave, or nothing.

        Cheap enough to be called in a loop.
        """
        if self._got_sigterm:
            return "its process got SIGTERM"
        now = time.monotonic()
        if now - self._asked_at < ASK_EVERY_S:
            return ""
        self._asked_at = now
        try:
            self.by_driver = _was_asked(self.scratch)
            draining = draining_nodes()
        except HEAD_IS_AWAY:  # then nobody can ask for anything either
            return ""
        if self.by_driver:
            return "the sweep is being stopped"
        if draining & set(nodes):
            return "Ray drains its node"
        return ""
