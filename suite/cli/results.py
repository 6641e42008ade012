"""`suite export-results` and `suite import-results`: the leaderboard as one file.

With it, results of several clusters come together in one store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suite.cli.options import (
    HomeOption,
    OnlySweepOption,
    TrackingOption,
    home_to_read,
)
from suite.cli.render import put
from suite.config.names import DEFAULT_HOME

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="The file; its name ends in .json or .parquet.")
]


def export_results(
    file: FileArgument,
    home: HomeOption = DEFAULT_HOME,
    tracking_uri: TrackingOption = None,
    sweep: OnlySweepOption = None,
) -> None:
    """Write the leaderboard to one file, with all that another machine needs to show it."""
    # MLflow takes seconds to import, and `--help` must not wait for it.
    from suite.record.folder import Home
    from suite.tracking.exchange import export_results as write
    from suite.tracking.store import resolve_uri

    uri = resolve_uri(Home(home_to_read(home, tracking_uri)), tracking_uri)
    put(f"{write(file, tracking_uri=uri, sweep=sweep)} cells written to {file}")


def import_results(
    file: FileArgument,
    home: HomeOption = DEFAULT_HOME,
    tracking_uri: TrackingOption = None,
    sweep: OnlySweepOption = None,
) -> None:
    """Add the results in a file to this home's; run it twice and nothing is added twice."""
    from suite.record.folder import Home
    from suite.tracking.exchange import describe
    from suite.tracking.exchange import import_results as read
    from suite.tracking.store import ARTIFACTS, resolve_uri

    # The home may be new: results from elsewhere can be the first that it holds.
    uri = resolve_uri(Home(home), tracking_uri, write=True)
    report = read(file, tracking_uri=uri, sweep=sweep, files=home / ARTIFACTS)
    put(describe(report, file, uri))
