"""Which checkpoints may run code of their own: those named on the command line, at one commit each, and no others.

What is typed (`--trust-remote-code NAME@COMMIT`) stands in an environment variable for the time of the command, so that its
workers know it too. Neither a sweep file nor a trial folder can grant it: a trial that was run so asks for it again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from suite.config.sweep import BackboneChoice
from suite.errors import ConfigError

OPTION = "--trust-remote-code"
TRUSTED = "SUITE_TRUST_REMOTE_CODE"
"""Environment variable: `NAME@COMMIT`, one a line."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def read_trusted(items: Sequence[str]) -> dict[str, str]:
    """Commit by name, of `NAME@COMMIT` items.

    Raises:
        ConfigError: Not of that form, or a name twice.
    """
    found: dict[str, str] = {}
    for item in items:
        name, _, commit = item.rpartition("@")
        if not name or not _COMMIT.fullmatch(commit):
            raise ConfigError(
                f"{OPTION} {item}: expected NAME@COMMIT, with the 40 hexadecimal digits of the commit whose code you have read; "
                "a branch or a tag may be another tomorrow"
            )
        if found.setdefault(name, commit) != commit:
            raise ConfigError(f"{OPTION}: {name} is given twice, with {found[name]} and {commit}")
    return found


@contextmanager
def trusting(items: Sequence[str]) -> Iterator[None]:
    """Trust these checkpoints, in this process and in its workers, for the time of the block.

    Raises:
        ConfigError: As `read_trusted`.
    """
    read_trusted(items)
    before = os.environ.get(TRUSTED)
    os.environ[TRUSTED] = "\n".join(items)
    try:
        yield
    finally:
        if before is None:
            del os.environ[TRUSTED]
        else:
            os.environ[TRUSTED] = before


def trusted() -> dict[str, str]:
    """Commit by name of everything that was named on the command line."""
    return read_trusted([line for line in os.environ.get(TRUSTED, "").splitlines() if line])


def with_trust(choice: BackboneChoice, *, where: str) -> BackboneChoice:
    """A backbone as it was typed, with what the command line says about its code.

    Raises:
        ConfigError: It is pinned to another commit there.
    """
    commit = trusted().get(choice.name)
    if commit is None:
        return choice
    if choice.revision not in ("main", commit):
        raise ConfigError(
            f"{where}: {choice.name} has revision {choice.revision}, but {OPTION} names {commit}; give the same commit"
        )
    if choice.config is not None:
        raise ConfigError(
            f"{where}: {choice.name} starts from random weights (config), and {OPTION} is about a checkpoint; leave one out"
        )
    return choice.model_copy(update={"revision": commit, "trust_remote_code": True})


def check_named(names: Sequence[str], *, where: str) -> None:
    """See that everything on the command line is a backbone of what is run.

    Raises:
        ConfigError: One is not.
    """
    strangers = sorted(trusted().keys() - {*names})
    if strangers:
        raise ConfigError(
            f"{OPTION} {strangers[0]}: no backbone of {where}; it has {', '.join(dict.fromkeys(names))}"
        )


def refuse_trust(backbone: Any, *, where: str) -> None:
    """Refuse `trust_remote_code: true` from a file or `--set`; whoever runs a sweep decides, not who wrote it.

    Raises:
        ConfigError: It is there; says how it is done.
    """
    if isinstance(backbone, Mapping) and backbone.get("trust_remote_code", False) is not False:
        name = backbone.get("name", "NAME")
        raise ConfigError(
            f"{where}: trust_remote_code cannot be set there: whoever starts the run decides whose code it runs; "
            f"give {OPTION} {name}@COMMIT on the command line"
        )
