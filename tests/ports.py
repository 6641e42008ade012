"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A TCP port that nobody listens on at any address of this machine.

    A server may open it seconds later, while other tests start theirs. So it lies where no kernel looks for one that
    is free (Linux begins at 32768) and above the ports that Ray gives to its workers (10002 to 19999).
    """
    # From the system: tests seed `random`, and processes with one seed would take the same ports.
    source = random.SystemRandom()
    while True:
        port = source.randrange(20000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
