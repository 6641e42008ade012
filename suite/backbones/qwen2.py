"""Qwen 2 and 2.5: a decoder as Llama 3, with biases on queries, keys and values.

Source: Yang et al., Qwen2 (arXiv 2407.10671), section 2.2; Qwen2.5 (arXiv 2412.15115).
Deviations: none.
"""

from __future__ import annotations

from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from suite.backbones._rotary import RotaryDecoder


class Qwen2(RotaryDecoder):
    model_types = ("qwen2",)
    description = "Qwen 2 and 2.5: causal decoder with a head on the last token, or text"
    norm_class = Qwen2RMSNorm
