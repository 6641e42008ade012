"""The report of a sweep: one page that stands alone, the same as a document, its figures and the tables behind them.

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

_HOMES = {"Report": "data", "build": "compose", "read": "data", "write": "compose"}


def __getattr__(name: str) -> Any:
    if name == "figures":
        return import_module("suite.report.figures")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
