"""`suite export`: a confirmed model as a folder that others can load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from suite.cli import complete
from suite.cli.options import HomeOption, TasksOption, existing_home
from suite.cli.render import put, size, stdout_for_result
from suite.config.names import DEFAULT_HOME
from suite.errors import ConfigError, StorageError
from suite.signals import end_here, on_stop

if TYPE_CHECKING:
    from suite.export.card import Facts
    from suite.record.cells import Cell, Trial


def export(
    cell: Annotated[
        str,
        typer.Argument(
            metavar="CELL",
            autocompletion=complete.cells,
            help="ARM/TASK, as `lora/rte`; ARM where it has one task.",
        ),
    ],
    out: Annotated[
        str, typer.Argument(metavar="DIR", help="A new folder, or a URL: s3://BUCKET/PREFIX.")
    ],
    home: HomeOption = DEFAULT_HOME,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete.sweeps_of_home,
            help="The sweep to take, if several have such a cell.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the confirm run to take. (default: the best validation score)"),
    ] = None,
    as_lora: Annotated[
        bool,
        typer.Option(
            "--as-lora",
            help="Write a method of peft as plain LoRA, for servers that know no other.",
        ),
    ] = False,
    base: Annotated[
        bool,
        typer.Option(
            "--base/--no-base",
            help="Whether an adapter of a classifying encoder brings a copy of its base, so that"
            " pipeline(DIR) runs. A base without a name is always copied.",
        ),
    ] = True,
    tasks: TasksOption = None,
) -> None:
    """Write a confirmed model as safetensors, with tokenizer, labels and model card.

    The format is plain transformers weights where the model is one (full fine-tuning, folded
    attention), peft's own where peft has the method (LoRA, prompts, peft:*), and else a folder for
    the suite alone. `suite.load(DIR).predict(texts)` answers from each. What was written is loaded
    and compared before it gets its name.
    """
    # Imported here: torch takes seconds, and `--help` must not wait for it.
    from suite.leaderboard.select import find_cell
    from suite.record.folder import Home

    _check_new(out)  # before a model is loaded
    at = Home(existing_home(home))
    found = find_cell(at, cell, sweep=sweep)
    trial = chosen_trial(found, seed)
    # transformers and peft print while they load and save; a signal must leave no half of a folder.
    with stdout_for_result(), on_stop(end_here):
        from suite.export import export as write
        from suite.train.restore import restore

        facts = facts_of(found)
        with _folder_for(out) as folder:
            written = write(
                restore(trial.folder, at),
                folder,
                facts,
                name=_name_of(out),
                lora=as_lora,
                copy_base=base,
            )
    # The model is written all the same: it may be wanted to find out why.
    if facts.admitted is False:
        put(f"this row is rejected: {'; '.join(facts.rejected)}; the model card says so", err=True)
    if written.description.note:
        put(f"note: {written.description.note}", err=True)
    put(
        f"{out}: {written.description.format} format, {size(written.bytes)}, seed {trial.spec.seed}"
    )


def _check_new(out: str) -> None:
    from suite.storage.base import SHORT_PATIENCE_S
    from suite.storage.urls import is_local, open_storage

    if is_local(out):
        folder = Path(open_storage(out).url)
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    else:
        # A storage has no folders: any key below the prefix counts as one.
        taken = bool(open_storage(out, patience_s=SHORT_PATIENCE_S).keys())
    if taken:
        raise ConfigError(f"{out}: exists and is not empty; give a new folder")


def _name_of(out: str) -> str:
    """What the exported files call the folder: its path as given, or the last part of a URL."""
    if "://" not in out:
        return str(Path(out))
    return out.rstrip("/").rpartition("/")[2]


@contextmanager
def _folder_for(out: str) -> Iterator[Path]:
    """The folder itself, or for a URL a scratch folder, whose files are then put there."""
    from suite.export.description import FILE
    from suite.storage.urls import is_local, open_storage

    if is_local(out):
        yield Path(open_storage(out).url)
        return
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export"
        yield folder
        storage = open_storage(out)
        files = [path for path in folder.rglob("*") if path.is_file()]
        # The description comes last: an export that has it is whole.
        files.sort(key=lambda path: (path.name == FILE, path))
        keys = [path.relative_to(folder).as_posix() for path in files]
        begun = 0
        try:
            for path, key in zip(files, keys, strict=True):
                begun += 1
                storage.push(path, key)
        except BaseException:
            # A part of an export is no use to anybody, and would stand in the next one's way.
            with suppress(StorageError):
                for key in keys[:begun]:
                    storage.delete(key)
            raise


def chosen_trial(cell: Cell, seed: int | None) -> Trial:
    """The confirm run to export: that of the seed, else the best one on validation data.

    Raises:
        ConfigError: There is no confirm run, or none with this seed; the message lists them.
    """
    runs = confirmed(cell)
    if not runs:
        # The message tells a sweep that has not ended from one whose weights are gone.
        ended = sum(trial.result is not None for trial in cell.confirm)
        scored = sum(
            trial.result is not None and trial.result.status.has_score for trial in cell.confirm
        )
        if scored:
            raise ConfigError(
                f"{cell.key}: no confirmed run to export; {scored} confirm runs have a score, and "
                "their weights (best.safetensors) are not in this home, as in one unpacked from "
                "an archive of results. Export from the home where the sweep ran"
            )
        raise ConfigError(
            f"{cell.key}: no confirmed run to export; it has {len(cell.search)} search trials and "
            f"{ended} ended confirm runs, none with a score and its weights. "
            "Run the sweep to its end: suite run SWEEP"
        )
    if seed is None:
        # By validation, because a choice by test score would make that score too good.
        return max(runs, key=_validation)
    for trial in runs:
        if trial.spec.seed == seed:
            return trial
    seeds = sorted(trial.spec.seed for trial in runs)
    raise ConfigError(f"{cell.key}: no confirmed run with seed {seed}; it has seeds {seeds}")


def confirmed(cell: Cell) -> Sequence[Trial]:
    """Confirm runs with a score and weights, at the learning rate that the search chose."""
    runs = cell.confirm
    if cell.search:  # else nothing was searched, and every run counts
        runs = cell.confirmed()
    return [trial for trial in runs if _is_whole(trial)]


def _is_whole(trial: Trial) -> bool:
    result = trial.result
    return result is not None and result.status.has_score and trial.folder.best.is_file()


def _validation(trial: Trial) -> tuple[float, int]:
    """Sort key of a run: its validation score, then the lower seed."""
    utility = float("-inf")
    if trial.result is not None and trial.result.validation_score is not None:
        utility = trial.spec.task.utility(trial.result.validation_score)
    # The utility turns the sign where less is better, as with perplexity.
    return utility, -trial.spec.seed


def facts_of(cell: Cell) -> Facts:
    """Facts of the cell's row on the leaderboard, for the model card."""
    from suite.export.card import Facts
    from suite.leaderboard.row import score_fields

    row = score_fields(cell.confirmed(), cell.search)
    interval = None
    if row.get("ci_low") is not None:
        interval = (row["ci_low"], row["ci_high"])
    return Facts(
        seed_scores=row["seed_scores"],
        score_mean=row["score_mean"],
        score_std=row["score_std"],
        interval=interval,
        interval_of=row.get("ci_of", ""),
        admitted=row["admitted"],
        rejected=row["rejected"],
    )
