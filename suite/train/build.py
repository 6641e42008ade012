"""The model of a trial before its first step, for the trial and for whoever takes it up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from suite.backbones.heads import Head
from suite.backbones.loading import ResolvedBackbone
from suite.petl.arm import build_arm
from suite.petl.base import Method
from suite.record.spec import Phase, TrialSpec


def build_model(
    spec: TrialSpec,
    resolved: ResolvedBackbone,
    head: Head,
    *,
    weights: Path | None,
    meta: bool = False,
) -> tuple[nn.Module, Method[Any]]:
    """Load, convert, attach and initialise the arm of a trial, whole and on the CPU.

    What it draws depends on the trial's seed alone. Its forward keeps no cache of keys and values
    unless it is asked to, which `generate` does.

    Args:
        weights: File of the pretrain run that the arm names; None if it names none.
        meta: Make shapes only, and leave the random generator as it is.

    Raises:
        ConfigError: A name or key is unknown, or a value out of range.
        IncompatibleError: The choices do not go together.
    """
    if not meta:
        # Heads and methods draw next, and must not depend on what was drawn before.
        torch.manual_seed(spec.stream("init"))
    model, method = build_arm(
        resolved,
        head,
        spec.arm,
        meta=meta,
        pretrained=spec.phase is Phase.PRETRAIN,
        weights=weights,
        random_start=spec.random_start,
    )
    for module in model.modules():
        # T5's decoder has a configuration of its own, and an encoder's says nothing of a cache.
        if isinstance(module, PreTrainedModel) and hasattr(module.config, "use_cache"):
            # Training and scoring read a text once, so that keys and values would only take memory.
            module.config.use_cache = False
    return model, method
