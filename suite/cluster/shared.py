"""The home on every node of a cluster: one that all of them share, or one each with a storage behind it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from suite.cluster.session import ask_nodes
from suite.errors import ResourceError
from suite.files import write_atomic
from suite.record.folder import Home, TrialFolder
from suite.record.result import EpochRecord
from suite.storage.mirror import Mirror
from suite.storage.urls import is_local, open_storage

REMOVAL_S = 20.0


def open_mirror(home: Home, storage: str | None, *, patience_s: float) -> Mirror:
    """A home brought up to date with its storage, and the storage with it.

    Args:
        home: This host's.
        storage: URL below which it is mirrored; None = nothing is done.
        patience_s: How long a storage that is away later is waited for; now it is asked once.

    Raises:
        StorageError: The storage cannot be used.
    """
    if storage is None:
        return Mirror(home)
    behind = open_storage(storage, patience_s=patience_s)
    behind.check()
    mirror = Mirror(home, behind)
    mirror.fetch_home()
    mirror.push_home()
    return mirror


def note_epoch(folder: TrialFolder, record: EpochRecord) -> None:
    """Show the driver's host how far a trial is that runs elsewhere; the curve itself comes with the trial's end."""
    if all(known.epoch != record.epoch for known in folder.epochs()):
        folder.path.mkdir(parents=True, exist_ok=True)
        with (folder.path / "epochs.jsonl").open("a") as file:
            file.write(json.dumps(record.model_dump(mode="json")) + "\n")


def check_home_is_shared(home: Home, storage: str | None) -> None:
    """Every node of the cluster sees the home that the driver writes to; with a storage, the storage.

    Raises:
        ResourceError: Names the nodes that do not, and what can be done.
    """
    nodes = {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["Alive"]
    }
    here = ray.get_runtime_context().get_node_id()
    others = {node: host for node, host in nodes.items() if node != here}
    if not others or (storage is not None and not is_local(storage)):
        return
    root = home.path if storage is None else Path(open_storage(storage).url)
    mark = root / f".seen-{uuid.uuid4().hex}"
    write_atomic(mark, mark.name.encode())
    try:
        blind = [
            others[node] for node, sees in ask_nodes(others, _sees, str(mark)).items() if not sees
        ]
    finally:
        mark.unlink(missing_ok=True)
    if blind:
        what = f"--home {home.path}" if storage is None else f"--storage {storage}"
        raise ResourceError(
            f"{what}: not seen by {', '.join(sorted(blind))} of the cluster's {len(nodes)} nodes, which would lose what they train; "
            "expected a path on a disk that all nodes share, or a bucket that all reach (--storage s3://BUCKET/PREFIX)"
        )


def remove_on_all_nodes(path: Path) -> None:
    """Remove a folder that each node has its own of; a node that does not answer in time keeps it until the next sweep's end."""
    remove: Any = ray.remote(num_cpus=0, max_retries=0)(_remove)
    with contextlib.suppress(RayError, RuntimeError):  # the cluster is gone
        on = [
            NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            for node in ray.nodes()
            if node["Alive"]
        ]
        asked = [remove.options(scheduling_strategy=where).remote(str(path)) for where in on]
        ray.wait(asked, num_returns=len(asked), timeout=REMOVAL_S)


def _remove(path: str) -> None:
    """In a worker."""
    shutil.rmtree(path, ignore_errors=True)


def _sees(path: str) -> bool:
    """In a worker. Listing first makes a network file system look again."""
    with contextlib.suppress(OSError):
        os.listdir(os.path.dirname(path))
    return os.path.exists(path)
