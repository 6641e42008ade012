"""What asks a command to end."""

from __future__ import annotations

import signal
import threading

import pytest

from suite.signals import EXIT_CODES, STOPS, Stopped, end_here, on_stop


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_gives_its_reason_once_and_then_meets_the_handler_from_before(
    number: signal.Signals,
) -> None:
    told: list[str] = []

    def stop(reason: str) -> None:
        told.append(reason)
        restore()

    before = signal.signal(number, lambda *_: told.append("before"))
    try:
        with on_stop(stop) as restore:
            signal.raise_signal(number)
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert told == [STOPS[number], "before"]
    with pytest.raises(Stopped) as ended:
        end_here(told[0])
    assert ended.value.code == EXIT_CODES[told[0]] == 128 + number


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_stop(end_here):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_that_may_set_no_handler_goes_on_without() -> None:
    inside = threading.Event()

    def run() -> None:
        with on_stop(end_here):
            inside.set()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside.is_set()
