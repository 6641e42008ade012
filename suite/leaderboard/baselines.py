"""Compute PRR and PEoP of every row: its score beside multi-head and single-head attention's.

A baseline is the row of the same home, sweep, backbone, method, architecture and task whose
attention is `mha`, else `pretrained` (the backbone as it is, whatever its attention), or `sha`. On
mean rows the metrics are ratios of means, as in the MHE paper's tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from suite.leaderboard.fields import Row, with_values
from suite.metrics.efficiency import peop, prr
from suite.plan.cell_state import CellStatus

# The first that a sweep has is the baseline. A pretrained backbone's attention need not be
# multi-head, yet it is what the variants replace.
MHA = ("mha", "pretrained")
SHA = ("sha",)
BOTH_DIRECTIONS = "higher is better on some of these tasks and lower on others"
"""Why the mean row of such tasks has no ratio, and no rank."""


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """The same rows, rejected ones last, with `prr` and `peop`, or with the reasons for none."""
    rivals: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        rivals[_comparison(row)].append(row)
    found = []
    for row in sorted(rows, key=lambda row: row.admitted is False):
        found.append(_compared(row, rivals[_comparison(row)]))
    return found


def _comparison(row: Row) -> tuple[str, ...]:
    # `rivals` is equal for rows that differ in their attention and its pretrain run alone.
    return row.home, row.sweep, row.rivals, row.task


def _compared(row: Row, rivals: Sequence[Row]) -> Row:
    retained, retained_missing = _value_or_reason(_prr, row, rivals)
    elasticity, elasticity_missing = _value_or_reason(_peop, row, rivals)
    return with_values(
        row,
        prr=retained,
        prr_missing=retained_missing,
        peop=elasticity,
        peop_missing=elasticity_missing,
    )


def _value_or_reason(
    compute: Callable[[Row, Sequence[Row]], float], row: Row, rivals: Sequence[Row]
) -> tuple[float | None, str | None]:
    try:
        return compute(row, rivals), None
    # The functions below raise their reasons, which the row then shows in place of the number.
    except ValueError as reason:
        return None, str(reason)


def _prr(row: Row, rivals: Sequence[Row]) -> float:
    higher_is_better = _direction(row)
    return prr(_score(row), _score(_baseline(MHA, row, rivals)), higher_is_better=higher_is_better)


def _peop(row: Row, rivals: Sequence[Row]) -> float:
    higher_is_better = _direction(row)
    # The formula would divide by zero: the row has as many parameters as itself.
    if row.attention in SHA:
        raise ValueError("it is single-head attention itself")
    sha = _baseline(SHA, row, rivals)
    return peop(
        _score(row),
        _score(sha),
        _parameters(row),
        _parameters(sha),
        higher_is_better=higher_is_better,
    )


def _baseline(names: Sequence[str], row: Row, rivals: Sequence[Row]) -> Row:
    """The row with the first of these names that the sweep has."""
    for name in names:
        named = [rival for rival in rivals if rival.attention == name]
        # A rejected row is a baseline for rejected rows only; None means "not checked yet", which
        # rejects nothing.
        found = [rival for rival in named if rival.admitted is not False or row.admitted is False]
        # The next name would be another baseline than that of the arm's other tasks.
        if named and not found:
            raise ValueError(f"the row with attention {name} is rejected, and so is no baseline")
        # To take one of them would make the metric depend on the order of the rows.
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} rows of this sweep have attention {name}, with different options or "
                "pretraining: the baseline is ambiguous"
            )
        # The mean of the seeds that survived is no score of all of them.
        if found and found[0].status == CellStatus.FAILED:
            raise ValueError(f"the row with attention {name} failed, and so is no baseline")
        if found and _of_other_precisions(row, found[0]):
            raise ValueError(
                f"the row with attention {name} computed in {found[0].precision} and this one in "
                f"{row.precision}"
            )
        if found:
            return found[0]
    wanted = " or ".join(names)
    raise ValueError(
        f"this sweep has no row with attention {wanted} on the same backbone, method, architecture "
        "and task"
    )


def _of_other_precisions(row: Row, baseline: Row) -> bool:
    # A row without a trial has none yet; its missing score is then the reason.
    known = row.precision is not None and baseline.precision is not None
    return known and row.precision != baseline.precision


def _score(row: Row) -> float:
    if row.score_mean is None:
        raise ValueError(f"attention {row.attention} has no test score")
    return row.score_mean


def _parameters(row: Row) -> int:
    if row.attention_parameters is None:
        raise ValueError(
            f"the attention parameters of {row.attention} were not counted: no trial has ended "
            "that counted them"
        )
    return row.attention_parameters


def _direction(row: Row) -> bool:
    # This is a mean row over tasks of both directions, on which a ratio says nothing.
    if row.higher_is_better is None:
        raise ValueError(BOTH_DIRECTIONS)
    return row.higher_is_better
