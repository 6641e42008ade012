"""The backbone under an exported model: found by its name, or copied into the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from suite.backbones.loading import ResolvedBackbone, build, identity, resolve, resolve_folder
from suite.backbones.presets import PRESETS
from suite.backbones.weights import cast_weights
from suite.config.task import LabelTask
from suite.config.trust import with_trust
from suite.errors import BackboneError
from suite.export.description import BASE, Description
from suite.files import read_json
from suite.train.restore import Restored


def found_by_name(restored: Restored) -> bool:
    """Whether others can get the backbone by its name: from the hub, or from a Python package."""
    return restored.resolved.origin in ("hub", "package")


def base_name(restored: Restored) -> str:
    """The backbone's name elsewhere.

    This is its id on the hub, `package:NAME/FOLDER`, or the last part of its folder's path.
    """
    name = restored.spec.arm.backbone.name
    origin = restored.resolved.origin
    if origin == "hub":
        return restored.resolved.path
    if origin == "package" and name in PRESETS:
        return PRESETS[name].path
    if origin == "folder":
        return Path(name).name
    return name


def start_backbone(restored: Restored) -> PreTrainedModel:
    """The backbone that the trial started from, task head included, with its own attention."""
    # The head was drawn from this stream; the caller's random numbers stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(restored.spec.stream("init"))
        model = build(restored.resolved, restored.objective.head)
    prepare_to_save(model, restored)
    return model


def prepare_to_save(model: nn.Module, restored: Restored) -> None:
    """Cast a model to the trained one's precision in place, and complete its configuration.

    The configuration gets the names of the labels, and becomes one that transformers reads again.
    """
    dtype = next(restored.model.parameters()).dtype
    cast_weights(model, dtype)
    config: Any = model.config
    config.dtype = dtype
    words = label_words(restored)
    if words is not None:
        config.id2label = dict(enumerate(words))
        config.label2id = {word: number for number, word in enumerate(words)}
    # A head that scores each choice has one label, which transformers does not read back as
    # classification.
    if config.num_labels == 1 and config.problem_type == "single_label_classification":
        config.problem_type = None


def label_words(restored: Restored) -> list[str] | None:
    """The name of each class, in the order of the head's logits; None where it has no classes."""
    task = restored.spec.task
    if restored.objective.head.kind != "classification" or not isinstance(task, LabelTask):
        return None
    return task.label.words


def reads_plain_text(restored: Restored) -> bool:
    """Whether `pipeline("text-classification")` gives the answers.

    An encoder reads a row's text or pair of texts as it stands. Every other backbone reads a
    template, which no library fills in.
    """
    kinds = ("classification", "regression")
    return restored.resolved.family.kind == "encoder" and restored.objective.head.kind in kinds


def open_base(description: Description, folder: Path) -> ResolvedBackbone:
    """Find the backbone that a description names; `base: none` gives a shape without weights.

    Raises:
        BackboneError: It cannot be found, or is not the one that was trained on.
    """
    if description.base == "name":
        return _named(description, folder)
    if description.format == "transformers":
        return _described(description, folder, origin="folder")
    if description.base == "copy":
        return _described(description, folder / BASE, origin="folder")
    return _described(description, folder, origin="random")


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of an exported folder.

    Raises:
        BackboneError: It cannot be read.
    """
    kind: Any = AutoTokenizer
    try:
        described = read_json(folder / "tokenizer_config.json")
        # For some models (ModernBERT, Qwen2, ...) transformers takes another class than the file
        # names, which cuts texts in another way.
        for named in (ByT5Tokenizer, PreTrainedTokenizerFast):
            if described.get("tokenizer_class") == named.__name__:
                kind = named
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    # Of a file that holds something else, each library raises what it stumbles on.
    except Exception as error:
        raise BackboneError(
            f"{folder}: its tokenizer cannot be read: {error}; export the model again"
        ) from error
    return tokenizer


def _named(description: Description, folder: Path) -> ResolvedBackbone:
    # A name on the hub may move on to other weights; the commit that was trained on does not.
    choice = description.arm.backbone
    wanted = description.base_identity
    changes = {"revision": wanted.get("commit", choice.revision)}
    # The exported folder holds the tokenizer: its name may be a folder of another machine.
    if choice.tokenizer not in (None, "bytes"):
        changes["tokenizer"] = str(folder)
    resolved = resolve(with_trust(choice.model_copy(update=changes), where=str(folder)))
    found = identity(resolved)
    # A package has no commit, so the digest of its files tells versions apart.
    if found.get("sha256") != wanted.get("sha256"):
        raise BackboneError(
            f"{choice.name}: its weights have SHA-256 {found.get('sha256')}, but under the exported"
            f" model they had {wanted.get('sha256')};"
            " install the version that it was trained with"
        )
    return resolved


def _described(
    description: Description, folder: Path, *, origin: Literal["folder", "random"]
) -> ResolvedBackbone:
    # Only whoever calls this can trust the folder's code, by the folder's path. What `suite.json`
    # says of the backbone was written by whoever made the folder.
    changes = {"name": str(folder), "revision": "main", "config": None}
    choice = with_trust(description.arm.backbone.model_copy(update=changes), where=str(folder))
    return resolve_folder(choice, folder, origin=origin)
