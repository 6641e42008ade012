"""Time: device synchronisation, a light sampling thread, and the integral of a sampled gauge."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import torch


class Unavailable(Exception):
    """A quantity cannot be measured here; the message says why."""


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished what it was given, so that a clock read next to it is fair."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ticker:
    """Calls `tick` about every `interval_s` from a daemon thread.

    Intervals are drawn from [0.5, 1.5] x `interval_s`: a sampler in step with the work (or with NVML's own averaging) is biased
    (arXiv 2312.02741). The draws come from a private generator, so that the trial's random streams stay as they are.
    """

    def __init__(self, tick: Callable[[], None], interval_s: float) -> None:
        self._tick, self._interval_s = tick, interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="suite-meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Idempotent; returns when the thread has ended."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        draw = random.Random()
        while not self._stop.wait(self._interval_s * draw.uniform(0.5, 1.5)):
            self._tick()


class Integral:
    """Trapezoid integral over time of a gauge, sampled by a `Ticker` and at every `take`.

    Args:
        gauge: Reads the quantity now; raises `Unavailable` where it cannot.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, gauge: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gauge, self._clock = gauge, clock
        self._lock = threading.Lock()
        self._last: tuple[float, float] | None = None
        self._total = 0.0
        self._failure: Unavailable | None = None

    def sample(self) -> None:
        """Add the stretch since the last sample; a failure is kept for the next `take`."""
        with self._lock:
            try:
                now, value = self._clock(), self._gauge()
            except Unavailable as failure:
                self._failure, self._last = failure, None
                return
            if self._last is not None:
                self._total += (now - self._last[0]) * (value + self._last[1]) / 2
            self._last = now, value

    def take(self) -> float:
        """Gauge units x seconds since the last `take`.

        Raises:
            Unavailable: A sample failed in between, so the integral has a hole.
        """
        self.sample()
        with self._lock:
            total, self._total = self._total, 0.0
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return total
