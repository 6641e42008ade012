"""Databases of MLflow and Optuna: where an sqlite file may lie, and a server's deadlines."""

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
    # with the dot: `fuse.sshfs` is a network's, `fuseblk` is a local disk's
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
"""Parameters of libpq, in seconds; the last one is in milliseconds."""


def check_local(path: Path, *, option: str = "--tracking-uri") -> None:
    """Raise TrackingError for sqlite on a network file system, where its locks do not hold.

    Args:
        path: Absolute path of a file that need not exist yet.
        option: Command-line option that names another place.
    """
    kind = file_system(path)
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        raise TrackingError(
            f"{path}: lies on {kind}, a network file system, where two writers corrupt an sqlite "
            "database; name a server (docs/stores.md), or a file on a local disk: "
            f"{option} sqlite:////local/disk/{path.name}"
        )


def file_system(path: Path) -> str:
    """Return the type of the mount that holds a path: `ext4`, `nfs4`, `fuse.sshfs`."""
    # Without `all`, psutil lists physical disks and leaves out just the network's mounts.
    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    if not mounts:
        # An unknown place counts as local.
        return ""
    # The innermost of the mounts around a path holds it, and of two at one place the later one, as
    # where an automounter's is below.
    return max(reversed(mounts), key=lambda m: len(m.mountpoint)).fstype.lower()


def with_driver(uri: str) -> str:
    """Name the driver that `petl-suite[postgres]` installs, unless the URI names one.

    Some write `postgres:` for `postgresql:`.
    """
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", uri)


def for_mlflow(uri: str) -> str:
    """The URI by which MLflow opens a store: with SQLAlchemy's driver, where it is an sqlite file.

    Source: MLflow 3 makes the folder of a URI that begins with `sqlite:///` and does not decode it:
    for a home `a?b`, a folder `a%3Fb` beside it. With a driver's name it leaves that alone.
    """
    return re.sub("^sqlite:", "sqlite+pysqlite:", uri)


def with_deadlines(uri: str) -> str:
    """Add deadlines to a PostgreSQL URI; other URIs stay as they are.

    A server that is gone or cut off is then given up within half a minute.
    """
    # The parameters are libpq's: sqlite and HTTP servers do not know them.
    if not uri.startswith("postgresql+psycopg:"):
        return uri
    query = urlsplit(uri).query
    given = {item.partition("=")[0] for item in query.split("&")}
    for key, value in DEADLINES.items():
        # What the user wrote into the URI stays.
        if key not in given:
            separator = "&" if "?" in uri else "?"
            uri = f"{uri}{separator}{key}={value}"
    return uri
