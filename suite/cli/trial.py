"""`suite trial`: one training run by hand, without Ray, Optuna or MLflow."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli import complete
from suite.cli.options import (
    DEFAULT_HOME,
    AttentionOption,
    BackboneOption,
    DataRootOption,
    HomeOption,
    MethodOption,
    SetOption,
    TasksOption,
    TrustOption,
)
from suite.cli.render import stdout_for_result
from suite.errors import UnknownNameError

if TYPE_CHECKING:
    from suite.record.spec import Phase, TrialSpec

SETTINGS = ("learning_rate", "seed", "phase", "decoder_objective", "training", "limit")
# Our choice: within the range of most PETL methods; full fine-tuning wants less.
DEFAULT_LEARNING_RATE = 1e-3


def trial(
    backbone: BackboneOption,
    method: MethodOption,
    task: Annotated[
        str,
        typer.Option(
            "--task", metavar="T", autocompletion=complete.tasks, help="A task (suite list tasks)."
        ),
    ],
    attention: AttentionOption = "pretrained",
    overrides: SetOption = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Worker processes; 1 = this process, for a debugger.")
    ] = 1,
    test: Annotated[
        bool,
        typer.Option(
            "--test",
            help="Score the test data too, with the best epoch; without it they are not read.",
        ),
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Forget an earlier run of exactly this trial and train anew."),
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    data_root: DataRootOption = None,
    tasks: TasksOption = None,
    trust: TrustOption = None,
) -> None:
    """Train once, without Ray, Optuna or MLflow, and print the result record as JSON.

    --set takes learning_rate (default 1e-3), seed, training.*, limit.*, and the method's own
    settings by their bare names (rank=8).
    `score` is the best validation score; with --test the test score of that epoch.
    """
    from suite.record.folder import Home
    from suite.storage.workspace import Workspace

    spec = build_spec(
        backbone,
        method,
        task,
        attention=attention,
        overrides=overrides or (),
        ranks=ranks,
        test=test,
    )
    folder = Home(home).trial(spec)
    # After the specification was checked: a mistake must not cost the earlier run.
    if again and folder.path.exists():
        shutil.rmtree(folder.path)
    if folder.result() is not None:
        print(f"already trained: {folder.path}; --again trains anew", file=sys.stderr)
    with stdout_for_result():
        # torch and DeepSpeed take seconds: a mistake in the command is told before.
        from suite.train.launch import train_trial

        result = train_trial(spec, Workspace(Home(home), data_root))
    # The very content of result.json, with its checksum.
    print(result.as_bytes().decode(), end="")
    # The record is printed all the same: it holds the cause.
    if not result.status.has_score:
        raise typer.Exit(1)


def build_spec(
    backbone: str,
    method: str,
    task: str,
    *,
    attention: str = "pretrained",
    overrides: Sequence[str] = (),
    ranks: int = 1,
    test: bool = False,
) -> TrialSpec:
    """The specification of a run by hand, complete and checked; reads no weights and no data.

    Raises:
        ConfigError: A name, key or value cannot be used, or choices do not go together.
    """
    from suite.backbones.loading import load_tokenizer
    from suite.cli.arms import GROUPS, make_arm, read_overrides, resolve_backbone
    from suite.config.loader import validate
    from suite.config.task import load_task
    from suite.data.make_objective import make_objective
    from suite.petl.arm import check_arm
    from suite.record.spec import TrialSpec
    from suite.train.engine_config import micro_batching

    start: dict[str, Any] = {"learning_rate": DEFAULT_LEARNING_RATE, "training": {}}
    data = read_overrides(start, overrides, method=method, groups=(*SETTINGS, *GROUPS))
    changes = {}
    for key in GROUPS:
        if key in data:
            changes[key] = data.pop(key)
    arm = make_arm(backbone, method, attention, changes)
    identity = {
        # Runs by hand form a sweep of their own, apart from the searched ones.
        "sweep": "trial",
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
    kind = resolved.family.kind
    tokenizer = load_tokenizer(resolved, draft=True)
    objective = make_objective(
        spec.task,
        kind=kind,
        tokenizer=tokenizer,
        training=spec.training,
        decoder_objective=spec.decoder_objective,
    )
    check_arm(resolved, objective.head, spec.arm, max_length=objective.positions)
    return spec


def _phase(given: Any, test: bool) -> Phase:
    from suite.record.spec import Phase

    # Only the confirm phase may read test data.
    if given is None:
        if test:
            return Phase.CONFIRM
        return Phase.SEARCH
    known = [Phase.SEARCH, Phase.CONFIRM]
    if given not in known:
        raise UnknownNameError("phase", str(given), known, where="--set")
    return Phase(given)
