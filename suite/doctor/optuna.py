"""Whether the storage that `--optuna` names can be reached, has the schema that this Optuna writes, and can be written.

Changes nothing: `RDBStorage` would, for opening a database writes its version and makes what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import optuna
from alembic.config import Config
from alembic.script import ScriptDirectory
from optuna.storages import JournalStorage
from optuna.storages._rdb.models import BaseModel
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import Connection, create_engine, inspect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from suite.doctor.finding import Finding, fail, ok
from suite.doctor.machine import nearest
from suite.errors import TrackingError
from suite.plan.optuna_trials import quiet
from suite.redact import redact
from suite.tracking.optuna_mirror import database_url, explained, journal_path

REMEDY = "docs/stores.md; the sweep does not wait for it, suite sync --optuna catches up later"
VERSION = "alembic_version"
OWN_TABLES = frozenset({*BaseModel.metadata.tables, VERSION})
"""What Optuna makes in a database."""
TRIED = "written by suite doctor"


def check_optuna(url: str) -> Finding:
    """The storage behind a URL, as `suite.tracking.optuna_mirror.open_storage` takes it. Changes nothing there."""
    try:
        with quiet(), explained(url):
            path = journal_path(url)
            return _database(database_url(url)) if path is None else _journal(path)
    except TrackingError as error:
        return fail("optuna", found=str(error), remedy=REMEDY)


def _journal(path: Path) -> Finding:
    """A file that is read as Optuna reads it; one that is not there is not made."""
    if not path.exists():
        return _none_yet(path)
    if (why := _unwritable(path)) is not None:
        return why
    studies = JournalStorage(JournalFileBackend(str(path))).get_all_studies()
    return ok("optuna", found=f"{path}: a journal with {len(studies)} studies, can be written")


def _none_yet(path: Path) -> Finding:
    """A file that the first run makes, where it may."""
    return _unwritable(path) or ok("optuna", found=f"{path}: none yet, the first run makes it")


def _unwritable(path: Path) -> Finding | None:
    """A file beside which nothing can be written cannot be either: sqlite and journals have a second file while they write."""
    places = (nearest(path), nearest(path.parent))
    refused = next(
        (
            place
            for place in places
            if not os.access(place, os.W_OK | (os.X_OK if place.is_dir() else 0))
        ),
        None,
    )
    if refused is None:
        return None
    remedy = "name another place, or give this user the right to write there"
    return fail("optuna", found=f"{path}: {refused} cannot be written", remedy=remedy)


def _database(url: str) -> Finding:
    """A database: connection, tables, the version of its schema, and a row that is taken back."""
    if url.startswith("sqlite:"):
        path = Path(url.removeprefix("sqlite:///"))
        if not path.exists():
            return _none_yet(path)
        if (why := _unwritable(path)) is not None:
            return why
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        tables = {*inspect(connection).get_table_names()}
        server = f"{engine.dialect.name} {'.'.join(map(str, connection.dialect.server_version_info or ()))}"
        return _judged(connection, tables, f"{redact(url.partition('?')[0])}: {server}")


def _judged(connection: Connection, tables: Collection[str], text: str) -> Finding:
    """What the tables say, and of a whole set whether it takes a row."""
    own = OWN_TABLES & {*tables}
    if not own:
        has = "empty" if not tables else f"no table of Optuna, {len(tables)} of something else"
        tried = (
            "" if connection.dialect.name == "sqlite" else " (whether this user may was not tried)"
        )
        return ok("optuna", found=f"{text}, {has}: the first run makes its tables{tried}")
    if VERSION in own and (theirs := _other_schema(connection)) is not None:
        remedy = "all who use it need the same Optuna; back it up, then: optuna storage upgrade --storage URL"
        return fail("optuna", found=f"{text}, {theirs}", remedy=remedy)
    if own != OWN_TABLES:
        found = f"{text}, Optuna's tables are incomplete: no {', '.join(sorted(OWN_TABLES - own))}"
        return fail(
            "optuna",
            found=found,
            remedy="they were cut off while they were made, or somebody removed some: give an empty database",
        )
    if (why := _refused(connection)) is not None:
        return fail(
            "optuna",
            found=f"{text}, cannot be written: {redact(why)}",
            remedy="give its user the right to write there",
        )
    return ok("optuna", found=f"{text}, the schema of this Optuna, can be written")


def _other_schema(connection: Connection) -> str | None:
    """In words, where the database has another schema than this Optuna writes."""
    found = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION}").scalar()  # noqa: S608 - a constant
    newest = _newest_schema()
    return None if found == newest else f"schema {found or 'unknown'}, this Optuna writes {newest}"


def _newest_schema() -> str | None:
    """The last of the migrations that Optuna's package brings."""
    config = Config()
    folder = Path(optuna.__file__).parent / "storages" / "_rdb" / "alembic"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return ScriptDirectory.from_config(config).get_current_head()


def _refused(connection: Connection) -> str | None:
    """Why a study cannot be written: one is, in a transaction that is rolled back."""
    try:
        connection.rollback()  # what looking at the tables began
        connection.exec_driver_sql(f"INSERT INTO studies (study_name) VALUES ('{TRIED}')")  # noqa: S608 - a constant
    except SQLAlchemyError as error:
        return str(error).strip().splitlines()[0][:300]
    finally:
        connection.rollback()
    return None
