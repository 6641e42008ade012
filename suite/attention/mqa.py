"""Multi-query attention: all query heads share one key and one value head.

Source: Shazeer, arXiv 1911.02150; GQA (arXiv 2305.13245, section 2) for the conversion by mean
    pooling; MHE (arXiv 2310.07911, section 3.2) trains it from scratch at every attention:
    `{init: random, sites: all}`.
Deviations: as `gqa`.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from suite.attention.base import Variant
from suite.attention.gqa import Gqa, GqaOptions, GroupedOptions
from suite.backbones.base import AttentionSite, Family


class Mqa(Variant[GroupedOptions]):
    description = "all query heads share one key and one value head"
    source = "Shazeer, arXiv 1911.02150; GQA, arXiv 2305.13245, section 2; MHE, arXiv 2310.07911"
    Config = GroupedOptions

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        self._as_gqa().convert(model, family)

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        return self._as_gqa().cached_floats(site, family)

    def new_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return self._as_gqa().new_parameters(model, family)

    def _as_gqa(self) -> Gqa:
        return Gqa(GqaOptions(sites=self.config.sites, init=self.config.init, kv_heads=1))
