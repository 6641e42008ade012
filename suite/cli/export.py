"""`suite export`: a confirmed model as a folder that others can load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from suite.cli import complete
from suite.cli.options import DEFAULT_HOME, HomeOption, TasksOption, existing_home
from suite.cli.render import size, stdout_for_result
from suite.errors import ConfigError

if TYPE_CHECKING:
    from suite.export.card import Facts
    from suite.record.cells import Cell, Trial

PATIENCE_S = 5.0


def export(
    cell: Annotated[
        str,
        typer.Argument(metavar="CELL", help="ARM/TASK, as `lora/rte`; ARM where it has one task."),
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
            help="Of which sweep, where several have such a cell.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Which confirm run. (default: the one with the best validation score)"),
    ] = None,
    tasks: TasksOption = None,
) -> None:
    """Write a confirmed model as safetensors, with tokenizer and model card.

    Plain transformers weights where the model is one (full fine-tuning, folded attention), else peft's own format (LoRA, prompts,
    peft:*), else a folder for `suite.load(DIR)`, which loads all of them. What was written is loaded and compared before it gets its name.
    """
    from suite.cli.select import find_cell
    from suite.record.folder import Home

    _check_new(out)  # before a model is loaded
    at = Home(existing_home(home))
    found = find_cell(at, cell, sweep=sweep)
    trial = chosen_trial(found, seed)
    with stdout_for_result():
        from suite.export import export as write
        from suite.train.restore import restore

        facts = facts_of(found)
        with _folder_for(out) as folder:
            written = write(restore(trial.folder, at), folder, facts)
    if facts.admitted is False:
        typer.echo(
            f"this row is rejected: {'; '.join(facts.rejected)}; the model card says so", err=True
        )
    if written.description.note:
        typer.echo(f"note: {written.description.note}", err=True)
    typer.echo(
        f"{out}: {written.description.format} format, {size(written.bytes)}, seed {trial.spec.seed}"
    )


def _check_new(out: str) -> None:
    from suite.storage.urls import is_local, open_storage

    if is_local(out):
        folder = Path(open_storage(out).url)
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    else:
        taken = bool(open_storage(out, patience_s=PATIENCE_S).keys())
    if taken:
        raise ConfigError(f"{out}: exists and is not empty; give a new folder")


@contextmanager
def _folder_for(out: str) -> Iterator[Path]:
    """The folder itself, or one whose files are then put where the URL says, the description last: what has it is whole."""
    from suite.export.description import FILE
    from suite.storage.urls import is_local, open_storage

    if is_local(out):
        yield Path(open_storage(out).url)
        return
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export"
        yield folder
        storage = open_storage(out)
        for path in sorted(
            (p for p in folder.rglob("*") if p.is_file()), key=lambda p: (p.name == FILE, p)
        ):
            storage.push(path, path.relative_to(folder).as_posix())


def chosen_trial(cell: Cell, seed: int | None) -> Trial:
    """The confirm run that is taken.

    Raises:
        ConfigError: There is none, or none of this seed; says what there is.
    """
    runs = confirmed(cell)
    if not runs:
        ended = sum(t.result is not None for t in cell.confirm)
        has = f"{len(cell.search)} search trials and {ended} ended confirm runs, none with a score and its weights"
        raise ConfigError(
            f"{cell.key}: no confirmed run to export; it has {has}. Run the sweep to its end: suite run SWEEP"
        )
    if seed is not None:
        of_seed = [t for t in runs if t.spec.seed == seed]
        if not of_seed:
            raise ConfigError(
                f"{cell.key}: no confirmed run with seed {seed}; it has seeds {sorted(t.spec.seed for t in runs)}"
            )
        return of_seed[0]
    return max(runs, key=_validation)


def confirmed(cell: Cell) -> Sequence[Trial]:
    """Runs with a score and weights at the learning rate that the search chose; all of them where nothing was searched."""
    return [t for t in (cell.confirmed() if cell.search else cell.confirm) if _is_whole(t)]


def _is_whole(trial: Trial) -> bool:
    return (
        trial.result is not None and trial.result.status.has_score and trial.folder.best.is_file()
    )


def _validation(trial: Trial) -> tuple[float, int]:
    """How good a run is on validation data; of equals, the lowest seed."""
    if trial.result is None:
        score = None
    else:
        score = trial.result.validation_score
    return float("-inf") if score is None else trial.spec.task.utility(score), -trial.spec.seed


def facts_of(cell: Cell) -> Facts:
    """What the cell's row says."""
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
