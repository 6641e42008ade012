"""Padding: turns rows of different lengths into rectangular tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# the default of PyTorch's cross-entropy, which transformers' own losses use too
IGNORED = -100
"""The label that the loss skips."""


def padded_length(longest: int, *, at_most: int, multiple: int) -> int:
    """`longest` rounded up to a multiple, but not beyond `at_most` tokens.

    A model may have no more positions than `at_most`.
    """
    # upside-down floor division rounds up
    rounded = -(-longest // multiple) * multiple
    return max(longest, min(rounded, at_most))


def pad(
    sequences: Sequence[Sequence[int]], value: int, *, at_most: int, multiple: int
) -> torch.Tensor:
    """Sequences padded on the right, (rows, length), int64."""
    longest = max(len(sequence) for sequence in sequences)
    length = padded_length(longest, at_most=at_most, multiple=multiple)
    rows = [[*sequence, *[value] * (length - len(sequence))] for sequence in sequences]
    return torch.tensor(rows, dtype=torch.long)


def pad_left(
    sequences: Sequence[Sequence[int]], value: int, *, at_most: int, multiple: int
) -> torch.Tensor:
    """Sequences padded on the left, so that a model can continue them, (rows, length), int64."""
    mirrored = [sequence[::-1] for sequence in sequences]
    # mirrored, padded on the right, and mirrored back
    return pad(mirrored, value, at_most=at_most, multiple=multiple).flip(1)


def ones_like(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """The attention mask of sequences before padding: a 1 for each token."""
    return [[1] * len(sequence) for sequence in sequences]


def collate_padded(
    rows: Sequence[Mapping[str, Any]], fill: Mapping[str, int], *, at_most: int, multiple: int
) -> dict[str, torch.Tensor]:
    """Pad some columns, and add the `attention_mask` of `input_ids`.

    Args:
        rows: Encoded rows.
        fill: Column -> padding value. Columns that the rows lack are left out.
        at_most: Longest padded length, tokens.
        multiple: Lengths are rounded up to a multiple of so many tokens.
    """
    batch = {}
    for name, value in fill.items():
        if name in rows[0]:
            column = [row[name] for row in rows]
            batch[name] = pad(column, value, at_most=at_most, multiple=multiple)
    # from the rows, because the padding value may be a token's id as well
    mask = ones_like([row["input_ids"] for row in rows])
    batch["attention_mask"] = pad(mask, 0, at_most=at_most, multiple=multiple)
    return batch
