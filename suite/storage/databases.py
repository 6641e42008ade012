"""Databases that others keep for us: where an sqlite file may lie, and how long a server is waited for."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from suite.errors import TrackingError

NETWORK_FILE_SYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "afs",
    "fuse.",
    "9p",
    "pvfs",
    "gluster",
)
DEADLINES = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}
"""libpq's, in seconds but for the last, which is in milliseconds."""


def check_local(path: Path, *, option: str = "--tracking-uri") -> None:
    """Raises TrackingError where sqlite cannot be written: on a network file system its locks and its log do not hold.

    Args:
        path: Absolute; of a file that need not exist yet.
        option: That names another place.
    """
    kind = file_system(path)
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        raise TrackingError(
            f"{path}: lies on {kind}, a network file system, where two writers corrupt an sqlite database; "
            f"name a server (docs/stores.md), or a file on a local disk: {option} sqlite:////local/disk/{path.name}"
        )


def file_system(path: Path) -> str:
    """Type of the mount that holds a path: `ext4`, `nfs4`, `fuse.sshfs`."""
    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda m: len(m.mountpoint)).fstype.lower() if mounts else ""


def with_driver(uri: str) -> str:
    """PostgreSQL by the driver that `petl-suite[postgres]` installs, unless another is named; `postgres:` is what others call it."""
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", uri)


def with_deadlines(uri: str) -> str:
    """A PostgreSQL URI whose server, when it is gone or cut off, is given up within half a minute; others as they are."""
    if not uri.startswith("postgresql+psycopg:"):
        return uri
    query = urlsplit(uri).query
    given = {item.partition("=")[0] for item in query.split("&")}
    more = "&".join(f"{key}={value}" for key, value in DEADLINES.items() if key not in given)
    return f"{uri}{'&' if query else '?'}{more}" if more else uri
