"""Where a result comes from: versions and git revision; no host names and no secrets."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "datasets",
    "peft",
    "optuna",
    "ray",
    "mlflow",
    "tokenizers",
    "numpy",
)


@functools.cache
def versions() -> dict[str, str | None]:
    """Version of Python and of every package that can change a number; None where it is not
    installed.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("petl-suite", *PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


@functools.cache
def git_state() -> dict[str, Any]:
    """Revision of the suite's checkout and whether it was edited; nulls where it is installed from
    a wheel.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return {"revision": None, "dirty": None}
    try:
        revision = _git(root, "rev-parse", "HEAD")
        return {
            "revision": revision,
            "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"revision": None, "dirty": None}


def _git(root: Path, *arguments: str) -> str:
    # git of the PATH, with words of ours
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
    return done.stdout.strip()
