"""What a model ends in: which transformers class has a head, and the loss over choices.

Shapes: B rows, C choices of a row, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from suite.backbones._find import override_forward
from suite.backbones.base import Family
from suite.errors import IncompatibleError


@dataclass(frozen=True, slots=True)
class Head:
    """What a model ends in.

    Attributes:
        kind: "classification" and "regression" add a new head. "choice" adds one of width 1 and
            compares its scores over the choices of a row. "span" adds one of width 2, for the first
            and the last token of an answer. "text" keeps the language-model head, and "masked" an
            encoder's masked-language-model head.
        num_labels: Classes; 1 for regression; the others ignore it.
    """

    kind: Literal["classification", "regression", "choice", "span", "text", "masked"]
    num_labels: int = 1


def auto_class(family: Family, head: Head) -> Any:
    """The transformers class that makes a family's model with this head.

    Raises:
        IncompatibleError: There is none.
    """
    if head.kind == "masked" and family.kind == "encoder":
        return AutoModelForMaskedLM
    if head.kind == "text" and family.kind == "encoder-decoder":
        return AutoModelForSeq2SeqLM
    if head.kind == "text" and family.kind == "decoder":
        return AutoModelForCausalLM
    if head.kind in ("classification", "regression", "choice") and family.kind != "encoder-decoder":
        return AutoModelForSequenceClassification
    if head.kind == "span" and family.kind == "encoder":
        return AutoModelForQuestionAnswering
    reasons = {
        "encoder": "cannot answer in text",
        "decoder": "does not read both ways",
        "encoder-decoder": "answers in text only",
    }
    raise IncompatibleError(
        f"backbone family {family.name} ({family.kind}) {reasons[family.kind]},"
        f" got a {head.kind} head"
    )


def head_config(config: PreTrainedConfig, head: Head) -> PreTrainedConfig:
    """Copy the configuration and ask in it for the head."""
    config = copy.deepcopy(config)
    if head.kind == "classification":
        config.num_labels = head.num_labels
        config.problem_type = "single_label_classification"
    elif head.kind == "regression":
        config.num_labels = head.num_labels
        config.problem_type = "regression"
    elif head.kind == "choice":
        config.num_labels = 1  # one score a choice
        config.problem_type = "single_label_classification"
    elif head.kind == "span":
        config.num_labels = 2  # a score for the first and one for the last token
    return config


def set_loss(model: PreTrainedModel, head: Head) -> None:
    """Give a model with a "choice" head the loss over choices; transformers has all others."""
    if head.kind == "choice":
        override_forward(model, _forward_over_choices)


def has_own_forward(model: PreTrainedModel) -> bool:
    """Whether batches or answers have other shapes than libraries take for granted.

    These are (B, T) for batches, and (B, classes) or (B, T, vocabulary) for answers.
    """
    return "forward" in vars(model) or type(model).__name__.endswith("ForQuestionAnswering")


def _forward_over_choices(
    original: Callable[..., Any],
    model: PreTrainedModel,
    *,
    labels: Tensor | None = None,
    **inputs: Tensor,
) -> Any:
    """Score every choice as a text of its own; softmax and loss are over the choices of a row.

    Args:
        original: The model's own forward.
        model: The model; `override_forward` hands it on.
        labels: Number of the right choice, (B,).
        inputs: Tensors of (B, C, T).
    """
    rows, choices, _ = inputs["input_ids"].shape
    texts = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}  # (B * C, T)
    output = original(**texts)
    output.logits = output.logits.view(rows, choices)  # (B, C)
    if labels is not None:
        # fp32, as cross-entropy in half precision loses digits
        output.loss = cross_entropy(output.logits.float(), labels)
    return output
