"""The files of a control group of version 2, as the kernel shows them to a container."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def control_group(root: Path, *, limit: int | Literal["max"], used: int, pages: int) -> None:
    """Write a group that uses `used` bytes, `pages` of them for files."""
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text(f"{used}\n")
    active = pages // 4
    sizes = {
        "anon": used - pages,
        "file": pages,
        "inactive_file": pages - active,
        "active_file": active,
    }
    (root / "memory.stat").write_text("".join(f"{name} {size}\n" for name, size in sizes.items()))
