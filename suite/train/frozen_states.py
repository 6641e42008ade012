"""What frozen stacks without dropout give for every row of a task: computed once, and then read.

With `training.frozen_dropout: off` the stacks of a method that has no gradients in the backbone
give the same for a row in every epoch and every trial. Products of matrices differ in their last
bits with the shape of a batch, so what a row gets must not depend on the batch it is drawn in. It
is therefore defined as what the stacks give in evaluation mode for a *block*: `BLOCK_ROWS` rows
that lie side by side in order of length. All blocks are computed before the first step of the first
trial that asks, and every step of every trial reads them, the first trial's too. So it makes no
difference whether the cache was cold or warm.

Shapes: B rows, T tokens (n of a decoder, m of its encoder), N blocks of a stack, d its width, H
heads, S stacks of a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn

from suite.backbones.loading import ResolvedBackbone
from suite.config.hashing import short_hash
from suite.config.task_base import SplitName
from suite.config.training import Precision
from suite.data.collate import IGNORED
from suite.data.objective import Batch, Objective
from suite.data.prepare import Prepared, token_lengths
from suite.errors import IncompatibleError
from suite.files import replacing
from suite.meters import PhaseMeter
from suite.petl._frozen import GivenPass, StackStates, frozen_states
from suite.record.result import STATES_PHASE, PreparationRecord
from suite.record.spec import TrialSpec
from suite.train.batches import read_rows
from suite.train.fingerprint import frozen_fingerprint
from suite.train.initial import kept_record, once
from suite.train.process_group import all_agree
from suite.train.states_cache import (
    STATES,
    damage,
    make_room,
    note_use,
    remove_damaged,
    sign,
    states_folder,
)

FORMAT = 1
"""Raise this number when the files change, or what they hold is computed otherwise."""
BLOCK_ROWS = 32
"""Rows that are computed together (ours)."""
STATES_COME_FROM = {"backbone", "attention", "pretrain", "code"}
"""What of an arm decides over its states; the code is that of the user's own files."""
ALIGNED_BYTES = 8


