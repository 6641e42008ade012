"""Grouped-query attention whose heads are pooled with learned weights: what WGQA and its column and row forms have in common.

A `WeightedLinear` stands where a key or value projection was: all of the checkpoint's heads and their weights train, and
every forward pass first folds them to the few heads of their groups, which costs no more than one look at the weights.

Source: Chinnakonduru & Mohapatra, WGQA (arXiv 2407.10855), section 3. In the decoder's self- and cross-attention, for keys and
    values apart, a group's head is the sum over its (consecutive) heads W_i of
    w_i W_i (WGQA), diag(c_i) W_i (column form: output features), W_i diag(r_i) (row form: input features);
    all weights start at groups / heads, or from N(0, 1) (their RAND forms). Nothing normalises them.
Deviations:
    - Also on encoder-only and decoder-only backbones, as `gqa`; a backbone that has few key-value heads already groups those.
    - Biases (BERT, GPT-2), which T5 does not have: the scalar and column forms weight them like the rows they belong to; the
      row form weights inputs, of which a bias has none, and takes their mean.
    - Section 3 states 2h, 2d/h and 2d extra parameters per attention layer; the code and the totals (576, 36,864 and 442,368
      on t5-base) are 2h, 2d and 2h·d, as here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention import _surgery as surgery
from suite.attention._route import route
from suite.attention.base import Variant
from suite.attention.gqa import GroupedOptions, groups_of, site_names
from suite.backbones.base import AttentionSite, Family

Form = Literal["head", "column", "row"]
Init = Literal["mean", "random"]


class WeightedOptions(GroupedOptions):
    """Where, and how the weights start."""

    init: Init = Field(
        "mean",
        description="every weight is groups / heads, as GQA's mean (WGQA 3), or N(0, 1) (WGQA's RAND forms)",
    )


class WeightedGroupOptions(WeightedOptions):
    """`WeightedOptions`, and how many key-value heads remain."""

    kv_heads: Annotated[int, Field(ge=1)] | None = Field(
        None, description="groups; null = half of the heads (WGQA 4.1)"
    )


class WeightedLinear(nn.Linear):
    """A linear map to `heads` heads that gives their weighted sums per group.

    `out_features` is what it gives, groups·d; its parameters are those of all heads.

    Args:
        full: The map whose parameters it takes over; weight (heads·d, d_in), bias (heads·d) or None.
        heads: Heads of `full`.
        groups: Heads that it gives; divides `heads`.
        form: What a weight scales: a whole head, one output feature of it, or one input feature.
        init: "mean" = groups / heads; "random" = N(0, 1), from torch's global generator.
    """

    def __init__(self, full: nn.Linear, *, heads: int, groups: int, form: Form, init: Init) -> None:
        head_dim = full.out_features // heads
        super().__init__(full.in_features, groups * head_dim, bias=False, device="meta")
        self.weight, self.bias = full.weight, full.bias
        self.heads, self.groups, self.head_dim, self.form, self.init = (
            heads,
            groups,
            head_dim,
            form,
            init,
        )
        shape = {"head": (heads,), "column": (heads, head_dim), "row": (heads, full.in_features)}[
            form
        ]
        weights = torch.empty(shape, dtype=full.weight.dtype, device=full.weight.device)
        self.head_weight = nn.Parameter(
            weights.fill_(groups / heads) if init == "mean" else weights.normal_()
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, d_in) to (B, L, groups·d)."""
        return nn.functional.linear(x, self.folded_weight(), self.folded_bias())

    def folded_weight(self) -> Tensor:
        """The weight of the plain map that does the same, (groups·d, d_in)."""
        if self.form == "column":
            factors = self.head_weight.view(-1, 1)  # (heads·d, 1)
        else:
            factors = self.head_weight.view(self.heads, -1).repeat_interleave(
                self.head_dim, dim=0
            )  # (heads·d, 1 or d_in)
        # autograd keeps the parameter itself and no view of it, which would keep ZeRO-3's gathered copy alive
        return self._summed(self.weight * factors)

    def folded_bias(self) -> Tensor | None:
        """Its bias, (groups·d)."""
        bias: Tensor | None = self.bias
        if bias is None:
            return None
        if self.form == "row":
            return self._summed(bias) * (self.groups / self.heads)
        return self._summed(
            (bias.view(self.heads, -1) * self.head_weight.view(self.heads, -1)).flatten()
        )

    def folded(self) -> nn.Linear:
        """The plain map that does the same; it trains where this one did."""
        made = surgery.linear(self.folded_weight(), self.folded_bias())
        made.weight.requires_grad_(self.weight.requires_grad)
        if self.bias is not None:
            made.bias.requires_grad_(self.bias.requires_grad)
        return made

    def _summed(self, rows: Tensor) -> Tensor:
        """(heads·d, ...) to (groups·d, ...): consecutive heads summed."""
        return rows.view(self.groups, -1, self.head_dim, *rows.shape[1:]).sum(1).flatten(0, 1)


class Weighted(Variant[WeightedGroupOptions]):
    """Base of the six forms; `form` is what a weight scales."""

    Config: ClassVar[type[Any]] = WeightedGroupOptions
    form: ClassVar[Form]

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        for site in surgery.chosen_sites(
            model, family, site_names(self.config.sites, family), variant=self.name
        ):
            maps = surgery.projections(site)
            maps.k, maps.v = (self._weighted(full, site) for full in (maps.k, maps.v))
            surgery.place(site, maps)
            route(site.module)

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        if site.site not in site_names(self.config.sites, family):
            return super().cached_floats(site, family)
        return 2 * self.groups(site) * site.head_dim

    def new_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return [module.head_weight for module in surgery.modules_in(model, WeightedLinear)]

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return self.new_parameters(model, family)

    def fold(self, model: PreTrainedModel, family: Family) -> None:
        """Every `WeightedLinear` becomes the plain map of a grouped-query model; what a PETL method put beside it stays there."""
        for name, module in list(model.named_modules()):
            if isinstance(module, WeightedLinear):
                model.set_submodule(name, module.folded())

    def groups(self, site: AttentionSite) -> int:
        """Key-value heads that remain."""
        return groups_of(site, self.config.kv_heads, variant=self.name)

    def _weighted(self, full: nn.Module, site: AttentionSite) -> WeightedLinear:
        assert isinstance(full, nn.Linear)
        return WeightedLinear(
            full,
            heads=site.kv_heads,
            groups=self.groups(site),
            form=self.form,
            init=self.config.init,
        )


class WeightedToOne(Weighted):
    """Base of the multi-query forms: one group of all heads."""

    Config: ClassVar[type[Any]] = WeightedOptions

    def groups(self, site: AttentionSite) -> int:
        return 1
