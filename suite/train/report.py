"""What an epoch of a trial leaves for whoever decides what follows.

It imports no torch: the trial's own process reads it, and only the ranks train.
"""

from __future__ import annotations

from dataclasses import dataclass

from suite.record.result import EpochRecord


@dataclass(frozen=True, slots=True)
class EpochReport:
    """How an epoch ended, the same on every rank.

    Attributes:
        record: The epoch's point on the training curve; None if the trial diverged in it.
        done: No further epoch follows.
    """

    record: EpochRecord | None
    done: bool
