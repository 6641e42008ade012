"""Shows how far a sync has come to a person who waits for it."""

from __future__ import annotations

import sys
from typing import TextIO

from suite.clock import CLOCK, Clock

TERMINAL_S = 0.5
PIPED_S = 30.0
"""Seconds between two lines: on a terminal one line is written again and again."""


class Progress:
    """Says how many cells are done, how fast trials are written, and how long the rest takes.

    Args:
        stream: Where it is said; None = standard error.
        clock: By which time is counted.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Clock = CLOCK) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._began_s = clock.now_s()
        self._said_s = self._began_s
        self._shown = 0

    def __call__(self, done: int, total: int, trials: int) -> None:
        """Report a step.

        Args:
            done: Cells that are up to date.
            total: Cells that were not when it began.
            trials: Runs of trials that were written.
        """
        now_s = self._clock.now_s()
        pause_s = TERMINAL_S if self._is_terminal else PIPED_S
        if now_s - self._said_s < pause_s:
            return
        self._said_s = now_s
        elapsed_s = now_s - self._began_s
        parts = [f"{done:,} of {total:,} cells"]
        if trials >= elapsed_s:
            parts.append(f"{trials / elapsed_s:.0f} trials/s")
        elif trials:
            parts.append(f"{elapsed_s / trials:.1f} s per trial")
        # The rest is assumed to go at the pace so far, and one cell is no pace.
        if done > 1:
            parts.append(f"{duration(elapsed_s * (total - done) / done)} left")
        line = ", ".join(parts)
        # In a log file a carriage return would not go back to the start of the line.
        if not self._is_terminal:
            print(line, file=self._stream, flush=True)
            return
        # Padded to the line before, so that nothing of a longer one stays on the screen.
        print(f"\r{line:<{self._shown}}", end="", file=self._stream, flush=True)
        self._shown = len(line)

    def close(self) -> None:
        """Take the line away from the terminal."""
        if self._shown:
            print(f"\r{'':<{self._shown}}\r", end="", file=self._stream, flush=True)
            self._shown = 0


def duration(seconds: float) -> str:
    """A duration for people: `40 s`, `12 min`, `1 h 20 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
