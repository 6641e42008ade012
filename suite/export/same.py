"""Do two models give the same answers? Asked of everything that is exported, before it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from suite.backbones.base import Family
from suite.backbones.heads import Head

ROWS, TOKENS, UNPADDED = 2, 8, 5
SEED = 0
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative to the largest logit: sums in another order (folded heads, adapters merged or not), in each precision."""

Batch = dict[str, Tensor]


def make_batch(model: nn.Module, family: Family, head: Head) -> Batch:
    """Random tokens, the second row padded; where choices are compared, the two rows are the choices of one."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, config.vocab_size, (ROWS, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, UNPADDED:] = 0
    ids = ids.masked_fill(mask == 0, config.pad_token_id or 0)
    if head.kind == "choice":
        return {"input_ids": ids[None], "attention_mask": mask[None]}  # (1, 2, T)
    batch = {"input_ids": ids, "attention_mask": mask}
    return (
        {**batch, "decoder_input_ids": ids[:, :UNPADDED]}
        if family.kind == "encoder-decoder"
        else batch
    )


@torch.no_grad()
def answers(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Every kind of logits that a model gives."""
    output = model.eval()(**batch)
    return {
        name: value.float()
        for name, value in output.items()
        if name.endswith("logits") and isinstance(value, Tensor)
    }


def difference(ours: nn.Module, theirs: nn.Module, batch: Batch) -> float:
    """Largest difference between two models' logits, relative to the largest (at least 1); infinite where they have different ones.

    A model may answer at positions in front of the input's (a prompt's): they are left out.
    """
    expected, got = answers(ours, batch), answers(theirs, batch)
    if expected.keys() != got.keys() or not expected:
        return float("inf")
    worst = 0.0
    for name, wanted in expected.items():
        found = got[name][:, -wanted.shape[1] :] if wanted.dim() > 2 else got[name]
        if found.shape != wanted.shape:
            return float("inf")
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)))
    return worst


def same(ours: nn.Module, theirs: nn.Module, batch: Batch) -> bool:
    dtype = next(ours.parameters()).dtype
    return difference(ours, theirs, batch) <= TOLERANCES[dtype]
