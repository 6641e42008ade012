"""DeBERTa v2 and v3: BERT whose scores add terms between contents and relative positions.

The task head is a new `pooler` on the first token with `classifier`, or `cls` (masked language
modelling).

Source: He et al., DeBERTa (arXiv 2006.03654), section 3; DeBERTaV3 (arXiv 2111.09543).
Deviations: none. transformers has its eager attention alone.
"""

from __future__ import annotations

from suite.backbones.bert import Bert


class Deberta(Bert):
    model_types = ("deberta-v2",)
    description = "DeBERTa v2 and v3: encoder with a classification or regression head"
    maps = ("query_proj", "key_proj", "value_proj")
    heads = ("pooler", "classifier", "cls", "lm_predictions", "qa_outputs")
    implementation = "eager"
    fixed_attention = (
        "because its attention is disentangled: each head also scores relative positions with maps"
        " of its own"
    )
    refused_methods = {
        "lst": "because its blocks read a table of relative positions as wide as the model,"
        " which LST's narrow side blocks lack",
        "peft:prefix-tuning": "because its attention takes no keys and values in front of the text",
    }
