"""Which runs of an sqlite store hold rows, kept until the file changes.

MLflow takes seconds to import, and a leaderboard that is asked again mostly finds the store as it
was. Only MLflow's client reads the tables; this keeps its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from suite.config.hashing import short_hash
from suite.files import json_bytes, keep, kept_folder, read_json
from suite.tracking.store import StoredRun

KEPT = 256
"""Stores whose runs are kept; the oldest goes first."""

State = list[list[int]]
"""Size in bytes and time of change in ns of the file, and of sqlite's log beside it."""


def state_of(database: Path) -> State:
    """The state of a database; every commit changes it."""
    state = []
    for path in (database, database.with_name(f"{database.name}-wal")):
        found = [0, 0]
        with suppress(FileNotFoundError):
            about = path.stat()
            # A reader leaves an empty log behind.
            if about.st_size:
                found = [about.st_size, about.st_mtime_ns]
        state.append(found)
    return state


def recall(database: Path) -> list[StoredRun]:
    """The runs with rows of a database that has not changed; empty where they are not known."""
    # A file that cannot be read, or was written by another version, is as good as none.
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = read_json(_file(database))
        if kept["state"] == state_of(database):
            return [StoredRun(**run) for run in kept["runs"]]
    return []


def note(database: Path, before: State, runs: Sequence[StoredRun]) -> None:
    """Keep the runs that were read since `before`, unless the database changed meanwhile."""
    if runs and before == state_of(database):
        content = {"state": before, "runs": [asdict(run) for run in runs]}
        keep(_file(database), json_bytes(content), most=KEPT)


def _file(database: Path) -> Path:
    return kept_folder("stores") / f"{short_hash(str(database.resolve()))}.json"
