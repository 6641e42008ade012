"""How far the learned weights of the WGQA family moved from their start, and whether the move is more than scatter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from scipy import stats
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention._weighted import WeightedLinear
from suite.backbones.base import AttentionSite, Family


@dataclass(frozen=True, slots=True)
class WeightChange:
    """The head weights of one key or value map against their start; differences are weight minus start.

    Attributes:
        site: `encoder-self`, `decoder-self` or `decoder-cross`.
        layer: Counted from 0.
        projection: "k" or "v".
        start: Mean of the weights at the start (groups / heads, where they started as GQA's mean).
        mean_abs_difference: Over all weights of the map.
        mean_abs_difference_by_head: Over the weights of each head: one (WGQA), d_head (column form) or d_model (row form).
        mean_difference: Over all weights of the map.
        t: One-sample t statistic of the differences against 0; None where they have no spread (nothing trained, one weight).
        p_value: Two-sided, in 0..1; None with `t`. The weights of a map are not independent draws: a description, not a proof.
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
    """Every weighted key and value map of a model that is not partitioned, in the order of the forward pass.

    Args:
        model: Converted by a variant of the WGQA family, with or without a PETL method around its maps; not folded.
        family: The backbone's.
        start: Weights before training under the model's parameter names; may be left out where they started as the mean.

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
        maps: tuple[tuple[Literal["k", "v"], str], ...] = (("k", site.k), ("v", site.v))
        for projection, name in maps:
            if not site.fused:
                for module in _weighted_in(site.module.get_submodule(name)):
                    yield site, projection, module


def _weighted_in(projection: nn.Module) -> list[WeightedLinear]:
    """The weighted map that a projection is, or that a PETL method wrapped."""
    return [module for module in projection.modules() if isinstance(module, WeightedLinear)]


def _start(weighted: WeightedLinear, name: str, start: Mapping[str, Tensor] | None) -> Tensor:
    if start is not None and name in start:
        return start[name].detach().double()
    if weighted.init == "random":
        raise ValueError(
            f"{name} started at random; hand over its start (the state of the arm, built again with its seed)"
        )
    return torch.full_like(
        weighted.head_weight, weighted.groups / weighted.heads
    ).double()  # rounded as the weights were


def _change(
    site: AttentionSite, projection: Literal["k", "v"], weighted: WeightedLinear, start: Tensor
) -> WeightChange:
    difference = (
        weighted.head_weight.detach().double() - start.to(weighted.head_weight.device)
    ).view(weighted.heads, -1)  # (h, 1 | d | d_in)
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
    """t and p of "the mean difference is 0", or None where there is no spread to compare it with."""
    if len(differences) < 2 or bool((differences == differences[0]).all()):
        return None, None
    result = stats.ttest_1samp(differences.cpu().numpy(), 0.0)
    t, p_value = float(result.statistic), float(result.pvalue)
    return (t, p_value) if math.isfinite(t) else (None, None)
