"""The clock that deadlines, pauses and leases use.

Tests pass a clock of their own in and wait for nothing.
"""

from __future__ import annotations

import threading
import time


class Clock:
    """This machine's time. All deadlines of a process may share one clock."""

    def now_s(self) -> float:
        """Return the seconds since the machine started, including those that it slept."""
        # A monotonic clock stands still while a laptop sleeps, and other drivers' clocks do not.
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

    def sleep(self, seconds: float) -> None:
        """Let this thread wait."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for an event for at most so many seconds, and return whether it happened."""
        return event.wait(seconds)


CLOCK = Clock()
