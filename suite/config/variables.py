"""Environment variables that stand for what is not given, to the commands and from Python alike."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HOME = "SUITE_HOME"
DATA_ROOT = "SUITE_DATA_ROOT"
STORAGE = "SUITE_STORAGE"
OPTUNA = "SUITE_OPTUNA"


def given_or_set(given: str | None, variable: str) -> str | None:
    """What was given; else what the variable says; None = neither.

    An empty variable says nothing, as for Typer.

    Args:
        given: The option or argument; None = it was not given.
        variable: Name of the variable that stands for it.
    """
    if given is not None:
        return given
    return os.environ.get(variable) or None


def path_given_or_set(given: str | Path | None, variable: str) -> Path | None:
    """As `given_or_set`, of a path."""
    if given is not None:
        return Path(given)
    found = given_or_set(None, variable)
    if found is None:
        return None
    return Path(found)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the time of the block."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
