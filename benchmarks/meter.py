"""What the driver of a sweep spends: processor seconds by part, and memory over time."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import psutil

from suite.plan import cell_state
from suite.record.result import TrialResult
from suite.record.spec import TrialSpec
from suite.tune.callback import SweepCallback
from suite.tune.searcher import SweepSearcher

SAMPLE_S = 2.0


class Meter:
    """Processor seconds of the driver's thread by what they were spent on, and the driver's memory over time."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.samples: list[
            tuple[float, int, int]
        ] = []  # seconds, trials that ended, resident bytes
        self.ended = 0
        self._stop = threading.Event()
        self._began_s = time.monotonic()

    def timed(self, owner: Any, name: str, part: str) -> Callable[[], None]:
        """Count what a function spends; returns what undoes it."""
        function = getattr(owner, name)

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.cpu_s[part] += time.thread_time() - began_s

        setattr(owner, name, call)
        return lambda: setattr(owner, name, function)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        parts = [
            (SweepSearcher, "suggest", "suite: hand out"),
            (cell_state, "propose", "suite: hand out: proposals"),
            (SweepSearcher, "on_trial_complete", "suite: take in"),
            (SweepCallback, "on_step_begin", "suite: watch"),
            (SweepCallback, "on_trial_start", "suite: watch"),
            (SweepCallback, "on_trial_result", "suite: watch"),
            (SweepCallback, "on_trial_complete", "suite: watch"),
        ]
        undo = [self.timed(*part) for part in parts]
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.cpu_s["controller"] = time.thread_time() - began_s
            self._stop.set()
            thread.join()
            for each in undo:
                each()

    def _sample(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(SAMPLE_S):
            self.samples.append(
                (time.monotonic() - self._began_s, self.ended, process.memory_info().rss)
            )

    def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
        self.ended += 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *arguments: None
        raise AttributeError(name)


def memory(meter: Meter) -> dict[str, float]:
    """Resident memory of the driver at a tenth of the way, half-way and the end, and what a trial adds."""
    points = [s for s in meter.samples if s[1]]
    if len(points) < 3:
        return {}
    tenth = next(s for s in points if s[1] >= points[-1][1] / 10)
    half = next(s for s in points if s[1] >= points[-1][1] / 2)
    per_trial = (points[-1][2] - tenth[2]) / max(1, points[-1][1] - tenth[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "tenth_bytes": tenth[2],
        "half_bytes": half[2],
        "end_bytes": points[-1][2],
        "peak_bytes": peak,
        "bytes_per_trial": per_trial,
    }
