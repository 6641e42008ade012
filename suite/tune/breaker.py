"""Pause a sweep when trials fail alike in a row: then something other than the trials is broken."""

from __future__ import annotations

import re

from suite.record.attempts import OUT_OF_MEMORY, PREEMPTED, PROCESS_DIED, RANK_DIED, TIMEOUT
from suite.record.result import FailureRecord

HOST_LOSSES = (RANK_DIED, PROCESS_DIED, PREEMPTED, OUT_OF_MEMORY)
"""Failures that a lost host causes.

It ends several trials at once, and the next ones run elsewhere.
"""
MID_WORK = ("epoch", "finish", "ping", "baseline_bytes")
"""Methods of a rank that are called once its group has joined."""
_PARTICULARS = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+|/\S+")
MESSAGE_CHARS = 300


class CircuitBreaker:
    """Counts different trials that fail alike while no trial makes progress.

    Args:
        limit: Number of such trials that pauses the sweep; None = never.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._signature = ""
        self._trials: set[str] = set()

    def progressed(self) -> None:
        """An epoch was committed, or a trial ended that has one."""
        self._trials.clear()

    def failed(self, trial: str, record: FailureRecord) -> str:
        """Count a failed attempt. Returns why the sweep is to be paused, or nothing."""
        signature = failure_signature(record)
        if signature is None:
            return ""
        if signature != self._signature:
            self._signature = signature
            self._trials.clear()
        self._trials.add(trial)  # a set: the retries of one trial count once
        if self.limit is None or len(self._trials) < self.limit:
            return ""
        return (
            f"{len(self._trials)} trials in a row failed alike, so the trials are not the cause"
            f" ({record.type}: {record.message[:MESSAGE_CHARS]});"
            " mend the cause and run the same command again (failures.breaker)"
        )


def failure_signature(record: FailureRecord) -> str | None:
    """What failures that are alike share: type and message without numbers and paths.

    None: such a failure is not counted.
    """
    if record.type in HOST_LOSSES:
        return None
    # A group that hangs after it has joined was lost in the middle of its work, as a host is.
    if record.type == TIMEOUT and record.message.startswith(MID_WORK):
        return None
    first_line = record.message.partition("\n")[0]
    return f"{record.type}: {_PARTICULARS.sub('#', first_line)}"
