"""Multi-head embedding, multiplicative: there is one projected head, which each head scales.

It scales the queries, keys and values by 1 + an embedding each.

Source: MHE, arXiv 2310.07911, section 3.4, eq. 6: Q_i = X W_q * (1 + e_i^q), element by element,
    and so for keys and values.
Deviations: as `_mhe`, and
    - Embeddings start from N(0, 0.02) (ours, as BERT's do; the paper does not say).
    - The cache holds the one projected head, and heads are made of it at each step until the model
      is folded; the paper does not say. Under Llama that head is rotated already, so the
      embeddings act after the rotation.
"""

from __future__ import annotations

from torch import Tensor

from suite.attention._mhe import HeadEmbeddings, MultiHeadEmbedding


class ScalingEmbeddings(HeadEmbeddings):
    """x (1 + e_i)."""

    @staticmethod
    def combine(x: Tensor, embedding: Tensor) -> Tensor:
        return x * (1 + embedding)[:, None]  # (B, 1, L, d) * (H, 1, d) = (B, H, L, d)

    @staticmethod
    def of_query(query: Tensor, key: Tensor) -> Tensor:
        return query + key + query * key  # (1 + query) (1 + key) = 1 + this


class MheMul(MultiHeadEmbedding):
    description = (
        "one projected head; each head scales queries, keys and values by 1 + its own embedding"
    )
    source = "MHE, arXiv 2310.07911, section 3.4, eq. 6"
    Embeddings = ScalingEmbeddings
    shifts_scores = False
