"""The state of an engine in files that any number of ranks can read: safetensors, one per rank.

A file holds runs of the flattened parameters (`weight/<name>`, and after the first step
`exp_avg/<name>`, `exp_avg_sq/<name>`), and its metadata say which elements these are. A rank of
another group reads from all files what it needs. Nothing is gathered, so that a model too large for
one rank's memory can be written. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from suite.files import replacing
from suite.train.pieces import MOMENTS, Piece

FORMAT = "suite-shard-1"
WEIGHT = "weight"
BUFFER = "buffer/"


def shard_name(rank: int) -> str:
    return f"shard-{rank}.safetensors"


def write_shard(
    path: Path,
    pieces: Sequence[Piece],
    state: Mapping[torch.Tensor, Mapping[str, Any]],
    *,
    steps: int,
    buffers: Mapping[str, torch.Tensor],
) -> None:
    """Write one rank's pieces, whole or not at all.

    Args:
        pieces: What this rank is to write.
        state: The optimizer's, by the tensor that holds the fp32 weights.
        steps: Adam's step count; at 0 there are no moments.
        buffers: Those that this rank is to write, by name.
    """
    tensors = {}
    for name, tensor in buffers.items():
        tensors[BUFFER + name] = tensor.detach().cpu().contiguous()
    runs = {}
    for piece in pieces:
        runs[piece.name] = [piece.start, piece.length, piece.whole]
        tensors[f"{WEIGHT}/{piece.name}"] = piece.of(piece.master)
        if steps:
            for key in MOMENTS:
                tensors[f"{key}/{piece.name}"] = piece.of(state[piece.master][key])
    # The metadata of safetensors are text, keys and values.
    metadata = {"format": FORMAT, "steps": str(steps), "runs": json.dumps(runs)}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata)


def write_whole(path: Path, model: nn.Module) -> None:
    """Write the step 0 of a whole model: what one rank alone would write.

    Args:
        path: The file.
        model: On the CPU, in the precision of the engine that is to read it.
    """
    pieces = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            size = parameter.numel()
            # The optimizer keeps fp32 weights, which it takes from the forward weights.
            master = parameter.detach().float()
            pieces.append(Piece(name, 0, size, size, master, 0))
    buffers = stored_buffers(model)
    write_shard(path, pieces, {}, steps=0, buffers=buffers)


def stored_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a model stores with its parameters."""
    # Non-persistent buffers are not in a state dict.
    stored = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements `start` to `start + length` of a parameter of `whole` elements, in an open file."""

    file: Any
    start: int
    length: int
    whole: int


class Shards:
    """The files of one saved state, open for reading.

    Raises:
        ValueError: A file is not of this format, or they do not belong together.
        OSError: A file cannot be read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._stack = ExitStack()
        self.runs: dict[str, list[_Run]] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        steps: set[int] = set()
        try:
            for path in paths:
                steps.add(self._open(path))
        # No `with` block will close what this one has opened so far.
        except BaseException:
            self._stack.close()
            raise
        if len(steps) != 1:
            self._stack.close()
            raise ValueError(f"{paths[0].parent}: files of different steps: {sorted(steps)}")
        self.steps = steps.pop()

    def _open(self, path: Path) -> int:
        file = self._stack.enter_context(safe_open(path, framework="pt"))
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path}: format {metadata.get('format')!r}, expected {FORMAT}")
        for name, (start, length, whole) in json.loads(metadata["runs"]).items():
            self.runs.setdefault(name, []).append(_Run(file, start, length, whole))
        # The file has keys() and cannot be iterated over.
        for key in file.keys():  # noqa: SIM118
            if key.startswith(BUFFER):
                self.buffers[key.removeprefix(BUFFER)] = file.get_tensor(key)
        return int(metadata["steps"])

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def check(self, wholes: Mapping[str, int]) -> None:
        """Check that the files hold exactly these parameters, each element once.

        Args:
            wholes: Elements of every trained parameter.

        Raises:
            ValueError: They hold something else; the text says what.
        """
        if self.runs.keys() != wholes.keys():
            strange = sorted(self.runs.keys() ^ wholes.keys())
            raise ValueError(f"other parameters than those that train: {strange[:5]}")
        for name, runs in self.runs.items():
            whole = wholes[name]
            ends = sorted((run.start, run.start + run.length) for run in runs)
            covered = 0
            fits = all(run.whole == whole for run in runs)
            for start, end in ends:
                # In order of their starts, each run must begin where the one before ends.
                fits = fits and start == covered
                covered = end
            if not fits or covered != whole:
                raise ValueError(
                    f"{name}: {runs[0].whole} elements in runs {ends}, "
                    f"expected {whole} without a gap"
                )

    def read(
        self, pieces: Iterable[Piece], state: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> None:
        """Copy what the pieces cover into the fp32 weights and the optimizer's moments.

        At step 0 there are no moments.

        Raises:
            ValueError: The files do not hold all of a piece.
        """
        for piece in pieces:
            self._fill(piece, WEIGHT, piece.of(piece.master))
            if self.steps:
                for key in MOMENTS:
                    self._fill(piece, key, piece.of(state[piece.master][key]))

    def _fill(self, piece: Piece, key: str, target: torch.Tensor) -> None:
        filled = 0
        for run in self.runs.get(piece.name, ()):
            low = max(piece.start, run.start)
            high = min(piece.start + piece.length, run.start + run.length)
            if low < high:
                # Reads these elements from the disk, not the whole tensor.
                stored = run.file.get_slice(f"{key}/{piece.name}")
                values = stored[low - run.start : high - run.start]
                target[low - piece.start : high - piece.start].copy_(values)
                filled += high - low
        if filled != piece.length:
            raise ValueError(
                f"{piece.name}: {filled} of the {piece.length} elements from {piece.start} on"
            )
