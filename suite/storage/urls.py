"""Which storage a URL names."""

from __future__ import annotations

from pathlib import Path

from suite.errors import StorageError
from suite.storage.base import PATIENCE_S, Storage
from suite.storage.local import FileStorage
from suite.storage.s3 import S3Storage

# These are the names by which fsspec knows folders and buckets.
FILE = ("file", "local")
S3 = ("s3", "s3a")


def open_storage(url: str | Path, *, patience_s: float = PATIENCE_S) -> Storage:
    """The storage at a folder, `file://` or `s3://` URL. Asks nothing of it yet (`check` does).

    Raises:
        StorageError: The text is no URL or holds credentials, or this kind of storage is not known
            to create keys atomically.
    """
    text = str(url)
    protocol, found, rest = text.partition("://")
    if not found:
        return FileStorage(Path(text), patience_s=patience_s)
    # Credentials stand before the first slash; an `@` further on belongs to a path.
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
        return FileStorage(Path(rest), patience_s=patience_s)
    if protocol in S3:
        return S3Storage(text, patience_s=patience_s)
    raise StorageError(
        f"storage {text}: got {protocol!r}, "
        "expected a folder, file:// or s3://, which create keys atomically"
    )


def is_local(url: str | Path) -> bool:
    """Whether a URL is a folder."""
    protocol, found, _ = str(url).partition("://")
    return not found or protocol in FILE
