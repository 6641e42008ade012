"""Single-head attention: one head of width d attends.

The output projection gets its result once per head of the backbone.

Source: MHE, arXiv 2310.07911, section 3.2 (its baseline of least memory; MHE without head
    embeddings).
Deviations: as `_mhe`, and
    - The output projection stays (n d, d_model), as the paper counts it (8.85M on BERT-base); a
      (d, d_model) one can express the same functions.
    - Under T5 all heads attend with the one query, as each has a position bias of its own;
      elsewhere one head attends, and dropout on its probabilities is the same for all tiles.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from suite.attention._mhe import OneHead
from suite.attention._route import HeadTransform, route
from suite.backbones.base import AttentionSite, Family


class RepeatedQuery(HeadTransform):
    """Makes `heads` heads attend with the same query."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query.expand(-1, self.heads, -1, -1), key, value  # (B, H, n, d)


class Sha(OneHead):
    description = "one head of width d; the output projection sees it once per head"
    source = "MHE, arXiv 2310.07911, section 3.2"

    def spread(self, site: AttentionSite, family: Family) -> None:
        module: Any = site.module
        if family.position_bias:
            route(module, RepeatedQuery(site.heads))
            module.num_key_value_groups = site.heads  # all of them share the one key head
        else:
            route(module)
            module.tiles = site.heads  # routed_attention repeats the result so often
