"""The database behind an MLflow store: where it may lie, and its schema, made or migrated by one process at a time."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from suite.errors import TrackingError
from suite.storage.databases import check_local

LOCK_TIMEOUT_S = 120.0


@contextmanager
def sqlite_schema(path: Path) -> Iterator[None]:
    """Hold the database while MLflow opens it; an older schema is migrated before, with a copy kept beside it.

    Raises:
        TrackingError: It cannot be opened, is no database, lies on a network file system, or another process holds it for too long.
    """
    check_local(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S):
            if not is_current(path):
                _migrate(path)
            _forget_if_replaced(path)
            yield
    except Timeout:
        raise TrackingError(
            f"{path}.lock: held by another process for {LOCK_TIMEOUT_S:.0f} s; is a migration still running?"
        ) from None
    except OSError as error:
        raise TrackingError(f"{path}: cannot be opened: {error}") from error


_files: dict[Path, tuple[int, int]] = {}
"""Device and inode of every database this process has opened."""


def _forget_if_replaced(path: Path) -> None:
    """MLflow keeps its connections for the life of the process: to a file that was deleted since, and made anew, they lead nowhere."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from mlflow.tracking._tracking_service.utils import _tracking_store_registry

    stat = path.stat()
    if _files.setdefault(path, (stat.st_dev, stat.st_ino)) != (stat.st_dev, stat.st_ino):
        _files[path] = (stat.st_dev, stat.st_ino)
        _tracking_store_registry._get_store_with_resolved_uri.cache_clear()
        engine = SqlAlchemyStore._engine_map.pop(f"sqlite:///{path}", None)
        if engine is not None:
            engine.dispose()


def is_current(path: Path) -> bool:
    """Whether an sqlite database has the schema of this MLflow, or none yet.

    Raises:
        TrackingError: It is no database.
    """
    return _schema(path) in (None, _newest_schema())


def _schema(path: Path) -> str | None:
    """The revision of a database's schema, None for a new one. Uses the write-ahead log from now on.

    Raises:
        TrackingError: The file is no database; MLflow would try ten times.
    """
    try:
        with closing(sqlite3.connect(path, timeout=20)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            if not connection.execute(
                "SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'"
            ).fetchone():
                return None
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            return None if row is None else str(row[0])
    except sqlite3.Error as error:
        raise TrackingError(
            f"{path}: not a usable sqlite database: {error}; move it away, then suite sync rebuilds it"
        ) from error


@functools.cache
def _newest_schema() -> str:
    from mlflow.store.db.utils import _get_latest_schema_revision

    return str(_get_latest_schema_revision())


def _migrate(path: Path) -> None:
    """Bring the schema of an older MLflow up to date, keeping a copy of the database beside it."""
    from alembic.util import CommandError
    from mlflow.store.db.utils import _upgrade_db, create_sqlalchemy_engine_with_retry

    with (
        closing(sqlite3.connect(path)) as source,
        closing(sqlite3.connect(f"{path}.before-migration")) as copy,
    ):
        source.backup(copy)
    engine = create_sqlalchemy_engine_with_retry(f"sqlite:///{path}")
    try:
        _upgrade_db(engine)
    except CommandError as error:
        raise TrackingError(
            f"{path}: schema of another MLflow: {error}; move it away, then suite sync rebuilds it"
        ) from error
    finally:
        engine.dispose()
