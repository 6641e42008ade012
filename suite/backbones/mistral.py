"""Mistral: a decoder as Llama 3; its first version sees a window of 4,096 tokens in every layer.

Source: Jiang et al., Mistral 7B (arXiv 2310.06825), section 2.
Deviations: none.
"""

from __future__ import annotations

from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from suite.backbones._rotary import RotaryDecoder


class Mistral(RotaryDecoder):
    model_types = ("mistral",)
    description = "Mistral: causal decoder with a head on the last token, or text"
    norm_class = MistralRMSNorm
