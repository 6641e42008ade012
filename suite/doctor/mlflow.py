"""Whether an MLflow store can be reached, and has the schema that this MLflow writes."""

from __future__ import annotations

import os
import time
from importlib import metadata
from urllib.parse import urlsplit

import requests
from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError

from suite.doctor.finding import Finding, fail, ok, warn
from suite.errors import TrackingError
from suite.storage.databases import check_local, with_deadlines
from suite.tracking.store import ENVIRONMENT, open_store, sqlite_path, without_password

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
ANSWER_S = 10.0


def check_store(tracking_uri: str) -> Finding:
    """The store behind a URI: reachable, safe to write, with the right schema. Changes nothing there.

    Args:
        tracking_uri: As `resolve_uri` gives it: a database, or an MLflow server.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        if urlsplit(tracking_uri).scheme.partition("+")[0] not in DATABASES:
            return _server(tracking_uri)
        path = sqlite_path(tracking_uri)
        if path is not None:
            check_local(path)
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
    """A database that this process reaches by itself: connection, server and the revision of its schema."""
    from mlflow.store.db.utils import _get_latest_schema_revision, _get_schema_version

    shown = without_password(uri)
    try:
        engine = create_engine(with_deadlines(uri))
        try:
            with engine.connect() as connection:
                version = ".".join(map(str, connection.dialect.server_version_info or ()))
            found = _get_schema_version(engine)
        finally:
            engine.dispose()
    except (SQLAlchemyError, ImportError) as error:
        why = without_password(str(error).strip().splitlines()[0])[:300]
        return fail(
            "mlflow",
            found=f"{shown}: {why}",
            remedy="start the database; check its host, user and password, or the file",
        )
    text, newest = f"{shown}: {engine.dialect.name} {version}", _get_latest_schema_revision()
    if found is None:
        return ok("mlflow", found=f"{text}, empty: the first run makes its tables")
    if found != newest:
        remedy = "all who use it need the same MLflow; back it up, then suite sync (sqlite) or mlflow db upgrade URI"
        return fail(
            "mlflow", found=f"{text}, schema {found}, this MLflow writes {newest}", remedy=remedy
        )
    return ok("mlflow", found=f"{text}, the schema of this MLflow")


def _server(uri: str) -> Finding:
    """An MLflow server: an answer within seconds, and its version.

    Raises:
        TrackingError: It does not answer.
    """
    began = time.perf_counter()
    open_store(uri, create=False)
    took_s, ours = time.perf_counter() - began, metadata.version("mlflow")
    try:
        theirs = requests.get(f"{uri.rstrip('/')}/version", timeout=ANSWER_S).text.strip()[:40]
    except requests.RequestException as error:
        raise TrackingError(
            f"{without_password(uri)}: does not say its version: {type(error).__name__}"
        ) from None
    text = f"{without_password(uri)}: MLflow {theirs}, answers in {took_s * 1000:.0f} ms"
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        return warn(
            "mlflow",
            found=f"{text}, this client is {ours}",
            remedy="use the same minor version on both sides",
        )
    return ok("mlflow", found=text)
