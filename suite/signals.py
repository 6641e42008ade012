"""The signals that ask a command to end, what it then says and its exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = {
    signal.SIGINT: "stopped by Ctrl-C",
    signal.SIGTERM: "stopped by SIGTERM",  # batch systems send it before they kill
    signal.SIGHUP: "stopped by SIGHUP",  # the terminal is gone
}
EXIT_CODES = {reason: 128 + number for number, reason in STOPS.items()}
"""As shells have them."""
STOPPED = EXIT_CODES[STOPS[signal.SIGINT]]


class Stopped(SystemExit):
    """Ends the process where it is, and closes on the way what is open."""

    def __init__(self, reason: str) -> None:
        """`reason` is a value of `STOPS`."""
        super().__init__(EXIT_CODES[reason])
        self.reason = reason


def end_here(reason: str) -> None:
    """Handle a signal by `Stopped`."""
    raise Stopped(reason)


@contextmanager
def on_stop(handle: Callable[[str], object]) -> Iterator[Callable[[], None]]:
    """Call `handle` with a value of `STOPS` when one of these signals comes within the block.

    Outside the main thread, which alone may set handlers, this does nothing. SIGHUP stays ignored
    where it is, because `nohup` asks for that.

    Yields:
        What gives the signals back before the block ends.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOPS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(
                    number, lambda got, _: handle(STOPS[signal.Signals(got)])
                )

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield restore
    finally:
        restore()
