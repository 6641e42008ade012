"""What variants across layers have in common: whose layers, which take from which, and which variant goes first."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from suite.attention import _surgery as surgery
from suite.attention import variants
from suite.attention.base import Options, Variant
from suite.backbones.base import AttentionSite, Family, Stack
from suite.config.sweep import AttentionChoice, Named
from suite.errors import IncompatibleError


class LayeredOptions(Options):
    """Where, and over which other variant."""

    site: Literal["encoder-self", "decoder-self"] | None = Field(
        None,
        description="whose self-attentions; null = the decoder's of an encoder-decoder (ours), else the only ones there are",
    )
    over: Annotated[AttentionChoice, Named] | None = Field(
        None,
        description="a variant that is applied to the backbone first, as {name: gqa, options: {kv_heads: 2}}; null = none",
    )


C = TypeVar("C", bound=LayeredOptions)


class AcrossLayers(Variant[C]):
    """Base of the variants whose layers take from earlier ones; like the variant under it, it starts converted or from scratch."""

    across_layers = True

    def __init__(self, config: C) -> None:
        super().__init__(config)
        self.over = None if config.over is None else self._under(config.over)
        if self.over is not None:
            self.start = self.over.start

    @abstractmethod
    def taken_from(self, depth: int) -> dict[int, int]:
        """Layer that takes -> earlier layer that gives, in a stack of `depth` blocks.

        Raises:
            IncompatibleError: The options do not fit so many layers.
        """

    @abstractmethod
    def connect(self, stack: Stack, sites: list[AttentionSite], taken_from: dict[int, int]) -> None:
        """Take away what the taking layers do without, and hand them what they take; there is at least one."""

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        if self.over is not None:
            self._check_family(self.over, family)
            self.over.convert(model, family)
        name = self._site(family)
        sites = surgery.chosen_sites(model, family, [name], variant=self.name)
        taken_from = self.taken_from(len(sites))
        if taken_from:
            stack = next(stack for stack in family.stacks(model) if stack.role == sites[0].role)
            self.connect(stack, sites, taken_from)

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        alone = (
            super().cached_floats(site, family)
            if self.over is None
            else self.over.cached_floats(site, family)
        )
        takes = site.site == self._site(family) and site.layer in self.taken_from(_depth(site))
        return self.kept_floats(alone) if takes else alone

    @abstractmethod
    def kept_floats(self, alone: int) -> int:
        """What a taking layer caches per token, where it would cache `alone` by itself."""

    def new_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return [] if self.over is None else self.over.new_parameters(model, family)

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return [] if self.over is None else self.over.extra_parameters(model, family)

    def fold(self, model: PreTrainedModel, family: Family) -> None:
        if self.over is not None:
            self.over.fold(model, family)

    def _site(self, family: Family) -> Literal["encoder-self", "decoder-self"]:
        return self.config.site or ("encoder-self" if family.kind == "encoder" else "decoder-self")

    def _under(self, choice: AttentionChoice) -> Variant[Any]:
        cls = variants.get(choice.name, where=f"options of attention {self.name}: over")
        if cls.across_layers:
            raise IncompatibleError(
                f"attention {self.name}: over {cls.name}: both let layers take from one another; use one of them"
            )
        return cls.configure(
            choice.options, where=f"options of attention {self.name}: over: options"
        )

    def _check_family(self, over: Variant[Any], family: Family) -> None:
        if family.name not in over.families:
            known, why = (
                ", ".join(sorted(over.families)),
                f", {over.families_why}" if over.families_why else "",
            )
            raise IncompatibleError(
                f"attention {self.name}: over {over.name}, which works on {known}, not on {family.name} backbones{why}"
            )


def _depth(site: AttentionSite) -> int:
    """Number of blocks in a site's stack."""
    config: Any = site.module.config
    depth: int = config.num_hidden_layers
    return depth
