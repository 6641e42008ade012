"""Whether a row may stand on the leaderboard: every check of its confirm runs holds, and all its runs saw the same data and code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from suite.config.hashing import canonical_json
from suite.record.cells import Trial
from suite.record.result import TrialResult

COMPARED_VERSIONS = (
    "petl-suite",
    "torch",
    "transformers",
    "deepspeed",
    "datasets",
    "tokenizers",
    "peft",
    "numpy",
)
"""Packages that can change a number; Ray, Optuna and MLflow cannot."""


def judge(confirmed: Sequence[Trial], search: Sequence[Trial]) -> dict[str, Any]:
    """The fields `admitted`, `rejected` and `dirty` of a row.

    Args:
        confirmed: The confirm runs that the row counts.
        search: Its search trials; of these only data and versions count, as a hopeless learning rate need not train anything.

    Returns:
        `admitted` is None while no confirm run has a score, and where runs from before there were checks have nothing against them.
    """
    runs = [(t, t.result) for t in confirmed if t.result is not None and t.result.score is not None]
    everything = [
        t.result
        for t in (*confirmed, *search)
        if t.result is not None and t.result.score is not None
    ]
    rejected = [
        f"seed {t.spec.seed}: {problem}"
        for t, run in runs
        if run.validity
        for problem in run.validity.problems()
    ]
    rejected += _disagreements(everything)
    checked = bool(runs) and all(run.validity is not None for _, run in runs)
    dirty = any((run.provenance.get("git") or {}).get("dirty") for run in everything)
    return {
        "admitted": False if rejected else True if checked else None,
        "rejected": rejected,
        "dirty": dirty,
    }


def judge_mean(rows: Mapping[str, tuple[bool | None, Sequence[str], bool]]) -> dict[str, Any]:
    """The same for the mean over tasks: one task that is rejected is enough.

    Args:
        rows: The three fields by task.
    """
    rejected = [f"{task}: {reason}" for task, (_, reasons, _) in rows.items() for reason in reasons]
    admitted = [admitted for admitted, _, _ in rows.values()]
    return {
        "admitted": False if False in admitted else None if None in admitted else True,
        "rejected": rejected,
        "dirty": any(dirty for _, _, dirty in rows.values()),
    }


def _disagreements(runs: Sequence[TrialResult]) -> Iterator[str]:
    """What should be the same in all runs of a row; what a run does not say is passed over."""
    asked: dict[str, Callable[[TrialResult], Any]] = {
        "its runs read different data": lambda run: run.data_hash or None,
        "its runs have splits of different sizes": lambda run: (
            {n: rows for n, rows in run.splits.items() if n != "test"} or None
        ),
    }
    for reason, ask in asked.items():
        if len(_values(runs, ask)) > 1:
            yield reason
    for package in COMPARED_VERSIONS:
        found = _values(
            runs,
            lambda run, package=package: (run.provenance.get("versions") or {}).get(package),  # type: ignore[misc]
        )
        if len(found) > 1:
            yield f"its runs used different versions of {package} ({', '.join(sorted(found))})"


def _values(runs: Sequence[TrialResult], ask: Callable[[TrialResult], Any]) -> set[str]:
    known = [value for run in runs if (value := ask(run)) is not None]
    return {value if isinstance(value, str) else canonical_json(value) for value in known}
