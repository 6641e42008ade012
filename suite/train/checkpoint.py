"""Committed checkpoints of a running trial.

All ranks write one, and it is valid only with a commit marker, which is written last. A crash
leaves files that look whole, a disk returns other bytes than it was given, and the other ranks do
not notice one that fails to load. Hence two generations, a marker with size and SHA-256 of every
file and of itself, a look by every host at what it sees, and a vote before training goes on. The
files hold what any number of ranks can read (`suite.train.shards`).
"""

from __future__ import annotations

import contextlib
import hashlib
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
from suite.errors import EVERYWHERE, CheckpointError, StorageError
from suite.files import read_json, replacing, sha256, write_json
from suite.record.folder import MARKER, TrialFolder
from suite.storage.fence import Fence
from suite.storage.mirror import Mirror, epochs_of
from suite.train.engine import Engine
from suite.train.process_group import all_agree, gather_objects
from suite.train.shards import FORMAT

log = logging.getLogger(__name__)
# If the newest is cut off or damaged, the one before it serves.
GENERATIONS = 2


class UnusableError(Exception):
    """A generation cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one trial under `folder`, one sub-folder per epoch."""

    folder: Path
    fence: Fence | None = None
    mirror: Mirror | None = None

    def save(self, engine: Engine, epoch: int, state: dict[str, Any]) -> int:
        """Write and commit an epoch, then drop older generations. Collective.

        Args:
            epoch: 1-based.
            state: The loop's own state, JSON-able; rank 0's is kept.

        Returns:
            Bytes written, on every rank.
        """
        target = self.folder / f"epoch-{epoch}"
        self._check_fence()
        # An attempt that was cut off here may have left remains.
        if _first_of_host():
            shutil.rmtree(target, ignore_errors=True)
        if dist.get_rank() == 0 and self.mirror is not None:
            self.mirror.drop(target)
        # No rank writes before the remains are gone.
        dist.barrier()
        path = engine.save(target)
        if self.mirror is not None:
            self.mirror.push_file(path)
        about = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        # When this returns, every rank has written and pushed its file, so the marker may follow.
        files = dict(gather_objects((path.name, about)))
        # Collective, so it cannot stand in the branch of rank 0.
        frozen = engine.frozen_fingerprint
        if dist.get_rank() == 0:
            marker = {
                "format": FORMAT,
                "epoch": epoch,
                "world_size": engine.world_size,
                "precision": engine.precision,
                "frozen": frozen,
                "files": files,
                "state": state,
            }
            # Asked again: writing may have taken long enough for another driver to come.
            self._check_fence()
            write_json(target / MARKER, sealed(marker))
            if self.mirror is not None:
                self.mirror.push_file(target / MARKER)
        # An older generation goes when this one is committed, not before.
        dist.barrier()
        if _first_of_host():
            for old in _outdated(self._epochs(), epoch):
                shutil.rmtree(self.folder / f"epoch-{old}", ignore_errors=True)
        if dist.get_rank() == 0 and self.mirror is not None:
            for old in _outdated(self.mirror.generations(self.folder), epoch):
                self.mirror.drop(self.folder / f"epoch-{old}")
        return sum(int(file["bytes"]) for file in files.values())

    def load(self, engine: Engine) -> dict[str, Any] | None:
        """Load the newest committed epoch that is whole on every host. Collective.

        Any number of ranks may have written it.

        Returns:
            The loop's state, or None if there is nothing to go on from: the trial starts at its
            beginning.

        Raises:
            CheckpointError: A verified checkpoint could not be loaded on every rank, or belongs to
                other frozen weights.
        """
        if dist.get_rank() == 0 and self.mirror is not None:
            self.mirror.fetch_markers(self.folder, MARKER)
        # Rank 0's list, so that all ranks walk through the same epochs.
        for epoch in gather_objects(self._epochs())[0][::-1]:
            marker = self._agreed(epoch)
            if marker is not None and self._has_precision_of(engine, marker):
                self._check_frozen(engine, marker)
                engine.load(self.folder / f"epoch-{epoch}", written_by=marker["world_size"])
                state: dict[str, Any] = marker["state"]
                return state
        return None

    def _check_fence(self) -> None:
        """Raise StaleDriverError if another driver has taken the sweep over."""
        if self.fence is not None and dist.get_rank() == 0:
            self.fence.check(shared=TrialFolder(self.folder.parent).shared)

    def clear(self) -> None:
        """Remove what this host has and, on rank 0, what is stored: the trial has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if dist.get_rank() == 0 and self.mirror is not None:
            # Files that cannot be removed now disturb nobody.
            with contextlib.suppress(StorageError):
                self.mirror.drop(self.folder)

    def _agreed(self, epoch: int) -> dict[str, Any] | None:
        """Return rank 0's marker of a generation if every host has all files that it names."""
        folder = self.folder / f"epoch-{epoch}"
        marker: dict[str, Any] | None = None
        problem = ""
        if dist.get_rank() == 0:
            try:
                marker = read_marker(folder, epoch)
            except UnusableError as error:
                log.warning("%s is left out: %s", folder, error)
        marker = gather_objects(marker)[0]
        if marker is None:
            return None
        # The ranks of a host see the same files, so one of them reads and hashes them for all.
        if _first_of_host():
            if self.mirror is not None:
                self.mirror.fetch_files(folder, marker["files"])
            try:
                check_files(folder, marker["files"])
            except UnusableError as error:
                # Not raised: the other ranks would wait in the gather below.
                problem = f"{error} (seen by rank {dist.get_rank()})"
        problems = [text for text in gather_objects(problem) if text]
        if not problems:
            return marker
        if dist.get_rank() == 0:
            log.warning("%s is left out: %s", folder, "; ".join(problems))
        return None

    def _has_precision_of(self, engine: Engine, marker: dict[str, Any]) -> bool:
        """Whether the epoch was trained in the engine's precision: `auto` depends on the host."""
        # Markers of earlier versions do not say it.
        written = marker.get("precision", engine.precision)
        if written == engine.precision:
            return True
        if dist.get_rank() == 0:
            log.warning(
                "%s/epoch-%d is left out: it was trained in %s, and this host computes in %s;"
                " a new sweep can name one for all hosts (training.precision)",
                self.folder,
                marker["epoch"],
                written,
                engine.precision,
            )
        return False

    def _check_frozen(self, engine: Engine, marker: dict[str, Any]) -> None:
        if not all_agree(engine.fingerprint(trained=False) == marker["frozen"]):
            raise CheckpointError(
                f"{self.folder}/epoch-{marker['epoch']}: the frozen weights are not those that "
                "this trial began with: the backbone's files were changed or are damaged, or its "
                "random weights are drawn otherwise by this version; bring them back, or remove "
                f"the folder {self.folder} ({EVERYWHERE}) to train the trial anew"
            )

    def _epochs(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return epochs_of(path.name for path in self.folder.iterdir())


def _outdated(epochs: list[int], newest: int) -> set[int]:
    """The generations to drop: all but the last `GENERATIONS` up to `newest`.

    Later ones were left out when this attempt loaded.
    """
    kept = [epoch for epoch in epochs if epoch <= newest][-GENERATIONS:]
    return set(epochs).difference(kept)


def _first_of_host() -> bool:
    """Whether this rank is the one that looks after its host's disk."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content with a checksum over itself."""
    seal = hashlib.sha256(canonical_json(content).encode()).hexdigest()
    return {**content, "seal": seal}


def read_marker(folder: Path, epoch: int) -> dict[str, Any]:
    """The commit marker of a generation.

    Raises:
        UnusableError: There is none, or it was not written here, whole, for this epoch.
    """
    try:
        marker = read_json(folder / MARKER)
    except FileNotFoundError:
        raise UnusableError("it was never committed") from None
    except (OSError, ValueError) as error:
        raise UnusableError(f"{MARKER} cannot be read: {error}") from error
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        raise UnusableError(
            f"{MARKER} is not of the format {FORMAT} (another version of the suite wrote it)"
        )
    content = dict(marker)
    content.pop("seal", None)
    try:
        is_whole = sealed(content) == marker
    # NaN has no checksum, nor has what is nested as deep as can be read at all.
    except (ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        raise UnusableError(f"{MARKER} was changed since it was written")
    if marker["epoch"] != epoch:
        raise UnusableError(f"{MARKER} is that of epoch {marker['epoch']}")
    return marker


def check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the files of a generation are those that were committed.

    Nothing reads them before this holds.

    Raises:
        UnusableError: Names the file that is another, and says why.
    """
    for name, expected in files.items():
        path = folder / name
        # A marker that was tampered with must not make us read files elsewhere.
        if Path(name).name != name or path.is_symlink() or folder.is_symlink():
            raise UnusableError(f"{name} leads out of the folder")
        try:
            # The size first: it costs nothing and finds every file that was cut off.
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
