"""Notice that a cluster's head is gone.

Every call of Ray's that needs the head blocks then, and no signal ends it. After a minute Ray ends
the process itself, with a line from its C++.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import ray

from suite.clock import CLOCK

LOOK_S = 2.0
ANSWER_S = 5.0
LEAVING_S = 6.0
"""How long the head may be silent once this process was asked to end.

Whoever asked may have ended all processes of this machine, as `systemctl stop` and Slurm do, and
kills what is left soon.
"""
RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The variable that says for how long Ray itself waits; a head that is started again sets more."""
RAYS_PATIENCE_S = 60.0


@contextlib.contextmanager
def head_watched(
    on_gone: Callable[[str], None], *, leaving: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Watch the head of the connected cluster for the time of the block.

    Args:
        on_gone: Called once, in a thread, with what is wrong, when the head has refused connections
            for half of the time after which Ray would end this process, or for `LEAVING_S`.
        leaving: Whether this process was asked to end.
    """
    address: str = ray.get_runtime_context().gcs_address
    # The other half is for what is to be done before Ray ends the process.
    patience_s = float(os.environ.get(RAYS_PATIENCE, RAYS_PATIENCE_S)) / 2
    ended = threading.Event()
    # A daemon: a connection that hangs must not keep a process alive whose work is over.
    thread = threading.Thread(
        target=_watch,
        args=(address, patience_s, ended, on_gone, leaving),
        name="suite-head",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _watch(
    address: str,
    patience_s: float,
    ended: threading.Event,
    on_gone: Callable[[str], None],
    leaving: Callable[[], bool],
) -> None:
    answered_s = CLOCK.now_s()
    while not CLOCK.wait(ended, LOOK_S):
        most_s = min(patience_s, LEAVING_S) if leaving() else patience_s
        if _answers(address):
            answered_s = CLOCK.now_s()
        elif CLOCK.now_s() - answered_s >= most_s and not ended.is_set():
            on_gone(f"the head of the Ray cluster at {address} has not answered for {most_s:g} s")
            return


def _answers(address: str) -> bool:
    """Whether the head takes connections, as it does however busy it is."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S):
            return True
    except OSError:
        return False
