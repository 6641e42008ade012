"""Adapters: a small residual bottleneck after a sublayer's output map, inside the residual branch.

Source: Houlsby et al., arXiv 1902.00751, section 2.1 and figure 2: `x + up(act(down(x)))` before
    dropout, residual sum and (BERT) norm. READ (arXiv 2305.15348, table 8): bottleneck 64; table 1
    prints 0.96 % of t5-base, which is one adapter per block (2,379,264 parameters): `placement:
    block`, the default. READ's text says after every attention and feed-forward layer: `placement:
    every`, 60 on t5-base; `sublayer` leaves cross-attention out. ReLU: the bottleneck
    adapter in READ's published code. LST's code (arXiv 2206.06522): `placement: sublayer`, after
    self-attention and feed-forward but not cross-attention, bottleneck 48, gelu_new, norms trained
    too.
Deviations:
    - Houlsby et al. start near the identity; here `up` starts at zero, so that it is the identity
      exactly.
    - Houlsby et al. train the norms beside the adapters; READ does not count them, so `norms` is
      off by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from suite.backbones.base import Family, Sublayer
from suite.petl.base import Architecture, Method, backbone_norms, freeze

_PLACES = {
    "block": ("feed-forward",),
    "sublayer": ("feed-forward", "self"),
    "every": ("feed-forward", "self", "cross"),
}
"""Kinds of sublayers after which an adapter stands, by placement."""


class AdapterArchitecture(Architecture):
    """Hyperparameters of adapters."""

    bottleneck: Annotated[int, Field(ge=1)] = Field(
        64, description="width of the bottleneck (READ table 8: 64)"
    )
    placement: Literal["block", "sublayer", "every"] = Field(
        "block",
        description="block: after feed-forward only (READ's count); sublayer: after self-attention"
        " too (Houlsby, LST's code); every: after cross-attention too (READ's words)",
    )
    activation: Literal["relu", "gelu", "gelu_new", "silu"] = Field(
        "relu", description="READ's code: relu; LST's code: gelu_new"
    )
    norms: bool = Field(False, description="train the backbone's norms too (Houlsby, LST's code)")


class Bottleneck(nn.Module):
    """`x + up(act(down(x)))` over the last dimension; the identity at start.

    Args:
        width: d, features of x.
        bottleneck: Features in between.
        activation: Name of an activation in transformers.
    """

    def __init__(self, width: int, bottleneck: int, activation: str) -> None:
        super().__init__()
        self.down = nn.Linear(width, bottleneck)
        self.act = ACT2FN[activation]
        self.up = nn.Linear(bottleneck, width)
        # at zero, so that an untrained adapter changes nothing
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = x + self.up(self.act(self.down(x)))  # (..., d)
        return adapted


class Adapter(Method[AdapterArchitecture]):
    description = "residual bottlenecks after feed-forward (and self-attention) sublayers"
    source = "Houlsby et al., arXiv 1902.00751, section 2.1; READ, arXiv 2305.15348, table 8"
    Config = AdapterArchitecture

    def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
        freeze(model)
        if self.config.norms:
            for norm in backbone_norms(model, family):
                norm.requires_grad_(True)
        width = family.stacks(model)[0].width
        # any parameter gives device and dtype; a token mixer's output map has no weight to ask
        like = next(model.parameters())
        for sublayer in self._sublayers(model, family):
            with torch.device(like.device):
                adapter = Bottleneck(width, self.config.bottleneck, self.config.activation)
            # a child of the output map: T5's code reads the map's weight, and ZeRO-3 finds both
            sublayer.output.add_module("adapter", adapter.to(like.dtype))
            sublayer.output.register_forward_hook(_adapt)
        return model

    def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
        """(2 d b + b + d) per adapter, and the norms if they train."""
        d = family.stacks(model)[0].width
        b = self.config.bottleneck
        total = 0
        for _ in self._sublayers(model, family):
            total += 2 * d * b + b + d
        if self.config.norms:
            for norm in backbone_norms(model, family):
                total += sum(parameter.numel() for parameter in norm.parameters())
        return total

    def _sublayers(self, model: PreTrainedModel, family: Family) -> Iterator[Sublayer]:
        for sublayer in family.sublayers(model):
            if sublayer.kind in _PLACES[self.config.placement]:
                yield sublayer


def _adapt(module: Any, args: Any, output: Tensor) -> Tensor:
    # the module is an argument, so that the hook of a copied model finds the copy's adapter
    adapted: Tensor = module.adapter(output)
    return adapted
