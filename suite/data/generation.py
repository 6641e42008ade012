"""Texts that the model writes: translation and summaries.

Source: T5 (Raffel et al. 2020, arXiv 1910.10683), appendix D, for prompts; GPT-2 (Radford et al. 2019), section 3, for a
decoder that writes on after a prompt.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.task import GenerationTask, QuestionAnsweringTask
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED, collate_padded, pad, pad_left
from suite.data.objective import Batch, Columns, Features, Objective, prompts
from suite.data.tokenizer import plain_ids, prompt_ids
from suite.errors import IncompatibleError
from suite.metrics.text import score_texts, signatures


class GenerationObjective(Objective):
    """A prompt in, a text out; searched greedily or with beams."""

    head = Head("text")
    task: GenerationTask | QuestionAnsweringTask

    def __init__(
        self,
        task: GenerationTask | QuestionAnsweringTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.beams = training.beams or task.beams

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[str]:
        inputs = self._inputs(batch)
        written = model.generate(
            **inputs,
            max_new_tokens=self.training.target_max_length,
            do_sample=False,
            num_beams=self.beams,
            pad_token_id=self.pad_id,
            synced_gpus=synced,
        )
        texts = self.tokenizer.batch_decode(
            self._answers(written, inputs), skip_special_tokens=True
        )
        return [str(text).strip() for text in texts]

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        assert isinstance(self.task, GenerationTask)
        return score_texts(self.task.metrics, predictions, golds, answer=self.task.answer)

    def signatures(self) -> dict[str, str]:
        return signatures(tuple(self.task.metrics))

    def _targets(self, columns: Columns) -> list[str]:
        """What the model learns to write."""
        assert isinstance(self.task, GenerationTask)
        return list(columns[self.task.target])

    def _golds(self, columns: Columns) -> list[Any]:
        """What is held against what it writes."""
        return [*self._targets(columns)]

    @abstractmethod
    def _inputs(self, batch: Batch) -> Batch:
        """What `generate` starts from."""

    @abstractmethod
    def _answers(self, written: torch.Tensor, inputs: Batch) -> torch.Tensor:
        """The new tokens of what `generate` returned."""


class TextToTextGeneration(GenerationObjective):
    """Encoder-decoders: T5's prompt in, the target text out."""

    def encode(self, columns: Columns) -> Features:
        training, targets = self.training, self._targets(columns)
        ids = self.tokenizer(
            prompts(self.task, columns), truncation=True, max_length=training.max_length
        )["input_ids"]
        labels = self.tokenizer(
            text_target=targets, truncation=True, max_length=training.target_max_length
        )["input_ids"]
        lengths, units = [len(i) for i in ids], [len(i) for i in labels]
        return {
            "input_ids": ids,
            "labels": labels,
            "gold": self._golds(columns),
            "length": lengths,
            "units": units,
        }

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        size = {
            "at_most": self.training.target_max_length,
            "multiple": self.training.pad_to_multiple,
        }
        return {
            **self._padded(rows, {"input_ids": self.pad_id}),
            "labels": pad([row["labels"] for row in rows], IGNORED, **size),
        }

    def _inputs(self, batch: Batch) -> Batch:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def _answers(self, written: torch.Tensor, inputs: Batch) -> torch.Tensor:
        return written


class DecoderGeneration(GenerationObjective):
    """Decoders: prompt, cue and target in one sequence, loss on the target and the end token after it.

    `training.max_length` bounds the prompt with its cue, `training.target_max_length` the target; the model needs both.
    """

    CUE = " answer:"
    """Ours, as where a decoder scores label words; never cut off."""

    def __init__(
        self,
        task: GenerationTask | QuestionAnsweringTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.cue = plain_ids(tokenizer, self.CUE)
        self.end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.room = training.max_length - len(self.cue)
        if self.room < 1 or training.target_max_length <= len(self.end):
            raise IncompatibleError(
                f"task {task.name}: training.max_length {training.max_length} or training.target_max_length "
                f"{training.target_max_length} leaves no room for text; raise it"
            )

    @property
    def positions(self) -> int:
        return self.training.max_length + self.training.target_max_length

    def encode(self, columns: Columns) -> Features:
        starts = [
            [*prompt_ids(self.tokenizer, text)[: self.room], *self.cue]
            for text in prompts(self.task, columns)
        ]
        answers = [self._answer(text) for text in self._targets(columns)]
        both = list(zip(starts, answers, strict=True))
        return {
            "input_ids": [start + answer for start, answer in both],
            "labels": [[IGNORED] * len(start) + answer for start, answer in both],
            "gold": self._golds(columns),
            "length": [len(start) + len(answer) for start, answer in both],
            "units": [len(answer) for answer in answers],
        }

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        fill = {"input_ids": self.pad_id, "labels": IGNORED}
        return collate_padded(
            rows, fill, at_most=self.positions, multiple=self.training.pad_to_multiple
        )

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "cue": self.CUE}

    def _answer(self, text: str) -> list[int]:
        room = self.training.target_max_length - len(self.end)
        return [*plain_ids(self.tokenizer, " " + text)[:room], *self.end]

    def _inputs(self, batch: Batch) -> Batch:
        """The prompts alone, padded on the left, so that every answer begins where its prompt ends."""
        starts = (batch["labels"] != IGNORED).int().argmax(dim=1).tolist()
        rows = [ids[:start].tolist() for ids, start in zip(batch["input_ids"], starts, strict=True)]
        size = {"at_most": self.training.max_length, "multiple": self.training.pad_to_multiple}
        device = batch["input_ids"].device
        ids, mask = (
            pad_left(rows, self.pad_id, **size),
            pad_left([[1] * len(row) for row in rows], 0, **size),
        )
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def _answers(self, written: torch.Tensor, inputs: Batch) -> torch.Tensor:
        return written[:, inputs["input_ids"].shape[1] :]


def make_generation(
    task: GenerationTask,
    tokenizer: PreTrainedTokenizerBase,
    training: TrainingConfig,
    *,
    kind: Kind,
) -> GenerationObjective:
    """Text to text for encoder-decoders, one sequence for decoders.

    Raises:
        IncompatibleError: An encoder, which writes nothing; no room for text.
    """
    if kind == "encoder":
        raise IncompatibleError(
            f"task {task.name}: an encoder backbone cannot write text; use an encoder-decoder or a decoder-only backbone"
        )
    return (
        TextToTextGeneration(task, tokenizer, training)
        if kind == "encoder-decoder"
        else DecoderGeneration(task, tokenizer, training)
    )
