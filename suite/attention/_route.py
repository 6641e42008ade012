"""Change how an attention module attends to what its projections made, with no model code.

transformers lets a function be registered as attention implementation; `routed_attention` is one.
It gets q (B, h_q, n, d), k and v (B, h_kv, m, d) as projected, rotated and cached. Then,
per module:

1. it may take another layer's keys and values instead of its own (CLA);
2. `heads` (a module of the variant's) may make all heads of the few cached ones (MHE, SKV, SHA
   under T5), or attend by itself (MLA, folded);
3. it may take another layer's probabilities (Shared Attention); else the implementation that the
   backbone had (sdpa, eager, ...) attends, unless the probabilities are needed, which most
   implementations do not return;
4. the result of one head may be repeated for all heads of the output projection (`tiles`, SHA);
5. a gate may scale what the heads found (`gate_values`, which the variant computes beforehand);
6. `finish` (a module of the variant's) may change it (MHE, folded).

A variant may also hide keys from queries (`limit`, sliding windows), before 3.

What one layer gives to later ones travels as an explicit argument of their blocks' forward, so that
gradient checkpointing recomputes a block from the very tensors that it was called with.

Shapes: B rows, H query heads, H_kv key-value heads, n queries, m keys, d width of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from suite.errors import IncompatibleError

ROUTED = "suite_routed"
PLAIN = ("sdpa", "eager")
"""Implementations whose masks hold every pair of tokens, which computing probabilities needs."""


class HeadTransform(nn.Module):
    """Base of a variant's own step between projections and attention.

    It is a module, so that ZeRO-3's hooks fetch its parameters.

    Attributes:
        absorbs: Whether `attend`, which such a class has, takes the place of `forward` and of
            attention for a single query in evaluation. A variant's `fold` says so.
    """

    absorbs = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn (B, h, L, d) each into the heads that attend.

        Returns:
            query (B, H, n, d), key and value (B, H_kv, m, d).
        """
        return query, key, value

    def drop_keys(self) -> None:
        """Give up what acts on queries and keys alone, in a layer that takes probabilities."""


class LayerExchange:
    """What layers of one stack hand to later ones during one forward pass.

    It is closed and empty between passes, so that no tensor stays alive.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.given: dict[int, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerExchange:
        # a copied model exchanges tensors of its own passes; those in flight stay behind
        made = LayerExchange()
        memo[id(self)] = made
        return made


def route(attention: nn.Module, heads: HeadTransform | None = None) -> None:
    """Make one attention module attend through `routed_attention`, after `heads` if given."""
    ALL_ATTENTION_FUNCTIONS.register(ROUTED, routed_attention)
    module: Any = attention
    if not hasattr(module, "routed_implementation"):
        # a copy: the stack goes on making its masks for the original implementation
        config = copy.copy(module.config)
        # _attn_implementation: set_attn_implementation sets whole models, not one attention
        module.routed_implementation = config._attn_implementation
        config._attn_implementation = ROUTED
        module.config = config
    if heads is not None:
        module.heads = heads


def observe(attention: nn.Module) -> None:
    """Make one attention return its probabilities, without changing a bit of its output.

    They are (B, H, n, m), after softmax and before dropout. Where the implementation returns none
    (sdpa), they are computed beside it without a graph: a small price for a decoder's short
    targets.
    """
    route(attention)
    known: Any = attention
    known.observed = True


def check_plain(attention: nn.Module, *, variant: str) -> None:
    """Check that the attention's probabilities can be computed.

    Raises:
        IncompatibleError: The backbone's implementation has other masks (see `PLAIN`).
    """
    module: Any = attention
    implementation = getattr(module, "routed_implementation", module.config._attn_implementation)
    if implementation not in PLAIN:
        raise IncompatibleError(
            f"attention {variant}: the backbone attends with {implementation!r}, which cannot give"
            f" attention probabilities; expected {' or '.join(PLAIN)}, which `implementation` of"
            " the backbone's family says"
        )


def routed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, with the signature of transformers' attention functions.

    Returns:
        (B, n, H, d) and, where they are needed, probabilities (B, H, n, m).
    """
    output, seen = _attended(module, query, key, value, attention_mask, **options)
    tiles: int = getattr(module, "tiles", 1)
    if tiles > 1:
        output = output.repeat(1, 1, tiles, 1)  # (B, n, 1, d) to (B, n, H, d)
    # taken out, so that no tensor outlives the forward pass
    gate: Tensor | None = module.__dict__.pop("gate_values", None)
    if gate is not None:
        output = output * gate  # (B, n, H, d) times (B, n, H, 1 or d)
    if hasattr(module, "finish"):
        output = module.finish(output)
    return output, seen


