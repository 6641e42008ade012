"""Tell apart what one name stands for before and after a user edits the file behind it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from suite.attention import variants
from suite.backbones import families
from suite.backbones.loading import resolve
from suite.config.arm import Arm
from suite.config.hashing import short_hash
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.errors import ConfigError, OtherCodeError
from suite.petl import get_method, methods


def own_code(
    backbone: BackboneChoice, attention: AttentionChoice, method: str, *, where: str
) -> str | None:
    """A hash of the user's own files that define an arm; None = all its code is the suite's.

    Only the file of each class counts, not what that file imports.

    Args:
        where: The file or the command line that names them, for errors.

    Raises:
        ConfigError: There is no such method or variant, or the backbone cannot be found.
    """
    parts: dict[str, str | None] = {}
    # Who has no code of an axis waits for nothing here.
    if methods.own_names():
        parts["method"] = methods.digest(get_method(method, where=f"{where}: methods"))
    if variants.own_names():
        variant = variants.get(attention.name, where=f"{where}: attention")
        parts["attention"] = variants.digest(variant)
        # A variant across layers may stand over another one.
        over = getattr(variant.configure(attention.options), "over", None)
        if over is not None:
            parts["over"] = variants.digest(type(over))
    if families.own_names():
        family = resolve(backbone, where=f"{where}: backbones").family
        parts["backbone"] = families.digest(type(family))
    found = {part: digest for part, digest in parts.items() if digest is not None}
    if not found:
        return None
    return short_hash(found)


def check_own_code(arm: Arm) -> None:
    """Check that this host has the user's files that an arm was made from.

    Without them a shipped class of the same name would be trained, and the record would not say so.

    Raises:
        OtherCodeError: It has other files, or none.
    """
    try:
        found = own_code(arm.backbone, arm.attention, arm.method, where="SUITE_PATH")
        if found == arm.code:
            return
        got = _in_words(found)
    except ConfigError as error:
        # In one line: the driver passes on the last line of what a worker says.
        got = " ".join(str(error).split())
    raise OtherCodeError(
        f"{socket.gethostname()}: arm {arm.key}: got {got}, expected {_in_words(arm.code)}"
        f" (SUITE_PATH={os.environ.get('SUITE_PATH', '')}, looked from {Path.cwd()}); put the same"
        " files at the same path on every node (an edited file is another arm)"
    )


def _in_words(code: str | None) -> str:
    if code is None:
        return "the suite's own code"
    return f"your files with hash {code}"
