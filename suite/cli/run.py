"""`suite run`: a whole sweep, from its file to its leaderboard."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from suite.cli import complete, leaderboard, render
from suite.cli.attach import attach
from suite.cli.options import (
    AddressOption,
    DataRootOption,
    Format,
    FormatOption,
    HomeOption,
    InsecureOption,
    OptunaOption,
    RetryOption,
    SetOption,
    StorageOption,
    TasksOption,
    TrackingOption,
    TrustOption,
)
from suite.cli.render import put
from suite.config.names import DEFAULT_HOME
from suite.config.variables import HOME, OPTUNA, given_or_set
from suite.errors import SuiteError
from suite.registry import find_sweep
from suite.signals import EXIT_CODES, Stopped, end_here, on_stop

if TYPE_CHECKING:
    from suite.api import Outcome as Results
    from suite.config.sweep import SweepConfig
    from suite.plan.events import Outcome
    from suite.tracking.follower import Follower


def run(
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP",
            autocompletion=complete.sweeps,
            help="A sweep file, or the name of a known one (suite list sweeps).",
        ),
    ],
    home: HomeOption = DEFAULT_HOME,
    overrides: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print cells, resources and cost; start nothing.")
    ] = False,
    data_root: DataRootOption = None,
    tasks: TasksOption = None,
    fmt: FormatOption = Format.TABLE,
    retry_given_up: RetryOption = False,
    address: AddressOption = None,
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
    optuna: OptunaOption = None,
    trust: TrustOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Run a sweep or go on with it, and print the leaderboard. Finished trials never run again."""
    # Imported here: Ray and torch take seconds, and `--help` must not wait for them.
    from suite.config.sweep_files import load_sweep

    path = find_sweep(sweep)
    config = load_sweep(path, overrides or ())
    # Before anything is started or written: a dry run leaves no trace.
    if dry_run:
        from suite.cli.estimate import show_plan

        _check_stores(home, tracking_uri, optuna, storage)
        return show_plan(
            config,
            where=str(path),
            home=home,
            data_root=data_root,
            address=address,
            storage=storage,
            fmt=fmt,
        )
    asked = Asked(
        sweep=sweep,
        path=path,
        home=home,
        data_root=data_root,
        address=address,
        tracking_uri=tracking_uri,
        overrides=tuple(overrides or ()),
        tasks=tasks,
        storage=storage,
        trust=tuple(trust or ()),
        insecure=insecure,
        optuna=optuna,
    )
    found = _run(config, asked, retry_given_up=retry_given_up)
    outcome = found.ending
    assert outcome is not None
    # An interrupted sweep has a leaderboard too, of the cells that are done.
    if any(cell.done for cell in outcome.cells):
        _show_leaderboard(config, asked, fmt)
        if not outcome.interrupted:
            # Only of a whole sweep: the report of an interrupted one is out of date soon.
            _attach_report(config, asked)
    # Last, because it decides the exit code, and the last lines are the ones that are read.
    _say_how_it_ended(config, outcome, asked, found.followers)


