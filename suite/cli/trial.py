"""`suite trial`: one training run by hand, without Ray, Optuna or MLflow."""

from __future__ import annotations

from typing import Annotated

import typer

from suite.cli import complete
from suite.cli.options import (
    AttentionOption,
    BackboneOption,
    DataRootOption,
    HomeOption,
    MethodOption,
    SetOption,
    TasksOption,
    TrustOption,
)
from suite.cli.render import put, stdout_for_result
from suite.config.names import DEFAULT_HOME


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

    --set takes learning_rate (default 1e-3), seed, training.*, limit.*, decoder_objective,
    backbone.*, attention.options.*, and the method's own settings by their bare names (rank=8).
    `score` is the best validation score; with --test the test score of that epoch.
    """
    # torch takes seconds to import, and `--help` must not wait for it.
    from suite.plan.preflight import check_home
    from suite.record.folder import Home
    from suite.train.by_hand import build_spec, train_by_hand

    place = Home(home)
    check_home(place)
    spec = build_spec(
        backbone,
        method,
        task,
        attention=attention,
        overrides=overrides or (),
        ranks=ranks,
        test=test,
    )
    folder = place.trial(spec)
    if not again and folder.result() is not None:
        put(f"already trained: {folder.path}; --again trains anew", err=True)
    with stdout_for_result():
        # After the specification was checked: a mistake must not cost the earlier run.
        result = train_by_hand(spec, place, data_root=data_root, again=again)
    # The very content of result.json, with its checksum.
    print(result.as_bytes().decode(), end="")
    # The record is printed all the same: it holds the cause.
    if not result.status.has_score:
        raise typer.Exit(1)
