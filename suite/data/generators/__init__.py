"""Task generators: one file per generator, found by scanning."""

from __future__ import annotations

from typing import Any

from suite.data.generators.base import Generator
from suite.registry import Registry

generators: Registry[Generator[Any]] = Registry(
    "generator",
    Generator,  # type: ignore[type-abstract]
    "suite.data.generators",
    "generators",
)