def _check_stores(
    home: Path, tracking_uri: str | None, optuna: str | None, storage: str | None
) -> None:
    """Refuse what the run would refuse: stores that cannot be; asks no server.

    Raises:
        TrackingError: A store is of a kind that nobody knows, or cannot be written safely.
        StorageError: The same of the storage.
    """
    from suite.record.folder import Home
    from suite.storage.urls import checked_url
    from suite.tracking.store import resolve_uri

    resolve_uri(Home(home), tracking_uri, write=True)
    if optuna is not None:
        # Imports Optuna, which takes a second.
        from suite.tracking.optuna_mirror import check_url

        check_url(optuna)
    if storage is not None:
        checked_url(storage)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of `suite run`, for the run itself and for the command that goes on.

    Attributes:
        sweep: The sweep as typed.
        path: The file of the sweep.
    """

    sweep: str
    path: Path
    home: Path
    data_root: Path | None
    address: str | None
    tracking_uri: str | None
    overrides: tuple[str, ...]
    tasks: Path | None
    storage: str | None
    trust: tuple[str, ...]
    insecure: bool
    optuna: str | None

    @property
    def command(self) -> str:
        """The same command again, quoted for a shell."""
        options: list[tuple[str, object]] = [
            ("--data-root", self.data_root),
            ("--tasks", self.tasks),
            ("--address", self.address),
            ("--storage", self.storage),
            ("--tracking-uri", self.tracking_uri),
        ]
        # Optuna's URL may hold a password: one from the environment is not shown.
        if self.optuna != given_or_set(None, OPTUNA):
            options.append(("--optuna", self.optuna))
        options += [("--set", item) for item in self.overrides]
        options += [("--trust-remote-code", item) for item in self.trust]
        words = ["suite", "run", self.sweep, *self.home_option]
        for name, value in options:
            if value is not None:
                words += [name, str(value)]
        if self.insecure:
            words.append("--insecure")
        # Quoted, because people paste it into a shell.
        return shlex.join(words)

    @property
    def sync_command(self) -> str:
        """The command that brings MLflow and Optuna up to date later, quoted for a shell."""
        words = ["suite", "sync", *self.home_option]
        if self.tracking_uri is not None:
            words += ["--tracking-uri", self.tracking_uri]
        if self.optuna is not None and self.optuna != given_or_set(None, OPTUNA):
            words += ["--optuna", self.optuna]
        return shlex.join(words)

    @property
    def home_option(self) -> list[str]:
        # A short command is easier to read and to type. With the variable it means another home.
        if self.home == DEFAULT_HOME and given_or_set(None, HOME) is None:
            return []
        return ["--home", str(self.home)]


def _run(config: SweepConfig, asked: Asked, *, retry_given_up: bool) -> Results:
    """Run the sweep while the live table and MLflow listen."""
    from suite import api

    try:
        with on_stop(end_here), render.stdout_for_result():
            return api.run(
                api.Sweep.of(config, where=str(asked.path)),
                home=asked.home,
                data_root=asked.data_root,
                address=asked.address,
                storage=asked.storage,
                tracking_uri=asked.tracking_uri,
                optuna=asked.optuna,
                insecure=asked.insecure,
                retry_given_up=retry_given_up,
            )
    # The driver ends in order while trials run; before and after, a signal ends it where it is.
    except Stopped as stopped:
        put(f"\n{stopped.reason}. Go on with: {asked.command}", err=True)
        raise typer.Exit(EXIT_CODES[stopped.reason]) from None


def _show_leaderboard(config: SweepConfig, asked: Asked, fmt: Format) -> None:
    from suite.record.folder import Home
    from suite.redact import redact
    from suite.tracking.store import resolve_uri

    try:
        leaderboard.show(
            resolve_uri(Home(asked.home), asked.tracking_uri),
            # Whoever ran the sweep wants to see its rejected rows, with the reason.
            rejected=True,
            sweep=config.name,
            fmt=fmt,
        )
    except SuiteError as error:
        put(f"no leaderboard: {error}", err=True)
    except Exception as error:  # noqa: BLE001
        # The trials are done: how they ended must still be said, and decides the exit code.
        put(f"no leaderboard: {type(error).__name__}: {redact(error)}", err=True)


def _attach_report(config: SweepConfig, asked: Asked) -> None:
    from suite.record.folder import Home

    attach(Home(asked.home), asked.tracking_uri, config.name)


def _say_how_it_ended(
    config: SweepConfig, outcome: Outcome, asked: Asked, followers: Sequence[Follower]
) -> None:
    """Say what went wrong, or what to type next; exit with 1 if anything has no result."""
    here = shlex.join([*asked.home_option, "--sweep", config.name])
    # A home whose runs lie in another store has no database of its own to read.
    store = ""
    if asked.tracking_uri is not None:
        store = f" {shlex.join(['--tracking-uri', asked.tracking_uri])}"
    # A set, because cells may share a pretrain run.
    given_up = set()
    for cell in outcome.cells:
        given_up |= {failure.trial for failure in cell.failures if failure.status == "gave up"}
    # Neither cells without a result nor hints matter to somebody who stopped it.
    if outcome.interrupted:
        go_on = f"Go on with: {asked.command}"
        # Whatever else stopped the driver is a failure, with code 1, and stops the next one too.
        if outcome.reason not in EXIT_CODES:
            go_on = f"When that is mended, go on with: {asked.command}"
            if given_up:
                go_on += " --retry-given-up"
        put(f"{outcome.reason}; nothing that finished is lost. {go_on}", err=True)
        raise typer.Exit(EXIT_CODES.get(outcome.reason, 1))
    for folder, why in outcome.not_measured.items():
        put(
            f"lm-eval has not measured {folder}: {why}; try again with: {asked.command}",
            err=True,
        )
    # A retry is asked for, because the same trial may fail for ever.
    if given_up:
        put(
            f"trials given up: {len(given_up)}; once the cause is mended: "
            f"{asked.command} --retry-given-up",
            err=True,
        )
    # The code tells a script that the leaderboard lacks cells.
    if outcome.failed:
        put(
            f"cells without a result: {len(outcome.failed)}; causes and logs: suite status {here}",
            err=True,
        )
    all_worked = _say_what_never_worked(followers, asked)
    if outcome.failed or not all_worked:
        raise typer.Exit(1)
    hints = {
        f"suite report {here}{store}": "one page with all of it, to send to others",
        f"suite compare --all-pairs {here}": "which differences the seeds can show",
        "suite init my-sweep.yaml": "a sweep of your own, also on your own data",
    }
    width = max(len(hint) for hint in hints)
    put("\nnext:", err=True)
    for hint, what in hints.items():
        put(f"  {hint:<{width}}  {what}", err=True)


def _say_what_never_worked(followers: Sequence[Follower], asked: Asked) -> bool:
    """Name each store that has nothing of the sweep, and why; whether there is none."""
    all_worked = True
    for follower in followers:
        why = follower.never_worked
        if why is not None:
            all_worked = False
            put(
                f"{follower.name} has nothing of this sweep: {why}. Every trial is kept in "
                f"{asked.home}; mend this, then: {asked.sync_command}",
                err=True,
            )
    return all_worked
