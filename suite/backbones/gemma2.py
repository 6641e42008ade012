"""Gemma 2: a decoder with soft-capped scores, norms on both sides of each sublayer, and windows.

Every second layer sees a window of 4,096 tokens.

Source: Gemma Team, Gemma 2 (arXiv 2408.00118), section 2.
Deviations: none. transformers' sdpa has no soft cap, so attention is its eager one.
"""

from __future__ import annotations

from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from suite.backbones._rotary import AlternatingDecoder


class Gemma2(AlternatingDecoder):
    model_types = ("gemma2",)
    description = "Gemma 2: causal decoder with a head on the last token, or text"
    norm_class = Gemma2RMSNorm
    implementation = "eager"
