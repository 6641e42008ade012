"""MLflow's tables in a database: made by one process at a time, and then left to MLflow.

Drivers that meet at an empty database would each make the tables, and all but one would fail.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import Engine, create_engine, event, inspect, literal, select, table, text
from sqlalchemy.exc import DatabaseError, DisconnectionError
from sqlalchemy.pool import NullPool, Pool

from suite.errors import TrackingError
from suite.files import replacing, sqlite_uri
from suite.record.folder import SIDE_FILES
from suite.storage.databases import check_local, for_mlflow

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 120.0
FILLED_BY_MLFLOW = ("alembic_version", "workspaces")
"""Tables that have a row although nothing was tracked yet."""
SCHEMA_LOCK = 5_217_340_991_245
"""The number of PostgreSQL's advisory lock: any number that nobody else uses."""


def prepare_sqlite(path: Path) -> None:
    """Make the file and MLflow's tables where there are none.

    The tables are made in a file beside, which takes the name when it is whole: MLflow makes them
    in many transactions, and cannot go on from the middle. A half-made file, as `mlflow server`
    leaves it when it is killed in its first seconds, is kept aside under another name.

    Raises:
        TrackingError: The file cannot be opened, is no database, has tables of another program,
            lies on a network file system, or another process holds it for too long.
    """
    check_local(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the database, so that processes of all homes that share it wait for one another.
        with FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S):
            # Asked under the lock: the process before may just have made the tables.
            if not path.exists() or revision(sqlite_uri(path)) != newest_revision():
                _make_whole(path)
            # Readers do not wait for a writer, nor a writer for readers. The file remembers this.
            with _engine(sqlite_uri(path)) as engine, engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    except Timeout:
        raise TrackingError(
            f"{path}.lock: another process has held it for {LOCK_TIMEOUT_S:.0f} s; "
            "expected one that makes the tables within seconds; end it, then try again"
        ) from None
    except OSError as error:
        raise TrackingError(f"{path}: cannot be opened: {error}") from error


def is_half_made(path: Path) -> bool:
    """Whether a file without the newest revision is one whose tables were never finished.

    Nothing was tracked in such a file, while the database of another MLflow has rows, and that of
    another program has other tables.
    """
    with _engine(sqlite_uri(path)) as engine, engine.connect() as connection:
        tables = inspect(connection).get_table_names()
        if not all(_is_mlflows(name) for name in tables):
            return False
        for name in set(tables) - set(FILLED_BY_MLFLOW):
            query = select(literal(1)).select_from(table(name)).limit(1)
            if connection.execute(query).first() is not None:
                return False
    # An empty file is not half-made: sqlite creates one for every name that it is asked to open.
    return bool(tables)


def _is_mlflows(table: str) -> bool:
    """Whether MLflow makes a table of that name, or alembic on the way."""
    # Imported for its effect: it imports the modules of all tables.
    import mlflow.store.db.utils  # noqa: F401
    from mlflow.store.db.base_sql_model import Base

    # alembic changes a table of sqlite by way of another one, and a kill leaves it there.
    name = table.removeprefix("_alembic_tmp_")
    return name == "alembic_version" or name in Base.metadata.tables


def _make_whole(path: Path) -> None:
    """Make the tables, unless those of another MLflow are there, which the caller refuses.

    Raises:
        TrackingError: The file has the tables of another program.
    """
    if path.exists() and is_half_made(path):
        _set_aside(path)
    if not path.exists() or _is_empty(path):
        _make_file(path)
    elif revision(sqlite_uri(path)) is None:
        raise TrackingError(
            f"{path}: got a database with the tables of another program, expected MLflow's or "
            "none; name another file"
        )


def _is_empty(path: Path) -> bool:
    with _engine(sqlite_uri(path)) as engine:
        return not inspect(engine).get_table_names()


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"{path.stem}-half-made{path.suffix}")
    # The file first: without its journal it may not be readable, and nobody could tell what it is.
    for suffix in ("", *SIDE_FILES):
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    log.warning(
        "%s: MLflow was killed while it made the tables; the file is kept as %s, and a new one is "
        "written from the trial folders",
        path,
        aside.name,
    )


def _make_file(path: Path) -> None:
    """Make the tables beside the file, which gets its name when they are whole."""
    beside = path.with_name(f".{path.name}.making")
    # A kill leaves this folder, and the lock says that nobody works in it.
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    made = beside / "made.db"
    _make_tables(sqlite_uri(made))
    # sqlite would take the log of a file that is gone for that of the new one.
    for suffix in SIDE_FILES:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    # A copy, because MLflow may keep a connection to the file in which it made the tables.
    with replacing(path) as temporary, closing(sqlite3.connect(made)) as connection:
        connection.execute("VACUUM INTO ?", [str(temporary)])
    shutil.rmtree(beside)


def prepare_postgres(uri: str) -> None:
    """Make MLflow's tables in PostgreSQL, which drivers on several hosts may do at once.

    Raises:
        TrackingError: The driver for PostgreSQL is not installed.
        SQLAlchemyError: The server does not answer, or refuses.
    """
    with _engine(uri) as engine, engine.connect() as connection:
        # The lock ends with this connection, which no pool keeps.
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": SCHEMA_LOCK})
        # Asked again under the lock: the process before may just have made the tables.
        if revision(uri) is None:
            _make_tables(uri)


