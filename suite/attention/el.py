"""EL-attention as the MHE paper counts it: only queries are projected.

Head i takes slice i of the hidden state as keys and values.

Source: MHE, arXiv 2310.07911, section 3.2 and table 4 (d^2 n^2 weights per sublayer); Yan et al.,
    arXiv 2105.04779.
Deviations: as `_mhe`, and
    - Yan et al. rewrite multi-head attention so that each head's query meets whole hidden states;
      the count leaves room only for slices. The hidden state is what the sublayer gets, after its
      norm in pre-norm blocks.
    - The heads must fill the hidden state: T5 sizes where heads x d_kv is not d_model are refused.
    - Every query head has its slice, also where the backbone has fewer key-value heads (Llama 3):
      there the cache grows.
    - Llama rotates keys but not values: there both are cached.
"""

from __future__ import annotations

from torch import nn

from suite.attention import _surgery as surgery
from suite.attention._mhe import TiedValues
from suite.backbones.base import AttentionSite
from suite.errors import IncompatibleError


class El(TiedValues):
    description = "only queries are projected; keys and values are slices of the hidden state"
    source = "MHE, arXiv 2310.07911, section 3.2 and table 4; EL-attention, arXiv 2105.04779"

    def keys(self, site: AttentionSite, own: nn.Module) -> nn.Module:
        assert isinstance(own, nn.Linear)
        if site.heads * site.head_dim != own.in_features:
            raise IncompatibleError(
                f"attention {self.name}: {site.heads} heads of {site.head_dim} do not fill the"
                f" hidden state of {own.in_features}, whose slices are the keys; use a backbone"
                " whose heads do"
            )
        return surgery.PassThrough(own.in_features)

    def key_heads(self, site: AttentionSite) -> int:
        return site.heads
