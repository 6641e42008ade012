"""Check that what peft's options name is in the model; peft passes over what is not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from suite.backbones.base import Family
from suite.errors import IncompatibleError, UnknownNameError

LISTS = ("target_modules", "feedforward_modules")
TOKENS = ("token_indices", "trainable_token_indices")
PATTERNS = ("rank_pattern", "alpha_pattern")


def check_names(
    model: PreTrainedModel, family: Family, options: Mapping[str, Any], *, name: str
) -> None:
    """Check every module, layer and token that the options name.

    Args:
        model: The backbone, attention variant included, without adapters.
        family: Its family.
        options: Of a configuration class of peft.
        name: The method, for errors.

    Raises:
        UnknownNameError: A module is not in the model; near names are offered.
        IncompatibleError: A layer or token is not.
    """
    places = [place for place, _ in model.named_modules()]
    for key in LISTS:
        entries = options.get(key)
        if not isinstance(entries, list):  # peft reads text as a regular expression
            continue
        for entry in entries:
            if not any(place == entry or place.endswith(f".{entry}") for place in places):
                raise UnknownNameError("module", entry, adaptable(model), where=f"{name}: {key}")
    for key in PATTERNS:
        for pattern in options.get(key) or {}:
            if not any(re.match(rf"(.*\.)?({pattern})$", place) for place in places):
                raise UnknownNameError("module", pattern, adaptable(model), where=f"{name}: {key}")
    _check_layers(model, family, options.get("layers_to_transform"), name=name)
    for key in TOKENS:
        _check_tokens(model, options.get(key), where=f"{name}: {key}")


def adaptable(model: PreTrainedModel) -> list[str]:
    """The last names of the linear maps and norms of a backbone, which peft adapts."""
    parts = set()
    for place, module in model.base_model.named_modules():
        is_map = isinstance(module, (nn.Linear, Conv1D))
        # Norms have a class of their own in each family, and all of them hold vectors alone.
        is_norm = any(p.ndim == 1 for p in module.parameters(recurse=False))
        if is_map or is_norm:
            parts.add(place.rpartition(".")[2])
    return sorted(parts)


def _check_layers(model: PreTrainedModel, family: Family, layers: Any, *, name: str) -> None:
    if isinstance(layers, int):
        layers = [layers]
    depth = max(len(stack.blocks) for stack in family.stacks(model))
    for layer in layers or []:
        if not 0 <= layer < depth:
            raise IncompatibleError(
                f"{name}: layers_to_transform: got {layer}, expected 0 to {depth - 1}, the blocks"
                f" of this {family.name} backbone"
            )


def _check_tokens(model: PreTrainedModel, indices: Any, *, where: str) -> None:
    if isinstance(indices, Mapping):
        indices = [index for group in indices.values() for index in group]
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.num_embeddings
    for index in indices or []:
        if not 0 <= index < size:
            raise IncompatibleError(
                f"{where}: got {index}, expected 0 to {size - 1}, the tokens that the backbone"
                " embeds"
            )
