"""Whether what peft's options name is in the model; peft passes over modules that are not."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from suite.backbones.base import Family
from suite.errors import IncompatibleError

LISTS = ("target_modules", "feedforward_modules")
PATTERNS = ("rank_pattern", "alpha_pattern")
TOKENS = ("token_indices", "trainable_token_indices")
log = logging.getLogger(__name__)


def check_names(
    model: PreTrainedModel, family: Family, options: Mapping[str, Any], *, name: str
) -> None:
    """Warn of modules and layers that the options name in vain, and check the tokens.

    A list may name the modules of several backbones, of which this is one.

    Args:
        model: The backbone, attention variant included, without adapters.
        family: Its family.
        options: Of a configuration class of peft.
        name: The method, for messages.

    Raises:
        IncompatibleError: A token is not in the vocabulary, or a pattern is none.
    """
    places = [place for place, _ in model.named_modules()]
    for key in LISTS:
        entries = options.get(key)
        if isinstance(entries, list):  # peft reads text as a regular expression
            for entry in entries:
                _find(rf"(.*\.)?{re.escape(entry)}$", entry, places, model, f"{name}: {key}")
    for key in PATTERNS:
        for pattern in options.get(key) or {}:
            _find(rf"(.*\.)?({pattern})$", pattern, places, model, f"{name}: {key}")
    layers = options.get("layers_to_transform") or []
    depth = max(len(stack.blocks) for stack in family.stacks(model))
    for layer in [layers] if isinstance(layers, int) else layers:
        if layer >= depth:
            _warn(f"{name}: layers_to_transform: the backbone has no layer {layer}, only {depth}")
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


def _find(pattern: str, entry: str, places: list[str], model: PreTrainedModel, where: str) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise IncompatibleError(
            f"{where}: got {entry!r}, expected a regular expression: {error}"
        ) from None
    if any(map(compiled.match, places)):
        return
    known = adaptable(model)
    near = get_close_matches(entry, known)
    hint = f"did you mean {' or '.join(near)}?"
    if not near:
        hint = f"it has {', '.join(known)}"
    _warn(f"{where}: the backbone has no module {entry}, and peft passes over it; {hint}")


@cache
def _warn(message: str) -> None:
    """Say it once; an arm is built several times."""
    log.warning(message)


def _check_tokens(model: PreTrainedModel, indices: Any, *, where: str) -> None:
    if isinstance(indices, Mapping):
        indices = [index for group in indices.values() for index in group]
    if not indices:
        return
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.num_embeddings
    for index in indices:
        if not 0 <= index < size:
            raise IncompatibleError(
                f"{where}: got {index}, expected 0 to {size - 1}, the tokens that the backbone"
                " embeds"
            )
