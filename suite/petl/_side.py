"""LST's side network: a narrow copy of a stack that climbs beside it, fed by gated down-projections of the stack's states."""

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
from suite.petl._frozen import hidden_of, join, replace_states, split, traced


@dataclass(slots=True, eq=False)
class Wiring:
    """What a stack with a side network must know of itself; no module, so that nothing is registered twice.

    Attributes:
        stack: The frozen stack.
        hands_on: Whether its side states go to a side decoder (encoder of an encoder-decoder) rather than to the head.
        receives: Whether an encoder's side states arrive beside `encoder_hidden_states`.
        bypassed: True while the pre-trained model itself is asked (Fisher importances).
    """

    stack: Stack
    hands_on: bool
    receives: bool
    bypassed: bool = False


class SideNetwork(nn.Module):
    """Ladder beside one stack of N blocks.

    Args:
        stack: The frozen stack, width d.
        side: The narrow stack whose blocks, final norm and rotary positions are taken, width k = d / r.
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
        like, d, k = next(stack.module.parameters()), stack.width, side.width
        options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.kept, self.depth, self.temperature = tuple(kept), len(stack.blocks), temperature
        self.alpha = nn.Parameter(
            torch.zeros(self.depth, **options)
        )  # one a block, also of those without side block
        self.down = nn.ModuleList(nn.Linear(d, k, **options) for _ in range(len(kept) + 1))
        self.blocks = _after(side.blocks.to(dtype=like.dtype), self.depth)
        self.norm = (
            nn.Identity() if side.final_norm is None else side.final_norm.to(dtype=like.dtype)
        )
        self.rotary: nn.Module | None = getattr(side.module, "rotary_emb", None)
        self.dropout = nn.Dropout(dropout_frac)
        self.up = nn.Linear(k, d, **options) if to_head else None

    def forward(
        self,
        embedded: Tensor,
        states: Sequence[Tensor],
        received: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Climb the ladder.

        Args:
            embedded: What the stack's first block received, (B, T, d).
            states: Output of every block of the stack, (B, T, d) each.
            received: The side encoder's states (B, m, k), for a decoder that cross-attends.
            arguments: What else the stack's first block received: masks, positions, cache.

        Returns:
            (B, T, d) for the head, or (B, T, k) without `up`.
        """
        side: Tensor = self.down[0](embedded)  # (B, T, k)
        handed = self._arguments(arguments, side, received)
        gates = torch.sigmoid(self.alpha / self.temperature)
        for down, block, layer in zip(self.down[1:], self.blocks, self.kept, strict=True):
            side = gates[layer] * side + (1 - gates[layer]) * down(states[layer])
            output = block(side, **handed)
            side = hidden_of(output)
            if isinstance(
                output, tuple
            ):  # T5: the first block computes the position biases, all others reuse them
                handed["position_bias"], handed["encoder_decoder_position_bias"] = output[1:3]
        side = self.dropout(self.norm(side))
        return side if self.up is None else cast(Tensor, self.up(side))

    def _arguments(
        self, arguments: Mapping[str, Any], side: Tensor, received: Tensor | None
    ) -> dict[str, Any]:
        """The frozen block's arguments, with the side network's own encoder states, rotary angles and cache layers."""
        handed = {name: value for name, value in arguments.items() if name != "hidden_states"}
        if received is not None:
            handed["encoder_hidden_states"] = received
        if self.rotary is not None:
            handed["position_embeddings"] = self.rotary(
                side, position_ids=arguments["position_ids"]
            )
        if handed.get("past_key_values") is not None:
            _grow(handed["past_key_values"], self.depth + len(self.blocks))
        return handed


def _after(blocks: nn.ModuleList, depth: int) -> nn.ModuleList:
    """Number the side blocks behind the stack's `depth` own, so that both share one cache (which beams reorder as a whole)."""
    for module in blocks.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            cast(Any, module).layer_idx += depth
    return blocks


def _grow(cache: Any, layers: int) -> None:
    """Give a cache made for the backbone the layers of the side blocks."""
    parts = (
        (cache.self_attention_cache, cache.cross_attention_cache)
        if isinstance(cache, EncoderDecoderCache)
        else (cache,)
    )
    for part in parts:
        if not isinstance(part, DynamicCache):
            raise IncompatibleError(
                f"lst: got a {type(part).__name__}, expected a DynamicCache; leave `cache_implementation` unset"
            )
        part.layers.extend(type(part.layers[0])() for _ in range(layers - len(part.layers)))


def narrow_model(
    model: PreTrainedModel, family: Family, *, reduction: int, kept: Sequence[Sequence[int]]
) -> PreTrainedModel:
    """A freshly initialised model of the backbone's own class at 1/`reduction` width with as many blocks a stack as are kept.

    Its embeddings are never used, hence one row.

    Raises:
        IncompatibleError: A width is not divisible by `reduction`.
    """
    config: Any = family.scale_config(model.config, reduction)
    config.vocab_size, config.pad_token_id = 1, None
    config.num_hidden_layers = len(kept[0])
    if len(kept) > 1:
        config.num_decoder_layers = len(kept[1])
    with next(model.parameters()).device:
        return type(model)(config)


def place(stack: Stack, side: SideNetwork, *, hands_on: bool, receives: bool) -> None:
    """Put a side network beside a stack."""
    module: Any = stack.module
    module.side, module.side_wiring = side, Wiring(stack, hands_on, receives)
    override_forward(module, _climb)


def _climb(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the frozen stack without a graph, then the side network; its states replace the stack's last ones."""
    wiring: Wiring = module.side_wiring
    if wiring.bypassed:
        return original(*args, **kwargs)
    received: Tensor | None = None
    if wiring.receives and kwargs.get("encoder_hidden_states") is not None:
        kwargs["encoder_hidden_states"], received = split(
            kwargs["encoder_hidden_states"], wiring.stack.width
        )
    with torch.no_grad(), traced(wiring.stack.blocks) as trace:
        output = original(*args, **kwargs)
    states = module.side(trace.arguments["hidden_states"], trace.states, received, trace.arguments)
    if wiring.hands_on:
        output.last_hidden_state = join(output.last_hidden_state, states)
        return output
    return replace_states(module, output, states)
