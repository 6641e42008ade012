"""Keep frozen weights whole on every rank, where ZeRO-3 would gather them again in every step.

A frozen weight needs neither a gradient nor an optimizer, so it need not be a parameter. As a
buffer it has the same name and value, and DeepSpeed leaves it alone. What trains stays partitioned.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def keep_whole(model: nn.Module, device: str) -> tuple[str, ...]:
    """Replace the frozen parameters of a model by buffers of the same names on `device`.

    The buffers are not persistent: checkpoints hold what trains. A tensor that modules share stays
    shared.

    Args:
        model: Its `requires_grad` mask and its dtype are final, because moving a module later
            would give each of two modules that share a buffer one of its own.
        device: "cuda" or "cpu".

    Returns:
        The buffers' qualified names, each tensor once, in the order of the parameters.
    """
    names = []
    buffers: dict[nn.Parameter, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            names.append(name)
            buffers[parameter] = parameter.detach().to(device)
    for module in model.modules():
        # A tied parameter is met in each of its modules, so that all get the same buffer.
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in buffers:
                delattr(module, name)
                module.register_buffer(name, buffers[parameter], persistent=False)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and next(module.parameters(), None) is None:
            _say_place_by_buffers(module)
    return tuple(names)


def _say_place_by_buffers(model: PreTrainedModel) -> None:
    """Let a model without parameters tell its device and dtype.

    transformers asks its first parameter, and a backbone has none where all that trains lies
    outside of it, as prompts of `peft` do.
    """
    kind = type(model)

    def device(self: PreTrainedModel) -> torch.device:
        return next(self.buffers()).device

    def dtype(self: PreTrainedModel) -> torch.dtype:
        return next(buffer.dtype for buffer in self.buffers() if buffer.is_floating_point())

    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "device": property(device),
        "dtype": property(dtype),
    }
    # Both are properties of the class, so no attribute of the object can stand in for them.
    model.__class__ = type(kind.__name__, (kind,), members)


def kept_weights(model: nn.Module, names: tuple[str, ...]) -> Mapping[str, Tensor]:
    """The buffers that `keep_whole` made, by name."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in names}


def copy_beside(model: nn.Module) -> nn.Module:
    """Copy a model that shares all its frozen tensors with the original.

    Args:
        model: As `keep_whole` left it, before DeepSpeed has seen it.
    """
    shared: dict[int, Tensor] = {}
    for buffer in model.buffers():
        shared[id(buffer)] = buffer
    # deepcopy takes what its memo holds for the copy of an object.
    return copy.deepcopy(model, shared)
