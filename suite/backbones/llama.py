"""Llama 2 and 3: a decoder with rotary positions, RMSNorm, gated feed-forward and grouped KV heads.

Source: Touvron et al., Llama 2 (arXiv 2307.09288); Grattafiori et al., The Llama 3 Herd of Models
(arXiv 2407.21783).
Deviations: none.
"""

from __future__ import annotations

from transformers.models.llama.modeling_llama import LlamaRMSNorm

from suite.backbones._rotary import RotaryDecoder


class Llama(RotaryDecoder):
    model_types = ("llama",)
    description = "Llama 2 and 3: causal decoder with a head on the last token, or text"
    norm_class = LlamaRMSNorm
