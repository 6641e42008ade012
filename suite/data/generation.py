"""Texts that the model writes: translations and summaries.

Source: T5 (Raffel et al. 2020, arXiv 1910.10683), appendix D, for prompts; GPT-2 (Radford et al.
2019), section 3, for a decoder that continues a prompt.
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
from suite.data.classification_text import prompts_of
from suite.data.collate import IGNORED, collate_padded, ones_like, pad_left
from suite.data.decoding import own_decoding
from suite.data.objective import (
    Batch,
    Columns,
    Features,
    Objective,
    continuation_features,
    prompts,
    target_features,
)
from suite.data.tokenizer import CUE, as_written, end_ids, plain_ids, prompt_ids
from suite.errors import IncompatibleError
from suite.metrics.text import score_texts, signatures


class GenerationObjective(Objective):
    """The model reads a prompt and writes a text, searched greedily or with beams."""

    head = Head("text")
    generates = True
    task: GenerationTask | QuestionAnsweringTask

    def __init__(
        self,
        task: GenerationTask | QuestionAnsweringTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
    ) -> None:
        super().__init__(task, tokenizer, training)
        # a sweep may save time with fewer beams than the task asks for
        self.beams = training.beams or task.beams
        self.longest = training.max_new_tokens or training.target_max_length

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[str]:
        inputs = self._inputs(batch)
        with own_decoding(model, self.tokenizer, pad_id=self.pad_id) as options:
            written = model.generate(
                **inputs,
                max_new_tokens=self.longest,
                # greedy or beams: a sample would add chance to the score
                do_sample=False,
                num_beams=self.beams,
                synced_gpus=synced,
                **options,
            )
        answers = self._answers(written, inputs)
        # decoders write a space before the first word
        return [as_written(self.tokenizer, answer).strip() for answer in answers]

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        assert isinstance(self.task, GenerationTask)
        return score_texts(self.task.metrics, predictions, golds, answer=self.task.answer)

    def signatures(self) -> dict[str, str]:
        return signatures(tuple(self.task.metrics))

    def _targets(self, columns: Columns) -> list[str]:
        """The texts that the model learns to write."""
        assert isinstance(self.task, GenerationTask)
        return list(columns[self.task.target])

    def _golds(self, columns: Columns) -> list[Any]:
        """What each written text is compared with."""
        return list(self._targets(columns))

    @abstractmethod
    def _inputs(self, batch: Batch) -> Batch:
        """What `generate` starts from."""

    @abstractmethod
    def _answers(self, written: torch.Tensor, inputs: Batch) -> torch.Tensor:
        """The new tokens in what `generate` returned."""


class TextToTextGeneration(GenerationObjective):
    """Encoder-decoders read T5's prompt and write the target text."""

    def encode(self, columns: Columns) -> Features:
        inputs = self.tokenizer(
            prompts(self.task, columns), truncation=True, max_length=self.training.max_length
        )
        targets = self.tokenizer(
            text_target=self._targets(columns),
            truncation=True,
            max_length=self.training.target_max_length,
        )
        return target_features(inputs["input_ids"], targets["input_ids"], self._golds(columns))

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return self._padded_with_target(rows)

    def _inputs(self, batch: Batch) -> Batch:
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    def _answers(self, written: torch.Tensor, inputs: Batch) -> torch.Tensor:
        # the prompt is the encoder's, so all that is written is new
        return written


class DecoderGeneration(GenerationObjective):
    """Decoders read prompt, cue and target in one sequence.

    The loss is on the target and its end token.

    `training.max_length` bounds the prompt with its cue, `training.target_max_length` the target;
    the model needs room for both.
    """

    def __init__(
        self,
        task: GenerationTask | QuestionAnsweringTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.cue = plain_ids(tokenizer, CUE)
        self.end = end_ids(tokenizer)
        self.room = training.max_length - len(self.cue)
        if self.room < 1 or training.target_max_length <= len(self.end):
            raise IncompatibleError(
                f"task {task.name}: training.max_length {training.max_length} or "
                f"training.target_max_length {training.target_max_length} "
                "leaves no room for text; raise it"
            )

    @property
    def positions(self) -> int:
        return self.training.max_length + max(self.training.target_max_length, self.longest)

    @property
    def trained_positions(self) -> int:
        return self.training.max_length + self.training.target_max_length

    def encode(self, columns: Columns) -> Features:
        starts = []
        for text in prompts(self.task, columns):
            starts.append([*prompt_ids(self.tokenizer, text)[: self.room], *self.cue])
        room = self.training.target_max_length - len(self.end)
        targets = []
        for text in self._targets(columns):
            # the space makes the target's first word the same token as in running text
            targets.append([*plain_ids(self.tokenizer, " " + text)[:room], *self.end])
        return continuation_features(starts, targets, self._golds(columns))

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return collate_padded(
            rows,
            {"input_ids": self.pad_id, "labels": IGNORED},
            at_most=self.trained_positions,
            multiple=self.training.pad_to_multiple,
        )

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "cue": CUE}

    def _inputs(self, batch: Batch) -> Batch:
        """The prompts alone, padded on the left, so that every answer begins after its prompt."""
        rows = prompts_of(batch)
        at_most = self.training.max_length
        multiple = self.training.pad_to_multiple
        device = batch["input_ids"].device
        ids = pad_left(rows, self.pad_id, at_most=at_most, multiple=multiple)
        mask = pad_left(ones_like(rows), 0, at_most=at_most, multiple=multiple)
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def _answers(self, written: torch.Tensor, inputs: Batch) -> torch.Tensor:
        # a decoder's `generate` returns the prompt as well
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
        IncompatibleError: The backbone is an encoder, which writes nothing; or there is no room for
            text.
    """
    if kind == "encoder":
        raise IncompatibleError(
            f"task {task.name}: an encoder backbone cannot write text; "
            "use an encoder-decoder or a decoder-only backbone"
        )
    if kind == "encoder-decoder":
        return TextToTextGeneration(task, tokenizer, training)
    return DecoderGeneration(task, tokenizer, training)
