"""RoBERTa: BERT without token types and pooler, with positions that begin after the padding id.

The task head is `classifier`, a hidden layer and an output layer on the first token, or `lm_head`
(masked language modelling).

Source: Liu et al., RoBERTa (arXiv 1907.11692).
Deviations: none.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from suite.backbones.bert import Bert


class Roberta(Bert):
    model_types = ("roberta",)
    description = "RoBERTa: encoder with a classification or regression head"
    heads = ("classifier", "lm_head", "qa_outputs")

    def positions(self, config: PreTrainedConfig) -> int | None:
        """The table's rows less those up to the padding id's: 512 of 514."""
        known: Any = config
        positions: int = known.max_position_embeddings - (known.pad_token_id + 1)
        return positions
