"""Word that a trial's processes must leave soon: from the driver, from their host's operator, or from Ray.

A trial's own process is busy waiting for its ranks, so that no call reaches it; it looks here while it waits.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ray._private.state import state as cluster_state
from ray.exceptions import RaySystemError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_exists, _internal_kv_put

LOOK_EVERY_S = 2.0
NAMESPACE = b"suite"
AWAY = (RaySystemError, ConnectionError, TimeoutError, RuntimeError)
"""What asking raises while the head is away."""


def post(where: str) -> None:
    """Have every trial of a sweep write a checkpoint and leave."""
    _internal_kv_put(_key(where), b"1", overwrite=True, namespace=NAMESPACE)


def take_down(where: str) -> None:
    """The sweep begins, or has ended: what an earlier run of it was told does not count."""
    with contextlib.suppress(*AWAY):  # a notice is gone with its head
        _internal_kv_del(_key(where), namespace=NAMESPACE)


def _key(where: str) -> bytes:
    return f"leave/{where}".encode()


@dataclass(slots=True)
class Notice:
    """What the process of one trial looks at while it waits for its ranks.

    Attributes:
        where: The scratch folder of its sweep, which no other sweep of the cluster has.
        by_driver: Whether it was the driver who asked: the trial is not to be tried again by this run of the sweep.
    """

    where: str
    by_driver: bool = False
    _signalled: bool = False
    _looked: float = field(default=0.0)

    def listen(self) -> None:
        """Take SIGTERM for a notice, in the main thread; Ray's own handler would end the process at once, and its ranks with it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signalled = True

    def why(self, nodes: Iterable[str]) -> str:
        """Why the ranks on these nodes are to leave, or nothing. Cheap enough to be asked all the time."""
        if self._signalled:
            return "its process got SIGTERM"
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return ""
        self._looked = now
        try:
            self.by_driver = bool(_internal_kv_exists(_key(self.where), namespace=NAMESPACE))
            draining = set(cluster_state.get_draining_nodes())
        except AWAY:  # nobody can ask for anything
            return ""
        if self.by_driver:
            return "the sweep is being stopped"
        return "Ray drains its node" if draining & set(nodes) else ""