@dataclass(frozen=True, slots=True)
class StackLayout:
    """What is kept of one stack for a row of n tokens: (n, N, d), and scores (N, H, n, m).

    Attributes:
        depth, width: N and d.
        heads: H; 0 = the method reads no attention of this stack.
        beside: As in `StackStates`.
        dtype, score_dtype: Names in torch.
    """

    depth: int
    width: int
    heads: int
    beside: int | None
    dtype: str
    score_dtype: str

    @classmethod
    def of(cls, found: StackStates) -> StackLayout:
        """The layout of what a stack gave."""
        heads = 0
        dtype = score_dtype = _only_dtype(found.states)
        if found.scores:
            heads = found.scores[0].shape[1]
            score_dtype = _only_dtype(found.scores)
        return cls(
            depth=len(found.states),
            width=found.states[0].shape[-1],
            heads=heads,
            beside=found.beside,
            dtype=dtype,
            score_dtype=score_dtype,
        )

    def state_bytes(self, tokens: Any) -> Any:
        """Bytes of the states of a row, or of an array of rows, in the file."""
        return _aligned(tokens * self.depth * self.width * _dtype(self.dtype).itemsize)

    def score_bytes(self, tokens: Any, read_tokens: Any) -> Any:
        """Bytes of the scores of a row of n tokens that reads m."""
        elements = self.depth * self.heads * tokens * read_tokens
        return _aligned(elements * _dtype(self.score_dtype).itemsize)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of a split lie in the file.

    Attributes:
        lengths: Tokens by row and stack, (rows, S).
        starts: First byte by row, (rows,).
        order: The rows in the order of the file, (rows,).
        end: Byte behind the last one.
    """

    lengths: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    order: np.ndarray[Any, Any]
    end: int


class KeptStates:
    """The states of the rows of a task, read from a file that is open as long as this lives.

    Another process may remove the file's name meanwhile: the file stays until it is closed.

    Args:
        path: The file.
        layouts: By stack, in the order in which the model runs them.
        places: By split.
        device: Where the states are wanted.
    """

    def __init__(
        self,
        path: Path,
        layouts: Sequence[StackLayout],
        places: Mapping[SplitName, Places],
        device: str,
    ) -> None:
        self.layouts = layouts
        self.places = places
        self.device = device
        self._path = path
        self._file = path.open("rb", buffering=0)

    def given(self, split: SplitName, rows: Sequence[int], batch: Batch) -> GivenPass:
        """What the stacks give for some rows.

        States of padding are 0: masks hide them, and the loss skips them.

        Args:
            split: The split of the rows.
            rows: Their numbers in it.
            batch: The same rows as the model reads them, which tells how long they are padded.
        """
        padded = _padded_lengths(batch, len(self.layouts))
        room = []
        for layout, tokens in zip(self.layouts, padded, strict=True):
            room.append(self._room(layout, len(rows), tokens, padded[0]))
        for place, row in enumerate(rows):
            self._fill(room, place, split, row)
        stacks = []
        for layout, (states, scores) in zip(self.layouts, room, strict=True):
            of_blocks = list(self._on_device(states).unbind(0))
            of_attentions: list[Tensor] = []
            if layout.heads:
                of_attentions = list(self._on_device(scores).unbind(0))
            stacks.append(StackStates(of_blocks, of_attentions, layout.beside))
        return GivenPass(stacks)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _room(
        self, layout: StackLayout, rows: int, tokens: int, read_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Zeros for the states (N, B, T, d) and the scores (N, B, H, n, m) of a stack."""
        pinned = self.device != "cpu"
        states = torch.zeros(
            (layout.depth, rows, tokens, layout.width),
            dtype=_dtype(layout.dtype),
            pin_memory=pinned,
        )
        scores = torch.zeros(
            (layout.depth, rows, layout.heads, tokens, read_tokens),
            dtype=_dtype(layout.score_dtype),
            pin_memory=pinned,
        )
        return states, scores

    def _fill(
        self, room: Sequence[tuple[Tensor, Tensor]], place: int, split: SplitName, row: int
    ) -> None:
        """Read a row into the place of a batch."""
        places = self.places[split]
        lengths = places.lengths[row].tolist()
        data = self._read(int(places.starts[row]), int(_row_bytes(self.layouts, lengths)))
        at = 0
        for layout, (states, scores), tokens in zip(self.layouts, room, lengths, strict=True):
            of_states = (tokens, layout.depth, layout.width)
            kept = _part(data, at, of_states, layout.dtype)  # (n, N, d)
            states[:, place, :tokens] = kept.transpose(0, 1)
            at += layout.state_bytes(tokens)
            if layout.heads:
                of_scores = (layout.depth, layout.heads, tokens, lengths[0])
                kept = _part(data, at, of_scores, layout.score_dtype)  # (N, H, n, m)
                scores[:, place, :, :tokens, : lengths[0]] = kept
                at += layout.score_bytes(tokens, lengths[0])

    def _read(self, start: int, size: int) -> bytearray:
        # Read, not mapped: mapped pages would count as memory of this process.
        data = bytearray(size)
        found = os.preadv(self._file.fileno(), [data], start)
        if found != size:
            raise OSError(f"{self._path}: ends after byte {start + found} of {start + size}")
        return data

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def keep_states(
    spec: TrialSpec,
    model: nn.Module,
    resolved: ResolvedBackbone,
    objective: Objective,
    data: Prepared,
    *,
    cache: Path,
    most_bytes: int,
    device: str,
    precision: Precision,
    meter: PhaseMeter,
) -> tuple[KeptStates, PreparationRecord]:
    """Open the states of a trial's rows, and compute them first unless they are kept. Collective.

    Args:
        model: The arm, whole and on the CPU, in the precision of its engine, which comes later.
        cache: The home's cache.
        most_bytes: Most bytes that the cache may hold of states.
        device: Where the states are computed and wanted.
        precision: What the trial computes in.
        meter: The trial's meter, in its phase `load`.

    Returns:
        The states, and what it cost to compute them.

    Raises:
        IncompatibleError: The method runs its stacks in a way of its own.
        ResourceError: There is no room for the states.
    """
    objective.check_can_keep()
    stacks = len(resolved.family.stacks(model))  # type: ignore[arg-type]
    was_training = model.training
    model.to(device).eval()
    train = data.split("train", confirm=False)
    layouts = _layouts(model, objective, train, stacks, device)
    places = _all_places(objective, data, layouts)
    parts = [
        FORMAT,
        BLOCK_ROWS,
        frozen_fingerprint(model),
        spec.arm.model_dump(mode="json", include=STATES_COME_FROM),
        resolved.config.to_json_string(),
        data.data_hash,
        objective.fingerprint(),
        spec.training.pad_to_multiple,
        list(objective.kept_splits),
        [asdict(layout) for layout in layouts],
        precision,
        device,
        {name: version(name) for name in ("torch", "transformers")},
    ]
    folder = states_folder(cache) / f"{spec.task.name}-{short_hash(parts)}"
    needed = max(places[split].end for split in places)
    open_states = partial(_open, folder, layouts, places, device)
    states = open_states()
    record: PreparationRecord
    if not all_agree(states is not None):
        if states is not None:
            states.close()
        remove_damaged(folder, needed)

        def write(temporary: Path) -> None:
            make_room(folder.parent, needed, most_bytes)
            blocks = _blocks(objective, data, places)
            _write(temporary, model, blocks, layouts, places, device=device, meter=meter)

        record = once(folder, write, phase=STATES_PHASE, trial=spec.hash, meter=meter)
        states = open_states()
        if not all_agree(states is not None):
            raise OSError(f"{folder}: gone, or damaged, as soon as it was written")
    else:
        record = kept_record(folder)
    assert states is not None
    model.to("cpu").train(was_training)
    return states, record


