"""Backbone families (one file each) and how to load them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from suite.registry import Registry

if TYPE_CHECKING:
    from suite.backbones.base import Family

    families: Registry[Family]


@cache
def _families() -> Registry[Family]:
    from suite.backbones.base import Family

    # mypy refuses an abstract class as a value; the registry never makes an instance of Family
    # itself
    return Registry(
        "backbone family",
        Family,  # type: ignore[type-abstract]
        "suite.backbones",
        "backbones",
    )


def all_families() -> list[Family]:
    """One instance of every family, by name."""
    found = _families()
    return [found.get(name)() for name in found.names()]


def __getattr__(name: str) -> Any:
    """Make the registry when it is first used: a list of presets must not wait for torch."""
    if name != "families":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _families()
