"""The home on every node of a cluster: one that all share, or one each with a storage behind it."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import ray
from ray.exceptions import RayError

from suite.clock import CLOCK
from suite.cluster.session import alive_nodes, ask_nodes
from suite.errors import ResourceError
from suite.files import write_atomic
from suite.record.folder import Home, TrialFolder
from suite.record.result import EpochRecord
from suite.storage.fence import SHARED
from suite.storage.mirror import Mirror
from suite.storage.urls import is_local, open_storage

REMOVAL_S = 20.0
HOME_ANSWER_S = 300.0
"""How long a node is waited for that has to start a worker first, perhaps beside other work."""
ASK_AGAIN_S = 2.0


def open_mirror(home: Home, storage: str | None, *, patience_s: float) -> Mirror:
    """Bring a home up to date with its storage, and the storage with the home.

    Args:
        home: This host's.
        storage: URL below which it is mirrored; None = nothing is done.
        patience_s: How long the sweep will wait for a storage that is away.

    Raises:
        StorageError: The storage cannot be used.
    """
    if storage is None:
        return Mirror(home)
    mirror = Mirror(home, open_storage(storage, patience_s=patience_s))
    mirror.fetch_home()  # first: what other hosts wrote decides what is new here
    mirror.push_home()
    return mirror


def note_epoch(folder: TrialFolder, record: EpochRecord) -> None:
    """Show the driver's host how far a trial is that runs elsewhere.

    The curve itself comes with the trial's end.
    """
    if any(known.epoch == record.epoch for known in folder.epochs()):
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.add_epoch(record)


def check_home_is_shared(home: Home, storage: str | None) -> None:
    """Check that every node of the cluster sees the home that the driver writes to.

    With a storage in a folder, that folder is looked for.

    A node that joins later is asked by its ranks (`suite.storage.fence.Fence.check_seen`).

    Raises:
        ResourceError: Names the nodes that do not see it, or did not answer, and what can be done.
    """
    nodes = alive_nodes()
    here = ray.get_runtime_context().get_node_id()
    others = {node: host for node, host in nodes.items() if node != here}
    if not others:
        return
    if storage is None:
        root = home.path
    elif is_local(storage):
        root = Path(open_storage(storage).url)
    else:
        return  # each node reaches a bucket for itself
    mark = root / f".seen-{uuid.uuid4().hex}"
    # A fresh name, because a node could remember that an old one existed.
    write_atomic(mark, mark.name.encode())
    try:
        seen = _who_sees(mark, others)
    finally:
        mark.unlink(missing_ok=True)
    what = f"--home {home.path}" if storage is None else f"--storage {storage}"
    # A node that has left takes no part, one that is silent may.
    silent = _still_silent(others, seen)
    if silent:
        raise ResourceError(
            f"{what}: {', '.join(sorted(silent.values()))} did not say within"
            f" {HOME_ANSWER_S:.0f} s whether it is seen there;"
            " see that Ray's workers start on it, then give the same command again"
        )
    blind = sorted(others[node] for node, sees in seen.items() if not sees)
    if blind:
        raise ResourceError(
            f"{what}: not seen by {', '.join(blind)} of the cluster's {len(nodes)} nodes,"
            f" which would lose what they train; {SHARED}"
        )


def _who_sees(mark: Path, nodes: Mapping[str, str]) -> dict[str, bool]:
    """Ask nodes whether they see a file, until each has said so or has left, or time is up."""
    seen: dict[str, bool] = {}
    end_s = CLOCK.now_s() + HOME_ANSWER_S
    while True:
        silent = _still_silent(nodes, seen)
        left_s = end_s - CLOCK.now_s()
        if not silent or left_s <= 0:
            return seen
        seen |= ask_nodes(silent, _sees, str(mark), timeout_s=left_s)
        # Ray lists a lost node for some seconds more, and the worker of a live one may be killed.
        if silent.keys() - seen:
            CLOCK.sleep(min(ASK_AGAIN_S, left_s))


def _still_silent(nodes: Mapping[str, str], seen: Mapping[str, bool]) -> dict[str, str]:
    """Those of some nodes that are up and have not said whether they see it."""
    return {node: host for node, host in alive_nodes().items() if node in nodes.keys() - seen}


def remove_on_all_nodes(path: Path) -> None:
    """Remove a folder that each node has its own of.

    A node that does not answer in time keeps it until the next sweep's end.
    """
    with contextlib.suppress(RayError, ResourceError, RuntimeError):  # the cluster may be gone
        ask_nodes(alive_nodes(), _remove, str(path), timeout_s=REMOVAL_S)


def _remove(path: str) -> None:
    """Runs in a worker."""
    shutil.rmtree(path, ignore_errors=True)


def _sees(path: str) -> bool:
    """Runs in a worker."""
    with contextlib.suppress(OSError):
        os.listdir(os.path.dirname(path))  # makes a network file system look again
    return os.path.exists(path)
