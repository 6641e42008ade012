"""What variants across layers have in common: which layers take from which earlier ones."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, TypeVar

from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from suite.attention import _surgery as surgery
from suite.attention import variants
from suite.attention.base import Options, Variant
from suite.backbones import all_families
from suite.backbones.base import AttentionSite, Family, SelfSite, Stack, has_windows
from suite.backbones.fit import served_families, variant_refusal
from suite.config.sweep import AttentionChoice, Named
from suite.errors import IncompatibleError


class LayeredOptions(Options):
    """Which stack shares, and which other variant comes first."""

    site: SelfSite | None = Field(
        None,
        description="whose self-attentions; null = the decoder's of an encoder-decoder (ours),"
        " else the only ones there are",
    )
    over: Annotated[AttentionChoice, Named] | None = Field(
        None,
        description="a variant that is applied to the backbone first,"
        " as {name: gqa, options: {kv_heads: 2}}; null = none",
    )


C = TypeVar("C", bound=LayeredOptions)


class AcrossLayers(Variant[C]):
    """Base of the variants whose layers take something from earlier layers.

    Such a variant starts as the variant under it does: converted, or from scratch.
    """

    across_layers = True

    def __init__(self, config: C) -> None:
        super().__init__(config)
        self.over: Variant[Any] | None = None
        if config.over is not None:
            self.over = self._configure_over(config.over)
            self.start = self.over.start

    @property
    def draws(self) -> bool:
        return self.over is not None and self.over.draws

    @abstractmethod
    def taken_from(self, depth: int) -> dict[int, int]:
        """Each taking layer with the earlier layer that gives, in a stack of `depth` blocks.

        Raises:
            IncompatibleError: The options do not fit so many layers.
        """

    @abstractmethod
    def connect(self, stack: Stack, sites: list[AttentionSite], taken_from: dict[int, int]) -> None:
        """Remove what the taking layers do without, and hand them what they take.

        Args:
            stack: The stack whose layers share.
            sites: Its self-attentions, by layer.
            taken_from: Each taking layer with the layer that gives; never empty.
        """

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        if self.over is not None:
            self._check_family(self.over, family)
            self.over.convert(model, family)
        if has_windows(model.config):
            raise IncompatibleError(
                f"attention {self.name}: some layers of this {family.name} backbone see a window of"
                " the text, so that a layer cannot use what another one attends to"
            )
        name = self._site(family)
        sites = surgery.chosen_sites(model, family, [name], variant=self.name)
        taken_from = self.taken_from(len(sites))
        # an empty span or a factor of 1 leaves the backbone as it is
        if taken_from:
            stack = next(stack for stack in family.stacks(model) if stack.role == sites[0].role)
            self.connect(stack, sites, taken_from)

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        if self.over is None:
            alone = super().cached_floats(site, family)
        else:
            alone = self.over.cached_floats(site, family)
        if site.site == self._site(family) and site.layer in self.taken_from(_depth(site)):
            return self.kept_floats(alone)
        return alone

    @abstractmethod
    def kept_floats(self, alone: int) -> int:
        """Numbers that a taking layer caches per token, where it would cache `alone` by itself."""

    def new_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return [] if self.over is None else self.over.new_parameters(model, family)

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return [] if self.over is None else self.over.extra_parameters(model, family)

    def fold(self, model: PreTrainedModel, family: Family) -> None:
        if self.over is not None:
            self.over.fold(model, family)

    def _site(self, family: Family) -> SelfSite:
        if self.config.site is not None:
            return self.config.site
        return "encoder-self" if family.kind == "encoder" else "decoder-self"

    def _configure_over(self, choice: AttentionChoice) -> Variant[Any]:
        where = f"options of attention {self.name}: over"
        cls = variants.get(choice.name, where=where)
        if cls.across_layers:
            raise IncompatibleError(
                f"attention {self.name}: over {cls.name}: both let layers take from one another;"
                " use one of them"
            )
        if cls.not_shared:
            raise IncompatibleError(f"attention {self.name}: over {cls.name}: {cls.not_shared}")
        return cls.configure(choice.options, where=f"{where}: options")

    def _check_family(self, over: Variant[Any], family: Family) -> None:
        why_not = variant_refusal(over, family)
        if why_not is None:
            return
        known = ", ".join(served_families(over, all_families()))
        reason = f", {why_not}" if why_not else ""
        raise IncompatibleError(
            f"attention {self.name}: over {over.name}, which works on {known}, not on"
            f" {family.name} backbones{reason}"
        )


def _depth(site: AttentionSite) -> int:
    """Number of blocks in a site's stack."""
    config: Any = site.module.config
    depth: int = config.num_hidden_layers  # every family's configuration understands this name
    return depth
