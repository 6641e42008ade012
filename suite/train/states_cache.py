"""The part of a home's cache that holds what frozen stacks give: bounded, and whole or not used.

`cache/frozen-states/<task>-<hash>/` gets its name when all of it is written (`make_once`). It holds
the states, what tells whole ones from damaged ones, and what they cost. Whoever has a file open
reads on when another process removes it.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from suite.errors import gib, no_room_for_states
from suite.files import LOCK_TIMEOUT_S, read_json, sha256, write_json
from suite.record.result import PreparationRecord
from suite.train.initial import COST

STATES = "states.bin"
MANIFEST = "states.json"

log = logging.getLogger(__name__)


def states_folder(cache: Path) -> Path:
    """Where the cache of a home keeps states."""
    return cache / "frozen-states"


def make_room(folder: Path, needed: int, most: int) -> None:
    """Remove the states that were used longest ago until `needed` bytes more are at most `most`.

    What is being written by others at the same time does not count yet.

    Raises:
        ResourceError: Not even an empty cache has room.
    """
    if needed > most:
        raise no_room_for_states(needed, most)
    _clear_leavings(folder)
    by_use = []
    for path in folder.glob(f"*/{STATES}"):
        if _is_unfinished(path.parent):
            continue
        # Another process may remove it.
        with suppress(FileNotFoundError):
            found = path.stat()
            by_use.append((found.st_mtime, found.st_size, path.parent))
    held = sum(size for _, size, _ in by_use)
    for _, size, old in sorted(by_use):
        if held + needed <= most:
            return
        log.warning("%s: removed to make room for other states (%s)", old, gib(size))
        _remove(old)
        held -= size


def sign(folder: Path) -> None:
    """Write what `damage` needs to tell whole states from damaged ones."""
    path = folder / STATES
    write_json(folder / MANIFEST, {"bytes": path.stat().st_size, "sha256": sha256(path)})


def note_use(folder: Path) -> None:
    """Note that states are used now, because those used longest ago make room."""
    # Another process may have removed them to make room; an open file stays readable.
    with suppress(FileNotFoundError):
        os.utime(folder / STATES)


def damage(folder: Path, needed: int) -> str | None:
    """What is damaged in a folder of states; None where it is whole."""
    try:
        manifest = read_json(folder / MANIFEST)
        PreparationRecord.model_validate_json((folder / COST).read_bytes())
        size = (folder / STATES).stat().st_size
        if size != needed or manifest["bytes"] != needed:
            return f"{STATES} has {size} bytes, and {needed} were written"
        if sha256(folder / STATES) != manifest["sha256"]:
            return f"{STATES} has another SHA-256 than when it was written"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        return f"a file beside {STATES} cannot be read: {str(error).splitlines()[0]}"
    return None


def remove_damaged(folder: Path, needed: int) -> None:
    """Remove states that are not whole, and say so. All ranks may call it at once."""
    if not folder.exists():
        return
    # The lock of whoever makes the folder, who may have just made it anew.
    with FileLock(folder.with_name(f"{folder.name}.lock"), timeout=LOCK_TIMEOUT_S):
        why = damage(folder, needed)
        if why is not None and folder.exists():
            log.warning("%s: %s; the states are computed again", folder, why)
            _remove(folder)


def _is_unfinished(folder: Path) -> bool:
    """Whether a folder of the cache is being written, or removed."""
    return folder.name.startswith(".") or ".tmp-" in folder.name


def _clear_leavings(cache: Path) -> None:
    """Remove the remains of processes that were killed while they wrote or removed states."""
    for gone in cache.glob(".*.gone-*"):
        shutil.rmtree(gone, ignore_errors=True)
    for temporary in cache.glob("*.tmp-*"):
        name, _, _ = temporary.name.partition(".tmp-")
        with suppress(Timeout), FileLock(cache / f"{name}.lock", timeout=0):
            # Nobody else makes this folder now.
            shutil.rmtree(temporary, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a folder: its name first, so that nobody sees a part of it."""
    gone = folder.with_name(f".{folder.name}.gone-{uuid.uuid4().hex}")
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)
