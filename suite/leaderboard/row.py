"""Make the row of a cell from its state: everything that its own trials and the plan say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from suite.config.arm import Arm
from suite.config.hashing import short_hash
from suite.config.reference import MEAN
from suite.leaderboard.curves import (
    epochs_at_best,
    learning_rate_curve,
    search_best,
    sensitivity_decades,
)
from suite.leaderboard.fields import Row, measured
from suite.leaderboard.intervals import interval_fields
from suite.leaderboard.measures import CellResults, mean, spread
from suite.leaderboard.preparation import with_known_gap
from suite.leaderboard.validity import judge
from suite.plan.cell_state import CellState
from suite.plan.study import lies_at_end
from suite.record.cells import Trial
from suite.record.lm_eval import over_seeds, read_record
from suite.record.references import printed


def cell_row(state: CellState, *, home: str, digest: str = "") -> Row:
    """The row of a cell as far as it has come, without what compares it with other rows.

    Args:
        state: State of the cell, with whole results and not outcomes alone.
        home: Id of the home.
        digest: Digest of what the row is made of (`suite.leaderboard.collect`).
    """
    task = state.cell.task
    confirmed = [with_known_gap(trial) for trial in state.at_best]
    # Costs count the runs with a score: a run that died early would look cheap.
    scored = []
    measured_by_lm_eval = []
    for trial in confirmed:
        if trial.result is not None:
            measured_by_lm_eval.append(read_record(trial.folder.path))
            if trial.result.score is not None:
                scored.append(trial.result)
    ended = [trial.result for trial in state.searched if trial.result is not None]
    # Made first, because the difference to a paper needs the mean.
    of_score = score_fields(confirmed, state.searched) | _looks(state)
    return Row(
        home=home,
        digest=digest,
        status=state.status.value,
        task=task.name,
        higher_is_better=task.higher_is_better,
        search_trials=len(ended),
        lm_eval=over_seeds(measured_by_lm_eval),
        progress=epochs_at_best(confirmed, higher_is_better=task.higher_is_better),
        **_names(state),
        **_study(state),
        **of_score,
        **measured(CellResults(scored, ended)),
        **_references(state, of_score["score_mean"]),
        ended_at=_last_end_s(state),
    )


def _last_end_s(state: CellState) -> float | None:
    """When the last trial of a cell ended; a sweep that loses seeds never becomes older."""
    trials = (*state.searched, *state.confirm.values(), *state.set_aside)
    return max((trial.result.finished_at for trial in trials if trial.result), default=None)


def score_fields(confirmed: Sequence[Trial], searched: Sequence[Trial]) -> dict[str, Any]:
    """What the confirm runs scored, how sure that is, and whether it may be trusted.

    Args:
        confirmed: Runs at the chosen learning rate, ended or not.
        searched: The search trials, which must have seen the same data and code.
    """
    scores: dict[str, float] = {}
    for trial in confirmed:
        if trial.result is not None and trial.result.score is not None:
            scores[str(trial.spec.seed)] = trial.result.score
    verdict = judge(confirmed, searched)
    fields = interval_fields(confirmed)
    contradictions = fields.pop("rejected", [])
    if contradictions:
        verdict["admitted"] = False
        verdict["rejected"] = [*verdict["rejected"], *contradictions]
    return {
        "score_mean": mean(scores.values()),
        "score_std": spread(scores.values()),
        "seeds": len(scores),
        "seed_scores": scores,
        **verdict,
        **fields,
    }


def _looks(state: CellState) -> dict[str, Any]:
    """From how many sets of runs the score was read."""
    looks = state.looks
    return {
        "test_looks": looks.count,
        "looks_warning": looks.warning,
        "looks": looks.as_json(),
    }


def _names(state: CellState) -> dict[str, Any]:
    """What the cell is called, and what it is compared with."""
    arm = state.cell.arm
    return {
        "sweep": state.plan.config.name,
        **arm.names,
        "arm": arm.key,
        "planned_tasks": len(state.plan.config.tasks),
        "own_code": arm.own_code,
        # PRR and PEoP compare within the first, costs within the second.
        "rivals": _arm_without(arm, "attention", "pretrain"),
        "conditions": _arm_without(arm, "method", "architecture"),
    }


def _arm_without(arm: Arm, *keys: str) -> str:
    # Without the hash of the user's own files: only arms that need them have one, and a variant of
    # one's own would have no shipped baseline.
    return short_hash(arm.model_dump(mode="json", exclude={*keys, "code"}))


def _study(state: CellState) -> dict[str, Any]:
    """What the search tried and found, and what was decided about it."""
    study = state.study
    searched = study.searched
    curve = learning_rate_curve(state.searched)
    better = state.cell.task.higher_is_better
    edge = None
    rate, batch_size = state.chosen_setting or (None, None)
    # A fixed rate has no range, and so no edge.
    if rate is not None and not searched.fixed:
        edge = study.edge is not None
        # The guard looks at the best architecture of a study, which may be another one.
        if study.ended is not None and lies_at_end(searched, rate):
            edge = True
    return {
        "search_best": search_best(curve, higher_is_better=better),
        "learning_rate": rate,
        "batch_size": batch_size,
        "edge": edge,
        "curve": curve,
        "lr_sensitivity_decades": sensitivity_decades(curve, higher_is_better=better),
        "learning_rate_low": searched.low,
        "learning_rate_high": searched.high,
        "extensions": study.extensions,
        "saved_trials": study.saved_trials,
        "chosen": state.won,
    }


def _references(state: CellState, score: float | None) -> dict[str, Any]:
    """What a paper printed for the cell, and for the mean over its arm's tasks."""
    config = state.plan.config
    arm = state.cell.arm
    tasks = set(config.tasks)
    own = printed(config.reference, arm, state.cell.task.name, tasks)
    of_mean = printed(config.reference, arm, MEAN, tasks)
    return {**reference_fields(own, score), "reference_mean": of_mean}


def reference_fields(line: dict[str, Any], score: float | None) -> dict[str, Any]:
    """The columns that set a score beside what a paper printed.

    Args:
        line: What `suite.config.reference.Reference.as_row` gives; empty where nothing is printed.
    """
    if not line:
        return {}
    difference = None
    if score is not None and line["comparable"]:
        difference = score - line["score"]
    return {
        "reference_score": line["score"],
        "reference_std": line["std"],
        "reference_source": line["source"],
        "reference": line["printed"],
        "difference": difference,
    }
