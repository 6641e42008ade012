"""Code that a checkpoint brings along (`auto_map` in its config.json).

It runs only where the user names the checkpoint and its commit (`--trust-remote-code`). The code of
a hub repository is pinned by its commit; the code of a folder by a hash of its Python files, which
is written like a commit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from suite.backbones import _sources as sources
from suite.config.sweep import BackboneChoice
from suite.config.trust import OPTION, TRUSTED, trusted
from suite.errors import BackboneError
from suite.files import read_json

_BESIDE = re.compile(r"\w+\.\w+")
"""A class in a file beside `config.json`. transformers also takes `owner/repo--module.Class`,
`/folder--module.Class` and `folder/module.Class`."""
_ELSEWHERE = f"a command without that option reads {TRUSTED}"


def own_model_classes(raw: Mapping[str, Any]) -> list[str]:
    """The model classes in a checkpoint's own files that its configuration names, sorted."""
    named = raw.get("auto_map")
    if not isinstance(named, Mapping):
        return []
    # one class can serve several tasks
    return sorted({str(name) for task, name in named.items() if task.startswith("AutoModel")})


def code_digest(folder: Path) -> str:
    """40 hexadecimal digits over the names and contents of a folder's Python files.

    A file may be a link, as all are in the hub's cache: its content counts.

    Raises:
        BackboneError: There may be code that this cannot cover: behind a link to another folder,
            or in a pipe or device.
    """
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and path.is_dir():
            raise BackboneError(
                f"{path}: a link to a folder, whose code no hash of {folder} covers; put the files"
                " themselves there"
            )
        if path.suffix != ".py":
            continue
        if not path.is_file():
            raise BackboneError(f"{path}: expected a regular file of Python code")
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
            code, other code than the user named, or code from elsewhere.
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
                f" {OPTION} {choice.name}@{shown}; {_ELSEWHERE}"
            )
        return
    if not classes:
        raise BackboneError(f"{where}{choice.name} brings no code of its own; leave {OPTION} out")
    _check_beside(raw["auto_map"], where=f"{where}{choice.name}")
    # the sweep's file keeps the commit, but only this command line can allow it
    if trusted().get(choice.name) != choice.revision:
        raise BackboneError(
            f"{where}{choice.name} asks to run code of its own, at {choice.revision}; allow it"
            f" again with {OPTION} {choice.name}@{choice.revision}; {_ELSEWHERE}"
        )
    if commit != choice.revision:
        raise BackboneError(
            f"{where}{choice.name}: its code is {commit}, but {OPTION} names {choice.revision};"
            " read it again, then name it"
        )


def check_tokenizer_code(folder: Path, *, where: str) -> None:
    """Check that a trusted checkpoint's tokenizer runs no code from elsewhere.

    Args:
        folder: Holds `tokenizer_config.json`, if the tokenizer has one.
        where: File and key for messages.

    Raises:
        BackboneError: It names other code, or the file cannot be read.
    """
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return
    try:
        described = read_json(path)
    except (OSError, ValueError) as error:
        raise BackboneError(f"{where}{path} cannot be read: {error}") from error
    if isinstance(described, dict):
        _check_beside(described.get("auto_map"), where=f"{where}{path}")


def _check_beside(auto_map: object, *, where: str) -> None:
    """Check that every class of an `auto_map` lies in a file beside it."""
    for name in _classes(auto_map):
        # a tokenizer of one class has null for the other
        if name is None:
            continue
        if not isinstance(name, str) or not _BESIDE.fullmatch(name):
            raise BackboneError(
                f"{where} takes its code from another repository or folder ({name}), which its"
                " commit does not pin; expected MODULE.CLASS of a file beside it"
            )


def _classes(auto_map: object) -> Iterator[object]:
    """The classes that an `auto_map` names, whatever stands in their place."""
    values: list[object] = [auto_map]
    if isinstance(auto_map, Mapping):
        values = list(auto_map.values())
    for value in values:
        if isinstance(value, list):
            yield from value
        else:
            yield value


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
