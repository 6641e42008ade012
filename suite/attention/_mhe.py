"""What the variants that the MHE paper compares have in common: every attention sublayer changes, and nothing is converted.

Source: Xue & Aletras, MHE, arXiv 2310.07911, section 3.
Deviations:
    - Where the backbone's projections have biases (BERT, GPT-2), so have the new ones, at zero; the paper's counts are of weights.
    - T5 adds a position bias per head to the scores, and Llama rotates queries and keys; the paper has neither.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention import _surgery as surgery
from suite.attention._cache import KeyOnlyLayer, use_cache_layer
from suite.attention._route import Heads, route
from suite.attention._surgery import Projections
from suite.attention.base import Options, Start, Variant
from suite.attention.gqa import Sites, site_names
from suite.backbones.base import Absent, AttentionSite, Family

EMBEDDING_STD = 0.02


class MheOptions(Options):
    """Where."""

    sites: Sites = Field(
        "all", description="all attention sublayers (the paper's), the decoder's, or names"
    )


class FromScratch(Variant[MheOptions]):
    """Base of the variants that change attention sublayers and are trained from scratch."""

    start: Start = "scratch"
    Config = MheOptions

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        for site in surgery.chosen_sites(
            model, family, site_names(self.config.sites, family), variant=self.name
        ):
            self.convert_site(site, family)

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        if site.site not in site_names(self.config.sites, family):
            return super().cached_floats(site, family)
        return self.kept_floats(site, family)

    @abstractmethod
    def convert_site(self, site: AttentionSite, family: Family) -> None:
        """Change one attention sublayer in place."""

    @abstractmethod
    def kept_floats(self, site: AttentionSite, family: Family) -> int:
        """Numbers cached per token at a converted site."""


# ---- one head ---------------------------------------------------------------------------------------------------------


class OneHead(FromScratch):
    """Base of the variants whose projections have a single head of width d (SHA and MHE)."""

    def convert_site(self, site: AttentionSite, family: Family) -> None:
        old = surgery.projections(site)
        surgery.place(
            site, Projections(*(_single(m, site.head_dim) for m in (old.q, old.k, old.v)))
        )
        self.spread(site, family)

    def kept_floats(self, site: AttentionSite, family: Family) -> int:
        return 2 * site.head_dim

    @abstractmethod
    def spread(self, site: AttentionSite, family: Family) -> None:
        """Make the one head of a site answer for all heads of its output projection."""


def _single(like: nn.Module, head_dim: int) -> nn.Linear:
    assert isinstance(like, nn.Linear)
    return surgery.fresh(like, head_dim)


class HeadEmbeddings(Heads):
    """Makes H heads of the one that was projected and cached, with an embedding (H, d) each for queries, keys and values."""

    def __init__(self, heads: int, like: Tensor, head_dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            self._embedding(heads, like, head_dim) for _ in range(3)
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, 1, L, d) each to (B, H, L, d)."""
        return (
            self.combine(query, self.query),
            self.combine(key, self.key),
            self.combine(value, self.value),
        )

    @staticmethod
    @abstractmethod
    def combine(x: Tensor, embedding: Tensor) -> Tensor:
        """(B, 1, L, d) with (H, d) to (B, H, L, d)."""

    @staticmethod
    def _embedding(heads: int, like: Tensor, head_dim: int) -> nn.Parameter:
        drawn = torch.empty(heads, head_dim, dtype=like.dtype, device=like.device)
        return nn.Parameter(drawn.normal_(0.0, EMBEDDING_STD))


class MultiHeadEmbedding(OneHead):
    """Base of MHE-ADD and MHE-MUL; `Embeddings` says how a head's embedding acts."""

    Embeddings: type[HeadEmbeddings]

    def spread(self, site: AttentionSite, family: Family) -> None:
        like = next(site.module.parameters())
        route(site.module, self.Embeddings(site.heads, like, site.head_dim))

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return [
            parameter
            for module in surgery.modules_in(model, HeadEmbeddings)
            for parameter in module.parameters()
        ]


# ---- values are keys --------------------------------------------------------------------------------------------------


class KeysAsValues(Heads):
    """The values are the keys."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, key, key


class KeysAgain(Absent):
    """Gives what the key map gives, before it is rotated: the values of a backbone that rotates its keys.

    Has nothing of its own, so that whatever a PETL method makes of the key map holds for the values as well.
    """

    def __init__(self, attention: nn.Module, k: str, out_features: int) -> None:
        super().__init__(out_features)
        self._attention, self._k = (attention,), k  # in a tuple: not a child of this module

    def forward(self, x: Tensor) -> Tensor:
        keys: Tensor = self._attention[0].get_submodule(self._k)(x)
        return keys


class TiedValues(FromScratch):
    """Base of the variants whose values are their keys (SKV and EL); the cache holds one of the two, where that is enough."""

    def convert_site(self, site: AttentionSite, family: Family) -> None:
        maps = surgery.projections(site)
        maps.k = self.keys(site, maps.k)
        maps.v = (
            KeysAgain(site.module, site.k, surgery.width(maps.k))
            if family.rotates
            else Absent(site.head_dim)
        )
        surgery.place(site, maps)
        route(site.module, None if family.rotates else KeysAsValues())
        if not family.rotates:
            use_cache_layer(site.module, KeyOnlyLayer)

    def kept_floats(self, site: AttentionSite, family: Family) -> int:
        return self.key_heads(site) * site.head_dim * (2 if family.rotates else 1)

    @abstractmethod
    def keys(self, site: AttentionSite, own: nn.Module) -> nn.Module:
        """The map of keys and values, given the backbone's own map of keys.

        Raises:
            IncompatibleError: The backbone's shape does not allow it.
        """

    @abstractmethod
    def key_heads(self, site: AttentionSite) -> int:
        """Heads that the map gives."""
