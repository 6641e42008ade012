"""Find the files of a backbone or tokenizer: in a folder, a Python package or on the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from safetensors import SafetensorError, safe_open

from suite.backbones.folders import is_hub_id as is_hub_id
from suite.backbones.folders import local_folder as local_folder
from suite.config.trust import COMMIT
from suite.errors import BackboneError, HubUnreachableError
from suite.files import read_json
from suite.tables import sha256_of as kept_sha256

CONFIG_FILES = ("config.json",)
WEIGHT_FILES = (
    "config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
)
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "spm.model",
)
TOKENIZER_FILES = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    *VOCABULARY_FILES,
)
ADAPTER_FILE = "adapter_config.json"
CODE_FILES = ("*.py",)
"""Downloaded only where the user trusts the checkpoint's code."""


def hub_folder(
    repo: str, revision: str, files: Sequence[str], *, where: str = "", local_only: bool = False
) -> Path:
    """The folder with files of a hub repository, whose name is the commit.

    One request decides whether the hub can be reached, without retries; if not, the local cache
    answers. A full commit hash never changes, so there the cache is asked first.

    Args:
        repo: `organisation/name`.
        revision: A branch, a tag or a commit.
        files: Patterns of the files to download.
        where: File and key for messages.
        local_only: Whether to look in the local cache alone.

    Raises:
        BackboneError: Neither the hub nor the cache has them.
    """
    try:
        with no_hub_bars():
            if not local_only and COMMIT.fullmatch(revision):
                with suppress(LocalEntryNotFoundError):
                    cached = _snapshot(repo, revision, files, local_only=True)
                    if _is_complete(cached, files):
                        return cached
            return _snapshot(repo, revision, files, local_only=local_only)
    # the order matters: a gated repository's error is also a RepositoryNotFoundError
    except GatedRepoError as error:
        raise BackboneError(
            f"{where}{repo} is gated: accept its licence on its hub page and log in"
            " (hf auth login, or HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise BackboneError(f"{where}{repo} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise BackboneError(
            f"{where}{repo} does not exist on the hub, or is private (hf auth login, or HF_TOKEN)"
        ) from error
    except HFValidationError as error:
        raise BackboneError(f"{where}{repo!r} is not a hub id: {error}") from error
    except (OSError, HfHubHTTPError) as error:
        reason = str(error).splitlines()[0]
        raise HubUnreachableError(
            f"{where}{repo} (revision {revision}) is not in the local cache and the hub cannot be"
            f" reached or refuses ({reason}); give a folder path instead, or fill the cache on a"
            " machine with network and set HF_HOME to it"
        ) from error


def _snapshot(repo: str, revision: str, files: Sequence[str], *, local_only: bool) -> Path:
    folder = snapshot_download(
        repo, revision=revision, allow_patterns=list(files), local_files_only=local_only
    )
    return Path(folder)


def _is_complete(folder: Path, files: Sequence[str]) -> bool:
    """Whether a cached folder has what `files` asks for.

    The cache may hold a commit for other files alone: for weights it needs all shards and the
    configuration, for a tokenizer a vocabulary, otherwise any of the files.
    """
    names = {path.name for path in folder.iterdir()}
    if files == CODE_FILES:
        return any(name.endswith(".py") for name in names)
    if files == WEIGHT_FILES:
        with suppress(BackboneError):
            return bool(weight_files(folder)) and "config.json" in names
        return False
    if files == TOKENIZER_FILES:
        return not names.isdisjoint(VOCABULARY_FILES)
    return not names.isdisjoint(files)


def read_config(folder: Path, *, where: str = "") -> dict[str, Any]:
    """Read a folder's `config.json`.

    Raises:
        BackboneError: It is absent, or is not a JSON object with a `model_type`.
    """
    path = folder / "config.json"
    try:
        data = read_json(path)
    except FileNotFoundError:
        raise BackboneError(
            f"{where}{folder} holds no config.json; expected a folder as transformers'"
            " save_pretrained writes it"
        ) from None
    except (OSError, ValueError) as error:
        raise BackboneError(f"{where}{path} cannot be read: {error}") from error
    # the model type decides the family
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise BackboneError(
            f"{where}{path} names no model_type; expected a folder as transformers'"
            " save_pretrained writes it"
        )
    return data


def weight_files(folder: Path, *, where: str = "") -> list[Path]:
    """The safetensors files of a folder. Pickled weights are never read, as they can run code.

    Raises:
        BackboneError: There are none, a shard is absent, or the folder is an adapter.
    """
    # transformers would take the weights of the folder that it names, with the adapter inside
    if (folder / ADAPTER_FILE).exists():
        raise BackboneError(
            f"{where}{folder} holds {ADAPTER_FILE}, so that transformers would read the weights of"
            " another checkpoint; expected a backbone without an adapter: merge it, or remove the"
            " file"
        )
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise BackboneError(
            f"{where}{folder} holds no model.safetensors (nor its index); pickled weights are not"
            " read: load them once where you trust them and write the folder again with"
            " save_pretrained"
        )
    names = {str(name) for name in _read_index(index, where=where).values()}
    # an index could otherwise lead out of the folder, to any file of the machine
    elsewhere = sorted(name for name in names if Path(name).name != name)
    if elsewhere:
        raise BackboneError(f"{where}{index} names {elsewhere[0]!r}, expected files beside it")
    files = sorted(folder / name for name in names)
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise BackboneError(
            f"{where}{folder} lacks {', '.join(absent)}, which its model.safetensors.index.json"
            " names"
        )
    return files


def _read_index(index: Path, *, where: str) -> dict[str, Any]:
    try:
        return dict(read_json(index)["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackboneError(f"{where}{index} cannot be read: {error!r}") from error


def weight_shapes(files: Iterable[Path]) -> dict[str, list[int]]:
    """Read names and shapes of the tensors in safetensors files, from their headers alone.

    Raises:
        BackboneError: A file is damaged.
    """
    shapes: dict[str, list[int]] = {}
    for file in files:
        try:
            # opening reads the header only; a tensor is read when it is asked for
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                    shapes[name] = tensors.get_slice(name).get_shape()
        except (OSError, SafetensorError) as error:
            raise BackboneError(f"{file} is damaged or not a safetensors file: {error}") from error
    return shapes


def sha256_of(files: Sequence[Path]) -> str:
    """SHA-256 of a file, or of several files together.

    Several are hashed as `sha256sum` prints them: lines `<sha256>  <name>`, in the order of names.
    """
    digests = []
    for file in files:
        digests.append((file.name, kept_sha256(file)))
    if len(digests) == 1:
        return digests[0][1]
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@contextmanager
def no_hub_bars() -> Iterator[None]:
    """Download without progress bars, because many workers would draw theirs into one log."""
    # bars that the user switched off must stay off afterwards
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
