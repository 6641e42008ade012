"""From names to arms: every backbone x attention x method, with random weights, and those that do not go together set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from suite.attention.counts import Dtype, count_attention
from suite.backbones.loading import ResolvedBackbone, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.errors import IncompatibleError
from suite.petl import get_method
from suite.petl.arm import build_arm, count_arm, full_architecture
from suite.profile.batches import head_of
from suite.profile.record import ArmProfile


@dataclass(frozen=True, slots=True)
class ArmChoice:
    """One arm by name; picklable, so that a rank can build it.

    Attributes:
        backbone: A preset, folder or package: only its configuration is read.
        architecture: The method's hyperparameters, complete.
        shape: Changes to the backbone's configuration.
        reason: Why it cannot be built; None where it can.
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
            only_shape=True,
        )

    def extra_positions(self) -> int:
        """Positions that the method puts in front of the input."""
        return get_method(self.method).configure(self.architecture).extra_positions()

    def too_long(self, tokens: int) -> str | None:
        """Why sequences of so many tokens do not fit; None where they do."""
        resolved = self.resolve()
        positions = (
            None
            if resolved.family.kind == "encoder-decoder"
            else getattr(resolved.config, "max_position_embeddings", None)
        )
        extra = self.extra_positions()
        if positions is None or tokens + extra <= positions:
            return None
        added = f" and {extra} positions of {self.method}" if extra else ""
        return f"{tokens} tokens{added} exceed the backbone's {positions} positions; use a smaller --seq"

    def build(self, resolved: ResolvedBackbone, *, meta: bool = False) -> nn.Module:
        """The model to train, as if a pretrain stage had made what the attention variant adds."""
        model, _ = build_arm(
            resolved, head_of(resolved.family), self._arm(resolved), meta=meta, pretrained=True
        )
        return model

    def _arm(self, resolved: ResolvedBackbone) -> Arm:
        return Arm(
            backbone=resolved.choice,
            attention=AttentionChoice(name=self.attention),
            method=self.method,
            architecture=dict(self.architecture),
        )

    def counted(self, *, dtype: Dtype) -> ArmProfile:
        """Names and parameter counts; shapes only."""
        resolved = self.resolve()
        head = head_of(resolved.family)
        arm = self._arm(resolved)
        counted = count_arm(resolved, head, arm, pretrained=True)
        inside = count_attention(resolved, head, arm.attention, dtype=dtype)
        return replace_record(
            self.named(),
            total_parameters=counted.total,
            trainable_parameters=counted.trainable,
            attention_parameters=inside.with_output_projection,
            kv_bytes_per_token=inside.kv_bytes_per_token,
        )

    def named(self) -> ArmProfile:
        """A record that has nothing but names."""
        return ArmProfile(
            backbone=self.backbone,
            attention=self.attention,
            method=self.method,
            architecture=dict(self.architecture),
        )


def replace_record(record: ArmProfile, **changes: Any) -> ArmProfile:
    """A checked copy with some fields changed."""
    return ArmProfile.model_validate(
        {**{name: getattr(record, name) for name in ArmProfile.model_fields}, **changes}
    )


def choose(
    backbones: Sequence[str],
    methods: Sequence[str],
    attentions: Sequence[str],
    *,
    architectures: Mapping[str, Mapping[str, Any]] | None = None,
    shape: Mapping[str, Any] | None = None,
) -> list[ArmChoice]:
    """All combinations, in the order of a table; those that do not go together carry the reason.

    Args:
        architectures: By method, hyperparameters other than its defaults.
        shape: Changes to the configuration of every backbone.

    Raises:
        ConfigError: An unknown name or key, or a value out of range.
        IncompatibleError: No combination goes together; the message is the first one's.
    """
    given = architectures or {}
    found = [
        checked(
            ArmChoice(
                backbone,
                attention,
                method,
                full_architecture(method, given.get(method, {})),
                shape or {},
            )
        )
        for backbone in backbones
        for attention in attentions
        for method in methods
    ]
    if found and all(arm.reason for arm in found):
        raise IncompatibleError(str(found[0].reason))
    return found


def checked(arm: ArmChoice) -> ArmChoice:
    """The arm, with the reason where its parts do not go together."""
    try:
        arm.build(arm.resolve(), meta=True)
    except IncompatibleError as why:
        return replace(arm, reason=str(why))
    return arm
