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
    """Wait until the device has finished its work, so that a clock read after it is fair."""
    # CUDA runs kernels after the call returns; a CPU has finished already
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ticker:
    """Calls `tick` about every `interval_s` from a daemon thread.

    Intervals are drawn from [0.5, 1.5] x `interval_s`, because a sampler in step with the work (or
    with NVML's own averaging) is biased (arXiv 2312.02741). The draws come from a private
    generator, so that the trial's random streams stay as they are.
    """

    def __init__(self, tick: Callable[[], None], interval_s: float) -> None:
        self._tick = tick
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        # a daemon, so that an open phase does not keep a dying process alive
        self._thread = threading.Thread(target=self._run, name="suite-meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and return when the thread has ended; a second call does nothing."""
        self._stop.set()
        if self._thread is not None:
            # No deadline: the thread reads what this one has just read at the phase's end. A
            # driver that hangs has hung there, and the deadline of the rank ends both.
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        draw = random.Random()  # seeded by the system: the samples need not repeat
        while not self._stop.wait(self._interval_s * draw.uniform(0.5, 1.5)):
            self._tick()


class Integral:
    """Trapezoid integral over time of a gauge, sampled by a `Ticker` and at every `take`.

    Args:
        gauge: Reads the quantity; raises `Unavailable` where it cannot.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, gauge: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gauge = gauge
        self._clock = clock
        self._lock = threading.Lock()
        self._last: tuple[float, float] | None = None
        self._total = 0.0
        self._failure: Unavailable | None = None

    def sample(self) -> None:
        """Add the stretch since the last sample; a failure is kept for the next `take`."""
        with self._lock:
            now = self._clock()
            try:
                value = self._gauge()
            except Unavailable as failure:
                self._failure = failure
                self._last = None  # no trapezoid reaches over the hole
                return
            if self._last is not None:
                before, last_value = self._last
                self._total += (now - before) * (value + last_value) / 2
            self._last = now, value

    def take(self) -> float:
        """The integral since the last `take`, in gauge units x seconds.

        Raises:
            Unavailable: A sample failed in between, so the integral has a hole.
        """
        self.sample()
        with self._lock:
            total = self._total
            failure = self._failure
            self._total = 0.0
            self._failure = None
        if failure is not None:
            raise failure
        return total


class Most:
    """The largest value of a gauge since the last `take`, sampled as an `Integral` is.

    Args:
        gauge: Reads the quantity; raises `Unavailable` where it cannot.
    """

    def __init__(self, gauge: Callable[[], int]) -> None:
        self._gauge = gauge
        self._lock = threading.Lock()
        self._most = 0
        self._failure: Unavailable | None = None

    def sample(self) -> None:
        """Look once; a failure is kept for the next `take`."""
        with self._lock:
            try:
                self._most = max(self._most, self._gauge())
            except Unavailable as failure:
                self._failure = failure

    def take(self) -> int:
        """The largest value since the last `take`, the present one included.

        Raises:
            Unavailable: A sample failed in between, so a larger value may have been missed.
        """
        self.sample()
        with self._lock:
            most = self._most
            failure = self._failure
            self._most = 0
            self._failure = None
        if failure is not None:
            raise failure
        return most
