"""What a name looks like that becomes a part of a path or of a query.

Names also come from files and stores that others write, so every reader of these checks them.
"""

from __future__ import annotations

import re
from pathlib import Path

DEFAULT_HOME = Path("runs")
"""Where trials are kept unless another folder is named.

It is in the working folder, so that a first run asks for no path.
"""
BY_HAND = "trial"
"""The sweep of runs by hand, apart from the searched ones."""
SWEEP = r"[a-z0-9][a-z0-9._-]{0,63}"
TASK = r"\w[\w.-]*"
"""The stem of a task's file. It never begins with a dot, so it is no way out of a folder."""
ARM = r"[\w-][\w.-]*"
HOME = r"[0-9A-Za-z]{1,64}"

_EXPECTED = {
    "sweep": (SWEEP, "1 to 64 of a-z 0-9 . _ -, the first a letter or a digit"),
    "task": (TASK, "letters, digits and . _ -, the first no dot or dash"),
    "arm": (ARM, "letters, digits and . _ -, the first no dot"),
    "home": (HOME, "letters and digits"),
}
KINDS = tuple(_EXPECTED)


def why_not(kind: str, name: str) -> str | None:
    """What is wrong with a name that was read; None = nothing.

    Args:
        kind: "sweep", "task", "arm" or "home".
        name: As it was read.
    """
    pattern, expected = _EXPECTED[kind]
    # `$` would allow a newline at the end
    if re.fullmatch(pattern, name):
        return None
    return f"got the {kind} {name[:200]!r}, expected {expected}"
