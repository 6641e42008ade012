"""PRR and PEoP of every row: its score beside multi-head and single-head attention's.

A baseline is the row of the same home, sweep, backbone, method, architecture and task whose
attention is `mha`, else `pretrained` (the backbone as it is, whatever its attention), or `sha`. On
mean rows the metrics are ratios of means, as in the MHE paper's tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from suite.leaderboard.fields import Row, with_values
from suite.metrics.efficiency import peop, prr

MHA = ("mha", "pretrained")
SHA = ("sha",)


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """The same rows, rejected ones last, with `prr` and `peop`, or with the reasons for none."""
    fit = [row for row in rows if row.admitted is not False]
    rejected = [row for row in rows if row.admitted is False]
    rivals: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    found = []
    # A rejected row is a baseline for rejected rows only.
    for group in (fit, rejected):
        for row in group:
            rivals[_comparison(row)].append(row)
        for row in group:
            found.append(_compared(row, rivals[_comparison(row)]))
    return found


def _comparison(row: Row) -> tuple[str, ...]:
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
    except ValueError as reason:
        return None, str(reason)


def _prr(row: Row, rivals: Sequence[Row]) -> float:
    higher_is_better = _direction(row)
    return prr(_score(row), _score(_baseline(MHA, rivals)), higher_is_better=higher_is_better)


def _peop(row: Row, rivals: Sequence[Row]) -> float:
    higher_is_better = _direction(row)
    if row.attention in SHA:
        raise ValueError("it is single-head attention itself")
    sha = _baseline(SHA, rivals)
    return peop(
        _score(row),
        _score(sha),
        _parameters(row),
        _parameters(sha),
        higher_is_better=higher_is_better,
    )


def _baseline(names: Sequence[str], rivals: Sequence[Row]) -> Row:
    """The row of the first of these names that there is."""
    for name in names:
        found = [row for row in rivals if row.attention == name]
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} rows of this sweep have attention {name}, with different options or "
                "pretraining: the baseline is ambiguous"
            )
        if found:
            return found[0]
    wanted = " or ".join(names)
    raise ValueError(
        f"this sweep has no row with attention {wanted} on the same backbone, method, architecture "
        "and task"
    )


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
    if row.higher_is_better is None:
        raise ValueError("higher is better on some of these tasks and lower on others")
    return row.higher_is_better
