"""Whether two models give the same answers. Every export is checked with this."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from suite.backbones.base import Family
from suite.backbones.heads import Head

ROWS = 2
TOKENS = 8
UNPADDED = 5
SEED = 0
# Largest difference relative to the largest logit. Folded heads and merged adapters sum in another
# order, and each precision has its own rounding.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

Batch = dict[str, Tensor]


def make_batch(model: nn.Module, family: Family, head: Head) -> Batch:
    """Random tokens, the second row padded; for a choice, the rows are its two options."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, config.vocab_size, (ROWS, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    # Padding shows whether both models read the mask in the same way.
    mask[1:, UNPADDED:] = 0
    ids = ids.masked_fill(mask == 0, config.pad_token_id or 0)
    if head.kind == "choice":
        return {"input_ids": ids[None], "attention_mask": mask[None]}  # (1, 2, T)
    batch = {"input_ids": ids, "attention_mask": mask}
    if family.kind == "encoder-decoder":
        batch["decoder_input_ids"] = ids[:, :UNPADDED]
    return batch


@torch.no_grad()
def answers(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Every kind of logits that a model gives, by name."""
    output = model.eval()(**batch)
    logits = {}
    for name, value in output.items():
        if name.endswith("logits") and isinstance(value, Tensor):
            logits[name] = value.float()
    return logits


def difference(ours: nn.Module, theirs: nn.Module, batch: Batch) -> float:
    """Largest difference between two models' logits, relative to the largest logit.

    The largest logit counts as at least 1. Models with different kinds of logits differ
    infinitely. A model may also answer at the positions of a prompt in front of the input: these
    answers do not count.
    """
    expected = answers(ours, batch)
    got = answers(theirs, batch)
    if expected.keys() != got.keys() or not expected:
        return float("inf")
    worst = 0.0
    for name, wanted in expected.items():
        found = got[name]
        if wanted.dim() > 2:  # (B, T, ...): the prompt's positions come first
            found = found[:, -wanted.shape[1] :]
        if found.shape != wanted.shape:
            return float("inf")
        # Rounding grows with the logits, but tiny logits still carry the rounding of larger sums.
        scale = wanted.abs().max().clamp(min=1.0)
        worst = max(worst, float((found - wanted).abs().max() / scale))
    return worst


def same(ours: nn.Module, theirs: nn.Module, batch: Batch) -> bool:
    """Whether two models' logits agree within the tolerance of the first one's precision."""
    dtype = next(ours.parameters()).dtype
    return difference(ours, theirs, batch) <= TOLERANCES[dtype]
