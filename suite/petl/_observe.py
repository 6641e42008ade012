"""Make an attention return its probabilities without changing a bit of what it computes.

sdpa and its relatives return no probabilities, and eager attention returns them after dropout. The attention function
registered here runs whatever implementation the module had and computes the probabilities again, beside it: a small price
for a decoder's short targets, and the output stays that of the untouched backbone bit for bit.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

OBSERVED = "suite_observed"
Attend = Callable[..., tuple[Tensor, Tensor | None]]


def observe(attention: nn.Module) -> None:
    """Let one attention module return (…, probabilities) with probabilities after softmax and before dropout, (B, H, n, m)."""
    ALL_ATTENTION_FUNCTIONS.register(OBSERVED, _observed_attention)
    config = copy.copy(cast(Any, attention).config)  # a copy: the stack's masks are still made for the original implementation
    cast(Any, attention).observed_implementation = config._attn_implementation
    config._attn_implementation_internal = OBSERVED
    cast(Any, attention).config = config


def _observed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    eager = cast(Attend, getattr(sys.modules[type(module).__module__], "eager_attention_forward", None))
    attend = cast(Attend, ALL_ATTENTION_FUNCTIONS.get_interface(module.observed_implementation, eager))
    output, _ = attend(module, query, key, value, attention_mask, **options)
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    return output, probabilities(query, key, attention_mask, scaling=scaling, position_bias=options.get("position_bias"))


@torch.no_grad()
def probabilities(query: Tensor, key: Tensor, mask: Tensor | None, *, scaling: float, position_bias: Tensor | None = None) -> Tensor:
    """softmax(q k^T) with grouped keys repeated; masked keys get exactly 0.

    Args:
        query: (B, H, n, d_k).
        key: (B, H_kv, m, d_k), H_kv divides H.
        mask: None, boolean (True = may attend) or additive, broadcastable to (B, H, n, m).
        scaling: Factor on q k^T (T5: 1).
        position_bias: Added to the scores, broadcastable to (B, H, n, m).

    Returns:
        (B, H, n, m) in the dtype of `query`.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # (B, H, m, d_k)
    scores = query @ key.transpose(-1, -2) * scaling  # (B, H, n, m)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:
        floor = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, floor) if mask.dtype == torch.bool else (scores + mask).clamp(min=floor)
    return scores.float().softmax(dim=-1).to(query.dtype)
