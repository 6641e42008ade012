"""A class or a number in words: encoder-decoders write it, decoders score every label's words.

Source: T5 (Raffel et al. 2020, arXiv 1910.10683), section 2.4 and appendix D: prompts, label words,
numbers as text, and an answer that is no label counts as wrong. Scoring of label words: GPT-3
(Brown et al. 2020, arXiv 2005.14165), 2.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from suite.backbones.loading import Head
from suite.config.task import ClassificationTask
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED
from suite.data.decoding import own_decoding
from suite.data.label_words import LabelWords
from suite.data.objective import (
    AnyLabelTask,
    Batch,
    Columns,
    Features,
    LabelObjective,
    continuation_features,
    prompts,
    target_features,
)
from suite.data.tokenizer import CUE, as_written, end_ids, plain_ids, prompt_ids
from suite.errors import IncompatibleError


class TextToTextObjective(LabelObjective):
    """The model reads a prompt and writes the label's text (T5), searched greedily."""

    head = Head("text")
    generates = True

    def __init__(
        self, task: AnyLabelTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.words = LabelWords(task.label, tokenizer, where=f"task {task.name}")
        texts = self.words.texts()
        # generation ends after the longest label, because nothing longer can be right
        self.longest = 0
        longest_text = ""
        for text, ids in zip(texts, self._targets(texts), strict=True):
            if len(ids) > self.longest:
                self.longest = len(ids)
                longest_text = text
        if self.longest > training.target_max_length:
            raise IncompatibleError(
                f"task {task.name}: training.target_max_length is {training.target_max_length}, "
                f"but label {longest_text!r} has {self.longest} tokens for this backbone; raise it"
            )

    def encode(self, columns: Columns) -> Features:
        inputs = self.tokenizer(
            prompts(self.task, columns), truncation=True, max_length=self.training.max_length
        )["input_ids"]
        gold = self._gold(columns)
        targets = self._targets([self.words.text(value) for value in gold])
        return target_features(inputs, targets, gold)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return self._padded_with_target(rows)

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        with own_decoding(model, self.tokenizer, pad_id=self.pad_id) as options:
            written = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self.longest + 1,
                do_sample=False,
                num_beams=1,
                synced_gpus=synced,
                **options,
            )
        texts = [as_written(self.tokenizer, row) for row in written]
        return [float(self.words.value(text)) for text in texts]

    def _targets(self, texts: list[str]) -> list[list[int]]:
        targets: list[list[int]] = self.tokenizer(text_target=texts)["input_ids"]
        return targets


class DecoderTextObjective(LabelObjective):
    """Decoders read prompt and label word in one sequence; the loss is on the label's tokens.

    The answer is the likeliest label. A label ends with the end-of-text token where the tokenizer
    has one, so that no label is a prefix of another.
    """

    head = Head("text")

    def __init__(
        self, task: ClassificationTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        if task.label.words is None:
            raise IncompatibleError(
                f"task {task.name}: a number cannot be scored as label words; "
                "use decoder_objective: head"
            )
        self.cue = plain_ids(tokenizer, CUE)
        self.labels: list[list[int]] = []
        for word in task.label.words:
            # with the space before it the word is tokenised as within running text
            label = plain_ids(tokenizer, " " + word) + end_ids(tokenizer)
            if label in self.labels:
                raise IncompatibleError(
                    f"task {task.name}: to this backbone's tokenizer label.words "
                    f"{task.label.words} are not distinct"
                )
            self.labels.append(label)
        # room for the longest label, so that a prompt is the same whichever label follows it
        self.room = training.max_length - len(self.cue) - max(map(len, self.labels))
        if self.room < 1:
            raise IncompatibleError(
                f"task {task.name}: training.max_length {training.max_length} "
                "leaves no room for a prompt; raise it"
            )

    def encode(self, columns: Columns) -> Features:
        gold = self._gold(columns)
        starts = []
        for text in prompts(self.task, columns):
            # the prompt is cut, so that cue and label always fit
            starts.append([*prompt_ids(self.tokenizer, text)[: self.room], *self.cue])
        return continuation_features(starts, [self.labels[value] for value in gold], gold)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return self._padded(rows, {"input_ids": self.pad_id, "labels": IGNORED})

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        # one forward pass per label is the same number on every rank, so `synced` changes nothing
        starts = prompts_of(batch)
        device = batch["input_ids"].device
        by_label = [self._score(model, starts, label, device) for label in self.labels]
        best = torch.stack(by_label, dim=1).argmax(dim=1)  # (B,)
        return [float(number) for number in best.tolist()]

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "cue": CUE}

    def _score(
        self, model: Any, starts: list[list[int]], label: list[int], device: torch.device
    ) -> torch.Tensor:
        """Log-likelihood of `label` after each start, summed over its tokens, (B,)."""
        # padding is on the right, so every label stands right after its start
        rows = [{"input_ids": start + label} for start in starts]
        inputs = {}
        for name, tensor in self._padded(rows, {"input_ids": self.pad_id}).items():
            inputs[name] = tensor.to(device)
        length = inputs["input_ids"].shape[1]
        # prompt tuning puts its own positions in front
        logits = model(**inputs).logits[:, -length:]  # (B, T, vocabulary)
        # each token is predicted at the place before it
        first = torch.tensor([len(start) - 1 for start in starts], device=device)[:, None]
        places = first + torch.arange(len(label), device=device)  # (B, label tokens)
        # picked before the softmax: over all places it would take as much memory again as the
        # logits
        picked = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
        wanted = torch.tensor(label, device=device).expand(len(starts), -1)[..., None]
        found = picked.float().log_softmax(-1).gather(-1, wanted).squeeze(-1)  # (B, label tokens)
        scores: torch.Tensor = found.sum(dim=1)
        return scores


def prompts_of(batch: Batch) -> list[list[int]]:
    """The tokens of each row that stand before its labels."""
    starts = (batch["labels"] != IGNORED).int().argmax(dim=1).tolist()  # first label of each row
    prompts = []
    for ids, start in zip(batch["input_ids"], starts, strict=True):
        prompts.append(ids[:start].tolist())
    return prompts
