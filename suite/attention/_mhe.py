"""What the variants that the MHE paper compares have in common.

Every attention sublayer changes, and nothing is converted: they are trained from scratch.

Source: Xue & Aletras, MHE, arXiv 2310.07911, section 3.
Deviations:
    - Where the backbone's projections have biases (BERT, GPT-2), so have the new ones, at zero; the
      paper's counts are of weights.
    - T5 adds a position bias per head to the scores, and Llama rotates queries and keys; the paper
      has neither.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention import _surgery as surgery
from suite.attention._cache import KeyOnlyLayer, use_cache_layer
from suite.attention._route import HeadTransform, route
from suite.attention._surgery import Projections
from suite.attention.base import Options, Start, Variant
from suite.attention.gqa import Sites, site_names
from suite.backbones.base import Absent, AttentionSite, Family

EMBEDDING_STD = 0.02


class MheOptions(Options):
    """Which attention sublayers change."""

    sites: Sites = Field(
        "all", description="all attention sublayers (the paper's), the decoder's, or names"
    )


class FromScratch(Variant[MheOptions]):
    """Base of the variants that change attention sublayers and are trained from scratch."""

    start: Start = "scratch"
    Config = MheOptions

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        names = site_names(self.config.sites, family)
        for site in surgery.chosen_sites(model, family, names, variant=self.name):
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


# ---- one head ------------------------------------------------------------------------------------


class OneHead(FromScratch):
    """Base of the variants whose projections have a single head of width d (SHA and MHE)."""

    def convert_site(self, site: AttentionSite, family: Family) -> None:
        old = surgery.projections(site)
        # drawn in the order q, k, v: another order would change every seed's numbers
        q = _one_head_like(old.q, site.head_dim)
        k = _one_head_like(old.k, site.head_dim)
        v = _one_head_like(old.v, site.head_dim)
        surgery.place(site, Projections(q, k, v))
        self.spread(site, family)

    def kept_floats(self, site: AttentionSite, family: Family) -> int:
        return 2 * site.head_dim  # one key and one value

    @abstractmethod
    def spread(self, site: AttentionSite, family: Family) -> None:
        """Make the one head of a site answer for all heads of its output projection."""


def _one_head_like(old: nn.Module, head_dim: int) -> nn.Linear:
    assert isinstance(old, nn.Linear)
    return surgery.fresh(old, head_dim)


class HeadEmbeddings(HeadTransform):
    """Makes H heads of the one head that was projected and cached.

    Queries, keys and values have an embedding (H, d) each; in a layer that takes another's
    probabilities, values alone.
    """

    query: nn.Parameter | None
    key: nn.Parameter | None

    def __init__(self, heads: int, like: Tensor, head_dim: int) -> None:
        super().__init__()
        self.query = self._embedding(heads, like, head_dim)
        self.key = self._embedding(heads, like, head_dim)
        self.value = self._embedding(heads, like, head_dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn (B, 1, L, d) each into (B, H, L, d), or the value alone after `drop_keys`."""
        if self.query is not None and self.key is not None:
            query = self.combine(query, self.query)
            key = self.combine(key, self.key)
        return query, key, self.combine(value, self.value)

    def drop_keys(self) -> None:
        self.query = None
        self.key = None

    @staticmethod
    @abstractmethod
    def combine(x: Tensor, embedding: Tensor) -> Tensor:
        """Combine (B, 1, L, d) and (H, d) into (B, H, L, d)."""

    @staticmethod
    @abstractmethod
    def of_query(query: Tensor, key: Tensor) -> Tensor:
        """The embedding of queries that acts as both do where keys have none.

        All are (H, d). Scores may shift by the same number for all keys of a query.
        """

    @staticmethod
    def _embedding(heads: int, like: Tensor, head_dim: int) -> nn.Parameter:
        drawn = torch.empty(heads, head_dim, dtype=like.dtype, device=like.device)
        return nn.Parameter(drawn.normal_(0.0, EMBEDDING_STD))  # (H, d)


class FoldedQuery(HeadTransform):
    """Makes H heads of the query; key and value stay the one head that is cached.

    It stands for embeddings of queries and keys, as q (k e) = (q e) k.
    """

    def __init__(self, made: HeadEmbeddings) -> None:
        super().__init__()
        self.combine = made.combine
        assert made.query is not None and made.key is not None
        joint = made.of_query(made.query.detach(), made.key.detach())
        self.query = nn.Parameter(joint.clone(), requires_grad=made.query.requires_grad)  # (H, d)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn a query of (B, 1, n, d) into (B, H, n, d)."""
        return self.combine(query, self.query), key, value


