"""A view of the trial folders that follows a running sweep from a thread of its own.

It can neither delay nor fail a trial.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from suite.clock import CLOCK
from suite.plan.events import Listener
from suite.record.result import TrialResult
from suite.record.spec import TrialSpec
from suite.redact import printable, redact

MAX_PROBLEM_CHARS = 500
SYNC = "run: suite sync, with the same --home and stores"
SHARE = 0.1
"""The largest share of the time that a follower may take, once its first attempt is done."""


class Follower(Listener):
    """Base of listeners that bring a store up to date.

    The end of a trial wakes the thread, which then looks at the home. While the store is away, it
    tries again, ever less often. What is left at the end is up to the next run or to `suite sync`.

    The time that it takes grows with the sweep (MLflow: 0.1 s for 100 cells, seconds for 10,000),
    so a pause follows that is nine times as long. What happens meanwhile is written together.

    Args:
        name: Name of the store, for messages.
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
        self.name = name
        self.patience_s = patience_s
        self.retry_s = retry_s
        self._say = say or _say_on_stderr
        self._behind: set[str] = set()
        # Guards `_behind`, the start of the thread and the order of what it says: events come from
        # the sweep's own thread.
        self._lock = threading.Lock()
        # Set when there may be something to write; `_ended` is set once, at the end of the sweep.
        self._wake = threading.Event()
        self._ended = threading.Event()
        # This tells "late by some trials" from "was never there at all".
        self._reached = False
        self._problem: str | None = None
        self._warned = False
        self._deadline_s = math.inf
        # A daemon, so that a store that hangs cannot keep the process from ending.
        self._thread = threading.Thread(
            target=self._work, name=f"suite-{name.lower()}", daemon=True
        )

    def prepare(self) -> None:
        """Get ready; the sweep's own thread calls this before the first trial."""

    def bring_up_to_date(self) -> str | None:
        """Write what is lacking, or return why that failed; the follower's thread calls this."""
        raise NotImplementedError

    @property
    def behind(self) -> int:
        """Trials that ended in this run and are not yet in the store."""
        with self._lock:
            return len(self._behind)

    @property
    def never_worked(self) -> str | None:
        """Why nothing at all was written; None where something was, or there was nothing to do."""
        was_started = self._thread.ident is not None
        if self._reached or not was_started:
            return None
        return self._problem or f"no answer within {self.patience_s:.0f} s"

    def on_start(self, plan: Any, cells: Any) -> None:
        self.prepare()
        self._start()

    def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
        # A trial that ran out of retries has no result: nothing to write until it runs again.
        if result is None:
            return
        with self._lock:
            # A set of hashes, because a trial may end twice when it is run again.
            self._behind.add(spec.hash)
        self._start()

    def on_end(self, outcome: Any) -> None:
        """Wait a little for the thread, then say what is left to do."""
        # The deadline is set before the event, since the thread reads both after it wakes.
        self._deadline_s = CLOCK.now_s() + self.patience_s
        self._ended.set()
        self._start()
        self._thread.join(self.patience_s)
        with self._lock:
            # The line below is the last: an attempt that fails after it has nothing to add.
            self._warned = True
        if self.behind:
            self._say(f"{self.name} is behind by {self.behind} trials; {SYNC}")
        elif not self._reached:
            self._say(f"{self.name} is behind (it was never reached); {SYNC}")
        elif self._thread.is_alive():
            self._say(f"{self.name} is behind (its last sync is not over); {SYNC}")

    def _start(self) -> None:
        with self._lock:
            # A thread starts only once; one that has ended raises RuntimeError.
            if not self._thread.is_alive():
                with contextlib.suppress(RuntimeError):
                    self._thread.start()
        self._wake.set()

    def _work(self) -> None:
        pause_s, longest_s = self.retry_s
        # The first attempt, and one after a problem, may write a whole home: that says nothing
        # about the next, so no pause follows it.
        looks_afresh = True
        while CLOCK.now_s() < self._deadline_s:
            self._wake.clear()
            began_s = CLOCK.now_s()
            # Read before the attempt: trials that end during it deserve another one.
            is_last = self._ended.is_set()
            problem = self._attempt()
            if problem is None:
                if is_last:
                    return
                pause_s = self.retry_s[0]
                if not looks_afresh:
                    # The end of the sweep ends this pause.
                    took_s = CLOCK.now_s() - began_s
                    CLOCK.wait(self._ended, took_s * (1 / SHARE - 1))
                looks_afresh = False
                # No deadline: the end of the sweep wakes it too, and a daemon keeps nobody waiting.
                self._wake.wait()
                continue
            looks_afresh = True
            if is_last:
                # At the end there is little time left, so the pause stays short.
                CLOCK.sleep(self.retry_s[0])
            else:
                self._warn(problem)
                # Waiting for `_ended` and not merely sleeping: the end of the sweep cuts the pause
                # short.
                CLOCK.wait(self._ended, pause_s)
                pause_s = min(2 * pause_s, longest_s)

    def _attempt(self) -> str | None:
        with self._lock:
            # Only what had ended before the attempt is surely written by it.
            due = set(self._behind)
        problem = self._written()
        self._problem = problem
        if problem is None:
            with self._lock:
                self._behind -= due
            self._reached = True
        return problem

    def _written(self) -> str | None:
        try:
            return self.bring_up_to_date()
        except Exception as error:  # noqa: BLE001
            # Whatever it is, it would end this thread, and nobody would see that the store is
            # behind. The place is told, because only a defect of ours or of the store's library
            # gets here.
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(f"{type(error).__name__}: {redact(error)}".split())
            return f"{self.name}: {text[:MAX_PROBLEM_CHARS]} ({place.filename}:{place.lineno})"

    def _warn(self, problem: str) -> None:
        """Say once what is wrong; every further attempt fails for the same reason."""
        with self._lock:
            if self._warned:
                return
            self._warned = True
            self._say(f"{problem} (the sweep goes on; {self.name} is brought up to date later)")


def _say_on_stderr(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
