"""An arm: one of the things that a benchmark compares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self, TypeVar

from pydantic import Field

from suite.config.hashing import short_hash
from suite.config.loader import Strict
from suite.config.sweep import AttentionChoice, BackboneChoice

M = TypeVar("M", bound=Strict)


class Arm(Strict):
    """A backbone with an attention variant, a PETL method and an architecture choice."""

    backbone: BackboneChoice
    # pretrained: the backbone's own attention, unchanged
    attention: AttentionChoice = AttentionChoice()
    method: str
    architecture: dict[str, Any] = Field(
        default_factory=dict, description="every hyperparameter of the method"
    )
    pretrain: str | None = Field(
        None,
        pattern="^[0-9a-f]{16}$",
        description="hash of the pretrain run whose weights the converted backbone takes",
    )

    # left out where there is none, so that arms of shipped code keep their keys
    code: str | None = Field(
        None,
        pattern="^[0-9a-f]{16}$",
        description="hash of the user's own files that define its method, attention variant and "
        "backbone family; null = all of them come with the suite",
        exclude_if=lambda code: code is None,
    )

    @cached_property
    def key(self) -> str:
        """A readable, unique name that is safe as a path: `minilm.pretrained.lora.1f2e3d4c`."""
        parts = []
        for part in (self.backbone.name, self.attention.name, self.method):
            # hub ids and folders hold slashes, methods of peft a colon
            parts.append(re.sub(r"[^\w-]", "-", part.lower()))
        # the digits tell apart arms that differ in options only
        digits = short_hash(self.model_dump(mode="json"))[:8]
        return f"{'.'.join(parts)}.{digits}"

    @property
    def names(self) -> dict[str, Any]:
        """What the arm is made of, under the names of the columns of every table of arms."""
        return {
            "backbone": self.backbone.name,
            "attention": self.attention.name,
            "attention_options": self.attention.options,
            "method": self.method,
            "architecture": self.architecture,
        }

    @property
    def own_code(self) -> str | None:
        """Commit of the code that the backbone's checkpoint brings; None = it brings none."""
        if not self.backbone.trust_remote_code:
            return None
        return self.backbone.revision

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        return without_cached("key", super().model_copy(update=update, deep=deep))


def without_cached(name: str, copied: M) -> M:
    """A changed copy without one cached value.

    Pydantic copies cached values along with the fields, although a changed field may change them.
    """
    copied.__dict__.pop(name, None)
    return copied
