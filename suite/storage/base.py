"""Keys and bytes below a URL: what homes, leases and exports need of a folder or a bucket.

A storage must create a key only if nobody else has: by a hard link on files, by a conditional put on
S3. A file system that cannot is refused, because two drivers could then both believe that a sweep is
theirs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from suite.clock import CLOCK, Clock
from suite.errors import StorageError
from suite.files import replacing, write_atomic

T = TypeVar("T")
PATIENCE_S = 60.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
FILE = ("file", "local")
S3 = ("s3", "s3a")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
STALE = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EREMOTEIO)
"""A network file system's handle that the server replaced, or a server that is away."""


class Storage(ABC):
    """A root with keys below it, `a/b/c`; the same on files and on S3.

    Every method raises `StorageError` if the storage does not do what it is asked.

    Args:
        url: The root as given.
        patience_s: For how long a storage that does not answer is asked again.
        clock: By which patience is counted.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S, clock: Clock = CLOCK) -> None:
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        self.clock = clock

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The bytes of a key, None where there is none."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Set a key: a reader sees the old bytes or the new ones, never a part."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Set a key that does not exist. Of all who try at once, exactly one gets True.

        Args:
            key: The key.
            data: Should differ from what others would write: if an answer is lost, reading the
                key again decides who has won.
        """

    @abstractmethod
    def keys(self, prefix: str = "") -> list[str]:
        """All keys at or below `prefix`, cut at "/", sorted, without hidden ones; "" = all."""

    @abstractmethod
    def delete(self, prefix: str) -> None:
        """Remove a key, or all keys below it; do nothing where there is none."""

    @abstractmethod
    def push(self, local: Path, key: str) -> None:
        """Set a key to a file's content, as `write` does."""

    @abstractmethod
    def pull(self, key: str, local: Path) -> None:
        """Replace a file by a key's content, whole or not at all; the key must exist."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the key has a value."""

    def check(self) -> None:
        """Write, read and remove a key of its own, so that a mistake shows within seconds.

        Raises:
            StorageError: It cannot be reached, written or read.
        """
        key = f".check-{uuid.uuid4().hex}"
        first = key.encode()
        with self.asked_once():
            keeps_the_first = self.create(key, first) and not self.create(key, b"second")
            if not keeps_the_first or self.read(key) != first:
                raise StorageError(
                    f"storage {self.url}: does not keep the first of two writers; "
                    "expected a disk or a bucket that does"
                )
            self.delete(key)

    @contextlib.contextmanager
    def asked_once(self) -> Iterator[None]:
        """Give up at the first error, for the time of the block."""
        patience_s = self.patience_s
        self.patience_s = 0.0
        try:
            yield
        finally:
            self.patience_s = patience_s

    def patiently(self, call: Callable[[], T], transient: Callable[[Exception], bool]) -> T:
        """Ask again, ever less often, while the error may pass and patience lasts."""
        end_s = self.clock.now_s() + self.patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return call()
            except Exception as error:
                if not transient(error) or self.clock.now_s() + pause_s > end_s:
                    raise
            # At random, so that a hundred ranks do not come back at once.
            self.clock.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def open_storage(
    url: str | Path, *, patience_s: float = PATIENCE_S, clock: Clock = CLOCK
) -> Storage:
    """The storage at a folder, `file://` or `s3://` URL. Asks nothing of it yet (`check` does).

    Raises:
        StorageError: The text is no URL or holds credentials, or this kind of storage is not known
            to create keys atomically.
    """
    text = str(url)
    protocol, found, rest = text.partition("://")
    if not found:
        return FileStorage(Path(text), patience_s=patience_s, clock=clock)
    if "@" in rest.partition("/")[0]:
        raise StorageError(
            f"storage {protocol}://***: holds credentials; "
            "give them by AWS_ACCESS_KEY_ID, ... or ~/.aws"
        )
    if protocol in FILE:
        if not rest.startswith("/"):
            raise StorageError(
                f"storage {text}: expected file:///ABSOLUTE/PATH, got a host or a relative path"
            )
        return FileStorage(Path(rest), patience_s=patience_s, clock=clock)
    if protocol in S3:
        from suite.storage.s3 import S3Storage

        return S3Storage(text, patience_s=patience_s, clock=clock)
    raise StorageError(
        f"storage {text}: got {protocol!r}, "
        "expected a folder, file:// or s3://, which create keys atomically"
    )


def is_local(url: str | Path) -> bool:
    """Whether a URL is a folder."""
    protocol, found, _ = str(url).partition("://")
    return not found or protocol in FILE


class FileStorage(Storage):
    """A folder, which may lie on a shared disk.

    Libraries' local stores (obstore's, fsspec's) replace files whole but do not fsync them, so that
    a power cut can leave a result that has its name and not its bytes.
    """

    def __init__(self, root: Path, *, patience_s: float = PATIENCE_S, clock: Clock = CLOCK) -> None:
        self.root = root.absolute()
        super().__init__(self.root.as_posix(), patience_s=patience_s, clock=clock)

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
        files = self._do(lambda: _files_below(self._path(prefix)), prefix)
        return visible(path.relative_to(self.root).as_posix() for path in files)

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
        if not key:
            return self.root
        return self.root / checked_key(key)

    def _do(self, call: Callable[[], T], key: str) -> T:
        try:
            return self.patiently(call, _is_stale)
        except OSError as error:
            # A full disk stays an OSError: a sweep waits for room and does not try again.
            if error.errno in NO_ROOM:
                raise
            raise StorageError(
                f"storage {self.url}: {key}: {error.strerror or error}; "
                "expected a folder that can be read and written"
            ) from error


def visible(keys: Iterable[str]) -> list[str]:
    """The keys without a part that begins with a dot (temporary files, checks), sorted."""
    return sorted(key for key in keys if not key.startswith(".") and "/." not in key)


def checked_key(key: str) -> str:
    """The key without outer slashes.

    Raises:
        StorageError: It could leave the root.
    """
    parts = key.strip("/").split("/")
    for part in parts:
        if part in ("", ".", "..") or "\\" in part or "\0" in part:
            raise StorageError(
                f"storage key {key!r}: got a part that is empty or leaves its folder, "
                "expected NAME/NAME"
            )
    return "/".join(parts)


def _files_below(start: Path) -> list[Path]:
    """The file itself, or all files in a folder."""

    # What is removed meanwhile is left out. What cannot be listed is an error, not an empty folder.
    def fail(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error

    if start.is_file():
        return [start]
    found: list[Path] = []
    for folder, _, names in os.walk(start, onerror=fail):
        found += [Path(folder, name) for name in names]
    return found


def _link_new(path: Path, data: bytes) -> bool:
    """Give whole bytes a name that nobody had.

    A file opened exclusively under its own name could be seen half written.
    """
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


def _is_stale(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in STALE
