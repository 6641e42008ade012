"""Shared keys and values: one map gives the keys of a head, which are its values as well.

Source: MHE, arXiv 2310.07911, section 3.2, which names Reformer (arXiv 2001.04451).
Deviations: as `_mhe`, and
    - The map is the backbone's map of keys; where several heads share keys already (Llama 3), they
      share both.
    - Llama rotates keys but not values: there both are computed, with the same map, and both are
      cached.
"""

from __future__ import annotations

from torch import nn

from suite.attention._mhe import TiedValues
from suite.backbones.base import AttentionSite


class Skv(TiedValues):
    description = "one map gives keys and values; the cache holds one of the two"
    source = "MHE, arXiv 2310.07911, section 3.2"

    def keys(self, site: AttentionSite, own: nn.Module) -> nn.Module:
        return own

    def key_heads(self, site: AttentionSite) -> int:
        return site.kv_heads
