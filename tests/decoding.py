"""Checks of cached decoding that hold for any method: token by token equals one pass, and beams carry their own caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def both_ways(model: Any, family: str) -> tuple[Tensor, Tensor]:
    """Teacher-forced logits with a growing cache, and of one pass over all tokens."""
    ids = torch.randint(10, 50, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4, [1] * 6])
    if family == "t5":
        encoded = model.encoder(input_ids=ids, attention_mask=mask)
        fixed = {"encoder_outputs": encoded, "attention_mask": mask}
        steps = ids.flip(0)
        whole = model(decoder_input_ids=steps, **fixed).logits
    else:
        fixed = {}
        steps = ids
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        whole = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    cache = None
    parts = []
    for t in range(steps.shape[1]):
        token = steps[:, t : t + 1]
        if family == "t5":
            output = model(decoder_input_ids=token, past_key_values=cache, use_cache=True, **fixed)
        else:
            seen = {"attention_mask": mask[:, : t + 1], "position_ids": positions[:, t : t + 1]}
            output = model(input_ids=token, past_key_values=cache, use_cache=True, **seen)
        cache = output.past_key_values
        parts.append(output.logits)
    real = torch.ones_like(mask) if family == "t5" else mask
    return torch.cat(parts, dim=1)[real.bool()], whole[real.bool()]


@torch.no_grad()
def check_beams(model: Any, family: str) -> None:
    """The score of the best beam is the mean log-probability that one pass gives to it: caches were reordered rightly."""
    ids = torch.randint(10, 50, (4, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    found = model.generate(
        input_ids=ids,
        attention_mask=mask,
        num_beams=4,
        max_new_tokens=5,
        min_new_tokens=5,
        return_dict_in_generate=True,
        output_scores=True,
    )
    new = found.sequences[:, -5:]
    if family == "t5":
        logits = model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=found.sequences[:, :-1]
        ).logits
    else:
        logits = model(
            input_ids=found.sequences, attention_mask=torch.ones_like(found.sequences)
        ).logits[:, -6:-1]
    chosen = logits.log_softmax(-1).gather(-1, new[..., None])[..., 0]
    assert torch.allclose(found.sequences_scores, chosen.mean(1), atol=1e-5)
    assert (
        len({tuple(row) for row in found.sequences.tolist()}) > 1
    )  # else rows could not have been mixed up
