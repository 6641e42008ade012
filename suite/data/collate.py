"""Padding: rows of different lengths to rectangular tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

IGNORED = -100
"""Label that the loss skips."""


def padded_length(longest: int, *, at_most: int, multiple: int) -> int:
    """`longest` rounded up to a multiple, but not beyond `at_most` tokens (a model may have no more positions)."""
    return max(longest, min(-(-longest // multiple) * multiple, at_most))


def pad(
    sequences: Sequence[Sequence[int]], value: int, *, at_most: int, multiple: int
) -> torch.Tensor:
    """Sequences padded on the right, (rows, length), int64."""
    length = padded_length(
        max(len(sequence) for sequence in sequences), at_most=at_most, multiple=multiple
    )
    return torch.tensor(
        [[*sequence, *[value] * (length - len(sequence))] for sequence in sequences],
        dtype=torch.long,
    )


def pad_left(
    sequences: Sequence[Sequence[int]], value: int, *, at_most: int, multiple: int
) -> torch.Tensor:
    """Sequences padded on the left, so that a model can write on after them, (rows, length), int64."""
    return pad(
        [sequence[::-1] for sequence in sequences], value, at_most=at_most, multiple=multiple
    ).flip(1)


def collate_padded(
    rows: Sequence[Mapping[str, Any]], fill: Mapping[str, int], *, at_most: int, multiple: int
) -> dict[str, torch.Tensor]:
    """The columns named in `fill`, as far as the rows have them, padded; with `attention_mask` for `input_ids`.

    Args:
        rows: Encoded rows.
        fill: Column -> padding value.
        at_most: Longest padded length, tokens.
        multiple: What lengths are rounded up to, tokens.
    """
    size = {"at_most": at_most, "multiple": multiple}
    batch = {
        name: pad([row[name] for row in rows], value, **size)
        for name, value in fill.items()
        if name in rows[0]
    }
    batch["attention_mask"] = pad([[1] * len(row["input_ids"]) for row in rows], 0, **size)
    return batch
