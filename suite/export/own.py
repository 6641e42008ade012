"""The suite's own format, for what no library can hold: the trained tensors, and a description that rebuilds the rest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from suite.backbones.loading import build
from suite.errors import CheckpointError
from suite.export.base import by_name, open_base, ready_to_save, start_backbone
from suite.export.description import BASE, TENSORS, Description, Where
from suite.petl.arm import build_arm
from suite.train.restore import Restored

SEED = 0


def where_base(restored: Restored) -> Where:
    """A copy is needed where the backbone cannot be found by name and part of it stayed as it was."""
    if all(parameter.requires_grad for parameter in restored.model.parameters()):
        return "none"
    return "name" if by_name(restored) else "copy"


def write_own(restored: Restored, description: Description, folder: Path) -> None:
    """The base where it has to be copied, its configuration, and every tensor that a rebuild does not bring back by itself.

    These are the trained ones, and whatever else was drawn at random or pretrained: a rebuild with another seed tells.
    """
    shapes = build(restored.resolved, restored.objective.head, meta=True)
    ready_to_save(shapes, next(restored.model.parameters()).dtype)
    shapes.config.save_pretrained(str(folder))
    if description.base == "copy":
        start_backbone(restored).save_pretrained(str(folder / BASE))
    rebuilt = dict(_tensors(assemble(description, folder)))
    kept = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in _tensors(restored.model)
        if tensor.requires_grad or not torch.equal(tensor, rebuilt[name])
    }
    save_file(kept, folder / TENSORS)


def load_own(description: Description, folder: Path) -> nn.Module:
    """What `write_own` wrote.

    Raises:
        CheckpointError: The tensors are not those of this arm.
        BackboneError: The base cannot be found, or is not what it was.
    """
    model, path = assemble(description, folder), folder / TENSORS
    own = dict(_tensors(model))
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    lacking = [name for name, tensor in own.items() if tensor.requires_grad and name not in stored]
    strange = [
        name
        for name, tensor in stored.items()
        if name not in own or own[name].shape != tensor.shape
    ]
    if lacking or strange:
        raise CheckpointError(
            f"{path}: not the tensors of this model: lacks {lacking[:3]}, does not know {strange[:3]}"
        )
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)
    return model


def assemble(description: Description, folder: Path) -> nn.Module:
    """The arm before training, in the precision it is to have; its random parts mean nothing."""
    arm = description.arm
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model, _ = build_arm(
            open_base(description, folder),
            description.made_head,
            arm,
            pretrained=True,
            random_start=description.base == "none",
        )
    return model.to(getattr(torch, description.dtype))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, also those that a state dict leaves out; shared ones once."""
    return chain(model.named_parameters(), model.named_buffers())
