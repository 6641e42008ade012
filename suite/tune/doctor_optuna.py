"""Whether the storage that `--optuna` names can be reached, has the schema that this Optuna writes, and can be written."""

from __future__ import annotations

import os
from pathlib import Path

from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import Connection, create_engine, inspect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from suite.doctor.finding import Finding, fail, ok
from suite.doctor.machine import nearest
from suite.errors import TrackingError
from suite.redact import redact
from suite.tune.optuna_mirror import database_url, explained, journal_path
from suite.tune.optuna_trials import quiet

REMEDY = "docs/stores.md; the sweep does not wait for it, suite sync --optuna catches up later"
OWN_TABLES = {"studies", "version_info", "alembic_version"}
TRIED = "written by suite doctor"


def check_optuna(url: str) -> Finding:
    """The storage behind a URL, as `suite.tune.optuna_mirror.open_storage` takes it. Changes nothing there."""
    try:
        with quiet(), explained(url):
            path = journal_path(url)
            return _database(database_url(url)) if path is None else _journal(path)
    except TrackingError as error:
        return fail("optuna", found=str(error), remedy=REMEDY)


def _journal(path: Path) -> Finding:
    """A file that is read as Optuna reads it; one that is not there is not made."""
    if not os.access(nearest(path), os.W_OK):
        return fail("optuna", found=f"{path}: cannot be written", remedy="name another place, or give this user the right to write there")
    if not path.exists():
        return ok("optuna", found=f"{path}: none yet, the first run makes it")
    studies = JournalStorage(JournalFileBackend(str(path))).get_all_studies()
    return ok("optuna", found=f"{path}: a journal with {len(studies)} studies, can be written")


def _database(url: str) -> Finding:
    """A database: connection, tables, the version of its schema, and a row that is taken back."""
    shown = redact(url.partition("?")[0])
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:") and not path.exists():
        return ok("optuna", found=f"{path}: none yet, the first run makes it")
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        tables = {*inspect(connection).get_table_names()}
        text = f"{shown}: {engine.dialect.name} {'.'.join(map(str, connection.dialect.server_version_info or ()))}"
        if tables >= OWN_TABLES and (theirs := _other_schema(url)) is not None:
            remedy = "all who use it need the same Optuna; back it up, then: optuna storage upgrade --storage URL"
            return fail("optuna", found=f"{text}, {theirs}", remedy=remedy)
        why = _refused(connection, "studies" in tables)
    if why is not None:
        return fail("optuna", found=f"{text}, cannot be written: {redact(why)}", remedy="give its user the right to write there")
    has = "the schema of this Optuna" if tables >= OWN_TABLES else "empty: the first run makes its tables"
    return ok("optuna", found=f"{text}, {has}, can be written")


def _other_schema(url: str) -> str | None:
    storage = RDBStorage(url, engine_kwargs={"poolclass": NullPool}, skip_compatibility_check=True, skip_table_creation=True)
    found, newest = storage.get_current_version(), storage.get_head_version()
    return None if found == newest else f"schema {found}, this Optuna writes {newest}"


def _refused(connection: Connection, has_studies: bool) -> str | None:
    """Why nothing can be written: a study, or where there are no tables one of ours, in a transaction that is rolled back."""
    if connection.dialect.name == "mysql" and not has_studies:  # which would keep the table
        return None
    try:
        connection.rollback()  # what looking at the tables began
        if connection.dialect.name == "sqlite":  # Python's sqlite3 begins none for CREATE
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        insert = f"INSERT INTO studies (study_name) VALUES ('{TRIED}')"  # noqa: S608 - a constant
        connection.exec_driver_sql(insert if has_studies else "CREATE TABLE suite_doctor (id INTEGER)")
    except SQLAlchemyError as error:
        return str(error).strip().splitlines()[0][:300]
    finally:
        connection.rollback()
    return None
