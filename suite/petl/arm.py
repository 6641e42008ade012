"""Build an arm: backbone, attention variant, PETL method and task head put together, and counted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from suite.attention import variants
from suite.backbones.loading import Head, ResolvedBackbone, build
from suite.config.sweep import AttentionChoice
from suite.errors import IncompatibleError
from suite.petl import get_method
from suite.petl.base import Method, head_parameters


@dataclass(frozen=True, slots=True)
class ArmCount:
    """Parameters of an arm; shared tensors count once.

    Attributes:
        total: All.
        trainable: Those that train, with the task head.
        head: Part of `trainable` that is the task head.
        method: The rest of `trainable`: what papers report for a method.
    """

    total: int
    trainable: int
    head: int
    method: int


def build_arm(
    resolved: ResolvedBackbone, head: Head, *, attention: AttentionChoice, method: str, architecture: Mapping[str, Any], meta: bool = False
) -> tuple[nn.Module, Method[Any]]:
    """The model to train and the method that shaped it.

    Args:
        resolved: Which backbone.
        head: What the model answers with.
        attention: Variant that converts the backbone before the method sees it.
        method: Name, alias or `peft:<type>`.
        architecture: The method's hyperparameters; what is left out takes its default.
        meta: Shapes only: no weights are read or made.

    Raises:
        ConfigError: Unknown names or keys, or values out of range.
        IncompatibleError: Choices that do not go together.
    """
    petl = get_method(method).configure(architecture)
    variant = variants.get(attention.name).configure(attention.options)
    check_family(resolved, "method", petl.name, petl.families)
    check_family(resolved, "attention variant", variant.name, variant.families)
    model, family = build(resolved, head, meta=meta), resolved.family
    variant.convert(model, family)
    trained = petl.attach(model, family)
    for parameter in task_head(trained, resolved):
        parameter.requires_grad_(True)
    return trained, petl


def check_family(resolved: ResolvedBackbone, kind: str, name: str, families: Collection[str]) -> None:
    """Raise IncompatibleError unless `families` holds the backbone's."""
    if resolved.family.name not in families:
        known = ", ".join(sorted(families))
        raise IncompatibleError(
            f"{kind} {name} does not work on {resolved.choice.name}, a {resolved.family.name} backbone; it works on {known}"
        )


def check_arm(
    resolved: ResolvedBackbone,
    head: Head,
    *,
    attention: AttentionChoice,
    method: str,
    architecture: Mapping[str, Any],
    max_length: int | None = None,
) -> None:
    """Everything `build_arm` would refuse, found without reading weights.

    Args:
        max_length: Longest input in tokens, where it is known: it must fit the backbone's positions.
    """
    _, petl = build_arm(resolved, head, attention=attention, method=method, architecture=architecture, meta=True)
    positions, needed = getattr(resolved.config, "max_position_embeddings", None), (max_length or 0) + petl.extra_positions()
    if positions is not None and needed > positions:
        extra = f" and the {petl.extra_positions()} positions of {petl.name}" if petl.extra_positions() else ""
        raise IncompatibleError(
            f"inputs of {max_length} tokens{extra} exceed the backbone's {positions} positions; "
            f"set training.max_length to at most {positions - petl.extra_positions()}"
        )


def count(model: nn.Module, head: Collection[nn.Parameter]) -> ArmCount:
    """Count the parameters of a built arm, also one that ZeRO-3 has partitioned.

    Args:
        model: What `build_arm` returned.
        head: The task head's parameters, as `task_head` finds them.
    """
    heads = {id(parameter) for parameter in head}
    total = trainable = in_head = 0
    for parameter in model.parameters():
        elements = int(getattr(parameter, "ds_numel", parameter.numel()))
        total += elements
        if parameter.requires_grad:
            trainable += elements
            in_head += elements if id(parameter) in heads else 0
    return ArmCount(total=total, trainable=trainable, head=in_head, method=trainable - in_head)


def count_arm(
    resolved: ResolvedBackbone, head: Head, *, attention: AttentionChoice, method: str, architecture: Mapping[str, Any]
) -> ArmCount:
    """Count an arm on the meta device: no weights are read.

    Raises:
        As `build_arm`.
    """
    model, _ = build_arm(resolved, head, attention=attention, method=method, architecture=architecture, meta=True)
    return count(model, task_head(model, resolved))


def task_head(model: nn.Module, resolved: ResolvedBackbone) -> list[nn.Parameter]:
    """The task head's parameters of a built arm."""
    return head_parameters(model, resolved.family)


def trainable_names(model: nn.Module) -> list[str]:
    """Names of the trained parameters, in the model's order; shared tensors once."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The trained tensors by name, detached, shared tensors once: what a checkpoint of an unpartitioned arm holds."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_trained_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put trained tensors into a freshly built arm.

    Raises:
        ValueError: Names or shapes are not exactly those of the arm's trained parameters.
    """
    own = trained_state(model)
    if own.keys() != state.keys():
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        raise ValueError(f"trained tensors differ from the arm's: missing {missing}, unknown {unknown}")
    wrong = [name for name in own if own[name].shape != state[name].shape]
    if wrong:
        raise ValueError(f"trained tensors of another shape than the arm's: {wrong}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def full_architecture(method: str, architecture: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture with every default filled in, as it goes into an arm's name and record.

    Raises:
        ConfigError: As `Method.configure`.
    """
    complete: dict[str, Any] = get_method(method).configure(architecture).config.model_dump(mode="json")
    return complete
