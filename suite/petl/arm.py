"""Build an arm: backbone, attention variant, PETL method and task head put together, and counted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from suite.attention import variants
from suite.attention.base import Variant
from suite.backbones.loading import Head, ResolvedBackbone, build
from suite.backbones.weights import load_weights
from suite.config.arm import Arm
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
        method: The rest of `trainable`, what papers report for a method, with what the attention variant adds.
    """

    total: int
    trainable: int
    head: int
    method: int


def build_arm(
    resolved: ResolvedBackbone,
    head: Head,
    arm: Arm,
    *,
    meta: bool = False,
    pretrained: bool = False,
    weights: Path | None = None,
    random_start: bool = False,
) -> tuple[nn.Module, Method[Any]]:
    """The model to train and the method that shaped it.

    What the attention variant adds to the checkpoint trains with every method that sends gradients through the backbone,
    unless `weights` hold it: then it is part of the backbone like any other weight.

    Args:
        resolved: Which backbone.
        head: What the model answers with.
        arm: Its attention variant converts the backbone before its method sees it; of the architecture, what is left out takes
            the method's default.
        meta: Shapes only: no weights are read or made.
        pretrained: Treat the converted backbone as pretrained even if the arm names no pretrain run: for the pretrain run itself,
            and for an arm that is only counted.
        weights: File of these weights; None on the meta device, and for the pretrain run itself.
        random_start: New weights everywhere, although the backbone has others: for a pretrain run.

    Raises:
        ConfigError: Unknown names or keys, or values out of range.
        IncompatibleError: Choices that do not go together.
    """
    pretrained = pretrained or arm.pretrain is not None
    petl = get_method(arm.method).configure(arm.architecture)
    variant = variants.get(arm.attention.name).configure(arm.attention.options)
    check_family(resolved, "method", petl.name, petl.families)
    check_family(
        resolved, "attention variant", variant.name, variant.families, why=variant.families_why
    )
    check_pair(resolved, variant, petl, pretrained=pretrained)
    model, family = build(resolved, head, meta=meta, random_start=random_start), resolved.family
    variant.convert(model, family)
    if weights is not None:
        load_weights(model, family, weights)
    new = [] if weights is not None else variant.new_parameters(model, family)
    if new and not petl.backward_through_backbone:
        check_trained(variant, petl, pretrained=pretrained)
        new = []
    trained = petl.attach(model, family)
    for parameter in (*new, *task_head(trained, resolved)):
        parameter.requires_grad_(True)
    return trained, petl


def check_pair(
    resolved: ResolvedBackbone, variant: Variant[Any], petl: Method[Any], *, pretrained: bool
) -> None:
    """Raise IncompatibleError for a variant without the weights it needs, or a method without the projections it needs."""
    if variant.start == "scratch" and resolved.origin != "random" and not pretrained:
        raise IncompatibleError(
            f"attention {variant.name} starts from scratch: in the checkpoint of {resolved.choice.name} its new weights mean nothing; "
            f"add a pretrain stage (pretrain: ...) or take random weights (backbones: [{{name: {resolved.choice.name}, config: {{}}}}])"
        )
    if petl.needs_projections and not variant.keeps_projections:
        raise IncompatibleError(
            f"method {petl.name} does not go with attention {variant.name}: {petl.needs_projections}, "
            "and this variant changes the projections; use another method, or attention pretrained"
        )


def check_trained(variant: Variant[Any], petl: Method[Any], *, pretrained: bool) -> None:
    """Raise IncompatibleError where nothing ever trains what a variant adds; a pretrain stage has done it, and it stays frozen."""
    if not pretrained:
        raise IncompatibleError(
            f"method {petl.name} does not go with attention {variant.name}: the method runs the backbone without a backward pass, "
            "so that the variant's new parameters would never train; add a pretrain stage (pretrain: ...) or use another method"
        )


def check_family(
    resolved: ResolvedBackbone, kind: str, name: str, families: Collection[str], *, why: str = ""
) -> None:
    """Raise IncompatibleError, which says `why`, unless `families` holds the backbone's."""
    if resolved.family.name not in families:
        known, reason = ", ".join(sorted(families)), f", {why}" if why else ""
        raise IncompatibleError(
            f"{kind} {name} does not work on {resolved.choice.name}, a {resolved.family.name} backbone{reason}; it works on {known}"
        )


def check_arm(
    resolved: ResolvedBackbone,
    head: Head,
    arm: Arm,
    *,
    max_length: int | None = None,
    pretrained: bool = False,
) -> None:
    """Everything `build_arm` would refuse, found without reading weights.

    Args:
        pretrained: As in `build_arm`.
        max_length: Longest sequence in tokens, where it is known: it must fit the backbone's positions.
    """
    _, petl = build_arm(resolved, head, arm, meta=True, pretrained=pretrained)
    positions, needed = (
        getattr(resolved.config, "max_position_embeddings", None),
        (max_length or 0) + petl.extra_positions(),
    )
    if positions is not None and needed > positions:
        extra = (
            f" and the {petl.extra_positions()} positions of {petl.name}"
            if petl.extra_positions()
            else ""
        )
        raise IncompatibleError(
            f"sequences of {max_length} tokens{extra} exceed the backbone's {positions} positions; set training.max_length "
            f"(where a decoder writes text: and training.target_max_length, together) to at most {positions - petl.extra_positions()}"
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
    resolved: ResolvedBackbone,
    head: Head,
    arm: Arm,
    *,
    pretrained: bool = False,
) -> ArmCount:
    """Count an arm on the meta device: no weights are read.

    Args:
        pretrained: As in `build_arm`; True also counts what could not train without a pretrain stage.

    Raises:
        As `build_arm`.
    """
    model, _ = build_arm(resolved, head, arm, meta=True, pretrained=pretrained)
    return count(model, task_head(model, resolved))


def task_head(model: nn.Module, resolved: ResolvedBackbone) -> list[nn.Parameter]:
    """The task head's parameters of a built arm."""
    return head_parameters(model, resolved.family)


def trainable_names(model: nn.Module) -> list[str]:
    """Names of the trained parameters, in the model's order; shared tensors once."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The trained tensors by name, detached, shared tensors once: what a checkpoint of an unpartitioned arm holds."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def load_trained_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put trained tensors into a freshly built arm.

    Raises:
        ValueError: Names or shapes are not exactly those of the arm's trained parameters.
    """
    own = trained_state(model)
    if own.keys() != state.keys():
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        raise ValueError(
            f"trained tensors differ from the arm's: missing {missing}, unknown {unknown}"
        )
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
    complete: dict[str, Any] = (
        get_method(method).configure(architecture).config.model_dump(mode="json")
    )
    return complete
