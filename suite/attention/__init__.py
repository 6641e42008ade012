"""Attention variants: one file per variant, found by scanning."""

from __future__ import annotations

from typing import Any

from suite.attention.base import Variant
from suite.registry import Registry

variants: Registry[Variant[Any]] = Registry(
    "attention variant",
    Variant,  # type: ignore[type-abstract]
    "suite.attention",
    "attention",
)
