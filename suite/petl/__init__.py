"""Parameter-efficient transfer learning (PETL): one file per method, found by scanning.

Any method of the `peft` library is `peft:<type>`.
"""

from __future__ import annotations

from typing import Any

from suite.config.space import peft_spaces
from suite.errors import UnknownNameError
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
    try:
        return methods.get(name, where=where)
    except UnknownNameError:
        if f"peft:{name}" not in peft_spaces():
            raise
    # Whoever knows a paper's name need not know which library has it.
    advice = f"the peft library has it: write peft:{name}"
    raise UnknownNameError("method", name, methods.names(), where=where, advice=advice)
