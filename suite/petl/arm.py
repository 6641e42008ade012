"""Build an arm of backbone, attention variant, PETL method and task head; check it and count it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from suite.attention import variants
from suite.attention.base import Variant
from suite.backbones import all_families
from suite.backbones.base import Family
from suite.backbones.fit import method_refusal, served_families, variant_refusal
from suite.backbones.loading import Head, ResolvedBackbone, build
from suite.backbones.weights import load_weights
from suite.config.arm import Arm
from suite.config.training import TrainingConfig
from suite.errors import IncompatibleError, OwnCodeError
from suite.petl import get_method, methods
from suite.petl.base import Method, head_parameters
from suite.registry import own_code_named


@dataclass(frozen=True, slots=True)
class ArmCount:
    """Number of parameters of an arm; a shared tensor counts once.

    Attributes:
        total: All parameters.
        trainable: Those that train, with the task head.
        head: The part of `trainable` that is the task head.
        method: The rest of `trainable`: what papers report for a method, and what the attention
            variant adds.
    """

    total: int
    trainable: int
    head: int
    method: int


@own_code_named()
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
    """Build the model to train.

    What the attention variant adds to the checkpoint trains with every method that sends gradients
    through the backbone. If `weights` has it, it is part of the backbone like any other weight.

    Args:
        resolved: The backbone.
        head: What the model ends in.
        arm: Its attention variant converts the backbone before its method sees it. An architecture
            need not be complete: the method's defaults fill it.
        meta: Whether to make shapes only, without reading or making weights.
        pretrained: Whether the converted backbone counts as pretrained even if the arm names no
            pretrain run: for the pretrain run itself, and for an arm that is only counted.
        weights: File of the pretrain run's weights; None on the meta device, and for the pretrain
            run itself.
        random_start: Whether all weights are new, although the backbone has others: for a pretrain
            run.

    Returns:
        The model, and the method that shaped it.

    Raises:
        ConfigError: A name or key is unknown, or a value out of range.
        IncompatibleError: The choices do not go together.
        OwnCodeError: A plug-in of the user's own raises something else, or trains what its own
            `expected_trainable` does not count.
    """
    pretrained = pretrained or arm.pretrain is not None
    petl = get_method(arm.method).configure(arm.architecture)
    variant = variants.get(arm.attention.name).configure(arm.attention.options)
    check_family(resolved, "method", petl, method_refusal(petl, resolved.family))
    check_family(resolved, "attention variant", variant, variant_refusal(variant, resolved.family))
    check_pair(resolved, variant, petl, pretrained=pretrained)
    model = build(resolved, head, meta=meta, random_start=random_start)
    family = resolved.family
    known = {name for name, _ in model.named_parameters()}
    variant.convert(model, family)
    _check_new(model, variant, known)
    new: list[nn.Parameter] = []
    if weights is not None:
        load_weights(model, family, weights)
    else:
        new = variant.new_parameters(model, family)
    if new and not petl.backward_through_backbone:
        check_trained(variant, petl, pretrained=pretrained)
        new = []  # a pretrain run has trained them, and they stay frozen
    added = _names(new, model)
    expected = None
    # Shapes are enough to count, and every arm is built of them before a sweep starts.
    if meta and methods.digest(type(petl)) is not None:
        expected = petl.expected_trainable(model, family)
    trained = _attached(petl, model, family)
    if expected is not None:
        _check_trains(petl, count(trained, task_head(trained, resolved)).method, expected)
    # after attach, which freezes whatever the method does not train
    for parameter in (*new, *task_head(trained, resolved)):
        parameter.requires_grad_(True)
    # On the meta device peft wraps a copy, which has the same names.
    for name, parameter in trained.named_parameters():
        if name.removeprefix("base_model.model.").replace(".base_layer.", ".") in added:
            parameter.requires_grad_(True)
    return trained, petl


def _names(parameters: Collection[nn.Parameter], model: nn.Module) -> set[str]:
    ids = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def _check_new(model: nn.Module, variant: Variant[Any], known: Collection[str]) -> None:
    """Check that a variant of the user's own says what it adds.

    Raises:
        OwnCodeError: It adds a parameter and has no `new_parameters`: no method would train it.
    """
    kind = type(variant)
    if variants.digest(kind) is None or kind.new_parameters is not Variant.new_parameters:
        return
    for name, _ in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        # Maps that take the place of others, under whatever name, are made from them.
        if name not in known and not isinstance(owner, (nn.Linear, Conv1D)):
            raise OwnCodeError(
                f"{inspect.getsourcefile(kind)}: attention variant {variant.name} adds the"
                f" parameter {name}, and nothing trains it: define new_parameters(self, model,"
                " family), which returns what every method trains ([] = it stays as it is)"
            )


def _attached(petl: Method[Any], model: PreTrainedModel, family: Family) -> nn.Module:
    """The model to train, as the method makes it.

    Raises:
        OwnCodeError: It makes something else, as where `return model` was forgotten.
    """
    trained: object = petl.attach(model, family)
    if not isinstance(trained, nn.Module):
        code = type(petl).attach.__code__
        raise OwnCodeError(
            f"{code.co_filename}:{code.co_firstlineno}: attach of method {petl.name} returns"
            f" {trained!r}, expected the model to train, an nn.Module"
        )
    if not hasattr(trained, "config"):
        code = type(petl).attach.__code__
        raise OwnCodeError(
            f"{code.co_filename}:{code.co_firstlineno}: attach of method {petl.name} returns a"
            f" {type(trained).__name__} without `config`, which exports read: set it to"
            " model.config"
        )
    return trained


def _check_trains(petl: Method[Any], trains: int, expected: int) -> None:
    """Check that a method of the user's own trains what it says.

    Args:
        petl: The method.
        trains: Parameters that train beside the task head.
        expected: What its formula says.

    Raises:
        OwnCodeError: The two differ, or nothing trains.
    """
    if trains == expected and trains > 0:
        return
    code = type(petl).attach.__code__
    place = f"{code.co_filename}:{code.co_firstlineno}: attach of method {petl.name}"
    if trains == 0:
        raise OwnCodeError(
            f"{place} leaves nothing to train beside the task head: call freeze(model) first, and"
            " then requires_grad_(True) on what trains"
        )
    raise OwnCodeError(
        f"{place} leaves {trains:,} parameters to train beside the task head, and its"
        f" expected_trainable says {expected:,}: freeze(model) freezes what the method does not"
        " train, and one of the two counts is wrong"
    )


def check_pair(
    resolved: ResolvedBackbone, variant: Variant[Any], petl: Method[Any], *, pretrained: bool
) -> None:
    """Check that variant and method find what they need.

    Raises:
        IncompatibleError: The variant lacks trained weights, or the method the checkpoint's own
            projections.
    """
    if variant.start == "scratch" and resolved.origin != "random" and not pretrained:
        raise IncompatibleError(
            f"attention {variant.name} starts from scratch: in the checkpoint of"
            f" {resolved.choice.name} its new weights mean nothing; add a pretrain stage"
            " (pretrain: ...) or take random weights"
            f" (backbones: [{{name: {resolved.choice.name}, config: {{}}}}]; with suite trial:"
            " --set backbone.config={})"
        )
    if petl.needs_projections and not variant.keeps_projections:
        raise IncompatibleError(
            f"method {petl.name} does not go with attention {variant.name}:"
            f" {petl.needs_projections}, and this variant changes the projections or what is cached"
            " of them; use another"
            " method, or attention pretrained"
        )


def check_trained(variant: Variant[Any], petl: Method[Any], *, pretrained: bool) -> None:
    """Check that something trains what a variant adds, where the method itself cannot.

    Raises:
        IncompatibleError: There is no pretrain stage that would have trained it.
    """
    if not pretrained:
        raise IncompatibleError(
            f"method {petl.name} does not go with attention {variant.name}: the method runs the"
            " backbone without a backward pass, so that the variant's new parameters would never"
            " train; add a pretrain stage (pretrain: ...) or use another method"
        )


def check_family(
    resolved: ResolvedBackbone,
    kind: str,
    plug_in: Variant[Any] | Method[Any],
    why_not: str | None,
) -> None:
    """Check that a method or variant works on the backbone's family.

    Args:
        resolved: The backbone.
        kind: "method" or "attention variant", for the message.
        plug_in: The method or variant.
        why_not: Why it does not, for the message; None = it does.

    Raises:
        IncompatibleError: It does not.
    """
    if why_not is None:
        return
    known = ", ".join(served_families(plug_in, all_families()))
    reason = f", {why_not}" if why_not else ""
    raise IncompatibleError(
        f"{kind} {plug_in.name} does not work on {resolved.choice.name}, a {resolved.family.name}"
        f" backbone{reason}; it works on {known}"
    )


def check_recomputed(method: type[Method[Any]], training: TrainingConfig) -> None:
    """Check that a method trains under the sweep's `gradient_checkpointing`.

    Raises:
        IncompatibleError: It does not.
    """
    if training.gradient_checkpointing and method.not_recomputed:
        raise IncompatibleError(
            f"method {method.name} does not go with training.gradient_checkpointing: "
            f"{method.not_recomputed}; set it to false"
        )


def check_arm(
    resolved: ResolvedBackbone,
    head: Head,
    arm: Arm,
    *,
    max_length: int | None = None,
    pretrained: bool = False,
) -> None:
    """Check an arm without reading weights.

    Args:
        resolved: The backbone.
        head: What the model ends in.
        arm: The arm.
        max_length: Longest sequence in tokens, where it is known; it must fit the backbone's
            positions.
        pretrained: See `build_arm`.

    Raises:
        ConfigError: See `build_arm`.
        IncompatibleError: See `build_arm`; or the sequences, or what the method puts in front of
            them, are too long.
    """
    _, petl = build_arm(resolved, head, arm, meta=True, pretrained=pretrained)
    # T5 has relative positions and no table, so its sequences may be of any length
    positions = resolved.family.positions(resolved.config)
    extra = petl.extra_positions()
    if positions is None:
        return
    # no sequence is short enough then
    if extra >= positions:
        raise IncompatibleError(
            f"the {extra} positions of {petl.name} leave none of the backbone's {positions}"
            " positions to a sequence; use fewer"
        )
    if max_length is not None and max_length + extra > positions:
        and_extra = f" and the {extra} positions of {petl.name}" if extra else ""
        raise IncompatibleError(
            f"sequences of {max_length} tokens{and_extra} exceed the backbone's {positions}"
            " positions; set max_length (of training, or of the pretrain stage; where a decoder"
            f" writes text: and target_max_length, together) to at most {positions - extra}"
        )


def count(model: nn.Module, head: Collection[nn.Parameter]) -> ArmCount:
    """Count the parameters of a built arm, which ZeRO-3 may have partitioned.

    Args:
        model: What `build_arm` returned.
        head: The task head's parameters, as `task_head` finds them.
    """
    # by id, because tensors compare by value
    heads = {id(parameter) for parameter in head}
    total = 0
    trainable = 0
    in_head = 0
    for parameter in model.parameters():
        # a partitioned parameter has no elements of its own; DeepSpeed keeps their number here
        elements = int(getattr(parameter, "ds_numel", parameter.numel()))
        total += elements
        if parameter.requires_grad:
            trainable += elements
            if id(parameter) in heads:
                in_head += elements
    return ArmCount(total=total, trainable=trainable, head=in_head, method=trainable - in_head)


def count_arm(
    resolved: ResolvedBackbone,
    head: Head,
    arm: Arm,
    *,
    pretrained: bool = False,
) -> ArmCount:
    """Count an arm on the meta device, without reading weights.

    Args:
        resolved: The backbone.
        head: What the model ends in.
        arm: The arm.
        pretrained: See `build_arm`; True also counts what cannot train without a pretrain stage.

    Raises:
        ConfigError: See `build_arm`.
        IncompatibleError: See `build_arm`.
    """
    model, _ = build_arm(resolved, head, arm, meta=True, pretrained=pretrained)
    return count(model, task_head(model, resolved))


def task_head(model: nn.Module, resolved: ResolvedBackbone) -> list[nn.Parameter]:
    """The task head's parameters of a built arm."""
    return head_parameters(model, resolved.family)


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The trained tensors by name, detached; a shared tensor has one name.

    A checkpoint of an arm that is not partitioned holds these.
    """
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state[name] = parameter.detach()
    return state


def load_trained_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put trained tensors into a freshly built arm.

    Raises:
        ValueError: Names or shapes are not exactly those of the arm's trained parameters.
    """
    own = trained_state(model)
    if own.keys() != state.keys():
        missing = sorted(own.keys() - state.keys())
        unknown = sorted(state.keys() - own.keys())
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
        ConfigError: A key is unknown, or a value out of range.
    """
    configured = get_method(method).configure(architecture)
    complete: dict[str, Any] = configured.config.model_dump(mode="json")
    return complete
