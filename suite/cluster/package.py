"""What a working folder would upload.

Ray packs all of it, so a forgotten data set is named here and not after an hour.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pathspec import PathSpec

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
    """The number of bytes that a submission of this folder uploads, before compression.

    Raises:
        ClusterError: More than a cluster should be handed; names the largest files. Or as `files`.
    """
    sizes = {path: path.stat().st_size for path in files(folder)}
    total = sum(sizes.values())
    if total > most_bytes:
        largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:SHOWN]
        named = ""
        for path in largest:
            named += f"\n  {sizes[path] / 2**20:.1f} MiB  {path.relative_to(folder)}"
        raise ClusterError(
            f"--working-dir {folder}: {total / 2**20:.0f} MiB would be uploaded,"
            f" expected at most {most_bytes / 2**20:.0f};"
            " name what the sweep does not need in .rayignore, or choose another folder;"
            f" the largest:{named}"
        )
    return total


def files(folder: Path) -> list[Path]:
    """The files below a folder that Ray packs, by the documented rules for `working_dir`.

    Raises:
        ClusterError: A link leads to a folder that it lies in; Ray would pack it again and again.
    """
    always = PathSpec.from_lines("gitignore", EXCLUDES)
    return list(_packed(folder, [(folder, always)], {}))


def _packed(
    folder: Path, rules: list[tuple[Path, PathSpec[Any]]], above: Mapping[Path, Path]
) -> Iterator[Path]:
    """Files of a folder and those below, but for what its ignore files or those above it name.

    Args:
        folder: Where to look.
        rules: The ignore rules of the folders above, each with the folder that its patterns start
            from.
        above: The folders above, by where they really lie.
    """
    place = folder.resolve()
    if place in above:
        top = next(iter(above.values()))
        raise ClusterError(
            f"--working-dir {top}: {folder.relative_to(top)} links to {above[place]}, in which it"
            " lies, and Ray would pack it again and again; remove the link, or name it in"
            " .rayignore"
        )
    above = {**above, place: folder}
    names = [".rayignore"]
    if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1":
        names.append(".gitignore")
    for name in names:
        ignore_file = folder / name
        if ignore_file.is_file():
            lines = ignore_file.read_text().splitlines()
            rules = [*rules, (folder, PathSpec.from_lines("gitignore", lines))]
    for path in sorted(folder.iterdir()):  # a folder that is ignored is not looked into
        if any(spec.match_file(path.relative_to(base)) for base, spec in rules):
            continue
        if path.is_dir():
            yield from _packed(path, rules, above)
        elif path.is_file():
            yield path