def _attended(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    from_layer = options.pop("from_layer", None)
    gives: str | None = getattr(module, "gives", None)
    takes: str | None = getattr(module, "takes", None)
    assert takes is None or from_layer is not None, f"no layer gave the {takes} that this one takes"
    if takes == "key_value":
        key, value = from_layer
    # given before `heads`, so that the taking layer makes heads of its own
    if gives == "key_value":
        _give(module, (key, value))
    if hasattr(module, "heads"):
        if module.heads.absorbs and query.shape[2] == 1 and not module.training:
            attended: tuple[Tensor, Tensor] = module.heads.attend(
                module, query, key, value, attention_mask, **options
            )
            return attended
        query, key, value = module.heads(query, key, value)
    if hasattr(module, "limit"):
        attention_mask, options = module.limit(module, query, key, attention_mask, options)
    dropout = options.get("dropout", 0.0)
    if takes == "probabilities":
        return apply(from_layer, value, dropout=dropout), from_layer
    # T5's own eager path does not repeat grouped heads, so eager attention is computed here
    if gives == "probabilities" or module.routed_implementation == "eager":
        seen = probabilities(module, query, key, attention_mask, **options)
        if gives == "probabilities":
            _give(module, seen)
        return apply(seen, value, dropout=dropout), seen
    attend = cast(
        Callable[..., tuple[Tensor, Tensor | None]],
        ALL_ATTENTION_FUNCTIONS[module.routed_implementation],
    )
    output, returned = attend(module, query, key, value, attention_mask, **options)
    if getattr(module, "observed", False):
        with torch.no_grad():
            returned = probabilities(module, query, key, attention_mask, **options)
    return output, returned


def probabilities(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """softmax(q k^T) with grouped keys repeated, before dropout; masked keys get exactly 0.

    Args:
        module: The attention, which knows whether it is causal where there is no mask.
        query: (B, H, n, d).
        key: (B, H_kv, m, d), H_kv divides H.
        mask: None, boolean (True = may attend) or additive, broadcastable to (B, H, n, m).
        options: `scaling`, a factor on q k^T (T5: 1; without it 1 / sqrt(d)), `softcap` (Gemma 2),
            which scores only approach, `position_bias`, added to the scores, and `is_causal`.

    Returns:
        (B, H, n, m) in the dtype of `query`, in which the scores are computed; the softmax is in
        fp32. Fused attention keeps scores in fp32, so under bf16 it errs less.
    """
    key = repeated(key, query.shape[1])  # (B, H, m, d)
    scores: Tensor = query @ key.transpose(-1, -2) * scaling(query, options)  # (B, H, n, m)
    return normalised(module, scores, mask, **options).to(query.dtype)


def scaling(query: Tensor, options: Mapping[str, Any]) -> float:
    """The factor on q k^T for queries (B, H, n, d)."""
    given: float | None = options.get("scaling")
    return query.shape[-1] ** -0.5 if given is None else given


def normalised(module: Any, scores: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """The softmax of scaled scores (B, H, n, m), in fp32; arguments as in `probabilities`."""
    softcap = options.get("softcap")
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if options.get("position_bias") is not None:
        scores = scores + options["position_bias"]
    if mask is None:
        is_causal = options.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", False)
        if is_causal:
            n, m = scores.shape[-2:]
            # with a cache there are more keys than queries, and the last query sees all keys
            mask = torch.ones(n, m, dtype=torch.bool, device=scores.device).tril(m - n)
    if mask is not None:
        # the least finite number, as -inf in a whole row would make its softmax NaN
        floor = torch.finfo(scores.dtype).min
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, floor)
        else:
            # a score plus the mask's own floor may overflow to -inf
            scores = (scores + mask).clamp(min=floor)
    return scores.float().softmax(dim=-1)


def apply(scores: Tensor, value: Tensor, *, dropout: float) -> Tensor:
    """Weigh values by probabilities, after dropout.

    Args:
        scores: Probabilities, (B, H, n, m).
        value: (B, H_kv, m, d).
        dropout: Probability that a weight is dropped; 0 outside of training.

    Returns:
        (B, n, H, d).
    """
    dropped = nn.functional.dropout(scores, p=dropout, training=dropout > 0)
    found = dropped @ repeated(value, scores.shape[1])  # (B, H, n, d)
    return found.transpose(1, 2).contiguous()


def repeated(x: Tensor, heads: int) -> Tensor:
    """Turn (B, h, L, d) into (B, heads, L, d); the copies of a head stand side by side."""
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], dim=1)


# ---- from layer to layer -------------------------------------------------------------------------


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
        taken_from: Each taking layer with the layer that gives.
    """
    exchange = LayerExchange()
    known: Any = stack
    known.exchange = exchange
    stack.register_forward_pre_hook(_open)
    # also after an error, so that the tensors of a failed pass are freed
    stack.register_forward_hook(_close, always_call=True)
    for giver in set(taken_from.values()):
        attention = attentions[giver]
        route(attention)
        attention.gives = what
        attention.exchange = exchange
        attention.number = giver
    for taker, giver in taken_from.items():
        route(attentions[taker])
        attentions[taker].takes = what
        block: Any = blocks[taker]
        block.exchange = exchange
        block.taken_from = giver
        block.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _give(module: Any, tensors: Any) -> None:
    # closed while gradient checkpointing computes a block again, in the backward pass
    if module.exchange.is_open:
        module.exchange.given[module.number] = tensors


def _open(stack: Any, args: tuple[Any, ...]) -> None:
    stack.exchange.is_open = True
    stack.exchange.given = {}


def _close(stack: Any, args: tuple[Any, ...], output: Any) -> None:
    stack.exchange.is_open = False
    stack.exchange.given = {}


def _hand_over(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add what the block takes to its arguments.

    A block's hooks run outside of its checkpoint, so the tensors are among the arguments that the
    block is recomputed from.
    """
    given = block.exchange.given
    # the blocks of a replayed frozen stack run no attention, so none gives and none takes
    if not given:
        return args, kwargs
    return args, {**kwargs, "from_layer": given[block.taken_from]}
