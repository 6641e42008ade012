"""Code that a checkpoint brings (`auto_map` in its config.json): found, pinned, and run only where it was named for that.

The code of a hub repository is pinned by its commit; that of a folder by a hash of its Python files, written like one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from suite.backbones import _sources as sources
from suite.config.sweep import BackboneChoice
from suite.config.trust import OPTION, trusted
from suite.errors import BackboneError


def brings_code(raw: Mapping[str, Any]) -> list[str]:
    """The classes of its own, in files of its own, that a configuration names for its model."""
    named = raw.get("auto_map")
    if not isinstance(named, Mapping):
        return []
    return sorted({str(name) for task, name in named.items() if task.startswith("AutoModel")})


def code_digest(folder: Path) -> str:
    """40 hexadecimal digits over the names and contents of a folder's Python files."""
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        sha.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        sha.update(path.read_bytes())
    return sha.hexdigest()[:40]


def check_code(
    choice: BackboneChoice, raw: Mapping[str, Any], *, folder: Path | None, where: str
) -> None:
    """See that a checkpoint's own code is run where it was asked for by name and commit, and never otherwise.

    Args:
        raw: Its config.json.
        folder: Where it lies, of a folder or package; None = on the hub.

    Raises:
        BackboneError: It brings code and is not trusted, is trusted and brings none, or the code is not the one that was named.
    """
    classes = brings_code(raw)
    pinned = choice.revision if folder is None or not classes else code_digest(folder)
    if not choice.trust_remote_code:
        if classes:
            commit = "COMMIT" if folder is None else pinned
            raise BackboneError(
                f"{where}{choice.name} brings code of its own ({', '.join(classes)}), without which its weights mean something else; "
                f"read the code, then run it with {OPTION} {choice.name}@{commit}"
            )
        return
    if not classes:
        raise BackboneError(f"{where}{choice.name} brings no code of its own; leave {OPTION} out")
    if elsewhere := [name for name in classes if "--" in name]:
        raise BackboneError(
            f"{where}{choice.name} takes its code from another repository ({elsewhere[0]}), which its commit does not pin"
        )
    if trusted().get(choice.name) != choice.revision:
        raise BackboneError(
            f"{where}{choice.name} was to run code of its own, at {choice.revision}; allow it again with "
            f"{OPTION} {choice.name}@{choice.revision}"
        )
    if pinned != choice.revision:
        raise BackboneError(
            f"{where}{choice.name}: its code is {pinned}, but {OPTION} names {choice.revision}; read it again, then name it"
        )


def code_folder(choice: BackboneChoice, origin: str, path: str) -> Path:
    """Where a trusted checkpoint's code lies on this machine, downloaded first where it has to be.

    Raises:
        BackboneError: The hub cannot be reached.
    """
    return (
        sources.hub_folder(path, choice.revision, sources.CODE_FILES)
        if origin == "hub"
        else Path(path)
    )


def own_config(raw: Mapping[str, Any], folder: Path) -> type[PreTrainedConfig] | None:
    """The configuration class that a trusted checkpoint brings; None where it brings none. Runs its code."""
    name = raw["auto_map"].get("AutoConfig")
    if name is None:
        return None
    found: type[PreTrainedConfig] = get_class_from_dynamic_module(
        str(name), str(folder), local_files_only=True
    )
    return found
