"""Descriptions of experiments and runs, as MLflow's pages show them (tag `mlflow.note.content`, Markdown).

They are written once, with what they describe, so that whoever edits one in MLflow keeps what was written there.
"""

from __future__ import annotations

from suite.config.arm import Arm
from suite.record.spec import Phase, TrialSpec
from suite.redact import redact

NOTE = "mlflow.note.content"
FORMULAS = "Formula, unit and source of every number: docs/metrics.md of petl-suite."


def sweep_note(sweep: str) -> str:
    """Of a sweep's experiment."""
    return redact(
        f"The sweep **{sweep}** of petl-suite. A run with others under it is a cell, one arm on one task: its metrics sum these up, "
        "its trials. A run `ranks ...` says which arms can be told apart, the run `report` has the report as its artifact.\n\n"
        "- Only cells: `tags.suite.kind = 'cell'`; only test scores: `tags.phase = 'confirm'`; one method: `tags.method = 'lora'`.\n"
        "- The table with intervals, ranks and costs: `suite leaderboard --sweep "
        + sweep
        + "`.\n\n"
        + FORMULAS
    )


def cell_note(spec: TrialSpec) -> str:
    """Of a cell's run."""
    return redact(
        f"{_arm(spec.arm)} on the task **{spec.task.name}**: {spec.task.description}.\n\n"
        "The runs under this one are its trials. `search N` tried a learning rate, scored on validation data; the best one was trained "
        f"again with fresh seeds, `confirm seed N`, and only these were tested.\n\n{FORMULAS}"
    )


def trial_note(spec: TrialSpec) -> str:
    """Of a trial's run; short, for there are many."""
    what = (
        "Tried on validation data"
        if spec.phase is Phase.SEARCH
        else "Confirms the learning rate found, on test data"
    )
    return redact(
        f"{what}: {_arm(spec.arm)} on **{spec.task.name}**, learning rate {spec.learning_rate:g}, seed {spec.seed}. {FORMULAS}"
    )


def _arm(arm: Arm) -> str:
    attention = (
        "" if arm.attention.name == "pretrained" else f" with `{arm.attention.name}` attention"
    )
    return f"`{arm.method}` on `{arm.backbone.name}`{attention}"
