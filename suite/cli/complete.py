"""Names for a shell to complete. Files are looked at, nothing of them is run or imported: a shell waits for the answer."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from suite.registry import shipped_folder, stem_to_name, user_folders, yaml_names

PACKAGE = Path(__file__).parents[1]
PLUG_IN = re.compile(r"^    description\b.*=", re.MULTILINE)
"""What the class of a method or variant has, and a helper module beside it has not."""
Completer = Callable[[str], list[str]]


def methods(incomplete: str) -> list[str]:
    return _matching(_plug_ins("petl"), incomplete)


def attention(incomplete: str) -> list[str]:
    return _matching(_plug_ins("attention"), incomplete)


def tasks(incomplete: str) -> list[str]:
    folders = [*user_folders("tasks"), shipped_folder("tasks")]
    paths = (
        path
        for folder in folders
        for path in folder.iterdir()
        if path.suffix in (".yaml", ".py") and path.stem[0] not in "_."
    )
    return _matching(
        (stem_to_name(path.stem) if path.suffix == ".py" else path.stem for path in paths),
        incomplete,
    )


def backbones(incomplete: str) -> list[str]:
    tree = ast.parse((PACKAGE / "backbones" / "presets.py").read_text())
    tables = (
        n.value
        for n in tree.body
        if isinstance(n, ast.AnnAssign)
        and isinstance(n.target, ast.Name)
        and n.target.id == "PRESETS"
    )
    keys = (key for table in tables if isinstance(table, ast.Dict) for key in table.keys)
    return _matching(
        (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)),
        incomplete,
    )


def sweeps(incomplete: str) -> list[str]:
    """Known ones; where nothing fits, the shell offers files."""
    return _matching(yaml_names("sweeps"), incomplete)


def sweeps_of_home(context: typer.Context, incomplete: str) -> list[str]:
    """Those that were run in the home that the line names."""
    home = Path(context.params.get("home") or "runs")
    return _matching((path.stem for path in (home / "sweeps").glob("*.json")), incomplete)


def listed(names: Completer) -> Completer:
    """The same for a list with commas between the names: its last one is completed."""

    def complete(incomplete: str) -> list[str]:
        *before, last = incomplete.split(",")
        return [",".join([*before, name]) for name in names(last) if name not in before]

    return complete


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete)})


def _plug_ins(axis: str) -> list[str]:
    folders = [*user_folders(axis), PACKAGE / axis]
    paths = (
        path
        for folder in folders
        for path in folder.glob("*.py")
        if not path.stem.startswith("_") and path.stem != "base"
    )
    return [
        stem_to_name(path.stem)
        for path in paths
        if PLUG_IN.search(path.read_text(errors="replace"))
    ]
