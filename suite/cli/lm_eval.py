"""`suite lm-eval`: EleutherAI's lm-eval library on any arm of a causal backbone."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli import complete, render
from suite.cli.options import (
    DataRootOption,
    Format,
    FormatOption,
    HomeOption,
    SetOption,
    TrackingOption,
    TrustOption,
    existing_home,
    was_typed,
)
from suite.cli.paper import with_paper
from suite.cli.render import Column, Row, column, put
from suite.config.lm_eval import DEFAULT_TASKS
from suite.config.names import DEFAULT_HOME
from suite.errors import ConfigError, IncompatibleError

if TYPE_CHECKING:
    from suite.config.lm_eval import LmEvalConfig
    from suite.evaluation.subjects import Subject
    from suite.record.cells import Cell
    from suite.record.folder import Home

NAMES = (
    "sweep",
    "backbone",
    "attention",
    "attention_options",
    "method",
    "architecture",
    "task",
    "arm",
)
KEYS = (
    *NAMES,
    "lm_eval_task",
    "metric",
    "value",
    "std",
    "stderr",
    "seeds",
    "reference_score",
    "reference_source",
    "difference",
)
"""Keys of a row; values are in lm-eval's own units, accuracies from 0 to 1."""


def lm_eval(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="CELL|DIR", help="A cell's confirmed runs, or what `suite export` wrote."
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete.sweeps_of_home,
            help="All confirmed runs of this sweep.",
        ),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(metavar="B", help="This backbone, untrained, instead of trained runs."),
    ] = None,
    attention: Annotated[
        str, typer.Option(metavar="V", help="Attention variant of the --backbone.")
    ] = "pretrained",
    overrides: SetOption = None,
    tasks: Annotated[
        str, typer.Option(metavar="T,T:N", help="Tasks, groups or tags of lm-eval, with shots.")
    ] = ",".join(DEFAULT_TASKS),
    include_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Task files of your own.")
    ] = None,
    before: Annotated[
        bool, typer.Option("--before", help="Measure also what each arm starts from, untrained.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Questions per task, to try it out; scores are then no result."),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Questions at a time. (default: GPU auto, CPU 8)"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="D", help="cpu, cuda or cuda:N. (default: the GPU if there is one)"),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, fp32, bf16 or fp16; auto = bf16 on a GPU that has it.")
    ] = "auto",
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the model sees at a time. (default: its positions)"),
    ] = None,
    # 1234 is lm-eval's own default, so that the draw is the one that others report.
    seed: Annotated[int, typer.Option(min=0, help="Seed that draws the solved examples.")] = 1234,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again what was measured.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    data_root: DataRootOption = None,
    tracking_uri: TrackingOption = None,
    trust: TrustOption = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Measure causal language models with lm-eval; what was measured is not measured again.

    A model is one of: CELL or --sweep (the confirmed runs, all seeds), --backbone (untrained), DIR
    (an exported model). Results stand in lm-eval.json in the trial's folder and in MLflow. --set
    takes backbone.config.* and attention.options.*. Tasks read their data from the hub's cache, or
    from files that a task file in --include-path names.
    """
    given = []
    if what is not None:
        given.append("CELL or DIR")
    if backbone is not None:
        given.append("--backbone")
    if len(given) > 1 or (not given and sweep is None):
        got = " and ".join(given) or "no model"
        raise ConfigError(f"got {got}, expected one of CELL, DIR, --sweep NAME and --backbone B")
    exported = what is not None and Path(what).is_dir()
    # No cell has such a name, and the home would be searched for it.
    if what is not None and not exported and what.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"{what}: no such folder; expected one that `suite export` wrote")
    if sweep is not None and (backbone is not None or exported):
        raise ConfigError(
            f"--sweep {sweep}: means the confirmed runs of that sweep, and --backbone or DIR means"
            " another model; leave one of the two out"
        )
    _refuse_idle(_typed(context), untrained=backbone is not None, exported=exported)
    config = _config(
        tasks=tasks.split(","),
        include_path=None if include_path is None else str(include_path),
        before=before,
        limit=limit,
        batch_size=_whole(batch_size),
        max_length=max_length,
        dtype=dtype,
        seed=seed,
    )
    # lm-eval and the data sets print to stdout; a person may pipe the table from there.
    with render.stdout_for_result():
        # Both import torch, which takes seconds: `--help` must not wait for it.
        from suite.evaluation.harness import choose_device
        from suite.record.folder import Home

        chosen = choose_device(device)
        place = Home(home)
        if backbone is not None:
            subjects = [_untrained(place, backbone, attention, overrides or (), data_root)]
        elif what is not None and exported:
            subjects = [_exported(Path(what))]
        else:
            subjects = _of_home(
                Home(existing_home(home)), what, sweep, before=before, data_root=data_root
            )
        found, failed = _measured(subjects, config, device=chosen, again=again)
        # Exported models and those of --backbone belong to no sweep.
        sweeps = set()
        for subject in subjects:
            if subject.names["sweep"]:
                sweeps.add(str(subject.names["sweep"]))
        # A cell is of one sweep, which has the paper's line for what its runs started from.
        if sweep is None and sweeps:
            (sweep,) = sweeps
        rows = with_paper(found, place, sweep)
        _sync(place, tracking_uri, sweeps)
    # The table comes first: what could be measured is of use whatever failed.
    render.render(rows, columns(rows), fmt, keys=KEYS)
    for folder, why in failed.items():
        put(f"not measured: {folder}: {why}", err=True)
    if failed:
        raise typer.Exit(1)


def _typed(context: typer.Context) -> set[str]:
    """Options whose values were typed, among those that not every model takes."""
    options = {"attention": "--attention", "overrides": "--set", "before": "--before"}
    return {option for name, option in options.items() if was_typed(context, name)}


def _refuse_idle(typed: Set[str], *, untrained: bool, exported: bool) -> None:
    """Refuse options that would change nothing: whoever types them expects other numbers.

    Raises:
        ConfigError: There is one.
    """
    for option in ("--attention", "--set"):
        if option in typed and not untrained:
            raise ConfigError(
                f"{option} changes a --backbone alone, and trained models stay as they are; add "
                f"--backbone B instead of the model, or leave {option} out"
            )
    if "--before" in typed and untrained:
        raise ConfigError("--before: the --backbone is untrained already; leave --before out")
    if "--before" in typed and exported:
        raise ConfigError(
            "--before: the exported model does not know what its run started from; give CELL "
            "instead of DIR, or leave --before out"
        )


def _whole(text: str | None) -> int | str | None:
    # `auto` stays text; the configuration refuses any other word.
    if text is not None and text.isdecimal():
        return int(text)
    return text


def _config(**given: Any) -> LmEvalConfig:
    from suite.config.lm_eval import LmEvalConfig
    from suite.config.loader import validate

    return validate(LmEvalConfig, given, where="suite lm-eval")


def _measured(
    subjects: Sequence[Subject], config: LmEvalConfig, *, device: str, again: bool
) -> tuple[list[Row], dict[str, str]]:
    """Measure what is missing; the rows of all subjects, and why some could not be measured.

    Rows come from each subject's `lm-eval.json`, so that earlier results are among them.
    """
    from suite.evaluation.library import Library
    from suite.evaluation.run import measure, plan

    failed = measure(
        subjects,
        config,
        device=device,
        again=again,
        on_progress=lambda line: put(line, err=True),
    )
    # The records may hold results of other calls, with other tasks or settings.
    _, wanted = plan(subjects, config, Library(config.include_path), device=device)
    return list(result_rows(subjects, wanted)), failed


def _untrained(
    home: Home, backbone: str, attention: str, overrides: Sequence[str], data_root: Path | None
) -> Subject:
    from suite.evaluation.subjects import untrained
    from suite.train.arms import make_arm, read_overrides

    changes = read_overrides({}, overrides, method="full", groups=("backbone", "attention"))
    return untrained(make_arm(backbone, "full", attention, changes), home, data_root=data_root)


def _exported(folder: Path) -> Subject:
    """A model that `suite export` wrote; its results stand in the same folder."""
    from suite.evaluation.harness import Opened
    from suite.evaluation.subjects import Subject, check_head, check_writes, positions_of
    from suite.export import load
    from suite.export.base import open_base
    from suite.export.description import read_description

    description = read_description(folder)
    resolved = open_base(description, folder)
    arm = description.arm
    # Refuse before lm-eval loads its data: that takes minutes.
    check_writes(resolved)
    check_head(description.made_head, arm, description.task)
    names = {"sweep": None, **arm.names, "arm": arm.key}
    names |= {"task": description.task, "seed": description.seed}

    def opened() -> Opened:
        loaded = load(folder)
        return Opened(loaded.model, loaded.tokenizer)

    return Subject(folder, names, positions_of(resolved, arm), opened)


def _of_home(
    home: Home, what: str | None, sweep: str | None, *, before: bool, data_root: Path | None
) -> list[Subject]:
    """The confirmed runs of a cell, or of every cell of a sweep whose model writes."""
    from suite.evaluation.subjects import confirmed_run, confirmed_trials, start_of
    from suite.leaderboard.select import find_cell, read_arms

    cells: list[Cell] = []
    if what is not None:
        cells.append(find_cell(home, what, sweep=sweep))
    else:
        for cells_of_arm in read_arms(home, sweep).values():
            cells += cells_of_arm
    # By folder: seeds of one arm share the untrained model that they start from.
    found: dict[Path, Subject] = {}
    refused = []
    for trial in confirmed_trials(cells):
        try:
            subject = confirmed_run(trial, home)
        except IncompatibleError as error:
            # A sweep may mix models that write with others; those are passed over.
            refused.append(error)
            continue
        found[subject.folder] = subject
        if before:
            start = start_of(trial, home, data_root=data_root)
            found[start.folder] = start
    if not found and refused:
        raise refused[0]
    if not found:
        raise ConfigError(
            f"{what or f'sweep {sweep}'}: has no finished run of the confirm phase; run the sweep "
            "to its end first"
        )
    return list(found.values())


def result_rows(subjects: Iterable[Subject], wanted: Mapping[Path, Set[str]]) -> Iterable[Row]:
    """A row for each arm, task of its training, lm-eval task and metric, over the seeds.

    Args:
        wanted: By a subject's folder the keys of the results to show.
    """
    from suite.config.hashing import canonical_json
    from suite.record.lm_eval import over_seeds, read_record

    # Options and architectures are nested: as canonical JSON they can be the key of a group.
    groups = defaultdict(list)
    for subject in subjects:
        groups[canonical_json(_names_of(subject))].append(subject)
    for members in groups.values():
        records = []
        for member in members:
            records.append(read_record(member.folder).only(wanted[member.folder]))
        for name, metrics in over_seeds(records).items():
            for metric, numbers in metrics.items():
                yield {
                    **_names_of(members[0]),
                    "lm_eval_task": name,
                    "metric": metric,
                    "value": numbers["mean"],
                    "std": numbers["std"],
                    "stderr": numbers["stderr"],
                    "seeds": numbers["seeds"],
                }


def _names_of(subject: Subject) -> dict[str, Any]:
    return {key: subject.names[key] for key in NAMES}


def columns(rows: Sequence[Row]) -> list[Column]:
    """Columns of the table; an axis with one value in all rows is left out."""
    shown = []
    for axis in (column("sweep"), column("backbone"), Column("attention", render.attention)):
        if len({axis.show(row) for row in rows}) > 1:
            shown.append(axis)
    shown.append(column("method"))
    # An architecture is worth a column where one method comes with several.
    methods = {row["method"] for row in rows}
    arms = {(row["method"], str(row["architecture"])) for row in rows}
    if len(arms) > len(methods):
        shown.append(column("architecture", show=render.settings, rank=2))
    shown += [
        column("task", "trained on"),
        column("lm_eval_task", "lm-eval task"),
        column("metric"),
        column("value", show=_four),
        column("stderr", "± stderr", _four),
    ]
    if any(row["reference_score"] is not None for row in rows):
        shown.append(column("reference_score", "paper", _four))
    shown.append(column("std", "std of seeds", _four, rank=1))
    shown.append(column("seeds", show=render.count, rank=1))
    return shown


def _four(value: float | None) -> str:
    return render.number(value, ".4f")


def _sync(home: Home, tracking_uri: str | None, sweeps: Iterable[str]) -> None:
    """Write the results into MLflow; if it is out of reach, `suite sync` can do it later."""
    from suite.plan.definition import sweeps as defined_sweeps
    from suite.tracking.store import resolve_uri
    from suite.tracking.writer import sync

    # Runs by hand (`suite trial`) and copied trial folders belong to no sweep that MLflow shows.
    for sweep in sorted(set(sweeps) & set(defined_sweeps(home))):
        report = sync(home, tracking_uri=resolve_uri(home, tracking_uri, write=True), sweep=sweep)
        if report.unreachable is not None:
            command = ["suite", "sync", "--home", str(home.path)]
            if tracking_uri is not None:
                command += ["--tracking-uri", tracking_uri]
            put(f"MLflow is behind ({report.unreachable}); run: {shlex.join(command)}", err=True)
