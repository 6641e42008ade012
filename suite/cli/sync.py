"""`suite sync`: bring a home up to date from its storage, and MLflow from the home."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from suite.cli.attach import attach
from suite.cli.options import (
    HomeOption,
    OnlySweepOption,
    OptunaOption,
    StorageOption,
    TrackingOption,
    existing_home,
)
from suite.cli.render import put
from suite.config.names import DEFAULT_HOME
from suite.errors import ConfigError, StorageError, SweepConflictError, TrackingError

if TYPE_CHECKING:
    from suite.record.folder import Home


def sync(
    home: HomeOption = DEFAULT_HOME,
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
    optuna: OptunaOption = None,
    weights: Annotated[
        bool,
        typer.Option(
            "--all", help="Get trained weights and logs too from the storage, for suite export."
        ),
    ] = False,
    sweep: OnlySweepOption = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="Let this copy of a home replace the one that MLflow knows."
        ),
    ] = False,
    new_id: Annotated[
        bool,
        typer.Option("--new-id", help="Give this copy of a home a name of its own in MLflow."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Look up every trial, also where nothing seems to have changed."
        ),
    ] = False,
) -> None:
    """Bring the home up to date from the storage, and MLflow from the home.

    The command writes only what is missing: running it twice does nothing twice.
    """
    if new_id and take_over:
        raise ConfigError(
            "--new-id, --take-over: got both; this copy is either a home of its own or the home "
            "from now on, so give one of them"
        )
    # MLflow takes seconds to import, and `--help` must not wait for it.
    from suite.record.folder import Home
    from suite.tracking.progress import Progress
    from suite.tracking.store import resolve_uri, without_password
    from suite.tracking.writer import sync as bring_up_to_date

    # Before the long parts, which a mistyped URL would make useless.
    uri = resolve_uri(Home(home), tracking_uri, write=True)
    if optuna is not None:
        from suite.tracking.optuna_mirror import check_url

        check_url(optuna)
    # First the files: MLflow is brought up to date from what the home then holds.
    if storage is not None:
        _fetch(Home(home), storage, weights=weights)
    place = Home(existing_home(home))
    # Asked before the long part: a sweep that ends meanwhile attaches its report itself.
    going_on = _going_on(place, sweep)
    if new_id:
        _rename(place, uri)
    progress = Progress()
    report = bring_up_to_date(
        place,
        tracking_uri=uri,
        sweep=sweep,
        verify=verify,
        step=progress,
        take_over=take_over,
    )
    progress.close()
    if report.unreachable is not None:
        raise TrackingError(
            f"{report.unreachable}; {report.written} trials were written, run suite sync again "
            "for the rest"
        )
    put(
        f"{report.written} trials written, {report.already} others ended before, "
        f"{report.cells} cells brought up to date, in {without_password(uri)}"
    )
    attach(place, tracking_uri, sweep, unless=going_on)
    if optuna is not None:
        _mirror(place, optuna, sweep)


def _rename(home: Home, uri: str) -> None:
    """Give a copy of a home a name of its own, unless it got one before.

    Raises:
        SweepConflictError: A sweep of the home is being run.
    """
    from suite.plan.definition import driver_pid, sweeps
    from suite.storage.identity import has_own_name, home_id, renew, set_aside
    from suite.tracking.claim import Claim
    from suite.tracking.store import open_store

    # A driver goes on writing under the name, and into the database, that it began with.
    for name in sweeps(home):
        pid = driver_pid(home, name)
        if pid is not None:
            raise SweepConflictError(
                f"{home.path}: process {pid} runs sweep {name!r}, and --new-id needs a home of "
                "which no sweep runs; wait until it has ended, or end it"
            )
    # Under yet another name, what was written by this one would stay in the store for nobody.
    if has_own_name(home) and not Claim(home, open_store(uri)).is_refused():
        put(f"{home.path} has a name of its own ({home_id(home)}), so --new-id changes nothing")
        return
    aside = set_aside(home, home_id(home))
    put(f"{home.path} is {renew(home)} in MLflow and Optuna from now on")
    if aside.exists():
        put(
            f"{aside}: the home's own MLflow database until now; keep it, or import again: rows of "
            "suite import-results and people's notes in it are not made again from the trials"
        )


def _mirror(home: Home, url: str, sweep: str | None) -> None:
    from suite.redact import redact
    from suite.tracking.optuna_mirror import mirror_studies

    report = mirror_studies(home, url, sweep=sweep)
    put(
        f"{report.written} trials of {report.studies} studies written, {report.already} were "
        f"there already, in {redact(url)}"
    )


def _fetch(home: Home, url: str, *, weights: bool) -> None:
    from suite.storage.base import SHORT_PATIENCE_S
    from suite.storage.mirror import Mirror
    from suite.storage.urls import open_storage

    storage = open_storage(url, patience_s=SHORT_PATIENCE_S)
    # A wrong prefix is an empty storage to S3, and no error.
    if not storage.keys("sweeps") and not storage.keys("trials"):
        raise StorageError(
            f"--storage {url}: holds no sweep; expected the URL given to `suite run --storage`"
        )
    count = Mirror(home, storage).fetch_home(weights=weights)
    put(f"{count} files came from {url}")


def _going_on(home: Home, sweep: str | None) -> set[str]:
    """Names of the sweeps that have not ended, whose reports would soon be out of date."""
    from suite.plan.cell_state import read_states
    from suite.plan.definition import driver_pid, known_plan, sweeps

    going_on = set()
    names = sweeps(home) if sweep is None else [sweep]
    for name in names:
        if driver_pid(home, name) is not None:
            going_on.add(name)
            continue
        # Without a driver here it may run on another machine, or wait to be taken up again.
        plan = known_plan(home, name)
        if plan is None:
            continue
        for state in read_states(plan, home).values():
            if not state.status.is_over:
                going_on.add(name)
    return going_on
