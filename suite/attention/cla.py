"""Cross-layer attention: the layers of a run attend to the keys and values of its first layer.

Source: Brandon et al., arXiv 2405.12981, section 3: the sharing factor is the length of a run
    (CLA2, CLA3, ...), a run being consecutive layers; only the first layer of each has key and
    value projections and a cache; all keep queries, softmax and output. A last run is shorter where
    the factor does not divide the number of layers (our reading; their layer counts were not at
    hand).
Deviations:
    - Converted from a checkpoint, a run uses its first layer's own maps; the paper trains from
      scratch only.
    - Encoders and encoder-decoders too; the paper has decoders only.
    - A variant may go first (`over`); the paper combines CLA with MQA and GQA.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from suite.attention import _surgery as surgery
from suite.attention._cache import LengthOnlyLayer, use_cache_layer
from suite.attention._layers import AcrossLayers, LayeredOptions
from suite.attention._route import share
from suite.backbones.base import Absent, AttentionSite, Stack


class ClaOptions(LayeredOptions):
    """How many layers share."""

    factor: Annotated[int, Field(ge=1)] = Field(
        2, description="layers in a run (CLA2, their best); 1 = the base model"
    )


class Cla(AcrossLayers[ClaOptions]):
    description = (
        "runs of neighbouring layers share one layer's keys and values, with its cache;"
        " each keeps its queries"
    )
    source = "Cross-Layer Attention, arXiv 2405.12981, section 3"
    Config = ClaOptions

    def taken_from(self, depth: int) -> dict[int, int]:
        factor = self.config.factor
        taken_from = {}
        for layer in range(depth):
            first_of_run = layer - layer % factor
            if layer != first_of_run:
                taken_from[layer] = first_of_run
        return taken_from

    def connect(self, stack: Stack, sites: list[AttentionSite], taken_from: dict[int, int]) -> None:
        for layer, giver in taken_from.items():
            _without_keys_and_values(sites[layer], like=sites[giver])
        share(
            stack.module,
            stack.blocks,
            [site.module for site in sites],
            what="key_value",
            taken_from=taken_from,
        )

    def kept_floats(self, alone: int) -> int:
        return 0  # the giving layer's cache serves the whole run


def _without_keys_and_values(site: AttentionSite, *, like: AttentionSite) -> None:
    """Remove a layer's key and value projections, and its part of the cache."""
    maps = surgery.projections(site)
    maps.k = Absent(site.head_dim)
    maps.v = Absent(site.head_dim)
    surgery.place(site, maps)
    module: Any = site.module
    # the layer attends to the giver's heads, so its query heads group as the giver's do
    module.num_key_value_groups = getattr(like.module, "num_key_value_groups", 1)
    use_cache_layer(site.module, LengthOnlyLayer)
