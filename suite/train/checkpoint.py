"""Committed checkpoints of a running trial: written by all ranks, valid only with a commit marker that was written last.

A crash leaves files that look whole, a disk returns other bytes than it was given, and a rank that fails to load is not noticed by the
others. Hence: two generations, a marker with size and SHA-256 of every file and of itself, a look by every host at what it sees, and a
vote before training goes on. The files hold what any number of ranks can read (`suite.train.shards`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from suite.config.hashing import canonical_json
from suite.errors import CheckpointError, StorageError
from suite.files import replacing, sha256, write_json
from suite.storage.fence import Fence
from suite.storage.mirror import Mirror, epochs_of
from suite.train.engine import Engine
from suite.train.process_group import all_agree, gather_objects
from suite.train.shards import FORMAT

log = logging.getLogger(__name__)
MARKER = "COMMIT.json"
GENERATIONS = 2


class UnusableError(Exception):
    """Why a generation cannot be used."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one trial under `folder`, one sub-folder per epoch."""

    folder: Path
    fence: Fence | None = None
    mirror: Mirror | None = None

    def save(self, engine: Engine, epoch: int, state: dict[str, Any]) -> int:
        """Write and commit the end of an epoch, then drop older generations. Collective.

        Args:
            epoch: 1-based.
            state: The loop's own state, JSON-able; rank 0's is kept.

        Returns:
            Bytes written, on every rank.
        """
        target = self.folder / f"epoch-{epoch}"
        self._check_fence()
        if _first_of_host():  # the remains of an attempt that was cut off here
            shutil.rmtree(target, ignore_errors=True)
        if dist.get_rank() == 0 and self.mirror is not None:
            self.mirror.drop(target, MARKER)
        dist.barrier()
        path = engine.save(target)
        if self.mirror is not None:
            self.mirror.push_file(path)
        files = dict(
            gather_objects((path.name, {"bytes": path.stat().st_size, "sha256": sha256(path)}))
        )
        frozen = engine.frozen_fingerprint
        if dist.get_rank() == 0:
            about = {
                "format": FORMAT,
                "epoch": epoch,
                "world_size": engine.world_size,
                "frozen": frozen,
            }
            self._check_fence()
            write_json(target / MARKER, sealed({**about, "files": files, "state": state}))
            if self.mirror is not None:
                self.mirror.push_file(target / MARKER)
        dist.barrier()  # an older generation goes when this one is committed, not before
        if _first_of_host():
            epochs = self._epochs()
            for old in set(epochs) - set(
                [e for e in epochs if e <= epoch][-GENERATIONS:]
            ):  # later ones were left out when we loaded
                shutil.rmtree(self.folder / f"epoch-{old}", ignore_errors=True)
        if dist.get_rank() == 0 and self.mirror is not None:
            self._prune_stored(self.mirror, epoch)
        return sum(int(file["bytes"]) for file in files.values())

    def load(self, engine: Engine) -> dict[str, Any] | None:
        """Load the newest committed epoch that is whole on every host, whatever number of ranks wrote it. Collective.

        Returns:
            The loop's state, or None where there is nothing to go on from: the trial starts at its beginning.

        Raises:
            CheckpointError: A verified checkpoint could not be loaded on every rank, or belongs to other frozen weights.
        """
        if dist.get_rank() == 0 and self.mirror is not None:
            self.mirror.fetch_markers(self.folder, MARKER)
        for epoch in gather_objects(self._epochs())[0][::-1]:
            marker = self._agreed(epoch)
            if marker is not None:
                self._check_frozen(engine, marker)
                engine.load(self.folder / f"epoch-{epoch}", written_by=marker["world_size"])
                state: dict[str, Any] = marker["state"]
                return state
        return None

    def _check_fence(self) -> None:
        """What lies here may be another driver's by now."""
        if self.fence is not None and dist.get_rank() == 0:
            self.fence.check()

    def clear(self) -> None:
        """Remove everything that this host has, and on rank 0 what is stored: the trial has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if dist.get_rank() == 0 and self.mirror is not None:
            with contextlib.suppress(StorageError):  # what stays is in nobody's way
                self.mirror.drop(self.folder, MARKER)

    def _prune_stored(self, mirror: Mirror, epoch: int) -> None:
        """Leave in the storage what this class leaves on a disk."""
        stored = mirror.generations(self.folder)
        for old in set(stored) - set([e for e in stored if e <= epoch][-GENERATIONS:]):
            mirror.drop(self.folder / f"epoch-{old}", MARKER)

    def _agreed(self, epoch: int) -> dict[str, Any] | None:
        """Rank 0's marker of a generation, where every host sees all the files that it names; each host looks once."""
        folder, marker, problem = self.folder / f"epoch-{epoch}", None, ""
        if dist.get_rank() == 0:
            try:
                marker = read_marker(folder, epoch)
            except UnusableError as error:
                log.warning("%s is left out: %s", folder, error)
        marker = gather_objects(marker)[0]
        if marker is None:
            return None
        if _first_of_host():
            if self.mirror is not None:
                self.mirror.fetch_files(folder, marker["files"])
            try:
                check_files(folder, marker["files"])
            except UnusableError as error:
                problem = f"{error} (seen by rank {dist.get_rank()})"
        problems = [text for text in gather_objects(problem) if text]
        if problems and dist.get_rank() == 0:
            log.warning("%s is left out: %s", folder, "; ".join(problems))
        return None if problems else marker

    def _check_frozen(self, engine: Engine, marker: dict[str, Any]) -> None:
        if not all_agree(engine.fingerprint(trained=False) == marker["frozen"]):
            raise CheckpointError(
                f"{self.folder}/epoch-{marker['epoch']}: the frozen weights are not those that this trial began with: the backbone's files "
                "were changed or are damaged, or its random weights are drawn otherwise by this version; bring them back, or remove the "
                f"folder {self.folder} to train the trial anew"
            )

    def _epochs(self) -> list[int]:
        return epochs_of(p.name for p in self.folder.iterdir()) if self.folder.is_dir() else []


