"""Make a folder once, whichever of many processes asks first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from suite.errors import DataError

LOCK_TIMEOUT_S = 3600.0


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Have `folder` made by `make(temporary)` unless it exists; others wait. A crash leaves nothing half made.

    Raises:
        DataError: Another process has been at it for too long.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(folder.name + ".lock")
    try:
        with FileLock(lock, timeout=LOCK_TIMEOUT_S):
            if not folder.exists():
                _make(folder, make)
    except Timeout:
        raise DataError(f"{lock}: another process has been making {folder.name} for over {LOCK_TIMEOUT_S:.0f} s; is it alive?") from None


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    """The caller holds the lock, so whatever lies beside the folder was left by a process that is gone."""
    for stale in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(stale)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    make(temporary)
    temporary.rename(folder)
