"""Batches of random tokens, of the shapes that a task would have."""

from __future__ import annotations

import torch
from torch import Tensor

from suite.backbones.base import Family
from suite.backbones.loading import Head

SMALLEST_ID = 4
"""Below are padding and other tokens with a meaning in most vocabularies."""


def head_of(family: Family) -> Head:
    """Text for encoder-decoders and decoders, two classes for encoders: what GLUE asks of the papers' backbones."""
    return Head("classification", 2) if family.kind == "encoder" else Head("text")


def random_ids(vocabulary: int, *shape: int, seed: int = 0) -> Tensor:
    """Token ids, the same for all arms of a backbone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(SMALLEST_ID, vocabulary - 1), vocabulary, shape, generator=generator)


def training_batch(
    family: Family, vocabulary: int, *, rows: int, tokens: int, target: int, seed: int = 0
) -> dict[str, Tensor]:
    """Inputs of one forward pass with labels, on the CPU: (rows, tokens), targets (rows, target) or (rows,)."""
    ids = random_ids(vocabulary, rows, tokens, seed=seed)
    if family.kind == "encoder-decoder":
        labels = random_ids(vocabulary, rows, target, seed=seed + 1)
    else:
        labels = ids if family.kind == "decoder" else ids[:, 0] % 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def forward_options(family: Family) -> dict[str, bool]:
    """What a training or scoring pass asks for beside its batch: no cache."""
    return {} if family.kind == "encoder" else {"use_cache": False}
