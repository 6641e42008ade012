"""Notice that it is not the trials: when several fail alike in a row, the sweep is paused instead of using up the retries of all."""

from __future__ import annotations

import re

from suite.record.attempts import OUT_OF_MEMORY, PREEMPTED
from suite.record.result import FailureRecord

LOSSES = ("RankDied", "TrialProcessDied", PREEMPTED, OUT_OF_MEMORY)
"""A host takes several trials with it, and the next ones run elsewhere."""
_PARTICULARS = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+|/\S+")


class Breaker:
    """Counts different trials that failed alike with no progress anywhere in between.

    Args:
        limit: As many of them pause the sweep; None = never.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._alike, self._trials = "", set[str]()

    def progressed(self) -> None:
        """An epoch was committed, or a trial ended with a result."""
        self._trials.clear()

    def failed(self, trial: str, record: FailureRecord) -> str:
        """Take in the end of an attempt. Returns why the sweep is to be paused, or nothing."""
        alike = signature(record)
        if alike is None:
            return ""
        if alike != self._alike:
            self._alike = alike
            self._trials.clear()
        self._trials.add(trial)
        if self.limit is None or len(self._trials) < self.limit:
            return ""
        return (
            f"{len(self._trials)} trials in a row failed alike, so it is not the trials ({record.type}: {record.message[:300]}); "
            "mend the cause and run the same command again (failures.breaker)"
        )


def signature(record: FailureRecord) -> str | None:
    """What makes two failures alike: their kind and words without numbers and paths. None of a loss, or of a hang in the middle."""
    if record.type in LOSSES or (
        record.type == "Timeout"
        and record.message.startswith(("epoch", "finish", "ping", "baseline"))
    ):
        return None
    return f"{record.type}: {_PARTICULARS.sub('#', record.message.partition(chr(10))[0])}"
