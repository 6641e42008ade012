"""The name of a home: several homes that write to one store may have sweeps of the same name.

A home that is copied keeps its name, so each copy also keeps the tokens that it has put into stores
(`suite.tracking.claim`). From the moment of the copy on, the two lists differ. Among the tokens is
a mark of the file that holds the name, which no copy of the file has.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from filelock import FileLock

from suite.config.names import why_not
from suite.errors import StorageError
from suite.record.folder import DATABASE, SIDE_FILES, Home
from suite.storage.urls import open_storage

SHARED = "storage"
"""The token of all hosts that share a storage: they are one home, whichever of them writes."""


def identity_path(home: Home) -> Path:
    return home.path / "tracking-id"


def home_id(home: Home) -> str:
    """A random name that is made once, even if several processes ask at the same time.

    Raises:
        StorageError: The file holds something else.
    """
    path = identity_path(home)
    if not path.exists():
        open_storage(home.path).create(path.name, uuid.uuid4().hex[:12].encode())
    found = path.read_text(errors="replace")
    # It becomes a part of a path and of queries, and a copied home was written by somebody else.
    wrong = why_not("home", found)
    if wrong is not None:
        raise StorageError(f"{path}: {wrong}; remove the file, and a new name is made")
    return found


def tokens(home: Home) -> set[str]:
    """The tokens that this home, or the one that it is a copy of, has put into stores."""
    try:
        return set(_tokens_path(home).read_text(errors="replace").split())
    except FileNotFoundError:
        return set()


def remember_token(home: Home, token: str) -> None:
    """Keep a token before a store gets it, so that no crash makes the home a stranger there."""
    if token in tokens(home):
        return
    with _tokens_path(home).open("a") as file:
        file.write(f"{token}\n")
        file.flush()
        os.fsync(file.fileno())


def has_own_name(home: Home) -> bool:
    """Whether this very folder, and not one that it is a copy of, got its name or wrote under it.

    False where that is not known. The hosts of a storage have the storage's name.
    """
    known = tokens(home)
    return SHARED not in known and _mark(home) in known


def keep_name(home: Home) -> None:
    """Remember that the name is this very folder's, which its copies will not be able to say."""
    remember_token(home, _mark(home))


def set_aside(home: Home, old: str) -> Path:
    """Where the database inside a home lies that was renamed, by the old name."""
    return home.path / f"mlflow-{old}.db"


def renew(home: Home) -> str:
    """Give a copied home a name of its own; the database inside it is set aside under the old one.

    Returns:
        The new name.

    Raises:
        StorageError: The home shares its name with a storage.
    """
    if SHARED in tokens(home):
        raise StorageError(
            f"{home.path}: got a home whose name is that of its storage, expected one of its own; "
            "fetch the storage into an empty --home instead"
        )
    name = renew_unused(home)
    keep_name(home)
    return name


def renew_unused(home: Home) -> str:
    """Give a home that has no trial a name of its own, also where it shares one with a storage."""
    with FileLock(home.tracking_lock):
        old = home_id(home)
        # It holds the same runs under the old name, and the leaderboard would show both.
        for suffix in ("", *SIDE_FILES):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{home.path / DATABASE}{suffix}", f"{set_aside(home, old)}{suffix}")
        _tokens_path(home).unlink(missing_ok=True)
        identity_path(home).unlink()
        return home_id(home)


def _mark(home: Home) -> str:
    home_id(home)  # makes the file where there is none
    # A copy is another file, made at another time; a home that is moved keeps the file. On two new
    # disks the inodes alone may be the same.
    about = identity_path(home).stat()
    return f"file-{about.st_ino}-{about.st_ctime_ns}"


def _tokens_path(home: Home) -> Path:
    return home.path / "tracking-writer"
