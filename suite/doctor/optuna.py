"""Checks the storage that `--optuna` names: connection, schema and the right to write.

The checks change nothing there. `RDBStorage` would: when it opens a database, it makes missing
tables and writes its version.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import Connection, create_engine, inspect
from sqlalchemy.pool import NullPool

from suite.doctor.finding import Finding, fail, ok
from suite.doctor.machine import unwritable
from suite.doctor.places import read_only, refused
from suite.errors import TrackingError
from suite.plan.optuna_trials import quiet
from suite.redact import redact
from suite.tracking.optuna_mirror import database_url, explained, journal_path
from suite.tracking.store import sqlite_path

REMEDY = "docs/stores.md; the sweep does not wait for it, suite sync --optuna catches up later"
VERSION = "alembic_version"
TRIED = "written by suite doctor"


def check_optuna(url: str) -> Finding:
    """Check the storage behind a URL, as `suite.tracking.optuna_mirror.open_storage` takes it."""
    try:
        with quiet(), explained(url):
            path = journal_path(url)
            if path is None:
                return _database(database_url(url))
            return _journal(path)
    except TrackingError as error:
        return fail("optuna", found=str(error), remedy=REMEDY)


def _journal(path: Path) -> Finding:
    """Read the file as Optuna does; do not make one that is not there."""
    if not path.exists():
        return _none_yet(path)
    if (why := unwritable("optuna", path)) is not None:
        return why
    studies = JournalStorage(JournalFileBackend(str(path))).get_all_studies()
    return ok("optuna", found=f"{path}: a journal with {len(studies)} studies, can be written")


def _none_yet(path: Path) -> Finding:
    """Judge a file that is not there: the first run makes it, where it may."""
    return unwritable("optuna", path) or ok(
        "optuna", found=f"{path}: none yet, the first run makes it"
    )


def _database(url: str) -> Finding:
    """Check connection, tables, the version of the schema, and whether a row can be written."""
    path = sqlite_path(url)
    if path is not None:
        if not path.exists():
            return _none_yet(path)
        if (why := unwritable("optuna", path)) is not None:
            return why
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        tables = set(inspect(connection).get_table_names())
        version = ".".join(map(str, connection.dialect.server_version_info or ()))
        text = f"{redact(url.partition('?')[0])}: {engine.dialect.name} {version}"
        return _judged(connection, tables, text)


def _judged(connection: Connection, tables: Collection[str], text: str) -> Finding:
    """Judge the tables; if they are complete, try whether they take a row."""
    # A new storage in memory shows what this Optuna makes, without a look into its models.
    template = RDBStorage("sqlite:///:memory:")
    expected = set(inspect(template.engine).get_table_names())
    own = expected.intersection(tables)
    if not own:
        return _no_tables(connection, tables, text)
    newest = template.get_head_version()
    if VERSION in own:
        found = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION}").scalar()  # noqa: S608 - a constant
        if found != newest:
            return fail(
                "optuna",
                found=f"{text}, schema {found or 'unknown'}, this Optuna writes {newest}",
                remedy="all who use it need the same Optuna; back it up, then: "
                "optuna storage upgrade --storage URL",
            )
    if own != expected:
        return fail(
            "optuna",
            found=f"{text}, Optuna's tables are incomplete: no {', '.join(sorted(expected - own))}",
            remedy="they were cut off while they were made, or somebody removed some: "
            "give an empty database",
        )
    why = refused(connection, f"INSERT INTO studies (study_name) VALUES ('{TRIED}')")  # noqa: S608 - a constant
    if why is not None:
        return read_only("optuna", text, redact(why))
    return ok("optuna", found=f"{text}, the schema of this Optuna, can be written")


def _no_tables(connection: Connection, tables: Collection[str], text: str) -> Finding:
    has = "empty"
    if tables:
        has = f"no table of Optuna, {len(tables)} of something else"
    untried = " (whether this user may was not tried)"
    # Of an sqlite file it is known: the right to write the file is all it takes.
    if connection.dialect.name == "sqlite":
        untried = ""
    return ok("optuna", found=f"{text}, {has}: the first run makes its tables{untried}")
