"""`suite report`: the result as a page, as a document, as figures or as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from suite.cli.options import (
    HomeOption,
    OnlySweepOption,
    TrackingOption,
    home_to_read,
)
from suite.cli.render import put
from suite.config.names import DEFAULT_HOME
from suite.errors import ConfigError, SuiteError, TrackingError
from suite.leaderboard.choice import Sort
from suite.report.compose import FOLDER, Form

if TYPE_CHECKING:
    from suite.report.data import Report


def report(
    home: HomeOption = DEFAULT_HOME,
    tracking_uri: TrackingOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write. (default: report in --home)")
    ] = None,
    sweep: OnlySweepOption = None,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="html = one page that needs nothing else; md = Markdown with figures; png = the "
            "figures; csv = the tables behind them.",
        ),
    ] = Form.HTML,
    site: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write DIR/index.html over all sweeps, with filters, and their pages beside it.",
        ),
    ] = None,
    sort: Annotated[
        Sort, typer.Option(help="Order of the leaderboard, the best first.")
    ] = Sort.SCORE,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Serve the page on 127.0.0.1 while the sweep runs; Ctrl-C ends it."
        ),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port to serve --live on. (default: any that is free)"),
    ] = None,
) -> None:
    """Write one page per sweep: who leads, at what cost, and which arms cannot be told apart."""
    place = home_to_read(home, tracking_uri)
    if port is not None and not live:
        raise ConfigError(
            "--port: got it without --live; only --live serves a page, so give both or neither"
        )
    if site is not None and (live or out is not None or form is not Form.HTML):
        raise ConfigError(
            "--site: writes pages into its own folder; leave out --out, --format and --live"
        )
    if site is not None:
        _write_site(place, tracking_uri, site, sweep, sort)
    elif not live:
        _write(place, tracking_uri, out or place / FOLDER, sweep, form, sort)
    elif out is not None or form is not Form.HTML:
        raise ConfigError("--live: serves a page and writes no file; leave out --out and --format")
    else:
        _serve(place, tracking_uri, sweep, sort, port or 0)


def _write(
    home: Path, tracking_uri: str | None, out: Path, sweep: str | None, form: Form, sort: Sort
) -> None:
    """Write the reports and print their paths, the file to open first.

    Raises:
        TrackingError: A sweep cannot be read; the reports of the others are written before.
    """
    # The report draws with plotly, which takes seconds to import.
    from suite.report.compose import write

    failed: list[str] = []
    for found in _reports(home, tracking_uri, sweep, sort, failed):
        for path in write(found, out, form):
            put(path)
    _refuse(failed)


def _write_site(
    home: Path, tracking_uri: str | None, out: Path, sweep: str | None, sort: Sort
) -> None:
    """Write the site and print its files, the index first.

    Raises:
        TrackingError: A sweep cannot be read; the site of the others is written before.
    """
    from suite.report.site import write_site

    failed: list[str] = []
    for path in write_site(_reports(home, tracking_uri, sweep, sort, failed), out):
        put(path)
    _refuse(failed)


def _reports(
    home: Path, tracking_uri: str | None, sweep: str | None, sort: Sort, failed: list[str]
) -> Iterator[Report]:
    """Read one sweep after the other.

    Args:
        home: The home.
        tracking_uri: Its MLflow store.
        sweep: The only one to read, whose error is raised; None = all.
        sort: Order of the rows.
        failed: Gets a line for every sweep that cannot be read.
    """
    # MLflow takes seconds to import.
    from suite.report.data import read, sweeps

    names = [sweep] if sweep is not None else sweeps(home, tracking_uri)
    for name in names:
        try:
            found = read(home, name, tracking_uri=tracking_uri, sort=sort.value)
        except SuiteError as error:
            if sweep is not None:
                raise
            # One sweep that cannot be read must not keep the reports of the others back.
            failed.append(f"{name}: {error}")
            continue
        yield found


def _refuse(failed: Sequence[str]) -> None:
    if failed:
        raise TrackingError("no report of " + "\n  ".join(failed))


def _serve(home: Path, tracking_uri: str | None, sweep: str | None, sort: Sort, port: int) -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    from suite.report.live import Source, addresses, make_server

    source = Source(home, sweep, tracking_uri=tracking_uri, sort=sort.value)
    with make_server(source, port) as server:
        try:
            names = source.names()
        except TrackingError as reason:
            # A sweep that has just begun has no run in MLflow: that is no reason to give up.
            names = []
            put(f"{reason}\nThe page shows the sweep as soon as it has a result.", err=True)
        put("\n".join([*addresses(server, names), "Ctrl-C ends it."]))
        try:
            # The interval, in seconds, is how long Ctrl-C may take.
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            put("ended", err=True)
