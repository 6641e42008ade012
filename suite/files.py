"""Write files whole or not at all, and name their content by a hash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from suite.disk import OF_RUST
from suite.errors import DataError

LOCK_TIMEOUT_S = 3600.0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block a temporary file to write, which then replaces `path`.

    A reader sees the old file or the new one, and so does whoever comes after a crash.
    """
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, because a rename is atomic within one file system only.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            yield Path(name)
            # The bytes first, then the name: a power cut must not leave a name without its bytes.
            _fsync(Path(name))
            # mkstemp lets nobody but the owner read.
            os.chmod(name, 0o644)
            os.replace(name, path)
            _fsync(path.parent)
        # Ctrl-C must leave no temporary file behind either.
        except BaseException:
            # A disk that fails may not let it go, and the first error is the one to tell.
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def remove_leavings(path: Path) -> None:
    """Remove what writers of a file left that were killed; nobody else may be writing it."""
    for left in path.parent.glob(f".{path.name}.*"):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have an error of the disk name the file that was to be written.

    The error of an fsync names none, the others name the temporary file, and safetensors raises one
    of its own for what is an OSError elsewhere.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or f"/.{path.name}." in str(error.filename):
            error.filename = str(path)
        raise
    except Exception as error:
        number = OF_RUST.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def sqlite_uri(path: Path) -> str:
    """The URI of an sqlite file: `sqlite:////ABSOLUTE/PATH`, `?`, `#` and `%` as `%3F` and so on.

    Source: SQLAlchemy 2.1 decodes the path of a URI and ends it at a `?`.
    """
    # Other characters stay readable: SQLAlchemy and MLflow take them as they are.
    quoted = str(path.absolute()).replace("%", "%25").replace("?", "%3F").replace("#", "%23")
    return f"sqlite:///{quoted}"


def file_name(name: str) -> str:
    """Put a dash for every character that a file name should not have, `/` among them."""
    return re.sub(r"[^\w.-]", "-", name)


def kept_folder(kind: str) -> Path:
    """The user's folder for what takes long to compute and can be computed again."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "petl-suite" / kind


def keep(path: Path, data: bytes, *, most: int) -> None:
    """Write a file into such a folder, and remove the oldest of its kind beyond `most`.

    A folder that cannot be written is left alone: next time the answer is computed again.
    """
    with contextlib.suppress(OSError):
        write_atomic(path, data)
        by_age = sorted(path.parent.glob(f"*{path.suffix}"), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-most]:
            old.unlink(missing_ok=True)


def parse_json(text: str | bytes, *, distinct: bool = False) -> Any:
    """Parse JSON that somebody else may have written or cut.

    Args:
        distinct: Whether an object that has a key twice is refused; else its last value counts.

    Raises:
        ValueError: It is no JSON, no UTF-8, or is nested too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct if distinct else None)
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there {names.count(twice)} times")
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file that somebody else may have written or cut.

    Raises:
        OSError: It cannot be read.
        ValueError: As `parse_json`.
    """
    return parse_json(path.read_bytes())


def json_bytes(value: Any) -> bytes:
    """Return a value as indented JSON; NaN and infinity are refused."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a value as indented JSON, whole or not at all."""
    write_atomic(path, json_bytes(value))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def nearest(path: Path) -> Path:
    """Return `path`, or the closest folder above it that this user can see."""
    path = path.resolve()
    # This ends, because the root exists. `Path.exists` raises an error below a folder that this
    # user may not enter.
    while not os.path.exists(path):
        path = path.parent
    return path


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Call `make(temporary)` to make the folder unless it exists. Other processes wait for it.

    A crash leaves nothing half made.

    Raises:
        DataError: Another process has been making it for too long.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(folder.name + ".lock")
    try:
        with FileLock(lock, timeout=LOCK_TIMEOUT_S):
            # Whoever held the lock before may have made it meanwhile.
            if not folder.exists():
                _make(folder, make)
    except Timeout:
        raise DataError(
            f"{lock}: another process has been making {folder.name} for over "
            f"{LOCK_TIMEOUT_S:.0f} s; is it alive?"
        ) from None


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    # The caller holds the lock, so a process that is gone has left what lies beside the folder.
    for stale in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(stale)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    make(temporary)
    # The last step: the folder gets its name when all of it is there.
    temporary.rename(folder)


def stamp(path: Path) -> int | None:
    """When a file was last written, ns since 1970; None where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
