"""Keys and bytes below a URL: what homes, leases and exports need of a folder or a bucket, and no more.

A storage must be able to create a key only if nobody else has: by a hard link on files, by a conditional put on S3. A file system that
cannot is refused, because two drivers could then both believe that a sweep is theirs.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from suite.errors import StorageError
from suite.files import replacing, write_atomic

T = TypeVar("T")
PATIENCE_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
FILE, S3 = ("file", "local"), ("s3", "s3a")


class Storage(ABC):
    """A root with keys below it, `a/b/c`; the same on files and on S3.

    Args:
        url: The root as given.
        patience_s: How long a storage that does not answer is asked again before `StorageError`.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        self.url, self.patience_s = url.rstrip("/"), patience_s

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The bytes of a key, None where there is none. Raises `StorageError`, as every method here does."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Set a key: a reader sees the old bytes or the new ones, never a part."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Set a key that does not exist; of all who try at once, exactly one gets True.

        Args:
            key: The key.
            data: Should differ from what others would write: if an answer is lost, reading it back decides who has won.
        """

    @abstractmethod
    def keys(self, prefix: str = "") -> list[str]:
        """All keys at or below `prefix`, cut at "/", sorted; "" = all."""

    @abstractmethod
    def delete(self, prefix: str) -> None:
        """Remove a key, or all keys below it; nothing happens where there is none."""

    @abstractmethod
    def push(self, local: Path, key: str) -> None:
        """Set a key to a file's content, as `write` does."""

    @abstractmethod
    def pull(self, key: str, local: Path) -> None:
        """Replace a file by a key's content, whole or not at all; a key that does not exist is an error."""

    def exists(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.read(key) is not None

    def check(self) -> None:
        """Write, read and remove a key of its own, asking once: what is wrong is said within seconds.

        Raises:
            StorageError: It cannot be reached, written or read.
        """
        patience_s, self.patience_s = self.patience_s, 0.0
        key = f".check-{uuid.uuid4().hex}"
        try:
            if (
                not self.create(key, key.encode())
                or self.create(key, b"")
                or self.read(key) != key.encode()
            ):
                raise StorageError(
                    f"storage {self.url}: does not keep the first of two writers; expected a disk or a bucket that does"
                )
            self.delete(key)
        finally:
            self.patience_s = patience_s


def open_storage(url: str | Path, *, patience_s: float = PATIENCE_S) -> Storage:
    """The storage at a folder, `file://` or `s3://` URL; nothing is asked of it yet (`check` does).

    Raises:
        StorageError: A URL that is none, holds credentials, or whose kind of storage is not known to create keys atomically.
    """
    text = str(url)
    protocol, found, rest = text.partition("://")
    if not found:
        return FileStorage(Path(text), patience_s=patience_s)
    if "@" in rest.partition("/")[0]:
        raise StorageError(
            f"storage {protocol}://***: holds credentials; give them by AWS_ACCESS_KEY_ID, ... or ~/.aws"
        )
    if protocol in FILE:
        if not rest.startswith("/"):
            raise StorageError(
                f"storage {text}: expected file:///ABSOLUTE/PATH, got a host or a relative path"
            )
        return FileStorage(Path(rest), patience_s=patience_s)
    if protocol in S3:
        from suite.storage.s3 import S3Storage

        return S3Storage(text, patience_s=patience_s)
    raise StorageError(
        f"storage {text}: got {protocol!r}, expected a folder, file:// or s3://, which create keys atomically"
    )


def is_local(url: str | Path) -> bool:
    """Whether a URL is a folder."""
    protocol, found, _ = str(url).partition("://")
    return not found or protocol in FILE


class FileStorage(Storage):
    """A folder; on a shared disk, with hard links for `create`."""

    def __init__(self, root: Path, *, patience_s: float = PATIENCE_S) -> None:
        self.root = root.absolute()
        super().__init__(self.root.as_posix(), patience_s=patience_s)

    def read(self, key: str) -> bytes | None:
        def now() -> bytes | None:
            try:
                return self._path(key).read_bytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None

        return self._do(now, key)

    def write(self, key: str, data: bytes) -> None:
        self._do(lambda: write_atomic(self._path(key), data), key)

    def create(self, key: str, data: bytes) -> bool:
        return self._do(lambda: _link_new(self._path(key), data), key)

    def exists(self, key: str) -> bool:
        return self._do(lambda: self._path(key).is_file(), key)

    def keys(self, prefix: str = "") -> list[str]:
        found = self._do(lambda: _files_below(self._path(prefix)), prefix)
        keys = (path.relative_to(self.root) for path in found)
        return sorted(
            key.as_posix() for key in keys if not any(part.startswith(".") for part in key.parts)
        )

    def delete(self, prefix: str) -> None:
        path = self._path(checked_key(prefix))

        def now() -> None:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

        self._do(now, prefix)

    def push(self, local: Path, key: str) -> None:
        self._do(lambda: _copy(local, self._path(key)), key)

    def pull(self, key: str, local: Path) -> None:
        self._do(lambda: _copy(self._path(key), local), key)

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key) if key else self.root

    def _do(self, call: Callable[[], T], key: str) -> T:
        """A full disk stays an OSError, because a sweep waits for room and does not try again."""
        try:
            return patient(call, patience_s=self.patience_s, transient=_is_stale)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StorageError(
                f"storage {self.url}: {key}: {error.strerror or error}; expected a folder that can be read and written"
            ) from error


def _files_below(start: Path) -> list[Path]:
    """The file itself, or all in a folder; what is removed meanwhile is left out, what cannot be listed is an error and not empty."""

    def fail(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error

    return (
        [start]
        if start.is_file()
        else [
            Path(folder, name)
            for folder, _, names in os.walk(start, onerror=fail)
            for name in names
        ]
    )


def checked_key(key: str) -> str:
    """The key without outer slashes.

    Raises:
        StorageError: It could leave the root.
    """
    parts = key.strip("/").split("/")
    if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise StorageError(
            f"storage key {key!r}: got a part that is empty or leaves its folder, expected NAME/NAME"
        )
    return "/".join(parts)


def _link_new(path: Path, data: bytes) -> bool:
    """Whole bytes under a name that nobody had: an exclusively opened file could be seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.link(name, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(name)
    return True


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)


def patient(
    call: Callable[[], T], *, patience_s: float, transient: Callable[[Exception], bool]
) -> T:
    """Ask again, ever less often, while the error may pass and patience lasts."""
    end, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
    while True:
        try:
            return call()
        except Exception as error:
            if not transient(error) or time.monotonic() + pause_s > end:
                raise
            time.sleep(
                pause_s * random.uniform(0.5, 1.0)
            )  # so that a hundred ranks do not come back at once
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _is_stale(error: Exception) -> bool:
    """Of a network file system: a handle that the server replaced, or a server that is away."""
    return isinstance(error, OSError) and error.errno in (
        errno.ESTALE,
        errno.EIO,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EREMOTEIO,
    )