class FoldedResult(nn.Module):
    """Lets the embeddings of values act on what each head found.

    That is the same while no weight is dropped, as a query's weights add up to 1.
    """

    def __init__(self, made: HeadEmbeddings) -> None:
        super().__init__()
        self.combine = made.combine
        self.value = made.value  # (H, d)

    def forward(self, found: Tensor) -> Tensor:
        """Combine (B, n, H, d) and the embeddings."""
        heads = found.transpose(1, 2)  # (B, H, n, d)
        return self.combine(heads, self.value).transpose(1, 2)


class MultiHeadEmbedding(OneHead):
    """Base of MHE-ADD and MHE-MUL; `Embeddings` says how a head's embedding acts.

    Attributes:
        shifts_scores: Whether a folded model's scores differ by a number per query. That changes
            nothing but where scores are capped (Gemma 2).
    """

    is_plain_folded = False
    Embeddings: type[HeadEmbeddings]
    shifts_scores: ClassVar[bool]

    def spread(self, site: AttentionSite, family: Family) -> None:
        like = next(site.module.parameters())
        route(site.module, self.Embeddings(site.heads, like, site.head_dim))

    def fold(self, model: PreTrainedModel, family: Family) -> None:
        """Let all heads attend to the one that is cached, instead of making keys and values of it.

        A step of decoding then reads the cache once and makes nothing of it, as in multi-query
        attention. The same function in evaluation, up to rounding. Attention with capped scores
        stays as it is where they would shift.
        """
        for attention in list(model.modules()):
            made = getattr(attention, "heads", None)
            if not isinstance(made, HeadEmbeddings):
                continue
            if self.shifts_scores and getattr(attention, "attn_logit_softcapping", None):
                continue
            module: Any = attention
            # a layer that takes another's probabilities has no use for its query
            module.heads = HeadTransform() if made.query is None else FoldedQuery(made)
            module.finish = FoldedResult(made)
            module.num_key_value_groups = len(made.value)

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        found: list[nn.Parameter] = []
        for module in surgery.modules_in(model, HeadEmbeddings):
            found.extend(module.parameters())
        return found


# ---- values are keys -----------------------------------------------------------------------------


class KeysAsValues(HeadTransform):
    """The values are the keys."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, key, key


class UnrotatedKeys(Absent):
    """Returns what the key map returns, before it is rotated.

    These are the values of a backbone that rotates its keys. The module has no weights of its own,
    so that whatever a PETL method makes of the key map holds for the values as well.
    """

    def __init__(self, attention: nn.Module, k: str, out_features: int) -> None:
        super().__init__(out_features)
        # in a tuple: torch would make a module in an attribute a child, and the tree a circle
        self._attention = (attention,)
        self._k = k

    def forward(self, x: Tensor) -> Tensor:
        keys: Tensor = self._attention[0].get_submodule(self._k)(x)  # (B, L, h d)
        return keys


class TiedValues(FromScratch):
    """Base of the variants whose values are their keys (SKV and EL).

    The cache holds one of the two, unless the backbone rotates its keys.
    """

    def convert_site(self, site: AttentionSite, family: Family) -> None:
        maps = surgery.projections(site)
        maps.k = self.keys(site, maps.k)
        if family.rotates:
            maps.v = UnrotatedKeys(site.module, site.k, surgery.width(maps.k))
            surgery.place(site, maps)
            route(site.module)
        else:
            maps.v = Absent(site.head_dim)
            surgery.place(site, maps)
            route(site.module, KeysAsValues())
            use_cache_layer(site.module, KeyOnlyLayer)

    def kept_floats(self, site: AttentionSite, family: Family) -> int:
        tensors = 2 if family.rotates else 1
        return self.key_heads(site) * site.head_dim * tensors

    @abstractmethod
    def keys(self, site: AttentionSite, own: nn.Module) -> nn.Module:
        """The map of keys and values, given the backbone's own map of keys.

        Raises:
            IncompatibleError: The backbone's shape does not allow it.
        """

    @abstractmethod
    def key_heads(self, site: AttentionSite) -> int:
        """Number of heads that the map of keys gives."""
