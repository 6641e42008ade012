"""The fields of a row that `suite.stats` computes from one cell's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from suite.errors import ContradictionError, SuiteError
from suite.leaderboard.fields import NOT_VERIFIABLE
from suite.record.cells import Trial
from suite.stats.answers import Answers, read_answers
from suite.stats.compare import NO_P, Difference, difference, gather
from suite.stats.constant_baseline import best_constant
from suite.stats.interval import cell_interval


def interval_fields(confirmed: Sequence[Trial]) -> dict[str, Any]:
    """The fields `ci_low`, `ci_high` and `ci_of`, or `ci_missing`, and those of `constant_fields`.

    Also `unverified`, and `rejected` where the answers contradict the records. There are no fields
    before a run has a score.
    """
    # Before there is a score, an interval is not due yet, so nothing is called missing.
    if not any(t.result is not None and t.result.score is not None for t in confirmed):
        return {}
    try:
        answers = read_answers(confirmed)
    except SuiteError as reason:  # also a task file of the user's that is gone or raises
        missing: dict[str, Any] = {"ci_missing": str(reason), "constant_missing": str(reason)}
        if isinstance(reason, ContradictionError):
            return missing | {"rejected": [str(reason)]}
        return missing | {"unverified": f"{NOT_VERIFIABLE}: {reason}"}
    # The constant answer has its own reasons to be missing, so either may stand without the other.
    constant = constant_fields(answers)
    try:
        found = cell_interval(answers)
    except SuiteError as reason:
        return {**constant, "ci_missing": str(reason)}
    return {**constant, "ci_low": found.low, "ci_high": found.high, "ci_of": found.of}


def constant_fields(answers: Answers) -> dict[str, Any]:
    """The fields `constant_score` and `constant_p`, and `constant_missing`: why one is null."""
    try:
        constant = best_constant(answers)
        found = difference(gather([answers, constant]))
    except SuiteError as reason:  # also a task's own score that cannot take a constant
        return {"constant_missing": str(reason)}
    fields: dict[str, Any] = {"constant_score": found.second, "constant_p": p_of_gain(found)}
    if found.p is None:
        fields["constant_missing"] = NO_P
    return fields


def p_of_gain(found: Difference) -> float | None:
    """One-sided p-value of "the first arm is no better", where more is better.

    It is None with one seed.
    """
    if found.p is None:
        return None
    # A half of the two-sided p-value, because to be worse shows nothing.
    if found.difference > 0:
        return found.p / 2
    return 1.0
