"""Shared Attention: the layers of a span use one layer's attention probabilities.

Each layer keeps its own values.

Source: Shared Attention (arXiv 2407.12866), Algorithm 1 (`anchor: first`); the official code
    (`anchor: previous`). Probabilities are those of all query heads after mask and softmax and
    before dropout.
Deviations:
    - The default span is the last quarter of the layers, at least two (ours). The paper names the
      layers for each model: 23-30, 27-30, 23-26, ... of Llama's 32.
    - Sharing layers have no query projection either (`drop_query: false` keeps it, as the official
      code does, which computes and discards it).
    - Encoders and encoder-decoders share as well (the paper has decoders only). On T5 the position
      bias is inside the probabilities, and so is shared.
    - Every layer draws its own dropout on the shared probabilities.
    - The probabilities are an argument of each sharing block, not an attribute of the model: the
      official code cannot be trained with gradient checkpointing.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from suite.attention import _surgery as surgery
from suite.attention._cache import ValueOnlyLayer, use_cache_layer
from suite.attention._layers import AcrossLayers, LayeredOptions
from suite.attention._route import check_plain, share
from suite.backbones.base import Absent, AttentionSite, Stack
from suite.errors import IncompatibleError


def _parse_span(given: Any) -> Any:
    """Turn `23-30` into the list [23, 30]; pydantic checks anything else."""
    if not isinstance(given, str):
        return given
    found = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", given)
    if found is None:
        raise ValueError(f"got {given!r}, expected first-last, such as 23-30")
    return [int(end) for end in found.groups()]


Span = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_parse_span)]


class SharedOptions(LayeredOptions):
    """Which layers share, and whose probabilities."""

    span: Span | None = Field(
        None,
        description="first-last layer, counted from 0, both inside (23-30); [] = none;"
        " null = the last quarter, at least two (ours)",
    )
    anchor: Literal["first", "previous"] = Field(
        "first",
        description="whose probabilities: the span's first layer's (Algorithm 1),"
        " or the layer's before it (official code)",
    )
    drop_query: bool = Field(
        True,
        description="sharing layers have no query projection"
        " (ours; the official code computes and discards it: false counts it as trained, though its"
        " gradient is 0)",
    )

    @model_validator(mode="after")
    def _ordered(self) -> SharedOptions:
        if self.span is not None and len(self.span) not in (0, 2):
            raise ValueError(f"span: got {self.span}, expected two layer numbers (23-30) or none")
        if self.span and self.span[0] > self.span[1]:
            raise ValueError(
                f"span: got {self.span[0]}-{self.span[1]}, expected the smaller number first"
            )
        return self


class Shared(AcrossLayers[SharedOptions]):
    description = (
        "layers of a span use one layer's attention probabilities; the key path of the others goes,"
        " values stay"
    )
    source = "Shared Attention, arXiv 2407.12866, Algorithm 1; official code"
    Config = SharedOptions

    def taken_from(self, depth: int) -> dict[int, int]:
        span = self._span(depth)
        if not span:
            return {}
        if self.config.anchor == "first":
            return dict.fromkeys(span[1:], span[0])
        return dict.fromkeys(span, span[0] - 1)

    def connect(self, stack: Stack, sites: list[AttentionSite], taken_from: dict[int, int]) -> None:
        check_plain(sites[0].module, variant=self.name)
        for layer in taken_from:
            self._without_keys(sites[layer])
        share(
            stack.module,
            stack.blocks,
            [site.module for site in sites],
            what="probabilities",
            taken_from=taken_from,
        )

    def kept_floats(self, alone: int) -> int:
        return alone // 2  # the values, without the keys

    def _span(self, depth: int) -> range:
        """The layers of the span.

        Raises:
            IncompatibleError: It leaves the stack, or no layer precedes it that could give.
        """
        if self.config.span == []:
            return range(0)
        if self.config.span is not None:
            first, last = self.config.span
        else:
            # the last quarter, at least two layers; a stack may have only one
            first = max(depth - max(depth // 4, 2), 0)
            last = depth - 1
        if last >= depth:
            raise IncompatibleError(
                f"attention {self.name}: span {first}-{last} leaves the {depth} layers; set"
                f" options.span within 0-{depth - 1}"
            )
        if first == 0 and self.config.anchor == "previous":
            raise IncompatibleError(
                f"attention {self.name}: span {first}-{last} with anchor previous: nothing precedes"
                " layer 0; start the span at 1 or later, or set options.anchor to first"
            )
        return range(first, last + 1)

    def _without_keys(self, site: AttentionSite) -> None:
        """Remove a layer's key projection, its part of the cache, and the query projection."""
        maps = surgery.projections(site)
        if self.over is not None and isinstance(maps.v, Absent):
            raise IncompatibleError(
                f"attention {self.name}: over {self.over.name}, whose values are its keys: without"
                " keys there are no values; use a variant that has both"
            )
        maps.k = Absent(site.head_dim)
        if self.config.drop_query:
            maps.q = Absent(site.head_dim)
        surgery.place(site, maps)
        heads = getattr(site.module, "heads", None)
        if heads is not None:
            heads.drop_keys()
        use_cache_layer(site.module, ValueOnlyLayer)
