"""Processes of this machine, seen from outside the hosts."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = float(os.environ.get("SUITE_TEST_PATIENCE", "1"))
"""Times every deadline here: more than 1 on a machine that does much else."""


class HostError(Exception):
    """A command on a host failed, or something did not come about in time; the message has all that was printed."""


def command_line(pid: int) -> str:
    """The words of a process; empty if it is gone."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""


def wait_until(
    what: str, condition: Callable[[], object], *, timeout_s: float = 60.0, every_s: float = 0.2
) -> None:
    """Poll until a callable is true.

    Raises:
        HostError: It was not in time.
    """
    end = time.monotonic() + timeout_s * PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise HostError(f"not within {timeout_s:g} s: {what}")
        time.sleep(every_s)


def must_run(*words: str) -> None:
    """Raises HostError with what it printed if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise HostError(f"{shlex.join(words)}: {done.stderr.strip()}")


def children(pid: int) -> list[int]:
    """None if it is gone."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def is_in(pid: int, world: str) -> bool:
    """Whether a process is in the process namespace with this name (`pid:[…]`)."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == world
    except OSError:
        return False
