"""Gated attention: a sigmoid gate on what scaled dot-product attention returns, before the output.

The attention's input makes the gate. It has a number for each head, or for each feature of each
head.

Source: Qiu et al., arXiv 2505.06708, section 2.2, position G1 (after the attention, the best of
    five), head-specific; official code (qiuzh20/gated_attention): gate = sigmoid(X W), and the
    biases of W are those of the query projection, which Qwen3 lacks.
Deviations:
    - A checkpoint is converted; the authors pre-train from scratch. W starts at zero, so that every
      gate starts at exactly 1/2, and the output projection's weight is doubled: the same function,
      bit for bit, until the first step. The authors draw W like other weights.
    - W is a map of its own, without bias. The authors widen the query projection by it, which
      gives the same function, and a bias wherever the query projection has one.
    - Encoders and cross-attention too (`sites`); the authors have decoders. A cross-attention's
      gate comes from the decoder's side, as its queries do.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention import _surgery as surgery
from suite.attention._route import route
from suite.attention.base import Options, Variant
from suite.attention.gqa import Sites, site_names
from suite.backbones.base import AttentionSite, Family


class GatedOptions(Options):
    """Which attention sublayers get a gate, and how fine it is."""

    form: Literal["element", "head"] = Field(
        "element",
        description="a gate for each feature of each head (their best), or one for each head"
        " (nearly as good, with few weights)",
    )
    sites: Sites = Field(
        "all", description="all attention sublayers (the paper's), the decoder's, or names"
    )


class OutputGate(nn.Module):
    """sigmoid(X W) by heads.

    Args:
        width: Features of X.
        heads: H, query heads.
        per_head: Gates of one head: its width, or 1.
        like: A tensor whose dtype and device W gets.
    """

    def __init__(self, width: int, heads: int, per_head: int, like: Tensor) -> None:
        super().__init__()
        self.heads = heads
        weight = torch.zeros(heads * per_head, width, dtype=like.dtype, device=like.device)
        self.map = surgery.linear(weight, None)

    def forward(self, x: Tensor) -> Tensor:
        """Turn (B, n, width) into gates between 0 and 1, (B, n, H, 1 or d)."""
        gates: Tensor = self.map(x).sigmoid()
        return gates.view(*x.shape[:-1], self.heads, -1)


class Gated(Variant[GatedOptions]):
    description = "a sigmoid gate on the attention's output, per feature or per head"
    source = "Gated Attention, arXiv 2505.06708, section 2.2, position G1; official code"
    is_plain_folded = False
    Config = GatedOptions

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        names = site_names(self.config.sites, family)
        widths = {stack.role: stack.width for stack in family.stacks(model)}
        for site in surgery.chosen_sites(model, family, names, variant=self.name):
            self._add_gate(site, widths[site.role])

    def new_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return [gate.map.weight for gate in surgery.modules_in(model, OutputGate)]

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return self.new_parameters(model, family)

    def _add_gate(self, site: AttentionSite, width: int) -> None:
        output: Any = site.owner.get_submodule(site.o)
        per_head = site.head_dim if self.config.form == "element" else 1
        module: Any = site.module
        module.output_gate = OutputGate(width, site.heads, per_head, output.weight)
        # the start's gates are 1/2, which a power of two undoes without rounding
        with torch.no_grad():
            output.weight.mul_(2)
        module.register_forward_pre_hook(_compute_gate, with_kwargs=True)
        route(module)


def _compute_gate(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep the gates of this forward pass for `routed_attention`, which takes them out."""
    hidden = args[0] if args else kwargs["hidden_states"]
    attention.gate_values = attention.output_gate(hidden)
