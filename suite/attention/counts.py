"""How large an attention is: weights in its projections and numbers in its cache, counted on the meta device.

Source: MHE (arXiv 2310.07911) counts weights and no biases: with the output projection in tables 1 to 3 and 13 to 15, without
    it in table 4, its figures and for GPT-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from suite.attention import variants
from suite.attention.base import Variant
from suite.backbones.base import Family
from suite.backbones.loading import Head, ResolvedBackbone, build
from suite.config.sweep import AttentionChoice

Dtype = Literal["fp16", "bf16", "fp32"]
DTYPE_BYTES: dict[Dtype, int] = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class AttentionCount:
    """Parameters (weights, no biases; shared ones once) and cache of all attention sublayers of a model.

    Attributes:
        with_output_projection: Of query, key, value and output projections, and `extra_over_base`.
        without_output_projection: The same without output projections.
        extra_over_base: The variant's own, in no projection: MHE's embeddings, WGQA's weights, all of a token mixer.
        kv_bytes_per_token: Cached by the decoder's self-attention for each of its tokens; None for encoders.
        cross_kv_bytes_per_token: Cached by cross-attention for each source token; None where there is none.
        kv_fraction: `kv_bytes_per_token` over that of the backbone before conversion; None for encoders.
    """

    with_output_projection: int
    without_output_projection: int
    extra_over_base: int
    kv_bytes_per_token: int | None
    cross_kv_bytes_per_token: int | None
    kv_fraction: float | None


def count_attention(
    resolved: ResolvedBackbone, head: Head, attention: AttentionChoice, *, dtype: Dtype = "fp16"
) -> AttentionCount:
    """Convert a backbone on the meta device and count it; reads no weights.

    Args:
        resolved: Which backbone.
        head: What it ends in.
        attention: Variant and options; "scratch" variants are counted like others.
        dtype: Of the cache.

    Raises:
        ConfigError: Unknown names or keys, or values out of range.
        IncompatibleError: The backbone cannot be converted.
    """
    variant = variants.get(attention.name).configure(attention.options)
    model = build(resolved, head, meta=True)
    variant.convert(model, resolved.family)
    return attention_counts(model, resolved.family, variant, dtype=dtype)


def attention_counts(
    model: PreTrainedModel, family: Family, variant: Variant[Any], *, dtype: Dtype = "fp16"
) -> AttentionCount:
    """Count a model that `variant` has converted, before any PETL method."""
    extra = sum(parameter.numel() for parameter in variant.extra_parameters(model, family))
    sites = list(family.attention_sites(model))
    without = extra + _weights(
        site.module.get_submodule(name) for site in sites for name in (site.q, site.k, site.v)
    )
    output = _weights(site.owner.get_submodule(site.o) for site in sites)
    kept, before = (_cached(model, family, "decoder-self", v) for v in (variant, None))
    cross = _cached(model, family, "decoder-cross", variant)
    return AttentionCount(
        with_output_projection=without + output,
        without_output_projection=without,
        extra_over_base=extra,
        kv_bytes_per_token=None if kept is None else kept * DTYPE_BYTES[dtype],
        cross_kv_bytes_per_token=None if cross is None else cross * DTYPE_BYTES[dtype],
        kv_fraction=kept / before if kept is not None and before else None,
    )


def _weights(modules: Any) -> int:
    """Numbers in the weights of modules, each module once; what stands for a map that is gone has none."""
    weights = [
        module.weight
        for module in {id(m): m for m in modules}.values()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
    ]
    return sum(weight.numel() for weight in weights)


def _cached(
    model: PreTrainedModel, family: Family, name: str, variant: Variant[Any] | None
) -> int | None:
    """Numbers cached per token at the sites of one name; without a variant, by the backbone itself. None = no such sites."""
    sites = [site for site in family.attention_sites(model) if site.site == name]
    if not sites:
        return None
    return sum(
        2 * site.kv_heads * site.head_dim
        if variant is None
        else variant.cached_floats(site, family)
        for site in sites
    )
