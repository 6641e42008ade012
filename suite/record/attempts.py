"""How often a trial was tried in vain: which failures count, and when it is given up."""

from __future__ import annotations

import time

from suite.record.folder import TrialFolder
from suite.record.result import FailureRecord, Status, TrialResult


class PreemptedError(Exception):
    """The group was asked to leave and has left a checkpoint, from which the trial goes on."""


PREEMPTED, OUT_OF_MEMORY, AGAIN = PreemptedError.__name__, "HostOutOfMemory", "TriedAgain"
FREE = (PREEMPTED,)
"""The machine gave notice: no sign that the next attempt would fail."""


def counted(folder: TrialFolder) -> list[FailureRecord]:
    """The failures since the trial last got further than ever before, or since a person asked for
    it to be tried again.
    """
    best = -1
    found: list[FailureRecord] = []
    for record in folder.failures():
        if record.type == AGAIN or (record.epoch or 0) > best:
            found.clear()
        best = max(best, record.epoch or 0)
        if record.type not in (*FREE, AGAIN):
            found.append(record)
    return found


def is_given_up(folder: TrialFolder, *, retries: int) -> bool:
    """Whether an unfinished trial is not tried again; in this run of the sweep or another one."""
    return len(counted(folder)) > retries


def asked_again() -> FailureRecord:
    """What is kept when a person wants a trial tried again that was given up."""
    return FailureRecord(type=AGAIN, message="its retries begin anew, as asked for")


def result_of(folder: TrialFolder, *, started_at: float) -> TrialResult | None:
    """The result of a given-up trial: out of memory if each attempt died of that, or None."""
    failures = counted(folder)
    if not failures or any(failure.type != OUT_OF_MEMORY for failure in failures):
        return None
    return TrialResult(
        trial=folder.hash,
        status=Status.OOM,
        score=None,
        failure=failures[-1],
        missing={"score": f"oom: its host ran out of memory in {len(failures)} attempts"},
        started_at=started_at,
        finished_at=time.time(),
    )
