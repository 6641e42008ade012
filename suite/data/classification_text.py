"""Answers in words: text to text for encoder-decoders, scoring of label words for decoders.

Source: T5 (Raffel et al. 2020, arXiv 1910.10683), section 2.4 and appendix D: prompts, label words, numbers as text, and
an answer that is no label counts as wrong. Scoring of label words: GPT-3 (Brown et al. 2020, arXiv 2005.14165), 2.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from suite.backbones.loading import Head
from suite.config.task import ClassificationTask
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED, pad
from suite.data.label_words import LabelWords
from suite.data.objective import AnyLabelTask, Batch, Columns, Features, LabelObjective
from suite.data.tokenizer import plain_ids, prompt_ids
from suite.errors import IncompatibleError


class TextToTextObjective(LabelObjective):
    """Prompt in, label text out (T5); answers are generated greedily."""

    head = Head("text")

    def __init__(
        self, task: AnyLabelTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.words = LabelWords(task.label, tokenizer, where=f"task {task.name}")
        lengths = {
            text: len(ids)
            for text, ids in zip(self.words.texts(), self._targets(self.words.texts()), strict=True)
        }
        longest = max(lengths, key=lengths.__getitem__)
        self.longest = lengths[longest]
        if self.longest > training.target_max_length:
            raise IncompatibleError(
                f"task {task.name}: training.target_max_length is {training.target_max_length}, "
                f"but label {longest!r} has {self.longest} tokens for this backbone; raise it"
            )

    def encode(self, columns: Columns) -> Features:
        ids = self.tokenizer(
            self._prompts(columns), truncation=True, max_length=self.training.max_length
        )["input_ids"]
        gold = self._gold(columns)
        labels = self._targets([self.words.text(value) for value in gold])
        lengths, units = [len(i) for i in ids], [len(i) for i in labels]
        return {"input_ids": ids, "labels": labels, "gold": gold, "length": lengths, "units": units}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        batch = self._padded(rows, {"input_ids": self.pad_id})
        training = self.training
        labels = pad(
            [row["labels"] for row in rows],
            IGNORED,
            at_most=training.target_max_length,
            multiple=training.pad_to_multiple,
        )
        return {**batch, "labels": labels}

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        written = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.longest + 1,
            do_sample=False,
            num_beams=1,
            synced_gpus=synced,
        )
        return [
            float(self.words.value(text))
            for text in self.tokenizer.batch_decode(written, skip_special_tokens=True)
        ]

    def _targets(self, texts: list[str]) -> list[list[int]]:
        targets: list[list[int]] = self.tokenizer(text_target=texts)["input_ids"]
        return targets


class DecoderTextObjective(LabelObjective):
    """Prompt and label word in one sequence, loss on the label's tokens; the likeliest label is the answer.

    A label ends with the end-of-text token where the tokenizer has one, so that no label is a prefix of another.
    """

    head = Head("text")
    CUE = " answer:"
    """Ours; stands between the T5 prompt and the label and is never cut off."""

    def __init__(
        self, task: ClassificationTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        if task.label.words is None:
            raise IncompatibleError(
                f"task {task.name}: a number cannot be scored as label words; use decoder_objective: head"
            )
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.cue = plain_ids(tokenizer, self.CUE)
        self.labels: list[list[int]] = [
            plain_ids(tokenizer, " " + word) + end for word in task.label.words
        ]
        if len(set(map(tuple, self.labels))) < len(self.labels):
            raise IncompatibleError(
                f"task {task.name}: to this backbone's tokenizer label.words {task.label.words} are not distinct"
            )
        self.room = training.max_length - len(self.cue) - max(map(len, self.labels))
        if self.room < 1:
            raise IncompatibleError(
                f"task {task.name}: training.max_length {training.max_length} leaves no room for a prompt; raise it"
            )

    def encode(self, columns: Columns) -> Features:
        gold = self._gold(columns)
        prompts = [self._prompt(text) for text in self._prompts(columns)]
        labels = [self.labels[value] for value in gold]
        return {
            "input_ids": [prompt + label for prompt, label in zip(prompts, labels, strict=True)],
            "labels": [
                [IGNORED] * len(prompt) + label
                for prompt, label in zip(prompts, labels, strict=True)
            ],
            "gold": gold,
            "length": [
                len(prompt) + len(label) for prompt, label in zip(prompts, labels, strict=True)
            ],
            "units": [len(label) for label in labels],
        }

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return self._padded(rows, {"input_ids": self.pad_id, "labels": IGNORED})

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        """One forward pass per label, the same number on every rank, so `synced` changes nothing."""
        starts = (batch["labels"] != IGNORED).int().argmax(dim=1).tolist()
        prompts = [
            ids[:start].tolist() for ids, start in zip(batch["input_ids"], starts, strict=True)
        ]
        scores = torch.stack(
            [
                self._score(model, prompts, label, batch["input_ids"].device)
                for label in self.labels
            ],
            dim=1,
        )
        return [float(best) for best in scores.argmax(dim=1).tolist()]

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "cue": self.CUE}

    def _score(
        self, model: Any, prompts: list[list[int]], label: list[int], device: torch.device
    ) -> torch.Tensor:
        """Log likelihood of `label` after each prompt, summed over its tokens, (rows,)."""
        rows = [{"input_ids": prompt + label} for prompt in prompts]
        inputs = {
            name: t.to(device) for name, t in self._padded(rows, {"input_ids": self.pad_id}).items()
        }
        logits = model(**inputs).logits[
            :, -inputs["input_ids"].shape[1] :
        ]  # prompt tuning puts its own positions in front
        first = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)[:, None]
        places = first + torch.arange(
            len(label), device=device
        )  # (rows, label tokens): where each token is predicted
        picked = (
            logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
            .float()
            .log_softmax(-1)
        )
        wanted = torch.tensor(label, device=device).expand(len(prompts), -1)[..., None]
        scores: torch.Tensor = picked.gather(-1, wanted).squeeze(-1).sum(dim=1)
        return scores

    def _prompt(self, text: str) -> list[int]:
        """The prompt, cut to leave room for cue and label."""
        return [*prompt_ids(self.tokenizer, text)[: self.room], *self.cue]
