"""What a working folder would upload: Ray packs it whole, so that a forgotten data set is said before and not after an hour."""

from __future__ import annotations

import os
from pathlib import Path

from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

from suite.errors import ClusterError

EXCLUDES = (
    ".git",
    ".venv",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "/runs",
    "/analysis",
    "mlruns",
    "*.egg-info",
)
"""Never uploaded, beside what .gitignore and .rayignore name."""
MOST_BYTES = 100 * 2**20
SHOWN = 5


def check_size(folder: Path, *, most_bytes: int = MOST_BYTES) -> int:
    """Bytes that a submission of this folder uploads, before compression.

    Raises:
        ClusterError: More than a cluster should be handed; names the largest files.
    """
    sizes = {path: path.stat().st_size for path in files(folder)}
    total = sum(sizes.values())
    if total > most_bytes:
        largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:SHOWN]
        named = "".join(
            f"\n  {sizes[path] / 2**20:.1f} MiB  {path.relative_to(folder)}" for path in largest
        )
        raise ClusterError(
            f"--working-dir {folder}: {total / 2**20:.0f} MiB would be uploaded, expected at most {most_bytes / 2**20:.0f}; "
            f"name what the sweep does not need in .rayignore, or choose another folder; the largest:{named}"
        )
    return total


def files(folder: Path) -> list[Path]:
    """The files below a folder that Ray packs, by its own walk."""
    found: list[Path] = []

    def take(path: Path) -> None:
        if path.is_file():
            found.append(path)

    with_gitignore = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    _dir_travel(
        folder, [_get_excludes(folder, list(EXCLUDES))], take, include_gitignore=with_gitignore
    )
    return found
