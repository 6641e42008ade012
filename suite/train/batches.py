"""Which examples every rank sees, in which order: the same global batches for any number of ranks and for every arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from suite.config.hashing import derive_seed
from suite.data.prepare import check_batch_fits

Collate = Callable[[Sequence[Mapping[str, Any]]], dict[str, torch.Tensor]]


class TrainBatches:
    """The optimizer steps of an epoch, cut for one rank.

    A global batch is a slice of a pass's permutation; rank r takes its rows r, r+N, r+2N, ... in micro-batches. The
    weight of a micro-batch is its share of the batch's loss units (label tokens, or rows) times the number of parts, so
    that the mean over parts is the mean over the whole batch, whatever the parts. The incomplete last batch of a pass is
    dropped. Every row comes with `draw`, the seed of whatever `collate` draws for it (what is masked): of the pass and the
    row alone, so that any number of ranks and a resumed run draw the same.

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
        self.data, self.collate = data, collate
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.rank, self.world_size = rank, world_size
        self.pass_steps = len(data) // batch_size
        self.epoch_steps = epoch_steps or self.pass_steps
        self.units = np.asarray(data["units"], dtype=np.float64)
        self.lengths = np.asarray(data["length"], dtype=np.int64)

    def __len__(self) -> int:
        """Steps per epoch."""
        return self.epoch_steps

    def epoch(
        self, number: int, seed: Callable[[int], int], *, first: int = 0
    ) -> Iterator[tuple[list[tuple[dict[str, torch.Tensor], float]], np.ndarray[Any, Any]]]:
        """Per step: this rank's (inputs, weight) micro-batches, and the input lengths in tokens of the whole batch.

        Args:
            number: Of the epoch, from 1.
            seed: Of the permutation of a pass over the data, by its number from 1; an epoch is a pass unless `epoch_steps` says otherwise.
            first: Steps of the epoch that are done already.
        """
        order, pass_seed = np.empty(0, dtype=np.int64), 0
        for step in range((number - 1) * len(self) + first, number * len(self)):
            turn, place = divmod(step, self.pass_steps)
            if place == 0 or not len(order):
                pass_seed = seed(turn + 1)
                order = np.random.default_rng(pass_seed).permutation(len(self.data))
            batch = order[place * self.batch_size : (place + 1) * self.batch_size]
            yield self._parts(batch, pass_seed), self.lengths[batch]

    def _parts(
        self, batch: np.ndarray[Any, Any], pass_seed: int
    ) -> list[tuple[dict[str, torch.Tensor], float]]:
        mine = batch[self.rank :: self.world_size]
        parts = [
            mine[i : i + self.micro_batch_size] for i in range(0, len(mine), self.micro_batch_size)
        ]
        mean_units = self.units[batch].sum() / (len(parts) * self.world_size)
        return [
            (self.collate(self._drawn(part, pass_seed)), float(self.units[part].sum() / mean_units))
            for part in parts
        ]

    def _drawn(self, part: np.ndarray[Any, Any], pass_seed: int) -> list[dict[str, Any]]:
        return [
            {**row, "draw": derive_seed(pass_seed, int(i))}
            for i, row in zip(part, _rows(self.data, part), strict=True)
        ]


def eval_batches(
    data: Dataset, collate: Collate, *, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[dict[str, torch.Tensor], list[int | None]]]:
    """This rank's evaluation batches and the rows they hold; every rank gets the same number of batches.

    Rows are sorted by length so that little is padded; where rows run out, row 0 is repeated and marked None.
    """
    order: list[int] = sorted(range(len(data)), key=data["length"].__getitem__)
    mine: list[int | None] = [*order[rank::world_size]]
    share = -(-len(order) // world_size)
    mine += [None] * (share - len(mine))
    for start in range(0, share, batch_size):
        rows = mine[start : start + batch_size]
        yield collate(_rows(data, [order[0] if row is None else row for row in rows])), rows


def _rows(data: Dataset, indices: Sequence[int] | np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    columns = data[[int(i) for i in indices]]
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
