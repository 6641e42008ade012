"""Count how often a trial was tried in vain, and decide when it is given up."""

from __future__ import annotations

import time

from suite.record.folder import TrialFolder
from suite.record.result import FailureRecord, Status, TrialResult


class PreemptedError(Exception):
    """The group was asked to leave and has left a checkpoint, from which the trial goes on."""


class LanesApartError(RuntimeError):
    """Trials cannot go on side by side; each of them can go on alone from what it has committed."""


class LanesUnevenError(LanesApartError):
    """Trials that were to train side by side are not equally far."""


# Values of `FailureRecord.type`. The first two say why a group of lanes ended.
APART = LanesApartError.__name__
UNEVEN = LanesUnevenError.__name__
PREEMPTED = PreemptedError.__name__
OUT_OF_MEMORY = "HostOutOfMemory"
RANK_DIED = "RankDied"
PROCESS_DIED = "TrialProcessDied"
TIMEOUT = "Timeout"
REMOVED = "TrialFolderRemoved"
# No failure: it is kept among them so that its place in their order is known.
AGAIN = "TriedAgain"
FREE = (PREEMPTED, REMOVED)
"""The machine gave notice, or somebody took the files: no sign that the next attempt would fail."""


def counted(folder: TrialFolder) -> list[FailureRecord]:
    """The failures that count towards the retries of a trial.

    These are the ones since the trial last got further than ever before, or since a person asked
    for it to be tried again.
    """
    # Progress earns new retries: a long trial goes on for as long as each attempt gets further.
    best = -1
    found: list[FailureRecord] = []
    for record in folder.failures():
        if record.type == AGAIN or (record.epoch or 0) > best:
            found.clear()
        best = max(best, record.epoch or 0)
        # Such a record may show progress, but is never a failure.
        if record.type not in (*FREE, AGAIN):
            found.append(record)
    return found


def is_given_up(folder: TrialFolder, *, retries: int) -> bool:
    """Whether an unfinished trial has used up its retries, in this run of the sweep or another."""
    # The first attempt is no retry, so this is "more than", not "at least".
    return len(counted(folder)) > retries


def asked_again() -> FailureRecord:
    """The record that is kept when a person wants a trial tried again that was given up."""
    return FailureRecord(type=AGAIN, message="its retries begin anew, as asked for")


def result_of(folder: TrialFolder, *, started_at: float) -> TrialResult | None:
    """The result of a given-up trial: out of memory if each attempt died of that, or None."""
    failures = counted(folder)
    # A host without memory each time says something about the trial. Any other failure says
    # something about a machine, and so is no result.
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
