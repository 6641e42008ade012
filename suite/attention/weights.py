"""How far the learned weights of the WGQA family moved from their start, and how surely."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from suite.attention._weighted import WeightedLinear
from suite.backbones.base import AttentionSite, Family


@dataclass(frozen=True, slots=True)
class WeightChange:
    """The head weights of one key or value map against their start.

    A difference is a weight minus its start.

    Attributes:
        site: `encoder-self`, `decoder-self` or `decoder-cross`.
        layer: Number of the layer, counted from 0.
        projection: "k" or "v".
        start: Mean of the weights at the start (groups / heads, where they started as GQA's mean).
        mean_abs_difference: Mean over all weights of the map.
        mean_abs_difference_by_head: Mean over the weights of each head: one (WGQA), d_head (column
            form) or d_model (row form).
        mean_difference: Mean over all weights of the map.
        t: One-sample t statistic of the differences against 0; None where they have no spread
            (nothing was trained, or there is one weight).
        p_value: Two-sided, in 0..1; None with `t`. The weights of a map are not independent draws,
            so it describes and proves nothing.
    """

    site: str
    layer: int
    projection: Literal["k", "v"]
    start: float
    mean_abs_difference: float
    mean_abs_difference_by_head: tuple[float, ...]
    mean_difference: float
    t: float | None
    p_value: float | None


def weight_changes(
    model: PreTrainedModel, family: Family, start: Mapping[str, Tensor] | None = None
) -> list[WeightChange]:
    """Compare every weighted key and value map with its start, in the order of the forward pass.

    Args:
        model: A model that is not partitioned, converted by a variant of the WGQA family and not
            folded, with or without a PETL method around its maps.
        family: The backbone's family.
        start: Weights before training, under the model's parameter names; not needed where they
            started as the mean.

    Raises:
        ValueError: The weights started at random and `start` lacks them.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for site, projection, weighted in _weighted_maps(model, family):
        first = _start(weighted, f"{names[id(weighted)]}.head_weight", start)
        found.append(_change(site, projection, weighted, first))
    return found


def _weighted_maps(
    model: PreTrainedModel, family: Family
) -> Iterator[tuple[AttentionSite, Literal["k", "v"], WeightedLinear]]:
    for site in family.attention_sites(model):
        if site.fused:  # not converted: a weighted map is split from the others
            continue
        for module in _weighted_in(site, site.k):
            yield site, "k", module
        for module in _weighted_in(site, site.v):
            yield site, "v", module


def _weighted_in(site: AttentionSite, name: str) -> list[WeightedLinear]:
    """The weighted map that a projection is, or that a PETL method wrapped."""
    projection = site.module.get_submodule(name)
    return [module for module in projection.modules() if isinstance(module, WeightedLinear)]


def _start(weighted: WeightedLinear, name: str, start: Mapping[str, Tensor] | None) -> Tensor:
    if start is not None and name in start:
        return start[name].detach().double()
    if weighted.init == "random":
        raise ValueError(
            f"{name} started at random; hand over its start (the state of the arm, built again with"
            " its seed)"
        )
    mean = torch.full_like(weighted.head_weight, weighted.groups / weighted.heads)
    # double only now, so that the start is rounded as the weights were
    return mean.double()


def _change(
    site: AttentionSite, projection: Literal["k", "v"], weighted: WeightedLinear, start: Tensor
) -> WeightChange:
    now = weighted.head_weight.detach().double()
    difference = (now - start.to(now.device)).view(weighted.heads, -1)  # (h, 1 | d | d_in)
    t, p_value = _one_sample_test(difference.flatten())
    return WeightChange(
        site=site.site,
        layer=site.layer,
        projection=projection,
        start=start.mean().item(),
        mean_abs_difference=difference.abs().mean().item(),
        mean_abs_difference_by_head=tuple(difference.abs().mean(1).tolist()),
        mean_difference=difference.mean().item(),
        t=t,
        p_value=p_value,
    )


def _one_sample_test(differences: Tensor) -> tuple[float | None, float | None]:
    """t and p of "the mean difference is 0"; None where there is no spread to compare it with."""
    if len(differences) < 2 or bool((differences == differences[0]).all()):
        return None, None
    # takes most of a second to import, and every search for variants imports this module
    from scipy.stats import ttest_1samp

    result = ttest_1samp(differences.cpu().numpy(), 0.0)
    t = float(result.statistic)
    # a spread below the smallest number gives infinity
    if not math.isfinite(t):
        return None, None
    return t, float(result.pvalue)
