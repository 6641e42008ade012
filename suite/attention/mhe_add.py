"""Multi-head embedding, additive: there is one projected head, and each head adds its embedding.

It adds an embedding each to the queries, keys and values.

Source: MHE, arXiv 2310.07911, section 3.4, eq. 5: Q_i = X W_q + e_i^q, and so for keys and values.
Deviations: as `_mhe`, and
    - Embeddings start from N(0, 0.02) (ours, as BERT's do; the paper does not say).
    - Section 3.4's sentence adds embeddings to the projection matrices; eq. 5, followed here, adds
      them to what those give.
    - The cache holds the one projected head, and heads are made of it at each step until the model
      is folded; the paper does not say. Under Llama that head is rotated already, so the
      embeddings act after the rotation.
    - A key's embedding adds the same to all scores of a query and so changes nothing: its gradient
      is zero. It is kept, as the paper counts it.
"""

from __future__ import annotations

from torch import Tensor

from suite.attention._mhe import HeadEmbeddings, MultiHeadEmbedding


class AddedEmbeddings(HeadEmbeddings):
    """x + e_i."""

    @staticmethod
    def combine(x: Tensor, embedding: Tensor) -> Tensor:
        return x + embedding[:, None]  # (B, 1, L, d) + (H, 1, d) = (B, H, L, d)

    @staticmethod
    def of_query(query: Tensor, key: Tensor) -> Tensor:
        return query  # a key's embedding adds the same to all scores of a query


class MheAdd(MultiHeadEmbedding):
    description = "one projected head; each head adds its own embedding to queries, keys and values"
    source = "MHE, arXiv 2310.07911, section 3.4, eq. 5"
    Embeddings = AddedEmbeddings
    shifts_scores = True
