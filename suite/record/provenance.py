"""Say where a result comes from: versions and git revision, without host names or secrets."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

COMPARED_VERSIONS = (
    "petl-suite",
    "torch",
    "transformers",
    "deepspeed",
    "datasets",
    "tokenizers",
    "peft",
    "numpy",
)
"""Packages that can change a number, so that all runs of a row need the same."""
PACKAGES = (*COMPARED_VERSIONS, "optuna", "ray", "mlflow")


# Versions and revision do not change while a process runs, and every trial asks for them.
@functools.cache
def versions() -> dict[str, str | None]:
    """The versions of Python and of `PACKAGES`.

    A package that is not installed has None.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


@functools.cache
def git_state() -> dict[str, Any]:
    """The revision of the suite's checkout, and whether it was edited.

    Both are None where the suite is installed from a wheel.
    """
    # This file lies two folders below the root of the checkout.
    root = Path(__file__).parents[2]
    # git looks in the folders above as well, so from a wheel it would find a stranger's repository.
    if not (root / ".git").exists():
        return {"revision": None, "dirty": None}
    try:
        revision = _git(root, "rev-parse", "HEAD")
        return {
            "revision": revision,
            # Files that git does not track are notes and outputs; they are no edit of the code.
            "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"revision": None, "dirty": None}


def _git(root: Path, *arguments: str) -> str:
    # git of the PATH, with words of ours
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
    return done.stdout.strip()
