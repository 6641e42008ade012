"""The backbone under an exported model: found by its name, or copied into the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from suite.backbones import families
from suite.backbones.base import Family
from suite.backbones.loading import ResolvedBackbone, build, identity, resolve
from suite.backbones.presets import PRESETS
from suite.errors import BackboneError
from suite.export.description import BASE, Description
from suite.train.restore import Restored


def by_name(restored: Restored) -> bool:
    """Whether whoever loads the folder can get the backbone by its name: from the hub, or from a Python package."""
    return restored.resolved.origin in ("hub", "package")


def base_name(restored: Restored) -> str:
    """What the backbone is called elsewhere: its id on the hub, `package:NAME/FOLDER`, or its own last name."""
    name, origin = restored.spec.arm.backbone.name, restored.resolved.origin
    if origin == "hub":
        return restored.resolved.path
    if origin == "package":
        return PRESETS[name].path if name in PRESETS else name
    return Path(name).name if origin == "folder" else name


def start_backbone(restored: Restored) -> PreTrainedModel:
    """The backbone as the trial found it, task head included, before attention was converted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(restored.spec.stream("init"))
        model = build(restored.resolved, restored.objective.head)
    ready_to_save(model, next(restored.model.parameters()).dtype)
    return model


def ready_to_save(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast in place, and let the configuration that is saved with the weights say so and be one that transformers reads again."""
    model.to(dtype)
    config: Any = model.config
    config.dtype = dtype
    if (
        config.num_labels == 1 and config.problem_type == "single_label_classification"
    ):  # a score for every choice
        config.problem_type = None


def open_base(description: Description, folder: Path) -> ResolvedBackbone:
    """The backbone that a description names; `base: none` gives one of the right shape, to be filled.

    Raises:
        BackboneError: It cannot be found, or is not what it was.
    """
    if description.base == "name":
        return _named(description, folder)
    if description.format == "transformers":
        return _described(description, folder, origin="folder")
    if description.base == "copy":
        return _described(description, folder / BASE, origin="folder")
    return _described(description, folder, origin="random")


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of an exported folder."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    return tokenizer


def _named(description: Description, folder: Path) -> ResolvedBackbone:
    choice, wanted = description.arm.backbone, description.base_identity
    revision = wanted.get("commit", choice.revision)
    own = choice.tokenizer in (None, "bytes")
    resolved = resolve(
        choice.model_copy(
            update={"revision": revision, **({} if own else {"tokenizer": str(folder)})}
        )
    )
    found = identity(resolved)
    if found.get("sha256") != wanted.get("sha256"):
        raise BackboneError(
            f"{choice.name}: its weights have SHA-256 {found.get('sha256')}, but under the exported model they had "
            f"{wanted.get('sha256')}; install the version that it was trained with"
        )
    return resolved


def _described(
    description: Description, folder: Path, *, origin: Literal["folder", "random"]
) -> ResolvedBackbone:
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return ResolvedBackbone(
        description.arm.backbone, _family(config.model_type), config, origin, str(folder)
    )


def _family(model_type: str) -> Family:
    for name in families.names():
        family = families.get(name)()
        if model_type in family.model_types:
            return family
    raise BackboneError(f"model type {model_type!r} belongs to no family")
