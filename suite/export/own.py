"""The suite's own format, for what no library can hold.

It holds the trained tensors, and a description that rebuilds the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from suite.backbones.loading import build
from suite.backbones.weights import cast_weights
from suite.errors import CheckpointError
from suite.export.base import found_by_name, open_base, prepare_to_save, start_backbone
from suite.export.description import BASE, TENSORS, BasePlace, Description
from suite.petl.arm import build_arm
from suite.petl.own_code import check_own_code
from suite.train.restore import Restored

# Seed of a rebuild: whatever is drawn with it differs from what the trial drew.
SEED = 0


def place_of_base(restored: Restored) -> BasePlace:
    """Decide where the base comes from when the folder is loaded.

    A copy is needed where no name finds the backbone and part of it stayed as it was.
    """
    if all(parameter.requires_grad for parameter in restored.model.parameters()):
        return "none"
    if found_by_name(restored):
        return "name"
    return "copy"


def write_own(restored: Restored, description: Description, folder: Path) -> None:
    """Write the base's configuration, the base where it is copied, and the tensors.

    The tensors are those that a rebuild does not bring back by itself: the trained ones, and
    whatever else was drawn at random or pretrained. A rebuild with another seed shows which.
    """
    # On the meta device: only the configuration is needed here, not the weights.
    shapes = build(restored.resolved, restored.objective.head, meta=True)
    prepare_to_save(shapes, restored)
    shapes.config.save_pretrained(str(folder))
    if description.base == "copy":
        start_backbone(restored).save_pretrained(str(folder / BASE))
    rebuilt = dict(_tensors(assemble(description, folder)))
    kept = {}
    for name, tensor in _tensors(restored.model):
        if tensor.requires_grad or not torch.equal(tensor, rebuilt[name]):
            kept[name] = tensor.detach().cpu().clone().contiguous()
    save_file(kept, folder / TENSORS)


def load_own(description: Description, folder: Path) -> nn.Module:
    """Load what `write_own` wrote.

    Raises:
        CheckpointError: The tensors are not those of this arm.
        BackboneError: The base cannot be found, or is not the one that was trained on.
    """
    model = assemble(description, folder)
    path = folder / TENSORS
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    own = dict(_tensors(model))
    missing = []
    for name, tensor in own.items():
        # What trained is always stored; all else only where a rebuild does not bring it back.
        if tensor.requires_grad and name not in stored:
            missing.append(name)
    unknown = []
    for name, tensor in stored.items():
        if name not in own or own[name].shape != tensor.shape:
            unknown.append(name)
    if missing or unknown:
        raise CheckpointError(
            f"{path}: expected the tensors of this model; {len(missing)} are missing, as"
            f" {missing[:3]}, and {len(unknown)} are not of this model, as {unknown[:3]}"
        )
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)
    return model


def assemble(description: Description, folder: Path) -> nn.Module:
    """Build the arm before training, in its precision; its random parts mean nothing.

    Raises:
        OtherCodeError: This host has other files of the user's than the arm was made from.
    """
    arm = description.arm
    check_own_code(arm)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model, _ = build_arm(
            open_base(description, folder),
            description.made_head,
            arm,
            pretrained=True,  # what the variant adds is among the stored tensors
            random_start=description.base == "none",
        )
    cast_weights(model, getattr(torch, description.dtype))
    return model


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, also those that a state dict leaves out; shared ones once."""
    return chain(model.named_parameters(), model.named_buffers())
