"""PRR and PEoP of every row: its score beside multi-head and single-head attention's in the same sweep.

A baseline is the row of the same home, sweep, backbone, method, architecture and task whose attention is `mha`, else
`pretrained` (the backbone as it is, whatever its attention), or `sha`. On mean rows the metrics are ratios of means, as in
the MHE paper's tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from suite.metrics.efficiency import peop, prr
from suite.tracking.summary import CellSummary, with_values

Row = tuple[CellSummary, str]
"""A cell and the home it was run in: two homes may hold a sweep of the same name."""
MHA = ("mha", "pretrained")
SHA = ("sha",)


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """The same rows with `prr` and `peop`, or with the reason why they have none."""
    rivals: dict[tuple[str, ...], list[CellSummary]] = defaultdict(list)
    for cell, home in rows:
        rivals[_comparison(cell, home)].append(cell)
    return [(_compared(cell, rivals[_comparison(cell, home)]), home) for cell, home in rows]


def _comparison(cell: CellSummary, home: str) -> tuple[str, ...]:
    return home, cell.sweep, cell.rivals, cell.task


def _compared(cell: CellSummary, rivals: Sequence[CellSummary]) -> CellSummary:
    retained, retained_missing = _value_or_reason(_prr, cell, rivals)
    elasticity, elasticity_missing = _value_or_reason(_peop, cell, rivals)
    return with_values(
        cell,
        prr=retained,
        prr_missing=retained_missing,
        peop=elasticity,
        peop_missing=elasticity_missing,
    )


def _value_or_reason(
    compute: Callable[[CellSummary, Sequence[CellSummary]], float],
    cell: CellSummary,
    rivals: Sequence[CellSummary],
) -> tuple[float | None, str | None]:
    try:
        return compute(cell, rivals), None
    except ValueError as reason:
        return None, str(reason)


def _prr(cell: CellSummary, rivals: Sequence[CellSummary]) -> float:
    higher_is_better = _direction(cell)
    return prr(_score(cell), _score(_baseline(MHA, rivals)), higher_is_better=higher_is_better)


def _peop(cell: CellSummary, rivals: Sequence[CellSummary]) -> float:
    higher_is_better = _direction(cell)
    if cell.attention in SHA:
        raise ValueError("it is single-head attention itself")
    sha = _baseline(SHA, rivals)
    return peop(
        _score(cell),
        _score(sha),
        _parameters(cell),
        _parameters(sha),
        higher_is_better=higher_is_better,
    )


def _baseline(names: Sequence[str], rivals: Sequence[CellSummary]) -> CellSummary:
    """The row of the first of these names that there is."""
    for name in names:
        found = [cell for cell in rivals if cell.attention == name]
        if len(found) > 1:
            what = f"{len(found)} rows of this sweep have attention {name}, with different options or pretraining"
            raise ValueError(f"{what}: the baseline is ambiguous")
        if found:
            return found[0]
    wanted = " or ".join(names)
    raise ValueError(
        f"this sweep has no row with attention {wanted} on the same backbone, method, architecture and task"
    )


def _score(cell: CellSummary) -> float:
    if cell.score_mean is None:
        raise ValueError(f"attention {cell.attention} has no test score")
    return cell.score_mean


def _parameters(cell: CellSummary) -> int:
    if cell.attention_parameters is None:
        raise ValueError(
            f"the attention parameters of {cell.attention} were not counted: no trial has ended that counted them"
        )
    return cell.attention_parameters


def _direction(cell: CellSummary) -> bool:
    if cell.higher_is_better is None:
        raise ValueError("higher is better on some of these tasks and lower on others")
    return cell.higher_is_better
