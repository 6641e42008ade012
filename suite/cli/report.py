"""`suite report`: the result as a page to read and to send, as a document, as figures or as tables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from suite.cli import complete
from suite.cli.leaderboard import Sort
from suite.cli.options import DEFAULT_HOME, HomeOption, TrackingOption, existing_home
from suite.errors import ConfigError, SuiteError, TrackingError
from suite.report.compose import FOLDER, Form


def report(
    home: HomeOption = DEFAULT_HOME,
    tracking_uri: TrackingOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write. (default: report in --home)")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=complete.sweeps_of_home, help="Only this sweep."
        ),
    ] = None,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="A page that needs nothing else; Markdown with figures; figures; the tables behind them.",
        ),
    ] = Form.HTML,
    sort: Annotated[Sort, typer.Option(help="What comes first on the leaderboard.")] = Sort.SCORE,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Serve the page on 127.0.0.1 while the sweep runs; Ctrl-C ends it."
        ),
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="For --live. (default: any that is free)")
    ] = None,
) -> None:
    """Who leads on what, at what cost, and what cannot be told apart: one self-contained page per sweep."""
    elsewhere = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if elsewhere:
        place = home
    else:
        place = existing_home(home)
    if port is not None and not live:
        raise ConfigError(
            "--port: goes with --live, which was not given; without it nothing is served"
        )
    if not live:
        _write(place, tracking_uri, out or place / FOLDER, sweep, form, sort)
    elif out is not None or form is not Form.HTML:
        raise ConfigError("--live serves the page and writes nothing; leave --out and --format out")
    else:
        _serve(place, tracking_uri, sweep, sort, port or 0)


def _write(
    home: Path, tracking_uri: str | None, out: Path, sweep: str | None, form: Form, sort: Sort
) -> None:
    """Prints the paths, what to open first; of several sweeps those that can be read, and fails at the end for the others."""
    from suite.report.compose import write
    from suite.report.data import read, sweeps

    failed = []
    for name in [sweep] if sweep is not None else sweeps(home, tracking_uri):
        try:
            found = read(home, name, tracking_uri=tracking_uri, sort=sort.value)
        except SuiteError as error:
            if sweep is not None:
                raise
            failed.append(f"{name}: {error}")
            continue
        for path in write(found, out, form):
            typer.echo(path)
    if failed:
        raise TrackingError("no report of " + "\n  ".join(failed))


def _serve(home: Path, tracking_uri: str | None, sweep: str | None, sort: Sort, port: int) -> None:
    """Until Ctrl-C or SIGTERM."""
    from suite.report.live import Source, addresses, make_server

    source = Source(home, sweep, tracking_uri=tracking_uri, sort=sort.value)
    with make_server(source, port) as server:
        try:
            names = source.names()
        except TrackingError as reason:
            names = []
            typer.echo(f"{reason}\nThe page shows the sweep as soon as it has a result.", err=True)
        typer.echo("\n".join([*addresses(server, names), "Ctrl-C ends it."]))
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            typer.echo("ended", err=True)