def _layouts(
    model: nn.Module, objective: Objective, train: Dataset, stacks: int, device: str
) -> list[StackLayout]:
    """What the stacks give, found with one row."""
    batch = _to(objective.collate(read_rows(train, [0])), device)
    try:
        found = frozen_states(model, batch, stacks)
    except AssertionError as error:
        raise IncompatibleError(
            f"training.frozen_dropout: off: {error}; leave it on for this method"
        ) from error
    return [StackLayout.of(stack) for stack in found]


def _all_places(
    objective: Objective, data: Prepared, layouts: Sequence[StackLayout]
) -> dict[SplitName, Places]:
    places: dict[SplitName, Places] = {}
    start = 0
    for split in objective.kept_splits:
        places[split] = _places(data.split(split, confirm=False), layouts, start)
        start = places[split].end
    return places


def _places(rows: Dataset, layouts: Sequence[StackLayout], start: int) -> Places:
    lengths = token_lengths(rows, len(layouts))
    # The longest first, so that memory peaks where it is looked at: in the first blocks.
    order = np.argsort(-lengths[:, 0], kind="stable")
    sizes = _row_bytes(layouts, list(lengths.T))[order]
    starts = np.empty(len(rows), dtype=np.int64)
    starts[order] = start + np.cumsum(sizes) - sizes
    return Places(lengths, starts, order, int(start + sizes.sum()))


def _row_bytes(layouts: Sequence[StackLayout], lengths: Sequence[Any]) -> Any:
    """Bytes of a row, or of an array of rows.

    Args:
        layouts: By stack.
        lengths: By stack, tokens of the row or of each row.
    """
    total = 0
    for layout, tokens in zip(layouts, lengths, strict=True):
        total = total + layout.state_bytes(tokens)
        if layout.heads:
            total = total + layout.score_bytes(tokens, lengths[0])
    return total


