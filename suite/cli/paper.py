"""Adds the scores that a paper printed to the rows of `suite lm-eval`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from suite.cli.render import Row

if TYPE_CHECKING:
    from suite.config.reference import Reference
    from suite.record.folder import Home


def with_paper(rows: Iterable[Row], home: Home, sweep: str | None) -> list[Row]:
    """The same rows with `reference_score`, `reference_source` and `difference`.

    Args:
        rows: Rows as `suite.cli.lm_eval.result_rows` makes them.
        home: The home whose sweeps hold the papers' scores, under `reference`.
        sweep: The sweep of rows that name none, which are those of untrained arms.
    """
    from suite.evaluation.subjects import UNTRAINED
    from suite.plan.definition import known_plan
    from suite.record.references import evaluated

    # A plan is read from two files; a sweep has many rows.
    @cache
    def lines(name: str | None) -> Sequence[Reference]:
        if name is None:
            return ()
        plan = known_plan(home, name)
        if plan is None:
            return ()
        return plan.config.reference

    def reference_of(row: Row) -> dict[str, Any]:
        method = row["method"]
        trained = method != UNTRAINED
        # A paper's line about an untrained model names no method.
        if not trained:
            method = None
        printed = evaluated(
            lines(row["sweep"] or sweep),
            trained=trained,
            method=method,
            backbone=row["backbone"],
            attention=row["attention"],
            architecture=row["architecture"],
            options=row["attention_options"],
        )
        found = printed.get(f"{row['lm_eval_task']}/{row['metric']}")
        # Every row gets the keys, so that all rows have the same columns.
        if found is None:
            return {"reference_score": None, "reference_source": None, "difference": None}
        difference = None
        if found["comparable"]:
            difference = row["value"] - found["score"]
        return {
            "reference_score": found["score"],
            "reference_source": found["source"],
            "difference": difference,
        }

    return [{**row, **reference_of(row)} for row in rows]
