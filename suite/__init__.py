"""A benchmark suite for attention variants and parameter-efficient transfer learning, on Ray.

The functions and classes of `suite.api` are attributes of this package. They are imported on first
use, so that `import suite` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# For type checkers and editors, which cannot follow `__getattr__`.
if TYPE_CHECKING:
    from suite.api import Outcome, Sweep, load, params, profile, results, run, trial

__version__ = "0.1.0"
__all__ = ["Outcome", "Sweep", "load", "params", "profile", "results", "run", "trial"]


# Python calls this for names that the module lacks, so the import waits until the first use.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("suite.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