def _blocks(
    objective: Objective, data: Prepared, places: Mapping[SplitName, Places]
) -> Iterator[tuple[SplitName, np.ndarray[Any, Any], Batch]]:
    """Every block of every split: the numbers of its rows, and the rows as the model reads them."""
    for split, of_split in places.items():
        rows = data.split(split, confirm=False)
        for first in range(0, len(rows), BLOCK_ROWS):
            block = of_split.order[first : first + BLOCK_ROWS]
            yield split, block, objective.collate(read_rows(rows, block))


def _write(
    folder: Path,
    model: nn.Module,
    blocks: Iterator[tuple[SplitName, np.ndarray[Any, Any], Batch]],
    layouts: Sequence[StackLayout],
    places: Mapping[SplitName, Places],
    *,
    device: str,
    meter: PhaseMeter,
) -> None:
    """Compute every block and write its rows, and what tells a whole file from a damaged one."""
    with replacing(folder / STATES) as path, path.open("r+b") as file:
        for split, block, batch in blocks:
            lengths = places[split].lengths[block]
            _check_lengths(batch, lengths)
            with meter.probe(batch["input_ids"].numel()):
                stacks = frozen_states(model, _to(batch, device), len(layouts))
            assert [StackLayout.of(stack) for stack in stacks] == list(layouts)
            file.seek(int(places[split].starts[block[0]]))
            for row in _row_data(stacks, lengths.tolist()):
                file.write(row)
    sign(folder)


def _check_lengths(batch: Batch, lengths: np.ndarray[Any, Any]) -> None:
    """Check that the rows of a batch are padded on the right, and as long as their places say."""
    masks = [batch["attention_mask"].bool()]
    if lengths.shape[1] > 1:
        masks.append(batch["labels"] != IGNORED)
    for mask, expected in zip(masks, torch.from_numpy(lengths.T.copy()), strict=True):
        places = torch.arange(mask.shape[1])
        assert torch.equal(mask, places < expected[:, None]), "rows are not padded on the right"


def _row_data(stacks: Sequence[StackStates], lengths: Sequence[Sequence[int]]) -> Iterator[bytes]:
    """The bytes of every row of a block, in order."""
    by_stack = []
    for stack in stacks:
        states = torch.stack(stack.states, dim=2).cpu()  # (B, T, N, d)
        scores: Tensor | None = None
        if stack.scores:
            scores = torch.stack(stack.scores, dim=1).cpu()  # (B, N, H, n, m)
        by_stack.append((states, scores))
    for place, of_row in enumerate(lengths):
        data = bytearray()
        for (states, scores), tokens in zip(by_stack, of_row, strict=True):
            data += _bytes(states[place, :tokens])
            if scores is not None:
                data += _bytes(scores[place, :, :, :tokens, : of_row[0]])
        yield bytes(data)


def _bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, filled up to what the file aligns to."""
    # Through integers of one byte, because numpy knows no bfloat16.
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data + bytes(_aligned(len(data)) - len(data))


def _part(data: bytearray, at: int, shape: Sequence[int], dtype: str) -> Tensor:
    count = int(np.prod(shape))
    return torch.frombuffer(data, dtype=_dtype(dtype), count=count, offset=at).view(*shape)


def _open(
    folder: Path,
    layouts: Sequence[StackLayout],
    places: Mapping[SplitName, Places],
    device: str,
) -> KeptStates | None:
    """The states of a folder; None where they are absent or damaged."""
    try:
        states = KeptStates(folder / STATES, layouts, places, device)
    except FileNotFoundError:
        return None
    if damage(folder, max(of_split.end for of_split in places.values())) is not None:
        states.close()
        return None
    note_use(folder)
    return states


def _padded_lengths(batch: Batch, stacks: int) -> list[int]:
    return [batch[name].shape[-1] for name in ("input_ids", "labels")[:stacks]]


def _to(batch: Batch, device: str) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _aligned(size: Any) -> Any:
    """Rounded up, so that every part begins where its type may begin."""
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _only_dtype(tensors: Sequence[Tensor]) -> str:
    """The name of the type that all of a stack's tensors have."""
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    assert len(names) == 1, f"a stack gives numbers of several types: {sorted(names)}"
    return names.pop()
