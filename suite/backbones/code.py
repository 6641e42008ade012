"""Code that a checkpoint brings along (`auto_map` in its config.json).

It runs only where the user names the checkpoint and its commit (`--trust-remote-code`). The code of
a hub repository is pinned by its commit; the code of a folder by a hash of its Python files, which
is written like a commit.
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


def own_model_classes(raw: Mapping[str, Any]) -> list[str]:
    """The model classes in a checkpoint's own files that its configuration names, sorted."""
    named = raw.get("auto_map")
    if not isinstance(named, Mapping):
        return []
    # one class can serve several tasks
    return sorted({str(name) for task, name in named.items() if task.startswith("AutoModel")})


def code_digest(folder: Path) -> str:
    """40 hexadecimal digits over the names and contents of a folder's Python files."""
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        # the length keeps two files apart from one file with the same bytes
        sha.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        sha.update(path.read_bytes())
    # as long as a commit, so that one option takes either
    return sha.hexdigest()[:40]


def check_code(
    choice: BackboneChoice, raw: Mapping[str, Any], *, folder: Path | None, where: str
) -> None:
    """Check that a checkpoint's own code runs only where the user asked for it by name and commit.

    Args:
        choice: The backbone as a person wrote it.
        raw: The checkpoint's config.json.
        folder: The checkpoint's folder or package; None = it is on the hub.
        where: File and key for messages.

    Raises:
        BackboneError: The checkpoint brings code and is not trusted; or it is trusted and brings no
            code, or other code than the user named.
    """
    classes = own_model_classes(raw)
    commit = choice.revision
    if folder is not None and classes:
        commit = code_digest(folder)
    if not choice.trust_remote_code:
        if classes:
            # the hub's commit is not known before a download, so the user has to look it up
            shown = "COMMIT" if folder is None else commit
            raise BackboneError(
                f"{where}{choice.name} brings code of its own ({', '.join(classes)}), without which"
                " its weights mean something else; read the code, then run it with"
                f" {OPTION} {choice.name}@{shown}"
            )
        return
    if not classes:
        raise BackboneError(f"{where}{choice.name} brings no code of its own; leave {OPTION} out")
    # transformers writes code of another repository as `owner/repo--module.Class`
    elsewhere = [name for name in classes if "--" in name]
    if elsewhere:
        raise BackboneError(
            f"{where}{choice.name} takes its code from another repository ({elsewhere[0]}), which"
            " its commit does not pin"
        )
    # the sweep's file keeps the commit, but only this command line can allow it
    if trusted().get(choice.name) != choice.revision:
        raise BackboneError(
            f"{where}{choice.name} asks to run code of its own, at {choice.revision}; allow it"
            f" again with {OPTION} {choice.name}@{choice.revision}"
        )
    if commit != choice.revision:
        raise BackboneError(
            f"{where}{choice.name}: its code is {commit}, but {OPTION} names {choice.revision};"
            " read it again, then name it"
        )


def code_folder(choice: BackboneChoice, origin: str, path: str) -> Path:
    """The folder of a trusted checkpoint's code on this machine, downloaded first if necessary.

    Raises:
        BackboneError: The hub cannot be reached.
    """
    if origin == "hub":
        return sources.hub_folder(path, choice.revision, sources.CODE_FILES)
    return Path(path)


def own_config_class(raw: Mapping[str, Any], folder: Path) -> type[PreTrainedConfig] | None:
    """Run a trusted checkpoint's code for its configuration class; None where it brings none."""
    name = raw["auto_map"].get("AutoConfig")
    if name is None:
        return None
    found: type[PreTrainedConfig] = get_class_from_dynamic_module(
        str(name), str(folder), local_files_only=True
    )
    return found
