"""Read MLflow's tables in an sqlite file, without MLflow: importing it takes longer than reading.

A caller compares `revision` with `newest_revision` before it reads anything else.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from suite.errors import TrackingError

WAIT_S = 20.0
"""How long a reader waits for a writer that has locked the whole file."""
# Both stand at the start of a line in every migration of MLflow; the first has no down_revision.
_REVISION = re.compile(r'^revision\b.*"(\w+)"', re.MULTILINE)
_DOWN_REVISION = re.compile(r'^down_revision\b.*"(\w+)"', re.MULTILINE)

_SELECT_RUNS = (
    "SELECT run_uuid, status, start_time, artifact_uri, key, value"
    " FROM runs JOIN tags USING (run_uuid)"
)
# The id makes the order the same on every call, also for runs of one millisecond.
_OLDEST_FIRST = "ORDER BY start_time, run_uuid"

RunLine = tuple[str, str, int, str, dict[str, str]]
"""Id, status, start in milliseconds since 1970, URI of the files, tags."""


def revision(path: Path) -> str | None:
    """The revision of MLflow's tables in a file, None where there are none.

    Raises:
        TrackingError: The file is no database.
    """
    if not _query(path, "SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'"):
        return None
    found: str | None = None
    for (number,) in _query(path, "SELECT version_num FROM alembic_version"):
        found = number
    return found


@functools.cache
def newest_revision() -> str:
    """The revision that the MLflow of this environment makes, and with which alone it works.

    Raises:
        TrackingError: MLflow's migrations do not end in one revision.
    """
    # This finds the folder and imports nothing. Alembic would run all migrations for the answer.
    spec = importlib.util.find_spec("mlflow")
    assert spec is not None and spec.origin is not None, "MLflow is a dependency"
    folder = Path(spec.origin).parent / "store" / "db_migrations" / "versions"
    made: set[str] = set()
    passed: set[str] = set()
    for path in folder.glob("*.py"):
        text = path.read_text()
        made.update(_REVISION.findall(text))
        passed.update(_DOWN_REVISION.findall(text))
    last = made - passed
    if len(last) != 1:
        raise TrackingError(
            f"{folder}: got the newest revisions {sorted(last)}, expected one; install MLflow anew"
        )
    return last.pop()


def experiments(path: Path) -> dict[str, str]:
    """Experiment id by sweep name, for every sweep."""
    lines = _query(
        path,
        "SELECT name, experiment_id FROM experiments JOIN experiment_tags USING (experiment_id)"
        " WHERE key = 'suite.kind' AND value = 'sweep' AND lifecycle_stage = 'active'"
        # MLflow's own order
        " ORDER BY creation_time DESC, experiment_id",
    )
    return {name: str(number) for name, number in lines}


def runs(
    path: Path, ids: Sequence[str], tags: Mapping[str, str], *, having: str | None = None
) -> list[RunLine]:
    """Every run of some experiments with these tags, and with the tag `having`, oldest first."""
    places = ", ".join("?" * len(ids))
    where = f"lifecycle_stage = 'active' AND experiment_id IN ({places})"
    values: list[str] = [*ids]
    # The key alone: few runs have it, and the database has an index of keys and none of values.
    for key in [having] if having is not None else tags:
        where += " AND run_uuid IN (SELECT run_uuid FROM tags WHERE key = ?)"
        values.append(key)
    found = []
    for line in _runs(path, where, values):
        if tags.items() <= line[-1].items():
            found.append(line)
    return found


def run(path: Path, run_id: str) -> RunLine:
    """A run as it is now.

    Raises:
        TrackingError: There is no such run.
    """
    found = _runs(path, "run_uuid = ?", [run_id])
    if not found:
        raise TrackingError(f"{path}: holds no run {run_id}; it was deleted meanwhile")
    return found[0]


def _runs(path: Path, where: str, values: Sequence[str]) -> list[RunLine]:
    lines = _query(path, f"{_SELECT_RUNS} WHERE {where} {_OLDEST_FIRST}", values)
    found: dict[str, RunLine] = {}
    for run_id, status, start_ms, files, key, value in lines:
        line = found.setdefault(run_id, (run_id, status, start_ms, files or "", {}))
        line[-1][key] = value
    return list(found.values())


def _query(path: Path, statement: str, values: Sequence[str] = ()) -> list[Any]:
    # `rw` makes no file. With `ro` the last reader would leave the files of the log behind.
    uri = f"{path.as_uri()}?mode=rw"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=WAIT_S)) as connection:
            return connection.execute(statement, values).fetchall()
    except sqlite3.DatabaseError as error:
        raise unusable(path, error) from error


def unusable(path: Path | str, error: object) -> TrackingError:
    """What to say of a file that sqlite cannot use."""
    return TrackingError(
        f"{path}: not a usable sqlite database: {error}; "
        "move it away, then suite sync makes it anew"
    )
