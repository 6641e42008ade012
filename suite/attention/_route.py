"""The way queries, keys and values take once the projections made them: a registered attention function, no model code.

q (B, h_q, n, d), k and v (B, h_kv, m, d) come as projected, rotated and cached. Then, per attention module:
1. `heads` (a module of the variant's) may turn the few cached heads into all heads (MHE, SKV, SHA under T5);
2. another layer's probabilities or keys and values may be taken instead of its own (Shared Attention, CLA);
3. the implementation that the backbone had (sdpa, eager, ...) attends, unless probabilities must be had;
4. what one head found may be given to all heads of the output projection (`tiles`, SHA).

What one layer gives to later ones travels as an explicit argument of their blocks' forward, so that gradient
checkpointing recomputes a block from the very tensors that it was called with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from suite.errors import IncompatibleError

ROUTED = "suite_routed"
PLAIN = ("sdpa", "eager")
"""Implementations whose masks hold every pair of tokens, from which probabilities can be had."""


class Heads(nn.Module):
    """Base of a variant's own step between projections and attention; its parameters are fetched by ZeRO-3's hooks."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, h, L, d) each, to heads that attend: query (B, H, n, d), key and value (B, H_kv, m, d)."""
        return query, key, value


class Exchange:
    """What layers of one stack hand to later ones during one forward pass; closed in between, so that nothing stays alive."""

    def __init__(self) -> None:
        self.is_open = False
        self.given: dict[int, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        made = Exchange()
        memo[id(self)] = made
        return made


def route(attention: nn.Module, heads: Heads | None = None) -> None:
    """Let one attention module attend through `routed_attention`, with `heads` in front of it."""
    ALL_ATTENTION_FUNCTIONS.register(ROUTED, routed_attention)
    module: Any = attention
    if not hasattr(module, "routed_implementation"):
        config = copy.copy(
            module.config
        )  # a copy: the stack's masks are still made for the original implementation
        module.routed_implementation = config._attn_implementation
        config._attn_implementation_internal = ROUTED
        module.config = config
    if heads is not None:
        module.heads = heads


def observe(attention: nn.Module) -> None:
    """Let one attention return its probabilities, (B, H, n, m), after softmax and before dropout, without changing a bit of its output.

    Where the implementation gives none (sdpa), they are computed again beside it, without a graph: a small price for a
    decoder's short targets.
    """
    route(attention)
    known: Any = attention
    known.observed = True


def check_plain(attention: nn.Module, *, variant: str) -> None:
    """Raise IncompatibleError where the backbone's implementation cannot give probabilities."""
    module: Any = attention
    implementation = getattr(module, "routed_implementation", module.config._attn_implementation)
    if implementation not in PLAIN:
        raise IncompatibleError(
            f"attention {variant}: the backbone attends with {implementation!r}, which cannot give attention probabilities; "
            f"set backbones: config: attn_implementation to {' or '.join(PLAIN)}"
        )


def routed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers' attention functions: (B, n, H, d) and, where they were needed, probabilities (B, H, n, m)."""
    output, seen = _attended(module, query, key, value, attention_mask, **options)
    tiles: int = getattr(module, "tiles", 1)
    return output if tiles == 1 else output.repeat(1, 1, tiles, 1), seen


def _attended(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    from_layer = options.pop("from_layer", None)
    give: str | None = getattr(module, "gives", None)
    takes: str | None = getattr(module, "takes", None)
    if takes == "key_value":
        key, value = from_layer
    if give == "key_value":
        _give(module, (key, value))
    if hasattr(module, "heads"):
        query, key, value = module.heads(query, key, value)
    dropout = options.get("dropout", 0.0)
    if takes == "probabilities":
        return apply(from_layer, value, dropout=dropout), from_layer
    if give == "probabilities" or module.routed_implementation == "eager":
        scores = probabilities(module, query, key, attention_mask, **options)
        if give == "probabilities":
            _give(module, scores)
        return apply(scores, value, dropout=dropout), scores
    attend = cast(
        Callable[..., tuple[Tensor, Tensor | None]],
        ALL_ATTENTION_FUNCTIONS[module.routed_implementation],
    )
    output, seen = attend(module, query, key, value, attention_mask, **options)
    if getattr(module, "observed", False):
        with torch.no_grad():
            seen = probabilities(module, query, key, attention_mask, **options)
    return output, seen


def probabilities(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """softmax(q k^T) with grouped keys repeated, before dropout; masked keys get exactly 0.

    Args:
        module: The attention, which knows whether it is causal where there is no mask.
        query: (B, H, n, d).
        key: (B, H_kv, m, d), H_kv divides H.
        mask: None, boolean (True = may attend) or additive, broadcastable to (B, H, n, m).
        options: `scaling`, a factor on q k^T (T5: 1), `position_bias`, added to the scores, `is_causal`.

    Returns:
        (B, H, n, m) in the dtype of `query`; computed in fp32.
    """
    scaling = options.get("scaling")
    key = repeated(key, query.shape[1])
    scores: Tensor = (
        query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    )  # (B, H, n, m)
    if options.get("position_bias") is not None:
        scores = scores + options["position_bias"]
    is_causal = options.get("is_causal")
    if mask is None and (getattr(module, "is_causal", False) if is_causal is None else is_causal):
        n, m = scores.shape[-2:]
        mask = torch.ones(n, m, dtype=torch.bool, device=scores.device).tril(m - n)
    if mask is not None:
        floor = torch.finfo(scores.dtype).min
        scores = (
            scores.masked_fill(~mask, floor)
            if mask.dtype == torch.bool
            else (scores + mask).clamp(min=floor)
        )
    return scores.float().softmax(dim=-1).to(query.dtype)


def apply(scores: Tensor, value: Tensor, *, dropout: float) -> Tensor:
    """Probabilities (B, H, n, m), after dropout, times values (B, H_kv, m, d) with their heads repeated: (B, n, H, d)."""
    dropped = nn.functional.dropout(scores, p=dropout, training=dropout > 0)
    return (dropped @ repeated(value, scores.shape[1])).transpose(1, 2).contiguous()


def repeated(x: Tensor, heads: int) -> Tensor:
    """(B, h, L, d) to (B, heads, L, d), each head as often in a row as needed."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


# ---- from layer to layer ----------------------------------------------------------------------------------------------


def share(
    stack: nn.Module,
    blocks: nn.ModuleList,
    attentions: list[Any],
    *,
    what: str,
    taken_from: dict[int, int],
) -> None:
    """Let layers take what an earlier one computed.

    Args:
        stack: The module whose forward runs the blocks.
        blocks: Its blocks.
        attentions: The attention of each block.
        what: "probabilities" or "key_value".
        taken_from: Layer that takes -> layer that gives.
    """
    exchange = Exchange()
    known: Any = stack
    known.exchange = exchange
    stack.register_forward_pre_hook(_open)
    stack.register_forward_hook(_close, always_call=True)
    for giver in set(taken_from.values()):
        route(attentions[giver])
        attentions[giver].gives, attentions[giver].exchange, attentions[giver].number = (
            what,
            exchange,
            giver,
        )
    for taker, giver in taken_from.items():
        block: Any = blocks[taker]
        route(attentions[taker])
        attentions[taker].takes = what
        block.exchange, block.taken_from = exchange, giver
        block.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _give(module: Any, tensors: Any) -> None:
    if module.exchange.is_open:  # not while a checkpointed block is computed again
        module.exchange.given[module.number] = tensors


def _open(stack: Any, args: tuple[Any, ...]) -> None:
    stack.exchange.is_open, stack.exchange.given = True, {}


def _close(stack: Any, args: tuple[Any, ...], output: Any) -> None:
    stack.exchange.is_open, stack.exchange.given = False, {}


def _hand_over(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The block's hooks run outside of its checkpoint: what it takes is one of the arguments that are recomputed from."""
    return args, {**kwargs, "from_layer": block.exchange.given[block.taken_from]}
