"""What a paper printed, beside the rows of `suite lm-eval`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from suite.cli.render import Row

if TYPE_CHECKING:
    from suite.config.reference import Reference
    from suite.record.folder import Home


def with_paper(rows: Iterable[Row], home: Home, sweep: str | None) -> list[Row]:
    """The same rows with `reference_score`, `reference_source` and `difference` from the `reference` of their sweep.

    Args:
        rows: As `suite.cli.lm_eval.result_rows`.
        home: Where the sweeps are defined.
        sweep: Of the rows that name none, which are those of untrained arms.
    """
    from suite.evaluation.subjects import UNTRAINED
    from suite.plan.definition import known_plan
    from suite.record.references import evaluated

    @cache
    def lines(name: str | None) -> Sequence[Reference]:
        if name is None:
            return ()
        plan = known_plan(home, name)
        if plan is None:
            return ()
        return plan.config.reference

    def of(row: Row) -> dict[str, Any]:
        trained = row["method"] != UNTRAINED
        about = {key: row[key] for key in ("backbone", "attention", "architecture")} | {
            "options": row["attention_options"]
        }
        if trained:
            method = row["method"]
        else:
            method = None
        found = evaluated(
            lines(row["sweep"] or sweep), trained=trained, method=method, **about
        ).get(f"{row['lm_eval_task']}/{row['metric']}")
        if found is None:
            return dict.fromkeys(("reference_score", "reference_source", "difference"))
        return {
            "reference_score": found["score"],
            "reference_source": found["source"],
            "difference": row["value"] - found["score"],
        }

    return [{**row, **of(row)} for row in rows]
