"""Which rows meet in a batch, and in which order: few are padded, all are drawn, and everyone draws the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.arrow_dataset import Column

from suite.data.collate import collate_padded
from suite.train.batches import WINDOW_BATCHES, TrainBatches, eval_batches

BATCH = 4
ROWS = WINDOW_BATCHES * BATCH * 2 + 11  # two whole windows, and one of two batches with a rest
SEEDS = {1: 101, 2: 202, 3: 303}


def rows() -> Dataset:
    # As skewed as sentences are: many short ones, few long ones. A row is told by its first token.
    lengths = np.random.default_rng(0).geometric(0.06, ROWS).clip(1, 120).tolist()
    ids = [[number + 1, *[0] * (length - 1)] for number, length in enumerate(lengths)]
    return Dataset.from_dict(
        {"input_ids": ids, "length": lengths, "units": [1] * ROWS, "labels": [[1]] * ROWS}
    )


DATA = rows()


def collate(batch: Any) -> dict[str, torch.Tensor]:
    return collate_padded(batch, {"input_ids": 0, "labels": -100}, at_most=128, multiple=8)


def batches(rank: int = 0, world_size: int = 1, **size: Any) -> TrainBatches:
    return TrainBatches(
        DATA,
        collate,
        **{"batch_size": BATCH, "micro_batch_size": BATCH // world_size, **size},
        rank=rank,
        world_size=world_size,
    )


def drawn(of: TrainBatches, number: int = 1, **begin: int) -> list[list[int]]:
    """The rows of every step of an epoch, by their first token."""
    return [
        [int(token) for inputs, _ in parts for token in inputs["input_ids"][:, 0]]
        for parts, _, _ in of.epoch(number, SEEDS.__getitem__, **begin)
    ]


def test_windows_of_sorted_rows_save_padding_and_their_batches_are_shuffled() -> None:
    of = batches()
    tokens = [int(of.lengths[batch].max()) for _, batch, _ in of.epoch(1, SEEDS.__getitem__)]
    order = np.random.default_rng(SEEDS[1]).permutation(ROWS)[: len(tokens) * BATCH]
    unsorted = np.asarray(DATA["length"])[order].reshape(-1, BATCH).max(1)
    assert sum(tokens) < 0.75 * unsorted.sum()
    whole = tokens[: 2 * WINDOW_BATCHES]
    for window in (whole[:WINDOW_BATCHES], whole[WINDOW_BATCHES:]):
        assert window not in (sorted(window), sorted(window, reverse=True))


def test_a_pass_draws_every_row_once_and_drops_rows_of_any_length() -> None:
    dropped = []
    for number in SEEDS:
        seen = [row for step in drawn(batches(), number) for row in step]
        assert len(seen) == len(set(seen)) == ROWS // BATCH * BATCH
        order = np.random.default_rng(SEEDS[number]).permutation(ROWS)
        missing = set(range(1, ROWS + 1)) - set(seen)
        assert missing == {row + 1 for row in order[len(seen) :].tolist()}
        dropped.append(missing)
    assert dropped[0] != dropped[1] != dropped[2]


@pytest.mark.parametrize("epoch_steps", [None, 5])
def test_any_number_of_ranks_and_any_start_see_the_same_batches(epoch_steps: int | None) -> None:
    whole = drawn(batches(epoch_steps=epoch_steps), 2)
    assert drawn(batches(epoch_steps=epoch_steps), 2, first=3) == whole[3:]
    for world_size in (2, 4):
        ranks = [
            drawn(batches(rank, world_size, epoch_steps=epoch_steps), 2)
            for rank in range(world_size)
        ]
        for step, parts in zip(whole, zip(*ranks, strict=True), strict=True):
            assert [step[rank::world_size] for rank in range(world_size)] == list(parts)


def test_a_pass_that_spans_epochs_is_drawn_as_one() -> None:
    steps = ROWS // BATCH
    assert steps % 2 == 0
    halves = batches(epoch_steps=steps // 2)
    assert drawn(halves, 1) + drawn(halves, 2) == drawn(batches())
    assert drawn(halves, 3) == drawn(batches(), 2)[: steps // 2]


def test_evaluation_comes_in_order_of_length() -> None:
    lengths = DATA["length"]
    seen = []
    for _, numbers in eval_batches(DATA, collate, batch_size=BATCH, rank=0, world_size=1):
        seen += [lengths[number] for number in numbers if number is not None]
    assert seen == sorted(lengths)


def test_lengths_are_read_once_and_not_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that is not cut reads the file for every row: 12 s at QQP's test, in every evaluation."""
    whole = Column.__getitem__

    def by_whole(self: Column, key: Any) -> Any:
        assert not isinstance(key, int), "a row of a column was read by itself"
        return whole(self, key)

    monkeypatch.setattr(Column, "__getitem__", by_whole)
    assert len(batches().lengths) == ROWS
    assert sum(1 for _ in eval_batches(DATA, collate, batch_size=50, rank=0, world_size=1)) > 1
