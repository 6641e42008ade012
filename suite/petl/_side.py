"""LST's side network: a narrow copy of a stack that runs beside it.

Its blocks read the stack's states through gated down-projections, so it climbs the stack like a
ladder. Shapes: B rows, T tokens, d width of the stack, k = d / r width of the side network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from suite.backbones._find import override_forward
from suite.backbones.base import Family, Stack
from suite.errors import IncompatibleError
from suite.petl._frozen import hidden_of, join, replace_states, split, traced, uses_cache


@dataclass(slots=True, eq=False)
class Wiring:
    """What the forward of a stack with a side network needs to know.

    It is no module, so that torch does not register the stack a second time.

    Attributes:
        stack: The frozen stack.
        hands_on: Whether its side states go to a side decoder (encoder of an encoder-decoder)
            rather than to the head.
        receives: Whether an encoder's side states arrive beside `encoder_hidden_states`.
        bypassed: Whether the pre-trained model runs alone (for Fisher importances).
    """

    stack: Stack
    hands_on: bool
    receives: bool
    bypassed: bool = False


class SideNetwork(nn.Module):
    """The ladder beside one stack of N blocks.

    Args:
        stack: The frozen stack, width d.
        side: The narrow stack whose blocks, final norm and rotary positions are taken, width k.
        kept: Numbers of the blocks that have a side block.
        to_head: Whether the result is projected up to d for the head.
        dropout_frac: Dropout after the side stack's final norm.
        temperature: T in the gates sigmoid(alpha / T).
    """

    def __init__(
        self,
        stack: Stack,
        side: Stack,
        *,
        kept: Sequence[int],
        to_head: bool,
        dropout_frac: float,
        temperature: float,
    ) -> None:
        super().__init__()
        like = next(stack.module.parameters())
        d = stack.width
        k = side.width
        options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.kept = tuple(kept)
        self.depth = len(stack.blocks)
        self.temperature = temperature
        # one gate a block, as in the official code, also of blocks without side block
        self.alpha = nn.Parameter(torch.zeros(self.depth, **options))
        # one for the embedding, and one for each kept block
        self.down = nn.ModuleList(nn.Linear(d, k, **options) for _ in range(len(kept) + 1))
        self.blocks = _number_after(side.blocks.to(dtype=like.dtype), self.depth)
        self.norm: nn.Module = nn.Identity()  # BERT's blocks end with a norm of their own
        if side.final_norm is not None:
            self.norm = side.final_norm.to(dtype=like.dtype)
        self.rotary: nn.Module | None = getattr(side.module, "rotary_emb", None)
        self.dropout = nn.Dropout(dropout_frac)
        self.up = nn.Linear(k, d, **options) if to_head else None
        # as the official code starts every linear map that is no part of a block
        for projection in (*self.down, self.up):
            if projection is not None:
                nn.init.normal_(projection.weight, std=0.01)
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        embedded: Tensor,
        states: Sequence[Tensor],
        received: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Climb the ladder.

        Args:
            embedded: The input of the stack's first block, (B, T, d).
            states: Output of every block of the stack, (B, T, d) each.
            received: The side encoder's states (B, m, k), for a decoder that cross-attends.
            arguments: The other arguments of the stack's first block: masks, positions, cache.

        Returns:
            (B, T, d) for the head, or (B, T, k) without `up`.
        """
        side: Tensor = self.down[0](embedded)  # (B, T, k)
        handed = self._arguments(arguments, side, received)
        gates = torch.sigmoid(self.alpha / self.temperature)  # (N,)
        for down, block, layer in zip(self.down[1:], self.blocks, self.kept, strict=True):
            side = gates[layer] * side + (1 - gates[layer]) * down(states[layer])
            output = block(side, **handed)
            side = hidden_of(output)
            # T5: the first block computes the position biases, all others reuse them
            if isinstance(output, tuple):
                handed["position_bias"] = output[1]
                handed["encoder_decoder_position_bias"] = output[2]
        side = self.dropout(self.norm(side))
        return side if self.up is None else cast(Tensor, self.up(side))

    def _arguments(
        self, arguments: Mapping[str, Any], side: Tensor, received: Tensor | None
    ) -> dict[str, Any]:
        """The frozen block's arguments, with what the side network has of its own.

        These are its encoder states, its rotary angles and its cache layers.
        """
        handed = dict(arguments)
        handed.pop("hidden_states", None)
        if received is not None:
            handed["encoder_hidden_states"] = received
        if self.rotary is not None:
            position_ids = arguments["position_ids"]
            # narrow heads turn by angles of their own
            handed["position_embeddings"] = self.rotary(side, position_ids=position_ids)
        if handed.get("past_key_values") is not None:
            _add_layers(handed["past_key_values"], self.depth + len(self.blocks))
        return handed


def _number_after(blocks: nn.ModuleList, depth: int) -> nn.ModuleList:
    """Number the side blocks after the stack's `depth` own blocks.

    Both then share one cache, which beam search reorders as a whole.
    """
    for module in blocks.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            cast(Any, module).layer_idx += depth
    return blocks


def _add_layers(cache: Any, layers: int) -> None:
    """Add layers for the side blocks to a cache that was made for the backbone."""
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    for part in parts:
        if not isinstance(part, DynamicCache):
            raise IncompatibleError(
                f"lst: got a {type(part).__name__}, expected a DynamicCache; leave"
                " `cache_implementation` unset"
            )
        layer_class = type(part.layers[0])
        while len(part.layers) < layers:
            part.layers.append(layer_class())


def narrow_model(
    model: PreTrainedModel, family: Family, *, reduction: int, kept: Sequence[Sequence[int]]
) -> PreTrainedModel:
    """A new model of the backbone's own class at 1/`reduction` of its width.

    Each stack has as many blocks as are kept of it.

    Raises:
        IncompatibleError: A width is not divisible by `reduction`.
    """
    config: Any = family.scale_config(model.config, reduction)
    config.vocab_size = 1  # the embeddings are never used
    config.pad_token_id = None  # it would lie outside of one row
    config.num_hidden_layers = len(kept[0])
    if len(kept) > 1:
        config.num_decoder_layers = len(kept[1])
    with next(model.parameters()).device:
        return type(model)(config)


def place(stack: Stack, side: SideNetwork, *, hands_on: bool, receives: bool) -> None:
    """Put a side network beside a stack."""
    module: Any = stack.module
    module.side = side
    module.side_wiring = Wiring(stack, hands_on, receives)
    override_forward(module, _forward_with_side)


def _forward_with_side(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the frozen stack without a graph, then the side network on its states."""
    wiring: Wiring = module.side_wiring
    if wiring.bypassed:
        return original(*args, **kwargs)
    received: Tensor | None = None
    if wiring.receives and kwargs.get("encoder_hidden_states") is not None:
        states, received = split(kwargs["encoder_hidden_states"], wiring.stack.width)
        kwargs["encoder_hidden_states"] = states
    with torch.no_grad(), traced(wiring.stack.blocks, cached=uses_cache(kwargs)) as trace:
        output = original(*args, **kwargs)
    embedded = trace.arguments["hidden_states"]
    side_states = module.side(embedded, trace.states, received, trace.arguments)
    if wiring.hands_on:
        output.last_hidden_state = join(output.last_hidden_state, side_states)
        return output
    return replace_states(module, output, side_states)
