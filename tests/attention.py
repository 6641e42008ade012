"""Tiny backbones converted by an attention variant, far from uniform attention, the same at every call."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from suite.attention import variants
from suite.attention._weighted import WeightedLinear
from suite.attention.base import Variant
from suite.backbones.base import AttentionSite, Family
from suite.backbones.loading import ResolvedBackbone, build, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice
from suite.petl.arm import build_arm
from tests.tiny import tiny_choice
from tests.toy import SMALL, Answer, Batch, disturb, make_batch, make_head, resolved_tiny

Options = dict[str, Any]


def answer_of(family: str) -> Answer:
    encoders = ("bert", "deberta", "modernbert", "roberta")
    return "classification" if family in encoders else "text"


@functools.cache
def resolved_backbone(family: str, **changes: Any) -> ResolvedBackbone:
    return resolve(tiny_choice(family, **changes))


def backbone(
    family: str, *, seed: int = 0, implementation: str | None = None, **changes: Any
) -> tuple[Any, Family]:
    """A backbone whose weights depend on `seed` alone; `changes` go into its configuration."""
    torch.manual_seed(seed)
    resolved = resolved_backbone(family, **changes)
    model: Any = build(resolved, make_head(answer_of(family)))
    model.set_attn_implementation(implementation or resolved.family.implementation)
    disturb(model, scale=0.2)
    return model.eval(), resolved.family


def converted(
    name: str, family: str, options: Options | None = None, *, seed: int = 0, **how: Any
) -> tuple[Any, Family, Variant[Any]]:
    """A backbone after conversion, `how` as in `backbone`; `seed` also draws what the variant adds."""
    model, found = backbone(family, seed=seed, **how)
    variant = variants.get(name).configure(options or {})
    torch.manual_seed(seed + 1)
    variant.convert(model, found)
    return model, found, variant


def batch_of(family: Family, *, seed: int = 0, size: int = 4) -> Batch:
    """Right-padded rows of up to ten tokens with their answers."""
    return make_batch(family, make_head(answer_of(family.name)), seed=seed, size=size)


def projection(site: AttentionSite, name: str) -> nn.Module:
    """The k or v map of a converted site."""
    return site.module.get_submodule(getattr(site, name))


def weighted_in(model: nn.Module) -> list[WeightedLinear]:
    return [module for module in model.modules() if isinstance(module, WeightedLinear)]


def arm(name: str, method: str, family: str) -> tuple[Any, Family, Variant[Any]]:
    """A variant with its defaults under a method, with a task head where the family has one."""
    torch.manual_seed(0)
    resolved = resolved_tiny(family)
    head = make_head("text" if family == "t5" else "classification")
    choice = AttentionChoice(name=name)
    model, _ = build_arm(
        resolved,
        head,
        Arm(
            backbone=resolved.choice,
            attention=choice,
            method=method,
            architecture=SMALL.get(method, {}),
        ),
    )
    return model, resolved.family, variants.get(name).configure({})
