"""A class or a number from a new head, on an encoder or on a decoder's last prompt token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from suite.backbones.loading import Head
from suite.config.task import ClassificationTask
from suite.config.training import TrainingConfig
from suite.data.objective import (
    Batch,
    Columns,
    Features,
    LabelObjective,
    fill,
    lengths,
    prompts,
)
from suite.data.tokenizer import start_ids


class HeadObjective(LabelObjective):
    """A new classification or regression head.

    Args:
        pairs: Read the row's text or pair of texts, as encoders do; else the prompt.
    """

    task: ClassificationTask
    kept_splits = ("train", "validation")

    def __init__(
        self,
        task: ClassificationTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
        *,
        pairs: bool,
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.pairs = pairs
        self.head = Head("regression" if task.is_regression else "classification", task.num_labels)

    def encode(self, columns: Columns) -> Features:
        # decoders read the same prompt as text-to-text models, so that only the head differs
        if self.pairs:
            texts = self._texts(columns)
        else:
            texts = [prompts(self.task, columns)]
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.training.max_length)
        # Without tokens of its own a decoder's tokenizer makes nothing of an empty text.
        start = start_ids(self.tokenizer)
        features: Features = {"input_ids": [ids or start for ids in encoded["input_ids"]]}
        if self.pairs and "token_type_ids" in encoded:
            features["token_type_ids"] = encoded["token_type_ids"]
        features["gold"] = self._gold(columns)
        features["length"] = lengths(features["input_ids"])
        # a head has one loss per row, however long the text is
        features["units"] = [1] * len(features["gold"])
        return features

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        batch = self._padded(rows, {"input_ids": self.pad_id, "token_type_ids": 0})
        # the mean squared error takes floats, the cross-entropy class ids
        dtype = torch.float32 if self.task.is_regression else torch.long
        batch["labels"] = torch.tensor([row["gold"] for row in rows], dtype=dtype)  # (B,)
        return batch

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        logits = model(**without_labels(batch)).logits.float()  # (B, classes), or (B, 1)
        if self.task.is_regression:
            answers = logits.squeeze(-1)
        else:
            answers = logits.argmax(-1)
        return [float(answer) for answer in answers.tolist()]

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "pairs": self.pairs}

    def _texts(self, columns: Columns) -> list[list[str]]:
        """The one or two columns of text."""
        if self.task.pair is None:
            return [list(columns[column]) for column in self.task.inputs]
        return [fill(template, columns) for template in self.task.pair]


def without_labels(batch: Batch) -> Batch:
    """The inputs of a batch; with labels a model would also compute a loss."""
    inputs = dict(batch)
    del inputs["labels"]
    return inputs
