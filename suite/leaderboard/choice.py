"""What a reader chooses of the leaderboard: the order of its rows, and the target of energy.

The command line imports it for the help of its options, so it imports nothing heavy.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypedDict

from suite.errors import UnknownNameError

TARGET_FRAC = 0.95
"""Share of full fine-tuning's validation score that counts as nearly as good; our choice."""
LEAST_TARGET_FRAC = 0.01
"""The smallest share that may be asked for, ours."""


class Sort(StrEnum):
    """What orders the rows of a task, the best first."""

    SCORE = "score"
    ENERGY = "energy"
    MEMORY = "memory"
    TRAINABLE = "trainable"
    PRR = "prr"
    PEOP = "peop"


SORT_FIELDS = {
    Sort.SCORE: "score_mean",
    Sort.ENERGY: "energy_kwh",
    Sort.MEMORY: "peak_memory_bytes",
    Sort.TRAINABLE: "trainable_parameters",
    Sort.PRR: "prr",
    Sort.PEOP: "peop",
}
"""The field of a row that each of them compares."""


class Choice(TypedDict, total=False):
    """Which rows are shown, and in which order; `suite.leaderboard.table.choose` says more."""

    task: str | None
    method: str | None
    attention: str | None
    sort: str
    target_frac: float
    rejected: bool


def sort_of(name: str) -> Sort:
    """The sort key of a name.

    Raises:
        UnknownNameError: There is none of that name.
    """
    if name not in SORT_FIELDS:
        raise UnknownNameError("sort key", name, SORT_FIELDS)
    return Sort(name)
