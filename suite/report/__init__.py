"""The report of a sweep: a page that needs no other file, a document, figures and tables.

Names are imported on first use: importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from suite.report import figures
    from suite.report.compose import build, write
    from suite.report.data import Report, read

__all__ = ["Report", "build", "figures", "read", "write"]

_MODULES = {"Report": "data", "build": "compose", "read": "data", "write": "compose"}


def __getattr__(name: str) -> Any:
    # A module of its own; the other names stand inside one.
    if name == "figures":
        return import_module("suite.report.figures")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
