"""Checks whether an MLflow store can be reached and has the tables of this MLflow."""

from __future__ import annotations

import time
from importlib import metadata
from urllib.parse import urlsplit

import requests
from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from suite.doctor.finding import Finding, fail, ok, warn
from suite.doctor.machine import unwritable
from suite.doctor.places import read_only, refused
from suite.errors import TrackingError
from suite.storage.databases import check_local, with_deadlines
from suite.tracking.schema import revision
from suite.tracking.store import (
    load_mlflow,
    open_store,
    set_environment,
    sqlite_path,
    without_password,
)

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
ANSWER_S = 10.0
# Rights are asked for before rows are looked for, so a statement without rows tells them.
WRITES_ROWS = (
    "INSERT INTO runs SELECT * FROM runs WHERE 1 = 0",
    "UPDATE runs SET name = name WHERE 1 = 0",
)
MAKES_TABLES = "CREATE TABLE suite_doctor_tried (a INTEGER)"


def check_store(tracking_uri: str) -> Finding:
    """Check that a store can be reached and is safe to write, and that it has the right tables.

    The check changes nothing there.

    Args:
        tracking_uri: As `resolve_uri` gives it: a database, or an MLflow server.
    """
    # With MLflow's own values a server that is away would be waited for for minutes.
    set_environment()
    try:
        if urlsplit(tracking_uri).scheme.partition("+")[0] not in DATABASES:
            return _server(tracking_uri)
        path = sqlite_path(tracking_uri)
        if path is not None:
            check_local(path)
            if (why := unwritable("mlflow", path)) is not None:
                return why
            # To open it would make an empty file.
            if not path.exists():
                return ok("mlflow", found=f"{path}: none yet, the first run makes it")
        return _database(tracking_uri)
    except TrackingError as error:
        return fail(
            "mlflow",
            found=str(error),
            remedy="docs/stores.md; trials do not wait for it, suite sync catches up later",
        )


def _database(uri: str) -> Finding:
    """Check a database that this process reaches by itself.

    Raises:
        TrackingError: It has the tables of another MLflow.
    """
    shown = without_password(uri)
    try:
        found = revision(with_deadlines(uri))
    except SQLAlchemyError as error:
        why = without_password(str(error).strip().splitlines()[0])[:300]
        return fail(
            "mlflow",
            found=f"{shown}: {why}",
            remedy="start the database; check its host, user and password",
        )
    if found is None:
        if uri.startswith("postgresql"):
            return _tried(uri, f"{shown}: empty", MAKES_TABLES)
        # Of an sqlite file it is known. MySQL keeps a table whatever is rolled back.
        untried = " (whether this user may was not tried)"
        if sqlite_path(uri) is not None:
            untried = ""
        return ok("mlflow", found=f"{shown}: empty, the first run makes its tables{untried}")
    open_store(uri, create=False)
    text = f"{shown}: it has the tables of this MLflow"
    # The right to write an sqlite file is all it takes, and a writer may hold its only lock.
    if sqlite_path(uri) is not None:
        return ok("mlflow", found=text)
    return _tried(uri, text, *WRITES_ROWS)


def _tried(uri: str, text: str, *statements: str) -> Finding:
    """Whether this user may write to a database on a server; nothing stays there."""
    with create_engine(with_deadlines(uri), poolclass=NullPool).connect() as connection:
        why = refused(connection, *statements)
    if why is not None:
        return read_only("mlflow", text, without_password(why))
    return ok("mlflow", found=f"{text}, can be written")


def _server(uri: str) -> Finding:
    """Check that an MLflow server answers within seconds, and compare its version.

    Raises:
        TrackingError: It does not answer.
    """
    # The import takes seconds, which are not the server's.
    load_mlflow()
    began_s = time.perf_counter()
    open_store(uri, create=False)
    took_s = time.perf_counter() - began_s
    ours = metadata.version("mlflow")
    theirs = _version(uri)
    text = f"{without_password(uri)}: MLflow {theirs}, answers in {took_s * 1000:.0f} ms"
    # Patch releases keep the interface between server and client.
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        return warn(
            "mlflow",
            found=f"{text}, this client is {ours}",
            remedy="use the same minor version on both sides",
        )
    return ok("mlflow", found=text)


def _version(uri: str) -> str:
    """The version of an MLflow server.

    Raises:
        TrackingError: It does not say.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    try:
        # MLflow's own request sends the user and password, or the token, as all its others do.
        answer = http_request(get_default_host_creds(uri), "/version", "GET", timeout=ANSWER_S)
        answer.raise_for_status()
    except (requests.RequestException, MlflowException) as error:
        raise TrackingError(
            f"{without_password(uri)}: does not say its version: {type(error).__name__}"
        ) from None
    return str(answer.text).strip()[:40]
