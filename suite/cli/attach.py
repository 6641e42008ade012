"""Puts the report of an ended sweep into MLflow, after `suite run` and `suite sync`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from suite.cli.render import put
from suite.redact import redact

if TYPE_CHECKING:
    from suite.record.folder import Home


def attach(
    home: Home, tracking_uri: str | None, sweep: str | None = None, *, unless: Collection[str] = ()
) -> None:
    """Attach new reports; one that cannot be made or stored costs a line on stderr and no more.

    Args:
        home: The home that holds the sweeps.
        tracking_uri: The MLflow store, as `resolve_uri` takes it.
        sweep: The only sweep to attach; None = all of the home.
        unless: Sweeps that still run, and get their report when they end.
    """
    try:
        for name in _attach(home, tracking_uri, sweep, unless):
            put(
                f"the report of {name} is an artifact of its run `report` in MLflow",
                err=True,
            )
    except Exception as error:  # noqa: BLE001
        # The trials are done and in MLflow: a report that fails must not fail the command.
        # The text may hold the store's password and, from SQL, a whole page.
        reason = " ".join(redact(error).split())[:500]
        put(f"no report in MLflow: {type(error).__name__}: {reason}", err=True)


def _attach(
    home: Home, tracking_uri: str | None, sweep: str | None, unless: Collection[str]
) -> list[str]:
    # MLflow and plotly take seconds to import; a sweep that failed never gets here.
    from suite.report import build
    from suite.tracking.attach import attach_reports
    from suite.tracking.store import resolve_uri

    uri = resolve_uri(home, tracking_uri)

    def page(home: Home, name: str, folder: Path) -> Path:
        return build(home, name, out=folder, tracking_uri=uri)

    return attach_reports(home, uri, page, sweep=sweep, unless=unless)
