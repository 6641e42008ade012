"""The attention of the checkpoint, unchanged.

Source: the backbone's own paper.
Deviations: none.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from suite.attention.base import Variant
from suite.backbones.base import Family
from suite.config.loader import Strict


class NoOptions(Strict):
    """`pretrained` has no options."""


class Pretrained(Variant[NoOptions]):
    description = "the checkpoint's own attention, unchanged"
    source = "the backbone's paper"
    keeps_projections = True
    Config = NoOptions

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        """Change nothing."""
