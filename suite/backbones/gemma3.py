"""Gemma 3 (text): Gemma 2 with norms on queries and keys in place of the soft cap.

One layer in six sees the whole text, the others a window of 512 or 1,024 tokens, with rotary
angles of their own. The larger checkpoints (4B and up) also read images; those are another model
type and are not served.

Source: Gemma Team, Gemma 3 (arXiv 2503.19786), section 2.
Deviations: none.
"""

from __future__ import annotations

from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from suite.backbones._rotary import AlternatingDecoder


class Gemma3(AlternatingDecoder):
    model_types = ("gemma3_text",)
    description = "Gemma 3 (text): causal decoder with a head on the last token, or text"
    norm_class = Gemma3RMSNorm
    normed_heads = True
