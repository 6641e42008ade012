"""What models end in: which class of transformers has a head, and the two heads whose loss it does not have."""

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
        kind: "classification" and "regression" add a new head; "choice" one of width 1, compared over the choices of a row;
            "span" one of width 2, for the first and the last token of an answer; "text" keeps the language-model head,
            "masked" an encoder's.
        num_labels: Classes; 1 for regression; ignored by the others.
    """

    kind: Literal["classification", "regression", "choice", "span", "text", "masked"]
    num_labels: int = 1


def auto_class(family: Family, head: Head) -> Any:
    """The class of transformers that makes a family's model with this head.

    Raises:
        IncompatibleError: There is none.
    """
    if head.kind == "masked" and family.kind == "encoder":
        return AutoModelForMaskedLM
    if head.kind == "text" and family.kind != "encoder":
        return AutoModelForSeq2SeqLM if family.kind == "encoder-decoder" else AutoModelForCausalLM
    if head.kind in ("classification", "regression", "choice") and family.kind != "encoder-decoder":
        return AutoModelForSequenceClassification
    if head.kind == "span" and family.kind == "encoder":
        return AutoModelForQuestionAnswering
    answers = {
        "encoder": "cannot answer in text",
        "decoder": "does not read both ways",
        "encoder-decoder": "answers in text only",
    }
    raise IncompatibleError(
        f"backbone family {family.name} ({family.kind}) {answers[family.kind]}, got a {head.kind} head"
    )


def head_config(config: PreTrainedConfig, head: Head) -> PreTrainedConfig:
    """A copy of the configuration that asks for the head."""
    config = copy.deepcopy(config)
    if head.kind in ("classification", "regression", "choice"):
        config.num_labels = 1 if head.kind == "choice" else head.num_labels
        config.problem_type = (
            "regression" if head.kind == "regression" else "single_label_classification"
        )
    if head.kind == "span":
        config.num_labels = 2
    return config


def set_loss(model: PreTrainedModel, head: Head) -> None:
    """Give a model with a "choice" head the loss over choices; all others have theirs."""
    if head.kind == "choice":
        override_forward(model, _choose)


def has_own_forward(model: PreTrainedModel) -> bool:
    """Whether batches are not (B, T), or answers not (B, classes) or (B, T, vocabulary), as libraries take for granted."""
    return "forward" in vars(model) or hasattr(model, "qa_outputs")


def _choose(
    original: Callable[..., Any],
    model: PreTrainedModel,
    *,
    labels: Tensor | None = None,
    **inputs: Tensor,
) -> Any:
    """Score every choice (B, C, T) as a text of its own; softmax and loss are over the choices of a row.

    Args:
        labels: Number of the right choice, (B,).
    """
    rows, choices, _ = inputs["input_ids"].shape
    output = original(**{name: tensor.flatten(0, 1) for name, tensor in inputs.items()})
    output.logits = output.logits.view(rows, choices)
    if labels is not None:
        output.loss = cross_entropy(output.logits.float(), labels)
    return output