def revision(uri: str) -> str | None:
    """The revision of MLflow's tables in a database, None where there are none.

    Raises:
        TrackingError: An sqlite file that is no database; PostgreSQL's driver is not installed.
        SQLAlchemyError: The server does not answer, or refuses.
    """
    # Imported here: alembic is needed where the tables are looked at, not by who imports this
    # module.
    from alembic.runtime.migration import MigrationContext

    try:
        with _engine(uri) as engine, engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    except DatabaseError as error:
        # With a server, the connection or the rights are at fault, and the caller says so.
        if not uri.startswith("sqlite:"):
            raise
        path = uri.removeprefix("sqlite:///")
        raise TrackingError(
            f"{path}: not a usable sqlite database: {error.orig}; "
            "move it away, then suite sync makes it anew"
        ) from error


@functools.cache
def newest_revision() -> str:
    """The revision that this environment's MLflow makes; it works with no other."""
    # Here for the place of its files alone; the import takes seconds.
    import mlflow
    from alembic.script import ScriptDirectory

    folder = Path(mlflow.__file__).parent / "store" / "db_migrations"
    return str(ScriptDirectory(str(folder)).get_current_head())


@contextmanager
def _engine(uri: str) -> Iterator[Engine]:
    """Connections of our own, beside MLflow's: to look, and to hold the lock."""
    watch_sqlite_files()
    try:
        # Without a pool the connection, and with it the lock, ends with the block.
        engine = create_engine(uri, poolclass=NullPool)
    except ImportError as error:
        raise TrackingError(
            f"tracking store {uri.partition(':')[0]}://...: {error}; "
            "for PostgreSQL: pip install 'petl-suite[postgres]'"
        ) from error
    # SQLAlchemy takes the port for a number without a look.
    except ValueError as error:
        raise TrackingError(
            f"tracking store {uri.partition(':')[0]}://...: {error}; "
            "expected postgresql://USER@HOST:PORT/DATABASE"
        ) from error
    try:
        yield engine
    finally:
        engine.dispose()


def _make_tables(uri: str) -> None:
    """Do what `mlflow db upgrade URI` does, without a password on a command line."""
    from mlflow.db import commands

    commands.main(args=["upgrade", for_mlflow(uri)], prog_name="mlflow db", standalone_mode=False)


# MLflow keeps its connections for as long as the process lives. One to a file that was deleted and
# made anew would go on writing into the deleted file; SQLAlchemy opens another when it is told so.


def _on_connect(connection: Any, record: Any) -> None:
    # The listener hears of every database of the process, PostgreSQL among them.
    if not isinstance(connection, sqlite3.Connection):
        return
    record.info["file"] = _file_of(connection)
    # With the write-ahead log this can lose the last writes when the machine loses its power, and
    # never damages the file. MLflow commits six times for a run, each with a wait for the disk.
    connection.execute("PRAGMA synchronous=NORMAL")


def _on_checkout(connection: Any, record: Any, _: Any) -> None:
    known = record.info.get("file")
    # SQLAlchemy answers this error with a new connection, to the file that is there now.
    if known is not None and _identity(known[0]) != known[1]:
        raise DisconnectionError("the file was replaced")


def _file_of(connection: sqlite3.Connection) -> tuple[str, tuple[int, int]] | None:
    _, _, path = connection.execute("PRAGMA database_list").fetchone()
    identity = _identity(path)
    # A database in memory has an empty path, and nothing that could be replaced.
    return None if identity is None else (path, identity)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    # A file that is made anew has the same name and another inode.
    return stat.st_dev, stat.st_ino


# A home on a read-only mount, or of another user, is read as it is. sqlite by itself would make the
# files of its write-ahead log beside the database.


def _before_connect(
    dialect: Any, record: Any, arguments: list[Any], options: dict[str, Any]
) -> Any:
    # The listener hears of every database of the process, those in memory among them.
    if dialect.name != "sqlite" or not os.path.isabs(arguments[0]):
        return None
    path = Path(arguments[0])
    if not path.exists() or (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        return None
    log = Path(f"{path}-wal")
    mode = "immutable=1"
    if log.exists() and Path(f"{path}-shm").exists():
        # A writer may be at work: sqlite reads beside it with the locks of its index.
        mode = "mode=ro"
    elif log.exists() and log.stat().st_size:
        return _copy_in_memory(path)
    arguments[0] = f"{path.as_uri()}?{mode}"
    options["uri"] = True
    return None


def _copy_in_memory(path: Path) -> sqlite3.Connection:
    """What a database and its log hold, where the log has no index and sqlite may not make one.

    `immutable` would read past such a log. No writer lives: it would have an index.
    """
    # SQLAlchemy gives a connection of a file to one thread after another.
    copy = sqlite3.connect(":memory:", check_same_thread=False)
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{path}{suffix}", f"{folder}/copy.db{suffix}")
        with closing(sqlite3.connect(f"{folder}/copy.db")) as merged:
            merged.backup(copy)
    return copy


def watch_sqlite_files() -> None:
    """Have every sqlite connection of this process follow its file, and write only where it may."""
    # Each store asks for this, but a listener that is added twice would run twice.
    if not event.contains(Pool, "checkout", _on_checkout):
        event.listen(Pool, "connect", _on_connect)
        event.listen(Pool, "checkout", _on_checkout)
        event.listen(Engine, "do_connect", _before_connect)
