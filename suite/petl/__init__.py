"""Parameter-efficient transfer learning (PETL): one file per method, found by scanning.

Any method of the `peft` library is `peft:<type>`.
"""

from __future__ import annotations

from typing import Any

from suite.petl.base import Method
from suite.registry import Registry

methods: Registry[Method[Any]] = Registry(
    "method",
    Method,  # type: ignore[type-abstract]
    "suite.petl",
    "petl",
)


def get_method(name: str, *, where: str = "") -> type[Method[Any]]:
    """The class of a method by name or alias, or of peft's method for `peft:<type>`.

    Raises:
        UnknownNameError: There is none; near names are offered.
    """
    if name.startswith("peft:"):
        from suite.petl.peft_method import peft_method  # importing peft takes seconds

        return peft_method(name, where=where)
    return methods.get(name, where=where)
