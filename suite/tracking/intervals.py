"""The fields of a row that `suite.stats` computes from one cell's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from suite.errors import SuiteError
from suite.stats.answers import Answers, read_answers
from suite.stats.compare import difference, gather
from suite.stats.constant import best_constant
from suite.stats.interval import cell_interval
from suite.train.cells import Trial


def interval_fields(confirmed: Sequence[Trial]) -> dict[str, Any]:
    """`ci_low`, `ci_high` and `ci_of`, or `ci_missing`, which says why there are none, and those of `constant_fields`.

    Nothing before a run has a score.
    """
    if not any(t.result is not None and t.result.score is not None for t in confirmed):
        return {}
    fields: dict[str, Any] = {}
    try:
        answers = read_answers(confirmed)
        fields |= constant_fields(answers)
        found = cell_interval(answers)
    except SuiteError as reason:  # also a task file of the user's that is gone or raises
        return {**fields, "ci_missing": str(reason)}
    return {**fields, "ci_low": found.low, "ci_high": found.high, "ci_of": found.of}


def constant_fields(answers: Answers) -> dict[str, Any]:
    """`constant_score` and `constant_p`; nothing where no constant answer fits all items."""
    constant = best_constant(answers)
    if constant is None:
        return {}
    found = difference(gather([answers, constant]))
    return {"constant_score": found.second, "constant_p": found.p}
