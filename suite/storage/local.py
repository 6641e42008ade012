"""A folder as a storage."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from suite.disk import FULL
from suite.errors import StorageError
from suite.files import replacing, write_atomic
from suite.storage.base import PATIENCE_S, Storage, checked_key, visible

T = TypeVar("T")
STALE = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EREMOTEIO)
"""A network file system's handle that the server replaced, or a server that is away."""

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What a file system answers that has no hard links, such as FAT and some mounts of clouds."""


class FileStorage(Storage):
    """A folder, which may lie on a shared disk.

    Libraries' local stores (obstore's, fsspec's) replace files whole but do not fsync them, so that
    a power cut can leave a result that has its name and not its bytes.
    """

    def __init__(self, root: Path, *, patience_s: float = PATIENCE_S) -> None:
        self.root = root.absolute()
        super().__init__(self.root.as_posix(), patience_s=patience_s)

    def read(self, key: str) -> bytes | None:
        def now() -> bytes | None:
            try:
                return self._path(key).read_bytes()
            # A folder, or a name below a file, is a key without a value, as it is on S3.
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None

        return self._do(now, key)

    def write(self, key: str, data: bytes) -> None:
        self._do(lambda: write_atomic(self._path(key), data), key)

    def create(self, key: str, data: bytes) -> bool:
        lost = False

        def link() -> bool:
            nonlocal lost
            try:
                return _link_new(self._path(key), data)
            except OSError as error:
                lost |= _is_stale(error)
                raise

        # A network disk may link the file and lose the answer; the next try then finds it.
        return self._do(link, key) or (lost and self.read(key) == data)

    def exists(self, key: str) -> bool:
        return self._do(lambda: self._path(key).is_file(), key)

    def keys(self, prefix: str = "") -> list[str]:
        files = self._do(lambda: _files_below(self._path(prefix)), prefix)
        return visible(path.relative_to(self.root).as_posix() for path in files)

    def delete(self, prefix: str) -> None:
        path = self._path(checked_key(prefix))

        def now() -> None:
            # `rmtree` refuses a link to a folder; of a link only the link goes.
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
            # As `Storage` says.
            if error.errno in FULL:
                raise
            raise StorageError(
                f"storage {self.url}: {key}: {error.strerror or error}; "
                "expected a folder that can be read and written"
            ) from error


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
    """Write a new file whole; return False if somebody has taken its name before.

    A file opened exclusively under its own name could be seen half written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a hard link cannot cross file systems.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp lets nobody but the owner read.
        os.chmod(name, 0o644)
        # A link fails where the name exists; a rename would replace the file.
        os.link(name, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in NO_LINKS:
            raise OSError(error.errno, "this disk has no hard links, which claims need") from error
        raise
    finally:
        os.unlink(name)
    return True


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)


def _is_stale(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in STALE
