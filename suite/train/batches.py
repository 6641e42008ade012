"""Which examples every rank sees, in which order.

The global batches are the same for any number of ranks and for every arm of a backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from suite.config.hashing import derive_seed
from suite.data.splits import check_batch_fits

Part = tuple[dict[str, torch.Tensor], float]
Rows = np.ndarray[Any, Any]
Collate = Callable[[Sequence[Mapping[str, Any]]], dict[str, torch.Tensor]]

# Ours. SST-2 (23 tokens a row, batches of 16 to 96) is padded to 48-57 tokens a row without
# windows, to 29 with 16, and to 27 where the whole pass is sorted. The narrower a window, the more
# freely rows meet in a batch.
WINDOW_BATCHES = 16
"""Batches whose rows are sorted by length together."""


class TrainBatches:
    """The optimizer steps of an epoch, cut for one rank.

    Global batches come in the order of `pass_order`. Rank r takes the rows r, r+N, r+2N, ... of a
    batch, sorted by length, in micro-batches, so that all ranks pad about as much. The weight of a
    micro-batch is its share of the batch's loss units (label tokens, or rows) times the number of
    parts, so that the mean over parts is the mean over the whole batch, however it was cut. (Under
    bf16 up to its rounding: DeepSpeed adds gradients up in bf16, over micro-batches and ranks.) The
    incomplete last batch of a pass is dropped. Every row comes with `draw`, the seed of whatever
    `collate` draws for it (what is masked). This seed depends on the pass and the row alone, so
    that any number of ranks and a resumed run draw the same.

    Args:
        data: Encoded training rows with the column `units`.
        collate: Rows to model inputs.
        batch_size: Examples per step over all ranks.
        micro_batch_size: Examples per forward pass.
        epoch_steps: Steps of an epoch; None = one pass over the data.
    """

    def __init__(
        self,
        data: Dataset,
        collate: Collate,
        *,
        batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        epoch_steps: int | None = None,
    ) -> None:
        check_batch_fits(len(data), batch_size, where="training data")
        self.data = data
        self.collate = collate
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.pass_steps = len(data) // batch_size
        self.epoch_steps = epoch_steps or self.pass_steps
        # Whole columns: one that is not cut reads the file for every row.
        self.units = np.asarray(data["units"][:], dtype=np.float64)
        self.lengths = np.asarray(data["length"][:], dtype=np.int64)

    def __len__(self) -> int:
        """Steps per epoch."""
        return self.epoch_steps

    def epoch(
        self, number: int, seed: Callable[[int], int], *, first: int = 0
    ) -> Iterator[tuple[list[Part], Rows, list[Rows]]]:
        """The steps of an epoch.

        Args:
            number: The epoch, counted from 1.
            seed: Seed of the permutation of a pass over the data, by the pass's number from 1. An
                epoch is a pass unless `epoch_steps` says otherwise.
            first: Steps of the epoch that are done already.

        Yields:
            This rank's (inputs, weight) micro-batches; the numbers of the rows of the whole batch,
            the same on all ranks; and those of each micro-batch.
        """
        order = np.empty(0, dtype=np.int64)
        pass_seed = 0
        # Steps count through the whole trial, so that a pass may span several epochs.
        for step in range((number - 1) * len(self) + first, number * len(self)):
            passes_done, place = divmod(step, self.pass_steps)
            # A pass has an order of its own, and an epoch may begin or go on in the middle of one.
            if place == 0 or not len(order):
                pass_seed = seed(passes_done + 1)
                order = pass_order(self.lengths, self.batch_size, pass_seed)
            batch = order[place * self.batch_size : (place + 1) * self.batch_size]
            parts, rows = self._parts(batch, pass_seed)
            yield parts, batch, rows

    def _parts(self, batch: Rows, pass_seed: int) -> tuple[list[Part], list[Rows]]:
        mine = batch[self.rank :: self.world_size]
        size = self.micro_batch_size
        # All ranks have the same number of parts: `micro_batching` refuses what leaves a rest.
        rows = [mine[i : i + size] for i in range(0, len(mine), size)]
        mean_units = self.units[batch].sum() / (len(rows) * self.world_size)
        found = []
        for part in rows:
            weight = float(self.units[part].sum() / mean_units)
            found.append((self.collate(self._drawn(part, pass_seed)), weight))
        return found, rows

    def _drawn(self, part: Rows, pass_seed: int) -> list[dict[str, Any]]:
        rows = read_rows(self.data, part)
        for i, row in zip(part, rows, strict=True):
            row["draw"] = derive_seed(pass_seed, int(i))
        return rows


def pass_order(lengths: np.ndarray[Any, Any], batch_size: int, seed: int) -> np.ndarray[Any, Any]:
    """Return the rows of a pass over the data, batch after batch.

    The rows are permuted, and cut into windows of `WINDOW_BATCHES` batches. The batches of a window
    are cut from its rows in order of length, so that little is padded. They then come in a random
    order, so that the lengths of steps are random too.

    Args:
        lengths: Tokens of each row.
        seed: Seed of the pass.

    Returns:
        Numbers of the rows, `batch_size` after `batch_size`. The rows of the incomplete last batch
        are left out.
    """
    # A generator of its own: the streams that dropout draws from stay as they are.
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(lengths))
    # Before any row is sorted: which ones are left out must not depend on their length.
    order = order[: len(order) - len(order) % batch_size]
    windows = []
    for start in range(0, len(order), WINDOW_BATCHES * batch_size):
        window = order[start : start + WINDOW_BATCHES * batch_size]
        # Stable, so that rows of one length stay in the order of the permutation.
        by_length = window[np.argsort(lengths[window], kind="stable")]
        windows.append(draw.permutation(by_length.reshape(-1, batch_size)))
    return np.concatenate(windows).reshape(-1)


def eval_batches(
    data: Dataset, collate: Collate, *, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[dict[str, torch.Tensor], list[int | None]]]:
    """This rank's evaluation batches, and the numbers of the rows that they hold.

    Every rank gets the same number of batches. Rows are sorted by length, so that little is padded.
    If they run out, the shortest row fills up and its number is None.
    """
    lengths = data["length"][:]
    order: list[int] = sorted(range(len(data)), key=lengths.__getitem__)
    mine: list[int | None] = [*order[rank::world_size]]
    # Rounded up: the ranks would wait for ever for one that has a batch less.
    share = -(-len(order) // world_size)
    mine += [None] * (share - len(mine))
    for start in range(0, share, batch_size):
        rows = mine[start : start + batch_size]
        filled = []
        for row in rows:
            filled.append(order[0] if row is None else row)
        yield collate(read_rows(data, filled)), rows


def read_rows(data: Dataset, indices: Sequence[int] | Rows) -> list[dict[str, Any]]:
    """Some rows of a split, by their numbers."""
    # One read of all rows: reading them one by one costs far more.
    columns = data[[int(i) for i in indices]]
    rows = []
    for values in zip(*columns.values(), strict=True):
        rows.append(dict(zip(columns, values, strict=True)))
    return rows
