"""Put the weights of a pretrain run into a converted backbone, and cast those of any model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from suite.backbones.base import Family
from suite.errors import EVERYWHERE, BackboneError


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Give a model's floating-point weights and buffers a dtype, in place.

    The frequencies of rotary positions keep theirs, as in transformers' own loading: in bf16 their
    angles would be wrong by 0.2 rad at position 127 and by 2 at 1,000 (Llama 3).
    """
    frequencies = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name.endswith("inv_freq"):
            frequencies[name] = buffer
    model.to(dtype)
    for name, buffer in frequencies.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer)
    for module in model.modules():
        known: Any = module
        # peft's AdaMSS computes in the dtype that it was attached in
        if isinstance(vars(module).get("dtype"), torch.dtype):
            known.dtype = dtype


def load_weights(model: PreTrainedModel, family: Family, path: Path) -> None:
    """Copy tensors into a model's parameters by name.

    The file's head for pre-training is left out where the model ends in another head. A task head
    stays new, and so does BERT's pooler, which masked language modelling does not train: it is
    marked `is_new`, which makes it part of the task head.

    Args:
        model: Not partitioned, with the attention variant that the weights were trained with.
        family: The model's family.
        path: A safetensors file.

    Raises:
        BackboneError: The file cannot be read, or holds the weights of another model.
    """
    own = dict(model.named_parameters())
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            # Before the names are checked, because a new pooler counts as head there.
            mark_new_pooler(model, names)
            _check_names(model, family, names, path)
            # in place: other modules may hold the same parameters (tied embeddings)
            with torch.no_grad():
                for name in sorted(names & own.keys()):
                    tensor = file.get_tensor(name)
                    if tensor.shape != own[name].shape:
                        raise BackboneError(
                            f"{path}: {name} has shape {tuple(tensor.shape)}, the model's is"
                            f" {tuple(own[name].shape)}"
                        )
                    own[name].copy_(tensor)
    except (OSError, SafetensorError) as error:
        raise BackboneError(
            f"{path}: cannot be read: {error}; remove its folder ({EVERYWHERE}) to train it again"
        ) from error


def mark_new_pooler(model: PreTrainedModel, names: Collection[str]) -> None:
    """Note on the pooler, if the model has one, whether a checkpoint of these names lacks it."""
    pooler = cast(Any, getattr(model.base_model, "pooler", None))
    if pooler is not None:
        pooler.is_new = not any("pooler." in name for name in names)


def _check_names(model: PreTrainedModel, family: Family, names: set[str], path: Path) -> None:
    """Check that the file has every weight but the head's, and no other weight of a backbone."""
    heads = tuple(f"{name}." for name in family.head_names(model))
    own = {name for name, _ in model.named_parameters()}
    missing = sorted(name for name in own - names if not name.startswith(heads))
    unknown = sorted(names - own)
    # names outside the backbone are the pre-training head's; a model without a head has none
    if model.base_model is not model:
        unknown = [name for name in unknown if name.startswith(f"{model.base_model_prefix}.")]
    if missing or unknown:
        raise BackboneError(
            f"{path}: not the weights of this model: lacks {missing[:3]}, has {unknown[:3]} beside"
            " them"
        )
