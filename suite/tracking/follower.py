"""A view of the trial folders that follows a running sweep from a thread of its own; it can neither delay nor fail a trial."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from suite.record.result import TrialResult
from suite.record.spec import TrialSpec


class Follower:
    """Base of listeners that bring a store up to date: a trial's end wakes the thread, which looks at the home.

    It duck-types the listener of `suite.tune`. While the store is away it tries again, ever less often; the next run or
    `suite sync` makes up for what is left at the end.

    Args:
        name: Of the store, for what is said.
        say: Receives the one or two lines meant for the user.
        patience_s: Longest wait at the end of the sweep.
        retry_s: First and longest pause between attempts.
    """

    def __init__(
        self,
        name: str,
        *,
        say: Callable[[str], None] | None = None,
        patience_s: float = 20.0,
        retry_s: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        self.name, self.patience_s, self.retry_s = name, patience_s, retry_s
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._behind: set[str] = set()
        self._lock, self._wake, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self._reached, self._warned = False, False
        self._deadline = math.inf
        self._thread = threading.Thread(
            target=self._work, name=f"suite-{name.lower()}", daemon=True
        )

    def prepare(self) -> None:
        """In the sweep's own thread, before the first trial."""

    def bring_up_to_date(self) -> str | None:
        """In the follower's thread: do what is to do; returns why it could not be done."""
        raise NotImplementedError

    @property
    def behind(self) -> int:
        """Trials that ended in this run and are not yet in the store."""
        with self._lock:
            return len(self._behind)

    def on_start(self, plan: Any, cells: Any) -> None:
        self.prepare()
        self._start()

    def on_trial_start(self, spec: TrialSpec) -> None: ...

    def on_epoch(self, spec: TrialSpec, record: Any) -> None: ...

    def on_trial_retry(self, spec: TrialSpec, failure: Any) -> None: ...

    def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
        if (
            result is None
        ):  # it ran out of retries: there is nothing to write until another run finishes it
            return
        with self._lock:
            self._behind.add(spec.hash)
        self._start()

    def on_end(self, outcome: Any) -> None:
        """Wait a little for the thread, then say what is left to do."""
        self._deadline = time.monotonic() + self.patience_s
        self._ended.set()
        self._start()
        self._thread.join(self.patience_s)
        if self.behind or not self._reached:
            late = f"by {self.behind} trials" if self.behind else "(it was never reached)"
            self._say(f"{self.name} is behind {late}; run: suite sync")

    def _start(self) -> None:
        with self._lock:
            if not self._thread.is_alive():
                with contextlib.suppress(
                    RuntimeError
                ):  # it had ended already: a thread starts once
                    self._thread.start()
        self._wake.set()

    def _work(self) -> None:
        pause_s = self.retry_s[0]
        while time.monotonic() < self._deadline:
            self._wake.clear()
            last = self._ended.is_set()
            problem = self._attempt()
            if problem is None:
                if last:
                    return
                pause_s = self.retry_s[0]
                self._wake.wait()
            elif last:
                time.sleep(self.retry_s[0])
            else:
                self._warn(problem)
                self._ended.wait(pause_s)
                pause_s = min(2 * pause_s, self.retry_s[1])

    def _attempt(self) -> str | None:
        with self._lock:
            due = set(self._behind)
        problem = self.bring_up_to_date()
        if problem is None:
            with self._lock:
                self._behind -= due
            self._reached = True
        return problem

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"{problem} (the sweep goes on; {self.name} is brought up to date later)")
