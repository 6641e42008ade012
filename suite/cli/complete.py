"""Names for a shell to complete.

Files of methods and variants are read as text, and nothing in them runs: a shell waits for the
answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import typer

from suite.config.names import DEFAULT_HOME
from suite.config.space import peft_spaces
from suite.config.task_files import task_paths
from suite.errors import ConfigError
from suite.registry import PACKAGE, plug_in_files, stem_to_name, user_folders, yaml_names

PLUG_IN = re.compile(r"^    description\b.*=", re.MULTILINE)
"""The class of a method or variant has this line; a helper module beside it does not."""
Completer = Callable[[str], list[str]]


def methods(incomplete: str) -> list[str]:
    return _matching([*_plug_ins("petl"), *peft_spaces()], incomplete)


def attention(incomplete: str) -> list[str]:
    return _matching(_plug_ins("attention"), incomplete)


def tasks(incomplete: str) -> list[str]:
    try:
        return _matching(task_paths(), incomplete)
    except ConfigError:
        return []  # two files of one name: the command itself says which


def backbones(incomplete: str) -> list[str]:
    from suite.backbones.presets import PRESETS

    return _matching(PRESETS, incomplete)


def fields(incomplete: str) -> list[str]:
    """Names of the leaderboard's columns."""
    from suite.leaderboard.fields import COLUMNS

    return _matching(COLUMNS, incomplete)


def sweeps(incomplete: str) -> list[str]:
    """Known sweeps; where none fits, the shell offers files."""
    return _matching(yaml_names("sweeps"), incomplete)


def sweeps_of_home(context: typer.Context, incomplete: str) -> list[str]:
    """Sweeps that were run in the home that the command line names."""
    # Options behind the cursor are not parsed yet: then it is the usual home.
    home = Path(context.params.get("home") or DEFAULT_HOME)
    return _matching([path.stem for path in (home / "sweeps").glob("*.json")], incomplete)


def arms(context: typer.Context, incomplete: str) -> list[str]:
    """Short names of the arms that the home's sweeps plan."""
    return _matching([arm for arm, _ in _planned(context)], incomplete)


def cells(context: typer.Context, incomplete: str) -> list[str]:
    """The same with a task behind each: `lora/rte`."""
    return _matching([f"{arm}/{task}" for arm, task in _planned(context)], incomplete)


def _planned(context: typer.Context) -> Iterator[tuple[str, str]]:
    """Arm and task of every cell that the home's sweeps plan."""
    from suite.errors import SuiteError
    from suite.plan.definition import read_plan
    from suite.record.folder import Home

    home = Path(context.params.get("home") or DEFAULT_HOME)
    for name in sweeps_of_home(context, ""):
        try:
            plan = read_plan(Home(home), name)
        # A definition of another version: the command says so, the shell offers nothing.
        except SuiteError:
            continue
        for cell in plan.cells:
            arm = cell.arm
            name_of_arm = arm.method
            # `full` would be the name of several arms.
            if arm.attention.name != "pretrained":
                name_of_arm = f"{arm.attention.name}/{arm.method}"
            yield name_of_arm, cell.task.name


def listed(names: Completer) -> Completer:
    """A completer for a list with commas between the names: it completes the last one."""

    def complete(incomplete: str) -> list[str]:
        # The shell sees one word: the names before the last comma must come back too.
        *before, last = incomplete.split(",")
        found = []
        for name in names(last):
            if name not in before:
                found.append(",".join([*before, name]))
        return found

    return complete


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    # A user's file may hide a shipped one of the same name: it is offered once.
    return sorted({name for name in names if name.startswith(incomplete)})


def _plug_ins(axis: str) -> list[str]:
    names = []
    for folder in [*user_folders(axis), PACKAGE / axis]:
        for path in plug_in_files(folder):
            # A file that is no UTF-8 must not break the shell's completion.
            if PLUG_IN.search(path.read_text(errors="replace")):
                names.append(stem_to_name(path.stem))
    return names
