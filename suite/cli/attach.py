"""The report of a sweep that has ended, put among the artifacts of its run in MLflow: after `suite run` and `suite sync`."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from suite.redact import redact

if TYPE_CHECKING:
    from suite.record.folder import Home


def attach(
    home: Home, tracking_uri: str | None, sweep: str | None = None, *, unless: Collection[str] = ()
) -> None:
    """Attach what is new; a report that cannot be made or stored is said and ends nothing.

    Args:
        home: Whose sweeps are meant.
        tracking_uri: As `resolve_uri` takes it.
        sweep: Only this one; None = all of the home.
        unless: Sweeps that go on.
    """
    try:
        for name in _attach(home, tracking_uri, sweep, unless):
            print(
                f"the report of {name} is an artifact of its run `report` in MLflow",
                file=sys.stderr,
            )
    except Exception as error:  # noqa: BLE001 - the trials are done and in MLflow: whatever a report lacks, the command goes on
        reason = " ".join(redact(error).split())[:500]
        print(f"no report in MLflow: {type(error).__name__}: {reason}", file=sys.stderr)


def _attach(
    home: Home, tracking_uri: str | None, sweep: str | None, unless: Collection[str]
) -> list[str]:
    from suite.report import build
    from suite.tracking.attach import attach_reports
    from suite.tracking.store import resolve_uri

    uri = resolve_uri(home, tracking_uri)

    def page(home: Home, name: str, folder: Path) -> Path:
        return build(home, name, out=folder, tracking_uri=uri)

    return attach_reports(home, uri, page, sweep=sweep, unless=unless)
