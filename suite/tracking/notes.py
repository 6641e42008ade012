"""Descriptions of experiments and runs, as MLflow's pages show them (tag `mlflow.note.content`).

They are Markdown, and are written once, with what they describe: what somebody else writes there
in MLflow stays.
"""

from __future__ import annotations

from suite.leaderboard.fields import Row
from suite.record.spec import Phase, TrialSpec
from suite.redact import redact

NOTE = "mlflow.note.content"
FORMULAS = "Formula, unit and source of every number: docs/metrics.md of petl-suite."


def sweep_note(sweep: str) -> str:
    """Describes the experiment of a sweep."""
    # Names come from files of users and may hold anything, a token in a URL too.
    return redact(
        f"The sweep **{sweep}** of petl-suite. A run with others under it is a cell, one arm on "
        "one task: its metrics sum up its trials. The run `leaderboard` has the rows of all cells "
        "as a file, the run `report` has the report.\n\n"
        "- Only cells: `tags.suite.kind = 'cell'`; only those that are done and not rejected: "
        "`tags.status = 'done'`; only test scores: `tags.phase = 'confirm'`; one method: "
        "`tags.method = 'lora'`; what failed: `attributes.status = 'FAILED'`. Join them by `and`; "
        "cells have tags, and no parameters.\n"
        "- The table with intervals, ranks and costs: "
        f"`suite leaderboard --sweep {sweep}`.\n\n{FORMULAS}"
    )


def rows_note(sweep: str) -> str:
    """Describes the run with the rows of a sweep."""
    return redact(
        f"The rows of the sweep **{sweep}**, one per cell, from which `suite leaderboard` makes "
        f"its table. The tag `suite.file` says which of the two files is the newer one. {FORMULAS}"
    )


def cell_note(row: Row, description: str = "") -> str:
    """Describes the run of a cell.

    Args:
        row: The row of the cell.
        description: What its task is about; empty where that is not known.
    """
    task = f"**{row.task}**"
    if description:
        task += f": {description}"
    # A row has the names alone; the arm itself is only in the trials.
    arm = _arm(row.method, row.backbone, row.attention)
    return redact(
        f"{arm} on the task {task}.\n\n"
        "The runs under this one are its trials. `search N` tried a learning rate, `lr`, scored "
        "on validation data; the best was trained again with fresh seeds, `confirm seed N`, and "
        f"only these were tested.\n\n{FORMULAS}"
    )


def trial_note(spec: TrialSpec) -> str:
    """Describes the run of a trial; short, for there are many."""
    what = "Confirms the learning rate found, on test data"
    if spec.phase is Phase.SEARCH:
        what = "Tried on validation data"
    arm = _arm(spec.arm.method, spec.arm.backbone.name, spec.arm.attention.name)
    return redact(
        f"{what}: {arm} on **{spec.task.name}**, "
        f"learning rate {spec.learning_rate:g}, seed {spec.seed}. {FORMULAS}"
    )


def _arm(method: str, backbone: str, attention: str) -> str:
    # This is the backbone's own attention, which needs no mention.
    if attention == "pretrained":
        return f"`{method}` on `{backbone}`"
    return f"`{method}` on `{backbone}` with `{attention}` attention"