def _first_of_host() -> bool:
    """One rank of every host: the others see the same disk."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """With a checksum over itself."""
    return {**content, "seal": hashlib.sha256(canonical_json(content).encode()).hexdigest()}


def read_marker(folder: Path, epoch: int) -> dict[str, Any]:
    """The commit marker of a generation.

    Raises:
        UnusableError: There is none, or it is not one that was written here, whole, for this epoch.
    """
    try:
        marker = json.loads((folder / MARKER).read_bytes())
    except FileNotFoundError:
        raise UnusableError("it was never committed") from None
    except (OSError, ValueError) as error:
        raise UnusableError(f"{MARKER} cannot be read: {error}") from error
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        raise UnusableError(
            f"{MARKER} is not of the format {FORMAT} (another version of the suite wrote it)"
        )
    if sealed({key: value for key, value in marker.items() if key != "seal"}) != marker:
        raise UnusableError(f"{MARKER} was changed since it was written")
    if marker["epoch"] != epoch:
        raise UnusableError(f"{MARKER} is that of epoch {marker['epoch']}")
    return marker


def check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """The files of a generation are those that were committed. Nothing else of them is read before this holds.

    Raises:
        UnusableError: Which is not, and why.
    """
    for name, expected in files.items():
        path = folder / name
        if Path(name).name != name or path.is_symlink() or folder.is_symlink():
            raise UnusableError(f"{name} leads out of the folder")
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise UnusableError(f"{name} has {size} bytes, {expected['bytes']} were written")
            if sha256(path) != expected["sha256"]:
                raise UnusableError(f"{name} holds other bytes than were written")
        except OSError as error:
            raise UnusableError(f"{name}: {error.strerror}") from error


def write_tensors(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Replace a safetensors file, whole or not at all."""
    with replacing(path) as temporary:
        save_file(dict(state), temporary)
