"""Backbone families (T5, BERT, GPT-2, Llama) and how to load them."""

from __future__ import annotations

from suite.backbones.base import Family
from suite.registry import Registry

families: Registry[Family] = Registry("backbone family", Family, "suite.backbones", "backbones")  # type: ignore[type-abstract]
