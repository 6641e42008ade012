"""Let fsync fail, a folder be read-only, or the clock jump, in processes of this machine.

`benchmarks/shim.c` stands between a process and the C library. It is compiled where it is needed.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = "gcc"


def why_not() -> str | None:
    """Why it cannot be built here, with the remedy; None if it can."""
    if shutil.which(COMPILER) is None:
        return f"{COMPILER} is missing, which builds benchmarks/shim.c: apt-get install {COMPILER}"
    return None


def build(library: Path) -> None:
    """Compile it."""
    command = [COMPILER, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(library)]
    subprocess.run([*command, str(SOURCE), "-ldl"], check=True)


def environment(library: Path, control: Path, *, below: Path) -> dict[str, str]:
    """What a process starts with that is to be disturbed.

    Args:
        library: What `build` has written.
        control: What `disturb` writes; it may differ from process to process.
        below: The folder whose files fail.
    """
    return {
        "LD_PRELOAD": str(library),
        "SUITE_SHIM_CONTROL": str(control),
        "SUITE_SHIM_BELOW": f"{below}/",
        # Ray takes LD_PRELOAD out of its workers' environment otherwise
        "RAY_LD_PRELOAD_ON_WORKERS": "1",
    }


def disturb(
    control: Path, *, clock_s: int = 0, fsync_fails: bool = False, read_only: bool = False
) -> None:
    """Say what goes wrong from now on; without arguments nothing does.

    Args:
        control: The file that the processes look at.
        clock_s: Seconds by which their wall clock is ahead.
        fsync_fails: Whether fsync raises EIO.
        read_only: Whether no file can be opened for writing, made, renamed or removed.
    """
    values = struct.pack("=3q", clock_s, fsync_fails, read_only)
    # Over the old bytes: the processes have mapped this very file
    with control.open("r+b" if control.exists() else "wb") as file:
        file.write(values)
