"""Full fine-tuning: every parameter of the backbone trains.

Source: the reference row of READ, arXiv 2305.15348, table 1.
Deviations: none.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from suite.backbones.base import Family
from suite.petl.base import Architecture, Method, head_parameters


class FullArchitecture(Architecture):
    """`full` has no hyperparameters other than the learning rate."""


class Full(Method[FullArchitecture]):
    description = "full fine-tuning: everything trains"
    source = "READ, arXiv 2305.15348, table 1"
    Config = FullArchitecture

    def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model

    def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
        """All parameters; a tied one counts once."""
        everything = sum(parameter.numel() for parameter in model.parameters())
        head = sum(parameter.numel() for parameter in head_parameters(model, family))
        return everything - head
