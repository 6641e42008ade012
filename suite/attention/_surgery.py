"""Replace projections: read them whatever the family calls them, make new ones, put them back.

To use fewer heads, it is enough to replace the k or v projection by a narrower one: transformers'
attentions infer the number of heads from its width, and cache the few. `num_key_value_groups` tells
sdpa how often to repeat each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.backbones.base import Absent, AttentionSite, Family, SplitProjection
from suite.errors import IncompatibleError


@dataclass(slots=True, eq=False)
class Projections:
    """The three maps of one attention sublayer, as modules from (B, L, d_in) to (B, L, width)."""

    q: nn.Module
    k: nn.Module
    v: nn.Module


def chosen_sites(
    model: PreTrainedModel, family: Family, names: Collection[str], *, variant: str
) -> list[AttentionSite]:
    """The attention sublayers with one of these site names, in the order of the forward pass.

    Raises:
        IncompatibleError: There is none.
    """
    sites = [site for site in family.attention_sites(model) if site.site in names]
    if not sites:
        has = sorted({site.site for site in family.attention_sites(model)})
        raise IncompatibleError(
            f"attention {variant}: sites {sorted(names)} do not exist in a {family.name} backbone,"
            f" which has {has}"
        )
    return sites


def projections(site: AttentionSite) -> Projections:
    """The maps of a site; GPT-2's fused one is split in three, which share no memory with it."""
    if not site.fused:
        q, k, v = (site.module.get_submodule(name) for name in (site.q, site.k, site.v))
        return Projections(q, k, v)
    fused: Any = site.module.get_submodule(site.q)  # Conv1D: weight (d_in, 3 d), bias (3 d)
    weights = fused.weight.chunk(3, dim=1)  # (d_in, d) each
    biases = fused.bias.chunk(3)  # (d) each
    # Conv1D stores (in, out), nn.Linear (out, in)
    q, k, v = (linear(w.T, b) for w, b in zip(weights, biases, strict=True))
    return Projections(q, k, v)


def place(site: AttentionSite, maps: Projections) -> None:
    """Replace a site's maps, and tell the attention how many query heads share a key head."""
    module: Any = site.module
    already_split = isinstance(module.get_submodule(site.q.partition(".")[0]), SplitProjection)
    if site.fused or already_split:
        module.c_attn = SplitProjection(maps.q, maps.k, maps.v)
        module.split_size = [width(maps.q), width(maps.k), width(maps.v)]
    else:
        setattr(module, site.q, maps.q)
        setattr(module, site.k, maps.k)
        setattr(module, site.v, maps.v)
    # a norm of queries or keys (Qwen 3) has nothing left to act on where they are absent
    for norm, projection in ((site.q_norm, maps.q), (site.k_norm, maps.k)):
        if norm and isinstance(projection, Absent):
            setattr(module, norm, nn.Identity())
    # an absent query is one head wide, so the division may give 0, but each head is used once
    module.num_key_value_groups = max(width(maps.q) // max(width(maps.k), 1), 1)


def width(projection: nn.Module) -> int:
    """Number of features that a projection returns."""
    if isinstance(projection, (nn.Linear, Absent, PassThrough)):
        return projection.out_features
    raise TypeError(f"{type(projection).__name__} has no known width")


class PassThrough(nn.Module):
    """Returns the hidden state itself as keys or values (EL-attention); it has no parameters."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.out_features = features

    def forward(self, x: Tensor) -> Tensor:
        return x


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear map with copies of a weight, (out, in), and a bias, (out)."""
    # on the meta device, so that torch does not draw weights that are replaced at once
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().clone().contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made


def fresh(like: nn.Linear, out_features: int) -> nn.Linear:
    """A new map in place of `like`: zero bias, and normal weights as spread as its weights are."""
    weight = torch.empty(
        out_features, like.in_features, dtype=like.weight.dtype, device=like.weight.device
    )
    if not weight.is_meta:  # the meta device has no numbers whose deviation could be taken
        weight.normal_(0.0, float(like.weight.detach().std()))
    bias: Tensor | None = like.bias
    if bias is not None:
        bias = torch.zeros_like(bias[:1]).expand(out_features)
    return linear(weight, bias)


def modules_in(model: nn.Module, kind: type[nn.Module]) -> Iterator[Any]:
    """Every module of a class inside a model."""
    return (module for module in model.modules() if isinstance(module, kind))
