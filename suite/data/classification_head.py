"""A class or a number from a new head on the backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from suite.backbones.loading import Head
from suite.config.task import ClassificationTask
from suite.config.training import TrainingConfig
from suite.data.objective import Batch, Columns, Features, LabelObjective, fill


class HeadObjective(LabelObjective):
    """A new classification or regression head: on an encoder's text or pair, or on a decoder's last token of the prompt."""

    task: ClassificationTask

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
        texts = self._texts(columns) if self.pairs else [self._prompts(columns)]
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.training.max_length)
        names = ("input_ids", "token_type_ids") if self.pairs else ("input_ids",)
        features: Features = {name: encoded[name] for name in names if name in encoded}
        ids = features["input_ids"]
        return {
            **features,
            "gold": self._gold(columns),
            "length": [len(i) for i in ids],
            "units": [1] * len(ids),
        }

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        batch = self._padded(rows, {"input_ids": self.pad_id, "token_type_ids": 0})
        dtype = torch.float32 if self.task.is_regression else torch.long
        return {**batch, "labels": torch.tensor([row["gold"] for row in rows], dtype=dtype)}

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        logits = model(
            **{name: tensor for name, tensor in batch.items() if name != "labels"}
        ).logits.float()
        answers: list[float] = (
            logits.squeeze(-1) if self.task.is_regression else logits.argmax(-1)
        ).tolist()
        return [float(answer) for answer in answers]

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "pairs": self.pairs}

    def _texts(self, columns: Columns) -> list[list[str]]:
        """The one or two texts of every row."""
        if self.task.pair is None:
            return [list(columns[column]) for column in self.task.inputs]
        return [fill(template, columns) for template in self.task.pair]
