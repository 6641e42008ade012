"""A clock for tests: its time passes when somebody sleeps, and costs none."""

from __future__ import annotations

import threading
from collections.abc import Callable

from suite.clock import Clock


class FakeClock(Clock):
    """Starts at 1,000 s; `sleep` moves it on, and so does `advance`.

    Args:
        on_sleep: Called with the new time after every sleep: what happens meanwhile elsewhere.
    """

    def __init__(self, on_sleep: Callable[[float], object] | None = None) -> None:
        self._time_s = 1000.0
        self._on_sleep = on_sleep
        self._moved = threading.Condition()
        self.sleeps_s: list[float] = []

    def now_s(self) -> float:
        with self._moved:
            return self._time_s

    def advance(self, seconds: float) -> None:
        """Let time pass for all threads that wait by this clock."""
        with self._moved:
            self._time_s += seconds
            self._moved.notify_all()

    def sleep(self, seconds: float) -> None:
        self.sleeps_s.append(seconds)
        self.advance(seconds)
        if self._on_sleep is not None:
            self._on_sleep(self.now_s())

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Unlike `sleep`, moves nothing: a thread that beats waits until somebody else lets time pass."""
        end_s = self.now_s() + seconds
        with self._moved:
            # The event is set without a word to this condition, so it is looked at now and then.
            while not event.is_set() and self._time_s < end_s:
                self._moved.wait(0.01)
        return event.is_set()
