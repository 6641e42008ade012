"""Parameter-efficient transfer learning: one file per method, found by scanning."""

from __future__ import annotations

from typing import Any

from suite.petl.base import Method
from suite.registry import Registry

methods: Registry[Method[Any]] = Registry("method", Method, "suite.petl", "petl")  # type: ignore[type-abstract]
