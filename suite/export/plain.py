"""A trained arm as a plain model of transformers, where its function allows that.

Full fine-tuning does, and attention that folds. Grouped heads stay few where the configuration has
`num_key_value_heads` (Llama) and all layers agree. Elsewhere each is written out once for every
query head that shared it: the same function, without the smaller cache.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from suite.attention import _surgery as surgery
from suite.attention import variants
from suite.backbones.base import AttentionSite, SplitProjection
from suite.backbones.loading import build
from suite.export.base import prepare_to_save
from suite.export.same import make_batch, same
from suite.train.restore import Restored

WRITTEN_OUT = (
    "its shared key and value heads are written out once for every query head:"
    " the same function, without the smaller cache"
)


@dataclass(frozen=True, slots=True)
class Plain:
    """A model that `from_pretrained` loads, and what to know about it."""

    model: PreTrainedModel
    note: str


def as_plain(restored: Restored) -> Plain | None:
    """Turn the arm into a plain model of transformers with the same function.

    None where there is no such model.
    """
    attention = restored.spec.arm.attention
    variant = variants.get(attention.name).configure(attention.options)
    if not variant.is_plain_folded:
        return None
    # A variant of the user's own says so itself: two short rows may agree where long ones do not.
    kind = type(variant)
    if variants.digest(kind) is not None and "is_plain_folded" not in vars(kind):
        return None
    family = restored.resolved.family
    head = restored.objective.head
    # Only names are compared here, so the model needs no numbers.
    shapes = build(restored.resolved, head, meta=True)
    if not isinstance(restored.model, PreTrainedModel):
        return None
    # This check is cheap, so it stands before anything is copied.
    if _names_outside_attention(restored.model) != _names_outside_attention(shapes):
        return None
    # Folding changes the model in place, and the trained one is needed for the comparison.
    model = copy.deepcopy(restored.model)
    variant.fold(model, family)
    sites = list(family.attention_sites(model))
    # A variant that cannot be folded leaves modules that a plain model does not have.
    if not all(_is_linear(site) for site in sites):
        return None
    config = copy.deepcopy(restored.resolved.config)
    note = ""
    head_counts = {_kv_heads(site) for site in sites}
    if hasattr(config, "num_key_value_heads") and len(head_counts) == 1:
        config.num_key_value_heads = head_counts.pop()
    elif any(_kv_heads(site) != site.kv_heads for site in sites):
        note = WRITTEN_OUT
        for site in sites:
            _write_out(site)
    for site in sites:
        _fuse(site)
    plain = _filled(restored, config, model)
    if plain is None or not same(restored.model, plain, make_batch(plain, family, head)):
        return None
    return Plain(plain, note)


def _names_outside_attention(model: nn.Module) -> set[str]:
    names = {name for name, _ in model.named_parameters()}
    return {name for name in names if "ttention" not in name and "attn" not in name}


def _is_linear(site: AttentionSite) -> bool:
    maps = [site.module.get_submodule(name) for name in (site.q, site.k, site.v)]
    return all(isinstance(each, (nn.Linear, Conv1D)) for each in maps)


def _kv_heads(site: AttentionSite) -> int:
    """Number of key heads that the site has now."""
    if site.fused:
        return site.kv_heads
    return surgery.width(site.module.get_submodule(site.k)) // site.head_dim


def _write_out(site: AttentionSite) -> None:
    """Repeat the few key and value heads of a site until they are as many as the checkpoint's."""
    times = site.kv_heads // _kv_heads(site)
    if times == 1 or site.fused:
        return
    maps = surgery.projections(site)
    maps.k = _repeated(maps.k, site, times)
    maps.v = _repeated(maps.v, site, times)
    surgery.place(site, maps)


def _repeated(projection: nn.Module, site: AttentionSite, times: int) -> nn.Linear:
    def rows(values: Tensor) -> Tensor:
        """(h·d, ...) to (h·times·d, ...), every head `times` in a row."""
        heads = values.view(-1, site.head_dim, *values.shape[1:])  # (h, d, ...)
        return heads.repeat_interleave(times, dim=0).flatten(0, 1)

    assert isinstance(projection, nn.Linear)
    bias = None
    if projection.bias is not None:
        bias = rows(projection.bias)
    return surgery.linear(rows(projection.weight), bias)


def _fuse(site: AttentionSite) -> None:
    """Put a projection of GPT-2 that was cut in three together again."""
    module: Any = site.module
    name = site.q.partition(".")[0]
    split = module.get_submodule(name)
    if isinstance(split, SplitProjection):
        parts: list[Any] = [split.q, split.k, split.v]
        weight = torch.cat([part.weight for part in parts]).T  # (d, 3 d)
        fused = Conv1D(weight.shape[1], weight.shape[0])  # type: ignore[no-untyped-call]
        fused.weight = nn.Parameter(weight.detach().contiguous())
        fused.bias = nn.Parameter(torch.cat([part.bias for part in parts]).detach())
        setattr(module, name, fused)


def _filled(
    restored: Restored, config: PreTrainedConfig, model: PreTrainedModel
) -> PreTrainedModel | None:
    """Build the configuration with the weights of `model`; None where they do not fit."""
    resolved = replace(restored.resolved, config=config)
    # A model is built with random weights first; the caller's random numbers stay as they are.
    with torch.random.fork_rng(devices=[]):
        plain = build(resolved, restored.objective.head, random_start=True)
    weights = model.state_dict()
    if _shapes_of(plain.state_dict()) != _shapes_of(weights):
        return None
    plain.load_state_dict(weights)
    prepare_to_save(plain, restored)
    return plain


def _shapes_of(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
