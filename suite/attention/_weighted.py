"""What WGQA and its column and row forms have in common: heads are pooled with learned weights.

A `WeightedLinear` takes the place of a key or value projection. All of the checkpoint's heads and
their weights train. Every forward pass first folds them to the few heads of their groups, which
costs one pass over the weights.

Source: Chinnakonduru & Mohapatra, WGQA (arXiv 2407.10855), section 3. In the decoder's self- and
    cross-attention, for keys and values apart, a group's head is the sum over its (consecutive)
    heads W_i of w_i W_i (WGQA), diag(c_i) W_i (column form: output features), W_i diag(r_i) (row
    form: input features); all weights start at groups / heads, or from N(0, 1) (their RAND forms).
    Nothing normalises them.
Deviations:
    - Also on encoder-only and decoder-only backbones, as `gqa`; a backbone that has few key-value
      heads already groups those.
    - Biases (BERT, GPT-2), which T5 does not have: the scalar and column forms weight them like the
      rows they belong to; the row form weights inputs, of which a bias has none, and takes their
      mean.
    - Section 3 states 2h, 2d/h and 2d extra parameters per attention layer; the code and the totals
      (576, 36,864 and 442,368 on t5-base) are 2h, 2d and 2h·d, as here.
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
    """Which attention sublayers change, and how the weights start."""

    init: Init = Field(
        "mean",
        description="every weight is groups / heads, as GQA's mean (WGQA 3), or N(0, 1)"
        " (WGQA's RAND forms)",
    )


class WeightedGroupOptions(WeightedOptions):
    """`WeightedOptions`, and how many key-value heads remain."""

    kv_heads: Annotated[int, Field(ge=1)] | None = Field(
        None, description="groups; null = half of the heads (WGQA 3)"
    )


class WeightedLinear(nn.Linear):
    """A linear map to `heads` heads that returns their weighted sums per group.

    `out_features` is the width of what it returns, groups·d; its parameters are those of all heads.

    Args:
        full: The map whose parameters it takes over; weight (heads·d, d_in), bias (heads·d) or
            None.
        heads: Heads of `full`.
        groups: Heads that it returns; divides `heads`.
        form: What a weight scales: a whole head, one of its output features, or one of its input
            features.
        init: "mean" = groups / heads; "random" = N(0, 1), from torch's global generator.
    """

    def __init__(self, full: nn.Linear, *, heads: int, groups: int, form: Form, init: Init) -> None:
        head_dim = full.out_features // heads
        super().__init__(full.in_features, groups * head_dim, bias=False, device="meta")
        self.weight = full.weight
        self.bias = full.bias
        self.heads = heads
        self.groups = groups
        self.head_dim = head_dim
        self.form = form
        self.init = init
        shapes = {"head": (heads,), "column": (heads, head_dim), "row": (heads, full.in_features)}
        weights = torch.empty(shapes[form], dtype=full.weight.dtype, device=full.weight.device)
        if init == "mean":
            weights.fill_(groups / heads)  # their sum per group is then GQA's mean
        else:
            weights.normal_()
        self.head_weight = nn.Parameter(weights)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, d_in) to (B, L, groups·d)."""
        return nn.functional.linear(x, self.folded_weight(), self.folded_bias())

    def folded_weight(self) -> Tensor:
        """The weight of the plain map that computes the same, (groups·d, d_in)."""
        if self.form == "column":
            factors = self.head_weight.view(-1, 1)  # (heads·d, 1)
        else:
            by_head = self.head_weight.view(self.heads, -1)  # (heads, 1 or d_in)
            factors = by_head.repeat_interleave(self.head_dim, dim=0)  # (heads·d, 1 or d_in)
        # not a view of the weight: autograd would keep it, and with it ZeRO-3's gathered copy
        return self._summed(self.weight * factors)

    def folded_bias(self) -> Tensor | None:
        """The bias of the plain map that computes the same, (groups·d)."""
        bias: Tensor | None = self.bias
        if bias is None:
            return None
        if self.form == "row":
            # row weights scale inputs, which a bias has not; it takes the mean of its group
            return self._summed(bias) * (self.groups / self.heads)
        weighted = bias.view(self.heads, -1) * self.head_weight.view(self.heads, -1)  # (heads, d)
        return self._summed(weighted.flatten())

    def folded(self) -> nn.Linear:
        """The plain map that computes the same, and trains where this one does."""
        made = surgery.linear(self.folded_weight(), self.folded_bias())
        made.weight.requires_grad_(self.weight.requires_grad)
        if self.bias is not None:
            made.bias.requires_grad_(self.bias.requires_grad)
        return made

    def _summed(self, rows: Tensor) -> Tensor:
        """Sum consecutive heads: (heads·d, ...) to (groups·d, ...)."""
        grouped = rows.view(self.groups, -1, self.head_dim, *rows.shape[1:])
        return grouped.sum(1).flatten(0, 1)


class Weighted(Variant[WeightedGroupOptions]):
    """Base of the six forms; `form` is what a weight scales."""

    Config: ClassVar[type[Any]] = WeightedGroupOptions
    form: ClassVar[Form]

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        names = site_names(self.config.sites, family)
        for site in surgery.chosen_sites(model, family, names, variant=self.name):
            maps = surgery.projections(site)
            # keys before values: random weights are drawn in this order
            maps.k = self._weighted(maps.k, site)
            maps.v = self._weighted(maps.v, site)
            surgery.place(site, maps)
            route(site.module)

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        if site.site not in site_names(self.config.sites, family):
            return super().cached_floats(site, family)
        return 2 * self.groups(site) * site.head_dim  # the folded keys and values

    def new_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return [module.head_weight for module in surgery.modules_in(model, WeightedLinear)]

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return self.new_parameters(model, family)

    def fold(self, model: PreTrainedModel, family: Family) -> None:
        """Replace every `WeightedLinear` by the plain map of a grouped-query model.

        Whatever a PETL method put beside it stays there.
        """
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
