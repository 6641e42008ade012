"""Turn names into arms with random weights, and set aside those that cannot be combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from suite.attention.counts import Dtype, count_attention
from suite.backbones.loading import ResolvedBackbone, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.errors import ConfigError, IncompatibleError, UnknownNameError
from suite.petl import get_method
from suite.petl.arm import build_arm, count_arm, full_architecture
from suite.profiling.batches import head_of
from suite.profiling.record import ArmProfile

BLOCK = 2**16
"""Random numbers that a larger tensor repeats."""
# What torch calls to draw, below every public name.
DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class RepeatedNumbers(TorchDispatchMode):
    """Within it, a tensor drawn at random repeats one block of random numbers.

    Drawing each number takes seconds for a backbone, and what an arm costs does not depend on them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func not in DRAWS or not _repeats(args[0]):
            return func(*args, **given)
        tensor: Tensor = args[0]
        block = func(torch.empty(BLOCK, dtype=tensor.dtype), *args[1:], **given)
        flat = tensor.view(-1)
        whole = tensor.numel() // BLOCK * BLOCK
        flat[:whole].view(-1, BLOCK).copy_(block)
        flat[whole:].copy_(block[: tensor.numel() - whole])
        return tensor


def _repeats(tensor: Tensor) -> bool:
    return tensor.numel() > BLOCK and tensor.device.type == "cpu" and tensor.is_contiguous()


@dataclass(frozen=True, slots=True)
class ArmChoice:
    """One arm by name. It can be pickled, so that a rank can build it.

    Attributes:
        backbone: A preset, folder or package: only its configuration is read.
        architecture: The method's hyperparameters, complete.
        shape: Changes to the backbone's configuration.
        reason: Why the arm cannot be built; None where it can.
    """

    backbone: str
    attention: str
    method: str
    architecture: Mapping[str, Any]
    shape: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None

    def resolve(self) -> ResolvedBackbone:
        """The backbone's shape, to be filled with random weights."""
        return resolve(
            BackboneChoice(name=self.backbone, config=dict(self.shape)),
            where="--backbone",
            # Weights are random here, so nothing is downloaded.
            only_shape=True,
        )

    def extra_positions(self) -> int:
        """Positions that the method puts in front of the input."""
        return get_method(self.method).configure(self.architecture).extra_positions()

    def too_long(self, tokens: int) -> str | None:
        """Why sequences of `tokens` tokens do not fit; None where they do."""
        resolved = self.resolve()
        positions = resolved.family.positions(resolved.config)
        extra = self.extra_positions()
        if positions is None or tokens + extra <= positions:
            return None
        # No --seq is short enough then.
        if extra >= positions:
            return (
                f"the {extra} positions of {self.method} leave none of the backbone's {positions} "
                "to an example; use fewer"
            )
        length = f"{tokens} tokens"
        if extra:
            length += f" and {extra} positions of {self.method}"
        return f"{length} exceed the backbone's {positions} positions; use a smaller --seq"

    def build(self, resolved: ResolvedBackbone, *, meta: bool = False) -> nn.Module:
        """Build the model to train; what the attention variant adds counts as pretrained.

        Raises:
            IncompatibleError: Backbone, attention and method cannot be combined.
        """
        arm = self._arm(resolved)
        head = head_of(resolved.family)
        # The cost of an arm does not depend on who made its weights.
        with RepeatedNumbers():  # type: ignore[no-untyped-call]
            model, _ = build_arm(resolved, head, arm, meta=meta, pretrained=True)
        return model

    def _arm(self, resolved: ResolvedBackbone) -> Arm:
        return Arm(
            backbone=resolved.choice,
            attention=AttentionChoice(name=self.attention),
            method=self.method,
            architecture=dict(self.architecture),
        )

    def counted(self, *, dtype: Dtype) -> ArmProfile:
        """A record with the arm's names and parameter counts, from shapes alone."""
        resolved = self.resolve()
        head = head_of(resolved.family)
        arm = self._arm(resolved)
        # `pretrained` as in `build`, so that the counts are those of the model that runs.
        parameters = count_arm(resolved, head, arm, pretrained=True)
        attention = count_attention(resolved, head, arm.attention, dtype=dtype)
        return replace_record(
            self.unmeasured(),
            total_parameters=parameters.total,
            trainable_parameters=parameters.trainable,
            attention_parameters=attention.with_output_projection,
            kv_bytes_per_token=attention.kv_bytes_per_token,
        )

    def unmeasured(self) -> ArmProfile:
        """A record that holds the arm's names and nothing else."""
        return ArmProfile(
            backbone=self.backbone,
            attention=self.attention,
            method=self.method,
            architecture=dict(self.architecture),
        )


def replace_record(record: ArmProfile, **changes: Any) -> ArmProfile:
    """A copy with some fields changed. Unlike `model_copy`, it validates the changes."""
    return ArmProfile.model_validate(dict(record) | changes)


def choose(
    backbones: Sequence[str],
    methods: Sequence[str],
    attentions: Sequence[str],
    *,
    architectures: Mapping[str, Mapping[str, Any]] | None = None,
    shape: Mapping[str, Any] | None = None,
) -> list[ArmChoice]:
    """Make all combinations, in a table's order; those that cannot be built carry the reason.

    Args:
        architectures: Hyperparameters by method, where they differ from the method's defaults.
        shape: Changes to the configuration of every backbone.

    Raises:
        ConfigError: No list of names, an unknown name or key, or a value out of range.
        IncompatibleError: No combination can be built; the message is the first one's.
    """
    chosen = {"backbones": backbones, "methods": methods, "attention": attentions}
    for key, names in chosen.items():
        # The letters of a name would be taken for names.
        if isinstance(names, str) or not isinstance(names, Sequence) or not names:
            raise ConfigError(f"profile: {key}: got {names!r:.60}, expected a list of names")
    given = architectures or {}
    for method in given:
        # It would be of no use and never seen.
        if method not in methods:
            raise UnknownNameError("method", method, methods, where="profile: architectures")
    arms = []
    for backbone in backbones:
        for attention in attentions:
            for method in methods:
                architecture = full_architecture(method, given.get(method, {}))
                arm = ArmChoice(backbone, attention, method, architecture, shape or {})
                arms.append(checked(arm))
    # Nothing would be left to measure.
    if all(arm.reason for arm in arms):
        raise IncompatibleError(str(arms[0].reason))
    return arms


def checked(arm: ArmChoice) -> ArmChoice:
    """The arm, with the reason where its parts cannot be combined."""
    try:
        # On the meta device a model of any size takes no memory.
        arm.build(arm.resolve(), meta=True)
    except IncompatibleError as error:
        return replace(arm, reason=str(error))
    return arm
