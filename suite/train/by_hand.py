"""One training run by hand, without Ray, Optuna or MLflow: its specification and its run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.backbones.loading import load_tokenizer
from suite.config.loader import validate
from suite.config.names import BY_HAND
from suite.config.task import load_task
from suite.data.make_objective import objective_of
from suite.data.splits import check_batch_fits
from suite.errors import UnknownNameError
from suite.petl import get_method
from suite.petl.arm import check_arm, check_recomputed
from suite.record.folder import Home
from suite.record.result import TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.workspace import Workspace
from suite.train.arms import GROUPS, make_arm, read_overrides, resolve_backbone
from suite.train.engine_config import micro_batching

SETTINGS = ("learning_rate", "seed", "phase", "decoder_objective", "training", "limit")
# Our choice: within the range of most PETL methods; full fine-tuning wants less.
DEFAULT_LEARNING_RATE = 1e-3


def train_by_hand(
    spec: TrialSpec, home: Home, *, data_root: Path | None = None, again: bool = False
) -> TrialResult:
    """Train a trial, or give the record of one that has ended.

    Args:
        spec: The trial.
        home: Where its folder is.
        data_root: Local data root that replaces the hub.
        again: Whether an earlier run of exactly this trial is forgotten.

    Raises:
        DataError: Its data cannot be read.
        IncompatibleError: There are too few rows for one batch.
    """
    from suite.train.launch import train_trial
    from suite.train.warm import open_data

    folder = home.trial(spec)
    workspace = Workspace(home, data_root)
    if again or folder.result() is None:
        # Before the trial begins: what is wrong with the data is no result of it.
        _, _, data = open_data(spec, workspace)
        rows = data.sizes["train"]
        check_batch_fits(rows, spec.training.batch_size, where=f"task {spec.task.name}")
    if again and folder.path.exists():
        shutil.rmtree(folder.path)
    return train_trial(spec, workspace)


def build_spec(
    backbone: str,
    method: str,
    task: str,
    *,
    attention: str = "pretrained",
    values: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    ranks: int = 1,
    test: bool = False,
) -> TrialSpec:
    """The specification of a run by hand, complete and checked; reads no weights.

    Args:
        backbone: Name, hub id, folder or package of the backbone.
        method: Name of the PETL method.
        task: Name of the task.
        attention: Name of the attention variant.
        values: By the names in `SETTINGS` and `GROUPS`, what is not the default.
        overrides: `key=value` items on top of them, as of `--set`.
        ranks: Worker processes.
        test: Whether the test data are scored too.

    Raises:
        ConfigError: A name, key or value cannot be used, or choices do not go together.
    """
    start = {"learning_rate": DEFAULT_LEARNING_RATE, "training": {}, **(values or {})}
    data = read_overrides(start, overrides, method=method, groups=(*SETTINGS, *GROUPS))
    changes = {}
    for key in GROUPS:
        if key in data:
            changes[key] = data.pop(key)
    arm = make_arm(backbone, method, attention, changes)
    identity = {
        "sweep": BY_HAND,
        "arm": arm,
        "task": load_task(task, where="--task"),
        "world_size": ranks,
    }
    spec = validate(
        TrialSpec, {**data, **identity, "phase": _phase(data.get("phase"), test)}, where="--set"
    )
    micro_batching(spec.training, ranks)  # raises where the batch does not divide
    # What follows checks that backbone, task and method fit; nothing of it is kept.
    resolved = resolve_backbone(arm)
    tokenizer = load_tokenizer(resolved, draft=True)
    objective = objective_of(spec, kind=resolved.family.kind, tokenizer=tokenizer)
    check_recomputed(get_method(method), spec.training)
    check_arm(resolved, objective.head, spec.arm, max_length=objective.positions)
    if get_method(method).keeps_states(spec.training):
        objective.check_can_keep()
    return spec


def _phase(given: Any, test: bool) -> Phase:
    # Only the confirm phase may read test data.
    if given is None:
        if test:
            return Phase.CONFIRM
        return Phase.SEARCH
    known = [Phase.SEARCH, Phase.CONFIRM]
    if given not in known:
        raise UnknownNameError("phase", str(given), known, where="--set")
    return Phase(given)
