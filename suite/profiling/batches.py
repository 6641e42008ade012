"""Batches of random tokens, in the shapes that a task would have."""

from __future__ import annotations

import torch
from torch import Tensor

from suite.backbones.base import Family
from suite.backbones.loading import Head

# Smaller ids are padding and other tokens with a meaning in most vocabularies.
SMALLEST_ID = 4


def head_of(family: Family) -> Head:
    """Give encoders two classes and all others text, as GLUE asks of the papers' backbones."""
    if family.kind == "encoder":
        return Head("classification", 2)
    return Head("text")


def random_ids(vocabulary: int, *shape: int, seed: int = 0) -> Tensor:
    """Token ids of the given shape, the same for all arms of a backbone."""
    generator = torch.Generator().manual_seed(seed)
    # A tiny vocabulary must have at least one id left.
    return torch.randint(min(SMALLEST_ID, vocabulary - 1), vocabulary, shape, generator=generator)


def training_batch(
    family: Family,
    vocabulary: int,
    *,
    rows: int,
    tokens: int,
    target: int,
    seed: int = 0,
    head: Head | None = None,
) -> dict[str, Tensor]:
    """Inputs of one forward pass with labels, on the CPU.

    Args:
        family: The backbone's family.
        vocabulary: Ids lie below this number.
        rows, tokens, target: Examples, and tokens of an example's input and of its text target.
        seed: Batches of different seeds differ.
        head: What the model ends in: classification, text or masked; None = as `head_of` says.

    Returns:
        `input_ids` and `attention_mask` (rows, tokens), and `labels`: (rows,) for classes, and for
        text (rows, target) for encoder-decoders and (rows, tokens) for all others.
    """
    head = head or head_of(family)
    ids = random_ids(vocabulary, rows, tokens, seed=seed)
    if head.kind == "classification":
        labels = ids[:, 0] % 2
    elif family.kind == "encoder-decoder":
        labels = random_ids(vocabulary, rows, target, seed=seed + 1)
    else:
        # transformers shifts a decoder's labels by one token itself.
        labels = ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def forward_options(family: Family) -> dict[str, bool]:
    """Arguments that a training or scoring pass gives beside its batch: no cache."""
    if family.kind == "encoder":
        return {}  # an encoder has no cache, and its forward refuses the argument
    return {"use_cache": False}
