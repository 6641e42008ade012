"""The report of an ended sweep, put among the artifacts of its run in MLflow: after `suite run` and `suite sync`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from suite.errors import SuiteError

if TYPE_CHECKING:
    from suite.train.folder import Home


def attach(home: Home, uri: str, sweep: str | None = None) -> None:
    """Attach what is new; a report that cannot be made or stored is said and ends nothing."""
    from suite.report import build
    from suite.tracking.attach import attach_reports

    def page(home: Home, name: str, folder: Path) -> Path:
        return build(home, name, out=folder, tracking_uri=uri)

    try:
        for name in attach_reports(home, uri, page, sweep=sweep):
            print(f"the report of {name} is an artifact of its run `report` in MLflow", file=sys.stderr)
    except SuiteError as error:
        print(f"no report in MLflow: {error}", file=sys.stderr)
