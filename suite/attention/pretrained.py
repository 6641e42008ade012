"""The attention of the checkpoint, unchanged.

Source: the backbone's own paper.
Deviations: none.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from suite.attention.base import Options, Variant
from suite.backbones.base import Family


class Pretrained(Variant[Options]):
    description = "the checkpoint's own attention, unchanged"
    source = "the backbone's paper"
    keeps_projections = True
    Config = Options

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        """Change nothing."""
