"""An arm: what a comparison compares."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self, TypeVar

from pydantic import Field

from suite.config.hashing import short_hash
from suite.config.loader import Strict
from suite.config.sweep import AttentionChoice, BackboneChoice

M = TypeVar("M", bound=Strict)


class Arm(Strict):
    """backbone x attention variant x PETL method x architecture choice."""

    backbone: BackboneChoice
    attention: AttentionChoice = AttentionChoice()
    method: str
    architecture: dict[str, Any] = Field(
        default_factory=dict, description="complete: every hyperparameter of the method"
    )
    pretrain: str | None = Field(
        None,
        pattern="^[0-9a-f]{16}$",
        description="hash of the pretrain run whose weights the converted backbone takes",
    )

    @cached_property
    def key(self) -> str:
        """A readable, unique name that is safe as a path: `minilm.pretrained.lora.1f2e3d4c`."""
        parts = (self.backbone.name, self.attention.name, self.method)
        slug = ".".join(
            "".join(c if c.isalnum() or c in "-_" else "-" for c in part.lower()) for part in parts
        )
        return f"{slug}.{short_hash(self.model_dump(mode='json'))[:8]}"

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        return without_cached("key", super().model_copy(update=update, deep=deep))


def without_cached(name: str, copied: M) -> M:
    """A changed copy, which pydantic gives the original's cached values, without one of them."""
    copied.__dict__.pop(name, None)
    return copied
