"""Put the weights of a pretrain run into a converted backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from suite.backbones.base import Family
from suite.errors import BackboneError


def load_weights(model: PreTrainedModel, family: Family, path: Path) -> None:
    """Copy tensors into a model's parameters by name.

    The head for pre-training is left behind where the model ends in another. A task head stays new, and so does BERT's
    pooler, which masked language modelling does not train: it is marked `is_new`, part of the task head.

    Args:
        model: Unpartitioned, with the attention variant that the weights were trained with.
        path: A safetensors file.

    Raises:
        BackboneError: The file cannot be read, or is not of this model.
    """
    own = dict(model.named_parameters())
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            _mark_new_pooler(model, names)
            _check_names(model, family, names, path)
            with torch.no_grad():
                for name in sorted(names & own.keys()):
                    tensor = file.get_tensor(name)
                    if tensor.shape != own[name].shape:
                        raise BackboneError(
                            f"{path}: {name} has shape {tuple(tensor.shape)}, the model's is {tuple(own[name].shape)}"
                        )
                    own[name].copy_(tensor)
    except (OSError, SafetensorError) as error:
        raise BackboneError(
            f"{path}: cannot be read: {error}; remove its folder to train it again"
        ) from error


def _mark_new_pooler(model: PreTrainedModel, names: set[str]) -> None:
    pooler = cast(Any, getattr(model.base_model, "pooler", None))
    if pooler is not None:
        pooler.is_new = not any(".pooler." in name for name in names)


def _check_names(model: PreTrainedModel, family: Family, names: set[str], path: Path) -> None:
    """Everything but the head must be there, and nothing of a backbone beside it."""
    own = {name for name, _ in model.named_parameters()}
    heads = tuple(f"{name}." for name in family.head_names(model))
    missing = sorted(name for name in own - names if not (heads and name.startswith(heads)))
    inside = f"{model.base_model_prefix}."
    strange = sorted(
        name for name in names - own if name.startswith(inside) or model.base_model is model
    )
    if missing or strange:
        raise BackboneError(
            f"{path}: not the weights of this model: lacks {missing[:3]}, has {strange[:3]} beside them"
        )
