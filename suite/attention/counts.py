"""How large an attention is: weights in its projections and numbers in its cache.

Everything is counted on the meta device.

Source: MHE (arXiv 2310.07911) counts weights and no biases: with the output projection in tables 1
    to 3 and 13 to 15, without it in table 4, its figures and for GPT-3.
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
from suite.registry import own_code_named

Dtype = Literal["fp16", "bf16", "fp32"]
DTYPE_BYTES: dict[Dtype, int] = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class AttentionCount:
    """Parameters and cache of all attention sublayers of a model.

    Parameters are weights without biases; a shared one counts once.

    Attributes:
        with_output_projection: Parameters of the query, key, value and output projections, and
            `extra_over_base`.
        without_output_projection: The same without output projections.
        extra_over_base: The variant's own parameters in no projection: MHE's embeddings, WGQA's
            weights, all of a token mixer.
        kv_bytes_per_token: What the decoder's self-attention caches for each of its tokens; None
            for encoders.
        kv_tokens: Most tokens of which the decoder's self-attention caches anything; None where it
            caches all, and for encoders.
        cross_kv_bytes_per_token: What cross-attention caches for each source token; None where
            there is none.
        kv_fraction: `kv_bytes_per_token` over that of the backbone before conversion; None for
            encoders.
    """

    with_output_projection: int
    without_output_projection: int
    extra_over_base: int
    kv_bytes_per_token: int | None
    kv_tokens: int | None
    cross_kv_bytes_per_token: int | None
    kv_fraction: float | None


@own_code_named()
def count_attention(
    resolved: ResolvedBackbone, head: Head, attention: AttentionChoice, *, dtype: Dtype = "fp16"
) -> AttentionCount:
    """Convert a backbone on the meta device and count it; this reads no weights.

    Args:
        resolved: The backbone.
        head: What it ends in.
        attention: Variant and options; "scratch" variants are counted like others.
        dtype: Type of the cached numbers.

    Raises:
        ConfigError: Unknown names or keys, or values out of range.
        IncompatibleError: The backbone cannot be converted.
        OwnCodeError: A variant of the user's own raises something else.
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
    inputs = []
    outputs = []
    for site in family.attention_sites(model):
        for name in (site.q, site.k, site.v):
            inputs.append(site.module.get_submodule(name))
        outputs.append(site.owner.get_submodule(site.o))
    without = extra + _count_weights(inputs)
    kept = _cached(model, family, "decoder-self", variant)
    before = _cached(model, family, "decoder-self", None)
    cross = _cached(model, family, "decoder-cross", variant)
    fraction = None
    if kept is not None and before:
        fraction = kept / before
    return AttentionCount(
        with_output_projection=without + _count_weights(outputs),
        without_output_projection=without,
        extra_over_base=extra,
        kv_bytes_per_token=None if kept is None else kept * DTYPE_BYTES[dtype],
        kv_tokens=_most_tokens(model, family, variant),
        cross_kv_bytes_per_token=None if cross is None else cross * DTYPE_BYTES[dtype],
        kv_fraction=fraction,
    )


def _count_weights(modules: list[nn.Module]) -> int:
    """Number of weights in modules; a module that occurs twice (GPT-2's fused one) counts once."""
    count = 0
    for module in dict.fromkeys(modules):
        weight = getattr(module, "weight", None)
        # the placeholder of a removed map (Absent) has none
        if isinstance(weight, nn.Parameter):
            count += weight.numel()
    return count


def _cached(
    model: PreTrainedModel, family: Family, name: str, variant: Variant[Any] | None
) -> int | None:
    """Numbers cached per token at the sites called `name`; None = there are no such sites.

    Without a variant it is what the backbone itself caches.
    """
    sites = [site for site in family.attention_sites(model) if site.site == name]
    if not sites:
        return None
    if variant is None:
        return sum(2 * site.kv_heads * site.head_dim for site in sites)
    return sum(variant.cached_floats(site, family) for site in sites)


def _most_tokens(model: PreTrainedModel, family: Family, variant: Variant[Any]) -> int | None:
    """Tokens that the decoder's self-attention keeps at most; None = all, or no decoder."""
    limits = []
    for site in family.attention_sites(model):
        if site.site == "decoder-self":
            limit = variant.cached_tokens(site, family)
            if limit is None:
                return None
            limits.append(limit)
    return max(limits, default=None)
