"""Judge whether a row may stand on the leaderboard.

Every check of its confirm runs must hold, and all its runs must have seen the same data and code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from suite.config.hashing import canonical_json
from suite.record.cells import Trial
from suite.record.provenance import COMPARED_VERSIONS
from suite.record.result import TrialResult


def judge(confirmed: Sequence[Trial], search: Sequence[Trial]) -> dict[str, Any]:
    """The fields `admitted`, `rejected` and `dirty` of a row.

    Args:
        confirmed: The confirm runs that the row counts.
        search: Its search trials. Of these only data and versions count, because a hopeless
            learning rate need not train anything.

    Returns:
        The fields. `admitted` is None while no confirm run has a score, and where nothing speaks
        against runs whose results hold no checks.
    """
    rejected: list[str] = []
    runs = 0
    checked = 0
    everything: list[TrialResult] = []
    for trial in confirmed:
        result = trial.result
        if result is None or result.score is None:
            continue
        runs += 1
        everything.append(result)
        if result.validity is not None:
            checked += 1
            for problem in result.validity.problems():
                rejected.append(f"seed {trial.spec.seed}: {problem}")
    for trial in search:
        if trial.result is not None and trial.result.score is not None:
            everything.append(trial.result)
    # A damaged record of the search may have chosen another learning rate.
    for trial in (*confirmed, *search):
        if trial.result is not None and trial.result.damaged is not None:
            rejected.append(trial.result.damaged)
    # The search chose the learning rate, so it must have seen the same data and code.
    rejected += _disagreements(everything)
    admitted = None
    # A reason against the row decides even where some of its runs were not checked.
    if rejected:
        admitted = False
    elif runs and checked == runs:
        admitted = True
    return {"admitted": admitted, "rejected": rejected, "dirty": _any_dirty(everything)}


def judge_mean(rows: Mapping[str, tuple[bool | None, Sequence[str], bool]]) -> dict[str, Any]:
    """The same fields for the mean over tasks: one task that is rejected is enough.

    Args:
        rows: The three fields by task.
    """
    rejected = []
    verdicts = []
    dirty = False
    for task, (admitted, reasons, task_dirty) in rows.items():
        verdicts.append(admitted)
        rejected += [f"{task}: {reason}" for reason in reasons]
        dirty = dirty or task_dirty
    verdict: bool | None = True
    # The order matters: one rejection is enough, and one unknown is enough not to admit.
    if False in verdicts:
        verdict = False
    elif None in verdicts:
        verdict = None
    return {"admitted": verdict, "rejected": rejected, "dirty": dirty}


def _any_dirty(runs: Sequence[TrialResult]) -> bool:
    """Whether an edited checkout made one of the runs."""
    for run in runs:
        # From a wheel there is no revision, which is no edit.
        git = run.provenance.get("git") or {}
        if git.get("dirty"):
            return True
    return False


def _disagreements(runs: Sequence[TrialResult]) -> list[str]:
    """What differs between the runs of a row and should not; a run need not say everything."""
    found = []
    data = set()
    splits = set()
    for run in runs:
        # Results without a data hash say nothing here.
        if run.data_hash:
            data.add(run.data_hash)
        # Only confirm runs have test data.
        sizes = {name: rows for name, rows in run.splits.items() if name != "test"}
        if sizes:
            splits.add(canonical_json(sizes))
    if len(data) > 1:
        found.append("its runs read different data")
    if len(splits) > 1:
        found.append("its runs have splits of different sizes")
    precisions = {run.precision for run in runs if run.precision}
    if len(precisions) > 1:
        found.append(f"its runs computed in different precisions ({', '.join(sorted(precisions))})")
    if _weights_differ(runs):
        found.append("its runs used different backbone weights, code or tokenizers")
    for package in COMPARED_VERSIONS:
        versions = _versions(runs, package)
        if len(versions) > 1:
            names = ", ".join(sorted(versions))
            found.append(f"its runs used different versions of {package} ({names})")
    return found


def _weights_differ(runs: Sequence[TrialResult]) -> bool:
    """Whether the runs began from different weights, as far as they say from which."""
    found: dict[str, set[str]] = {}
    for run in runs:
        backbone = run.provenance.get("backbone") or {}
        # A revision such as `main`, or a folder, may hold other files from one day to the next.
        said = {key: backbone.get(key) for key in ("commit", "sha256", "own_code")}
        said["tokenizer"] = run.provenance.get("tokenizer_sha256")
        if run.pretrain is not None:
            said["pretrain"] = run.pretrain.weights_sha256
        for key, value in said.items():
            if value is not None:
                found.setdefault(key, set()).add(str(value))
    return any(len(values) > 1 for values in found.values())


def _versions(runs: Sequence[TrialResult], package: str) -> set[str]:
    found = set()
    for run in runs:
        version = (run.provenance.get("versions") or {}).get(package)
        if version is not None:
            found.add(str(version))
    return found
