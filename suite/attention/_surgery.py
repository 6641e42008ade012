"""Replace projections: read them whatever the family calls them, make new ones, put them back.

A replaced k or v projection with fewer rows is all that transformers' attentions need to use fewer heads: they infer the
number from its width, and cache the few. `num_key_value_groups` tells sdpa how often each is repeated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.backbones.base import Absent, AttentionSite, Family, SplitProjection
from suite.errors import IncompatibleError

SiteName = Literal["encoder-self", "decoder-self", "decoder-cross"]


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
            f"attention {variant}: sites {sorted(names)} do not exist in a {family.name} backbone, which has {has}"
        )
    return sites


def projections(site: AttentionSite) -> Projections:
    """The maps of a site as plain `nn.Linear`s; GPT-2's fused one is cut in three, sharing no memory with it."""
    if not site.fused:
        return Projections(*(site.module.get_submodule(name) for name in (site.q, site.k, site.v)))
    fused: Any = site.module.get_submodule(site.q)  # Conv1D: weight (d_in, 3 d), bias (3 d)
    return Projections(
        *(
            _linear(w.T, b)
            for w, b in zip(fused.weight.chunk(3, dim=1), fused.bias.chunk(3), strict=True)
        )
    )


def place(site: AttentionSite, maps: Projections) -> None:
    """Put maps in place of a site's own and tell the attention how many query heads share a key head."""
    module: Any = site.module
    if site.fused or isinstance(module.get_submodule(site.q.partition(".")[0]), SplitProjection):
        split = SplitProjection(maps.q, maps.k, maps.v)
        module.c_attn, module.split_size = split, [width(maps.q), width(maps.k), width(maps.v)]
    else:
        for name, projection in zip(
            (site.q, site.k, site.v), (maps.q, maps.k, maps.v), strict=True
        ):
            setattr(module, name, projection)
    module.num_key_value_groups = max(width(maps.q) // max(width(maps.k), 1), 1)


def width(projection: nn.Module) -> int:
    """Features that a projection gives."""
    if isinstance(projection, (nn.Linear, Absent, Source)):
        return projection.out_features
    raise TypeError(f"{type(projection).__name__} has no known width")


class Source(nn.Module):
    """Hands the hidden state itself on as keys or values (EL-attention): no parameters."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.out_features = features

    def forward(self, x: Tensor) -> Tensor:
        return x


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear map with copies of these; weight (out, in)."""
    return _linear(weight, bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().clone().contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made


def fresh(like: nn.Linear, out_features: int) -> nn.Linear:
    """A new map drawn like the one it replaces: normal, with the standard deviation of its weight; zero bias."""
    weight = torch.empty(
        out_features, like.in_features, dtype=like.weight.dtype, device=like.weight.device
    )
    if not weight.is_meta:
        weight.normal_(0.0, float(like.weight.detach().std()))
    return _linear(
        weight, None if like.bias is None else torch.zeros_like(like.bias[:1]).expand(out_features)
    )


def repeated_heads(x: Tensor, times: int) -> Tensor:
    """(B, h, L, d) to (B, h·times, L, d), each head `times` in a row."""
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def modules_in(model: nn.Module, kind: type[nn.Module]) -> Iterator[Any]:
    """Every module of a class inside a model."""
    return (module for module in model.modules() if isinstance(module, kind))
