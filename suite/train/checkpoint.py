"""Committed checkpoints of a running trial: written by all ranks, valid only with a commit marker that was written last.

DeepSpeed writes shards and `latest` in place, so a crash leaves files that look whole; and a rank that fails to load is not
noticed by the others. Hence: two generations, a marker with size and SHA-256 of every file, a vote before training goes on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from suite.train.engine import Engine, gather_objects
from suite.train.folder import replacing, write_json

MARKER = "COMMIT.json"
GENERATIONS = 2


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one trial under `folder`, one sub-folder per epoch."""

    folder: Path

    def save(self, engine: Engine, epoch: int, state: dict[str, Any]) -> int:
        """Write and commit the end of an epoch, then drop older generations. Collective.

        Args:
            epoch: 1-based.
            state: The loop's own state, JSON-able; rank 0's is kept.

        Returns:
            Bytes written, on every rank.
        """
        target = self.folder / f"epoch-{epoch}"
        if dist.get_rank() == 0 and target.exists():  # the remains of an attempt that was cut off here
            shutil.rmtree(target)
        dist.barrier()
        engine.save(target)
        dist.barrier()
        size = 0
        if dist.get_rank() == 0:
            files: dict[str, dict[str, Any]] = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(target.iterdir())}
            size = sum(int(f["bytes"]) for f in files.values())
            write_json(target / MARKER, {"epoch": epoch, "world_size": dist.get_world_size(), "files": files, "state": state})
            for old in self._epochs()[:-GENERATIONS]:
                shutil.rmtree(self.folder / f"epoch-{old}", ignore_errors=True)
        return int(gather_objects(size)[0])

    def load(self, engine: Engine) -> dict[str, Any] | None:
        """Load the newest committed epoch that is whole. Collective.

        Returns:
            The loop's state, or None where there is nothing to go on from: the trial starts at its beginning.

        Raises:
            CheckpointError: A verified checkpoint could not be loaded on every rank.
        """
        choice: list[Any] = [self._newest_whole() if dist.get_rank() == 0 else None]
        marker = gather_objects(choice[0])[0]
        if marker is None:
            return None
        engine.load(self.folder / f"epoch-{marker['epoch']}")
        state: dict[str, Any] = marker["state"]
        return state

    def clear(self) -> None:
        """Remove everything: the trial has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _newest_whole(self) -> dict[str, Any] | None:
        for epoch in reversed(self._epochs()):
            marker = _verified(self.folder / f"epoch-{epoch}")
            if marker is not None and marker["world_size"] == dist.get_world_size():
                return marker
        return None

    def _epochs(self) -> list[int]:
        names = [p.name for p in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(n.removeprefix("epoch-")) for n in names if n.startswith("epoch-"))


def _verified(folder: Path) -> dict[str, Any] | None:
    """The marker if every file is there as it was committed. Nothing is unpickled before this holds."""
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_bytes())
        for name, expected in marker["files"].items():
            path = folder / name
            if path.is_symlink() or path.stat().st_size != expected["bytes"] or sha256(path) != expected["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return marker


def write_tensors(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Replace a safetensors file, whole or not at all."""
    with replacing(path) as temporary:
        save_file(dict(state), temporary)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
