"""Checks the folders and stores that a sweep writes to: the home and the storage behind it."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from suite.doctor.finding import Finding, fail, ok, warn
from suite.files import nearest, write_atomic
from suite.storage.databases import file_system

SLOW_WRITE_S = 0.5


@contextmanager
def left_as_found(folder: Path) -> Iterator[None]:
    """Remove the folders down to this one that come into being meanwhile and stay empty.

    The doctor leaves nothing behind, but keeps what a sweep has put there.
    """
    # Innermost first, because a folder can be removed only when it is empty.
    # `Path.exists` raises an error below a folder that this user may not enter.
    missing = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
    try:
        yield
    finally:
        for place in missing:
            # `rmdir` refuses a folder that holds something, and another node may have been faster.
            with contextlib.suppress(OSError):
                place.rmdir()


def home_writable(home: Path) -> Finding:
    """Check that the home can be written, in the way in which trials write their results.

    They write atomically: a file is on the disk before it gets its name.
    """
    path = home / f".doctor-{uuid.uuid4().hex}"
    began = time.perf_counter()
    try:
        with left_as_found(home):
            write_atomic(path, b"written by suite doctor")
            path.unlink()
    except OSError as error:
        return fail(
            "home",
            found=f"{home}: {error.strerror or error}",
            remedy="choose a --home that can be written, with space",
        )
    took_s = time.perf_counter() - began
    kind = file_system(nearest(home)) or "unknown file system"
    text = f"{home}: {kind}, a synced file in {took_s * 1000:.0f} ms"
    if took_s > SLOW_WRITE_S:
        return warn(
            "home",
            found=text,
            remedy="trials write several such files each; a faster disk saves their time",
        )
    return ok("home", found=text)


def storage(url: str) -> Finding:
    """Check that the storage answers and refuses to create a key that exists.

    A driver claims a sweep by creating a key, so two drivers must not both succeed.
    """
    # Imported here, because most homes have no storage behind them, and its client is slow to load.
    from suite.errors import StorageError
    from suite.storage.urls import open_storage

    began = time.perf_counter()
    try:
        open_storage(url).check()
    except (StorageError, OSError) as error:
        return fail(
            "storage",
            found=str(error),
            remedy="check the URL, this node's credentials and way to the store, and its space",
        )
    took_s = time.perf_counter() - began
    text = f"{url}: written, read, and a key created only once, in {took_s:.2f} s"
    return ok("storage", found=text)


def read_only(check: str, text: str, why: str) -> Finding:
    """Say that a database answers and cannot be written to."""
    return fail(
        check,
        found=f"{text}, cannot be written: {why}",
        remedy="give its user the right to write there",
    )


def refused(connection: Connection, *statements: str) -> str | None:
    """Why a database does not take these statements; None = it does. Nothing of them stays.

    Args:
        connection: To a database that makes and removes tables inside of transactions, if a
            statement does.
        statements: They are tried in a transaction that is rolled back.
    """
    try:
        # Looking at the tables began a transaction, perhaps a read-only one.
        connection.rollback()
        for statement in statements:
            connection.exec_driver_sql(statement)
    except SQLAlchemyError as error:
        return str(error).strip().splitlines()[0][:300]
    finally:
        connection.rollback()
    return None
