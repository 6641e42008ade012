"""`suite.load`: a model and its tokenizer from a folder that `suite export` wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import build
from suite.backbones.weights import cast_weights
from suite.errors import ConfigError
from suite.export.adapter import load_adapter, load_prompt
from suite.export.base import open_base, open_tokenizer
from suite.export.description import FILE, Description, read_description
from suite.export.own import load_own
from suite.export.predict import Answer, Text, predict


@dataclass(frozen=True, slots=True)
class Loaded:
    """An exported model, ready to answer; `model, tokenizer = suite.load(DIR)` takes it apart.

    Attributes:
        model: In evaluation mode, on the CPU; wherever it is moved, `predict` works there.
        kind: How its backbone reads and answers.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    description: Description
    kind: Kind

    def __iter__(self) -> Iterator[Any]:
        yield self.model
        yield self.tokenizer

    def predict(self, texts: Iterable[Text], *, batch_size: int = 32) -> list[Answer]:
        """Answer texts as the trial did when it was scored.

        A trial under autocast was scored in bf16; these answers are of the fp32 weights, and may
        differ in close cases.

        Args:
            texts: One entry per row: a text, or for several columns a tuple in the order of the
                task's `inputs` (and `choices`), or a dictionary by column.
            batch_size: Rows of a forward pass.

        Returns:
            For each row the label word (None where the model wrote no label), the number, the
            text that is pointed at or written, or the perplexity of the text (None where it has
            no token to score).

        Raises:
            DataError: A text is not what the task reads.
            ConfigError: The folder does not say how its model reads a text.
        """
        reading = self.description.reading
        if reading is None:
            raise ConfigError(
                f"{FILE} of {self.description.task}: it does not say how the model reads a text,"
                " expected its key reading; export the trial again"
            )
        return predict(
            self.model, self.tokenizer, reading, texts, kind=self.kind, batch_size=batch_size
        )


def load(folder: str | Path) -> Loaded:
    """Load a model and its tokenizer.

    The model is in evaluation mode, on the CPU, in the precision that it was trained in. Nothing
    is unpickled. No code of the folder runs, unless the caller names it by `FOLDER@DIGEST` in
    `suite.config.trust.trusting`. A base that is not in the folder comes from the hub's cache, the
    hub or a Python package, at the revision that was trained on.

    Args:
        folder: A folder that `suite export` wrote.

    Raises:
        ConfigError: It is not such a folder.
        BackboneError: The base cannot be found, is not the one that was trained on, or brings code
            that the caller does not trust.
        CheckpointError: The tensors do not fit.
    """
    folder = Path(folder)
    description = read_description(folder)
    model = load_model(description, folder)
    kind = open_base(description, folder).family.kind
    return Loaded(model, open_tokenizer(folder), description, kind)


def load_model(description: Description, folder: Path) -> nn.Module:
    """Load the model without its tokenizer."""
    if description.format == "suite":
        model = load_own(description, folder)
    elif description.format == "peft" and description.arm.method == "prompt":
        model = load_prompt(description, folder)
    elif description.format == "peft":
        model = load_adapter(description, folder)
    else:
        model = build(open_base(description, folder), description.made_head)
        cast_weights(model, getattr(torch, description.dtype))
    return model.eval()  # dropout off: the user may only want answers
