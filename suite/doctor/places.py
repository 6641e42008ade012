"""Checks the folders and stores that a sweep writes to: the home and the storage behind it."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from suite.doctor.finding import Finding, fail, ok, warn
from suite.doctor.machine import nearest
from suite.files import write_atomic
from suite.storage.databases import file_system

SLOW_WRITE_S = 0.5


def home_writable(home: Path) -> Finding:
    """Check that the home can be written, in the way in which trials write their results.

    They write atomically: a file is on the disk before it gets its name.
    """
    # Innermost first, because a folder can be removed only when it is empty.
    made = [folder for folder in (home, *home.parents) if not folder.exists()]
    path = home / f".doctor-{uuid.uuid4().hex}"
    began = time.perf_counter()
    try:
        write_atomic(path, b"written by suite doctor")
        path.unlink()
    except OSError as error:
        return fail(
            "home",
            found=f"{home}: {error.strerror or error}",
            remedy="choose a --home that can be written, with space",
        )
    finally:
        # The doctor leaves nothing behind, but keeps what a sweep has put there meanwhile.
        for folder in made:
            if folder.is_dir() and not os.listdir(folder):
                folder.rmdir()
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
    except StorageError as error:
        return fail(
            "storage",
            found=str(error),
            remedy="check the URL, this node's credentials and its way to the store",
        )
    took_s = time.perf_counter() - began
    text = f"{url}: written, read, and a key created only once, in {took_s:.2f} s"
    return ok("storage", found=text)
