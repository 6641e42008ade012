"""Which storage a URL names."""

from __future__ import annotations

import os
import re
from pathlib import Path

from suite.errors import StorageError
from suite.files import nearest
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
    # A folder may have a colon in its name, which a URL may not have everywhere.
    if isinstance(url, Path):
        return FileStorage(url, patience_s=patience_s)
    protocol, rest = split_url(url)
    if protocol in S3:
        return S3Storage(url, patience_s=patience_s)
    return FileStorage(Path(rest), patience_s=patience_s)


def split_url(text: str) -> tuple[str, str]:
    """The protocol of a storage's URL and what follows; a folder without one has `file`.

    Raises:
        StorageError: As `open_storage`.
    """
    protocol, found, rest = text.partition("://")
    if not found:
        # `--storage "$BUCKET"` without that variable, and s3:/BUCKET, would be folders here.
        if not text or re.match(r"\w+:", text):
            raise StorageError(
                f"storage {text!r}: expected a folder (./NAME where a name has a colon), file:// "
                "or s3://BUCKET/PREFIX"
            )
        return "file", text
    # Credentials stand before the first slash; an `@` further on belongs to a path.
    if "@" in rest.partition("/")[0]:
        raise StorageError(
            f"storage {protocol}://***: holds credentials; "
            "give them by AWS_ACCESS_KEY_ID, ... or ~/.aws"
        )
    if protocol in FILE and not rest.startswith("/"):
        raise StorageError(
            f"storage {text}: expected file:///ABSOLUTE/PATH, got a host or a relative path"
        )
    if protocol not in (*FILE, *S3):
        raise StorageError(
            f"storage {text}: got {protocol!r}, "
            "expected a folder, file:// or s3://, which create keys atomically"
        )
    return protocol, rest


def checked_url(url: str) -> str:
    """The URL of a storage, with a folder's path made absolute. Asks and writes nothing.

    Raises:
        StorageError: As `open_storage`, or the folder cannot be written to. It need not exist yet.
    """
    storage = open_storage(url)
    if isinstance(storage, FileStorage):
        there = nearest(storage.root)
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise StorageError(
                f"storage {url}: {there} cannot be written to; "
                "expected a folder that can be read and written"
            )
    return storage.url


def one_url(url: str) -> str:
    """The URL without slashes at its end: both name one storage."""
    # Those of `file:///` and `s3://` stay.
    return re.sub("(?<=[^/:])/+$", "", url)


def is_local(url: str | Path) -> bool:
    """Whether a URL is a folder."""
    protocol, found, _ = str(url).partition("://")
    return not found or protocol in FILE
