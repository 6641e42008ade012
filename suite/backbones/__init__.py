"""Backbone families (T5, BERT, GPT-2, Llama) and how to load them."""

from __future__ import annotations

from suite.backbones.base import Family
from suite.registry import Registry

# mypy refuses an abstract class as a value; the registry never makes an instance of Family itself
families: Registry[Family] = Registry(
    "backbone family",
    Family,  # type: ignore[type-abstract]
    "suite.backbones",
    "backbones",
)
