"""MLflow as a view of the trial folders: one run per trial, followed live, rebuilt from nothing.

Names are imported on first use, so that importing this package costs nothing, and no MLflow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# For type checkers and editors, which cannot follow `__getattr__`.
if TYPE_CHECKING:
    from suite.leaderboard.fields import COLUMNS
    from suite.leaderboard.table import to_rows
    from suite.tracking.listener import TrackingListener
    from suite.tracking.query import leaderboard
    from suite.tracking.store import open_store, resolve_uri
    from suite.tracking.writer import SyncReport, sync

__all__ = [
    "COLUMNS",
    "SyncReport",
    "TrackingListener",
    "leaderboard",
    "open_store",
    "resolve_uri",
    "sync",
    "to_rows",
]

_HOMES = {
    "COLUMNS": "suite.leaderboard.fields",
    "SyncReport": "suite.tracking.writer",
    "TrackingListener": "suite.tracking.listener",
    "leaderboard": "suite.tracking.query",
    "open_store": "suite.tracking.store",
    "resolve_uri": "suite.tracking.store",
    "sync": "suite.tracking.writer",
    "to_rows": "suite.leaderboard.table",
}


# Python calls this for names that the module lacks, so the import waits until the first use.
def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
