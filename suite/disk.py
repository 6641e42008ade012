"""What a disk, or the server behind it, refuses: said in one line, with what to do about it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""A full disk and a full quota. A sweep pauses on these, so storages leave them OSErrors."""
RIGHTS = "give this user the right to read and write there"
SERVER = "see that the file server answers"
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EIO: "look after the disk, or the server behind it (dmesg)",
    errno.ESTALE: "mount the share again",
    errno.EROFS: "mount it for writing",
    errno.EACCES: RIGHTS,
    errno.EPERM: RIGHTS,
    errno.ETIMEDOUT: SERVER,
    errno.EHOSTDOWN: SERVER,
    errno.ENOTCONN: SERVER,
    errno.EREMOTEIO: SERVER,
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "allow more open files (sysctl fs.file-max)",
}
"""What to do, by errno: these say that a disk does not work, whatever the suite does with it."""
# Of these a disk is the cause, even where the error names no file; the others happen to sockets.
OF_DISKS = (*FULL, errno.EIO, errno.ESTALE, errno.EROFS, errno.EREMOTEIO)
OF_RUST = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust, safetensors among them, print the number of a system's error."""
_OF_PYTHON = re.compile(r"\[Errno (\d+)\][^'\n]*(?:'([^'\n]*)')?", re.IGNORECASE)


def said(error: OSError) -> str:
    """What failed, where, and what to do, as the beginning of a sentence that goes on."""
    what = error.strerror or str(error) or type(error).__name__
    where = ""
    if error.filename is not None:
        where = f" ({os.fsdecode(error.filename)})"
    return f"{what}{where}; {REMEDIES.get(error.errno or 0, 'mend that')}"


def os_error_in(error: BaseException) -> OSError | None:
    """The error of the system that an exception is or tells of; None where there is none.

    Tune passes on the text of an exception alone, and safetensors raises its own kind.
    """
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, OSError) and cause.errno is not None:
        return cause
    # Arrow's errors are OSErrors, and have the number in the text, too.
    found = _OF_PYTHON.search(str(cause)) or OF_RUST.search(str(cause))
    if found is None:
        return None
    number = int(found[1])
    given = OSError(number, os.strerror(number))
    if found.re is _OF_PYTHON:
        given.filename = found[2]
    return given


def fault_of(error: BaseException, home: Path) -> str:
    """What the home's disk refused; "" where the exception tells of nothing like that.

    Args:
        error: What a process raised that worked for the home.
        home: Its folder. Files elsewhere are of one machine, and another one may have them whole.
    """
    found = os_error_in(error)
    if found is None or found.errno not in REMEDIES:
        return ""
    # A file that is written or synced by its handle has no name here.
    if found.filename is None:
        is_ours = found.errno in OF_DISKS
    else:
        is_ours = Path(os.fsdecode(found.filename)).is_relative_to(home)
    # Wherever there is no room, the next attempt finds none either.
    if is_ours or found.errno in FULL:
        return said(found)
    return ""
