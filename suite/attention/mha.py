"""Multi-head attention, trained from scratch: the baseline of the other variants in the MHE paper.

Source: Vaswani et al., arXiv 1706.03762, section 3.2.2; MHE, arXiv 2310.07911, section 3.1.
Deviations:
    - It is the backbone's own attention, untouched: with its biases (BERT, GPT-2), and with grouped
      keys and values where the backbone has fewer of those heads (Llama 3). `pretrained` is the
      same with the checkpoint's weights.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from suite.attention.base import Options, Start, Variant
from suite.backbones.base import Family


class Mha(Variant[Options]):
    description = (
        "every head has its own query, key and value projection: the backbone's attention,"
        " from scratch"
    )
    source = "Vaswani et al., arXiv 1706.03762, section 3.2.2; MHE, arXiv 2310.07911, section 3.1"
    start: Start = "scratch"
    keeps_projections = True

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        """Change nothing."""
