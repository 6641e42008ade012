"""A trained arm as a plain model of transformers, where it is one: fully fine-tuned, or with attention that folds.

Grouped heads: where the configuration has `num_key_value_heads` (Llama) and all layers agree, they stay few. Elsewhere each is
written out once for every query head that shared it: the same function, without the smaller cache.
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
from suite.export.base import ready_to_save
from suite.export.same import make_batch, same
from suite.train.restore import Restored

WRITTEN_OUT = "its shared key and value heads are written out once for every query head: the same function, without the smaller cache"


@dataclass(frozen=True, slots=True)
class Plain:
    """A model that `from_pretrained` loads, and what to know about it."""

    model: PreTrainedModel
    note: str


def as_plain(restored: Restored) -> Plain | None:
    """The same function as a model of transformers without anything of ours; None where there is none."""
    family, model, head = restored.resolved.family, restored.model, restored.objective.head
    shapes = build(restored.resolved, head, meta=True)
    if not isinstance(model, PreTrainedModel) or not _like(model, shapes):
        return None
    attention = restored.spec.arm.attention
    model = copy.deepcopy(model)
    variants.get(attention.name).configure(attention.options).fold(model, family)
    sites = list(family.attention_sites(model))
    if not all(_is_linear(site) for site in sites):
        return None
    config, note = copy.deepcopy(restored.resolved.config), ""
    heads = {_kv_heads(site) for site in sites}
    if hasattr(config, "num_key_value_heads") and len(heads) == 1:
        config.num_key_value_heads = heads.pop()
    elif any(_kv_heads(site) != site.kv_heads for site in sites):
        note = WRITTEN_OUT
        for site in sites:
            _write_out(site)
    for site in sites:
        _fuse(site)
    plain = _filled(restored, config, model)
    return (
        None
        if plain is None or not same(restored.model, plain, make_batch(plain, family, head))
        else Plain(plain, note)
    )


def _like(model: nn.Module, shapes: nn.Module) -> bool:
    """Whether outside of attention its parameters are the backbone's own: cheap, before anything is copied."""
    own, other = (
        {n for n, _ in m.named_parameters() if "ttention" not in n and "attn" not in n}
        for m in (model, shapes)
    )
    return own == other


def _is_linear(site: AttentionSite) -> bool:
    maps = (site.module.get_submodule(name) for name in (site.q, site.k, site.v))
    return all(isinstance(m, (nn.Linear, Conv1D)) for m in maps)


def _kv_heads(site: AttentionSite) -> int:
    key = site.module.get_submodule(site.k)
    return site.kv_heads if site.fused else surgery.width(key) // site.head_dim


def _write_out(site: AttentionSite) -> None:
    """Repeat the few key and value heads of a site until they are as many as the checkpoint's."""
    times = site.kv_heads // _kv_heads(site)
    if times == 1 or site.fused:
        return
    maps = surgery.projections(site)
    maps.k, maps.v = (_repeated(m, site, times) for m in (maps.k, maps.v))
    surgery.place(site, maps)


def _repeated(projection: nn.Module, site: AttentionSite, times: int) -> nn.Linear:
    def rows(values: Tensor) -> Tensor:
        """(h·d, ...) to (h·times·d, ...), every head `times` in a row."""
        heads = values.view(-1, site.head_dim, *values.shape[1:])
        return heads.repeat_interleave(times, dim=0).flatten(0, 1)

    assert isinstance(projection, nn.Linear)
    return surgery.linear(
        rows(projection.weight), None if projection.bias is None else rows(projection.bias)
    )


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
    """A new model of the configuration with the weights of `model`; None where they are not its own."""
    with torch.random.fork_rng(devices=[]):
        plain = build(
            replace(restored.resolved, config=config), restored.objective.head, random_start=True
        )
    own, weights = plain.state_dict(), model.state_dict()
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in weights.items()}:
        return None
    plain.load_state_dict(weights)
    ready_to_save(plain, next(model.parameters()).dtype)
    return plain
