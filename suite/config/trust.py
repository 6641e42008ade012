"""Which checkpoints may run code of their own: those that the command line names, and no others.

Each is named at one commit. What is typed (`--trust-remote-code NAME@COMMIT`) is kept in an
environment variable while the command runs, so that its workers know it too. Neither a sweep file
nor a trial folder can grant this trust: a trial that ran with it asks for it again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from suite.config.variables import environment
from suite.errors import ConfigError

if TYPE_CHECKING:
    # every command has the option, and few need the models of a sweep, which take long to build
    from suite.config.sweep import BackboneChoice

OPTION = "--trust-remote-code"
TRUSTED = "SUITE_TRUST_REMOTE_CODE"
"""The environment variable that holds items `NAME@COMMIT`, one on each line."""
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A full commit hash; a branch or a tag may move."""


def read_trusted(items: Sequence[str]) -> dict[str, str]:
    """The commit of each name, from items `NAME@COMMIT`.

    Raises:
        ConfigError: An item has another form, or a name is given twice.
    """
    found: dict[str, str] = {}
    for item in items:
        # from the right, since a folder's name may hold an @
        name, _, commit = item.rpartition("@")
        if not name or not COMMIT.fullmatch(commit):
            raise ConfigError(
                f"{OPTION} {item}: expected NAME@COMMIT, with the 40 hexadecimal digits of the "
                "commit whose code you have read; a branch or a tag may be another tomorrow"
            )
        # the same item twice does no harm
        if found.setdefault(name, commit) != commit:
            raise ConfigError(f"{OPTION}: {name} is given twice, with {found[name]} and {commit}")
    return found


@contextmanager
def trusting(items: Sequence[str]) -> Iterator[None]:
    """Trust these checkpoints within the block, in this process and in its workers.

    Raises:
        ConfigError: As `read_trusted`.
    """
    # checked here, so that a mistake is found before anything starts
    read_trusted(items)
    # one on each line, because names may hold commas and spaces
    with environment({TRUSTED: "\n".join(items)}):
        yield


def trusted() -> dict[str, str]:
    """The commit of each checkpoint that the command line names."""
    lines = os.environ.get(TRUSTED, "").splitlines()
    return read_trusted([line for line in lines if line])


def with_trust(choice: BackboneChoice, *, where: str) -> BackboneChoice:
    """A backbone as it was typed, with what the command line says about its code.

    Raises:
        ConfigError: The backbone is pinned to another commit, or starts from random weights.
    """
    commit = trusted().get(choice.name)
    if commit is None:
        return choice
    # main is what stands there when nothing was typed
    if choice.revision not in ("main", commit):
        raise ConfigError(
            f"{where}: {choice.name} has revision {choice.revision}, but {OPTION} names {commit}; "
            "give the same commit"
        )
    if choice.config is not None:
        raise ConfigError(
            f"{where}: {choice.name} starts from random weights (config), and {OPTION} is about a "
            "checkpoint; leave one out"
        )
    return choice.model_copy(update={"revision": commit, "trust_remote_code": True})


def check_named(names: Sequence[str], *, where: str) -> None:
    """Check that the command line names only backbones that are run.

    Raises:
        ConfigError: It names another one.
    """
    strangers = sorted(trusted().keys() - {*names})
    if strangers:
        known = ", ".join(dict.fromkeys(names))
        raise ConfigError(f"{OPTION} {strangers[0]}: no backbone of {where}; it has {known}")


def refuse_trust(backbone: Any, *, where: str) -> None:
    """Refuse `trust_remote_code: true` from a file or from `--set`.

    Whoever runs a sweep decides, not whoever wrote it.

    Raises:
        ConfigError: It is there; the message says how to grant trust.
    """
    # anything but false, so that no odd spelling of true slips through
    if isinstance(backbone, Mapping) and backbone.get("trust_remote_code", False) is not False:
        name = backbone.get("name", "NAME")
        raise ConfigError(
            f"{where}: trust_remote_code cannot be set there: whoever starts the run decides whose "
            f"code it runs; give {OPTION} {name}@COMMIT on the command line"
        )
