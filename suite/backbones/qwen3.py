"""Qwen 3 (dense): a decoder as Llama 3, with a norm on every head's queries and keys.

The norms stay where they are under any attention variant: they act on heads, however many there
are. They go where a variant does without queries or keys.

Source: Yang et al., Qwen3 (arXiv 2505.09388), section 2.
Deviations: none.
"""

from __future__ import annotations

from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from suite.backbones._rotary import RotaryDecoder


class Qwen3(RotaryDecoder):
    model_types = ("qwen3",)
    description = "Qwen 3 (dense): causal decoder with a head on the last token, or text"
    norm_class = Qwen3RMSNorm
    normed_heads = True
