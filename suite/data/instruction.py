"""Instructions and responses: fine-tuned on the response alone, scored by the perplexity of its tokens.

Source: Stanford Alpaca (Taori et al. 2023): two prompts, with and without an input; no loss on the prompt; an end token after
    the response. Shared Attention (arXiv 2407.12866), section 4, fine-tunes with it.
Deviations:
    - `training.max_length` bounds the prompt and `training.target_max_length` the response, as where text is generated; Alpaca
      bounds both together. A prompt that is too long loses the end of its instruction or input, never what stands after it.
    - The end token is the tokenizer's, also where Shared Attention's script writes `</s>` as text; its attention mask hides
      real end tokens, ours hides padding alone.
"""

from __future__ import annotations

import string
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.task import InstructionTask
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED, collate_padded, pad
from suite.data.language_model import summed_nll
from suite.data.objective import Batch, Columns, Features, Objective
from suite.data.splits import SplitName
from suite.data.tokenizer import plain_ids, prompt_ids
from suite.errors import IncompatibleError
from suite.metrics.text import perplexity


class InstructionObjective(Objective):
    """A prompt in, a response out; an item is an example, of which the tokens of the response are scored."""

    head = Head("text")
    task: InstructionTask
    item_columns: ClassVar[tuple[str, str]] = ("tokens", "nll")

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        return {"perplexity": perplexity(predictions, golds)}

    def fingerprint(self) -> dict[str, Any]:
        return {
            **super().fingerprint(),
            **self.task.model_dump(mode="json", include={"without_input", "packing"}),
        }

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        """Negative log-likelihood of each response, in nats, summed over its tokens; one forward pass, whatever `synced`."""
        pairs = zip(*self._aligned(model(**batch).logits, batch["labels"]), strict=True)
        answers: list[float] = torch.stack(
            [summed_nll(logits, labels) for logits, labels in pairs]
        ).tolist()
        return answers

    @abstractmethod
    def _aligned(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T, vocabulary) and (B, T): where each label is predicted."""

    def _examples(self, columns: Columns) -> Iterator[tuple[str, str, str]]:
        """Prompt, what of it must not be cut off, and response of every row."""
        *inputs, responses = (columns[name] for name in self.task.columns)
        for *texts, response in zip(*inputs, responses, strict=True):
            template = self._template(texts)
            yield (
                template.format(**dict(zip(self.task.inputs, texts, strict=True))),
                _tail(template),
                response,
            )

    def _template(self, texts: Sequence[str]) -> str:
        without = self.task.without_input
        return self.task.text_to_text if without is None or texts[1].strip() else without


class TextToTextInstruction(InstructionObjective):
    """Encoder-decoders: the encoder reads the prompt, the decoder writes the response."""

    def __init__(
        self, task: InstructionTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        if task.packing:
            raise IncompatibleError(
                f"task {task.name}: packing is for decoders; an encoder-decoder reads one prompt at a time"
            )

    def encode(self, columns: Columns) -> Features:
        rows = list(self._examples(columns))
        end = [] if self.tokenizer.eos_token_id is None else [int(self.tokenizer.eos_token_id)]
        prompts = [
            [
                *_cut(self.tokenizer, prompt, tail, self.training.max_length - len(end), self.task),
                *end,
            ]
            for prompt, tail, _ in rows
        ]
        size = {"truncation": True, "max_length": self.training.target_max_length}
        labels = self.tokenizer(text_target=[response for *_, response in rows], **size)[
            "input_ids"
        ]
        lengths, units = [len(ids) for ids in prompts], [len(ids) for ids in labels]
        return {
            "input_ids": prompts,
            "labels": labels,
            "gold": units,
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

    def _aligned(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return logits, labels


class DecoderInstruction(InstructionObjective):
    """Decoders: prompt and response in one sequence; with `packing` the training rows share sequences as they come, whole."""

    def __init__(
        self, task: InstructionTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        if training.target_max_length <= len(self.end):
            raise IncompatibleError(
                f"task {task.name}: training.target_max_length {training.target_max_length} leaves no room; raise it"
            )

    @property
    def positions(self) -> int:
        return self.training.max_length + self.training.target_max_length

    def encode(self, columns: Columns) -> Features:
        room = self.training.target_max_length - len(self.end)
        features: Features = {
            name: [] for name in ("input_ids", "labels", "gold", "length", "units")
        }
        for prompt, tail, text in self._examples(columns):
            start = _cut(self.tokenizer, prompt, tail, self.training.max_length, self.task)
            response = [*plain_ids(self.tokenizer, text)[:room], *self.end]
            row = (
                [*start, *response],
                [IGNORED] * len(start) + response,
                len(response),
                len(start) + len(response),
                len(response),
            )
            for values, value in zip(features.values(), row, strict=True):
                values.append(value)
        return features

    def features(
        self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName
    ) -> Iterator[Features]:
        parts = super().features(chunks, split)
        return map(self._packed, parts) if self.task.packing and split == "train" else parts

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        fill = {"input_ids": self.pad_id, "labels": IGNORED}
        return collate_padded(
            rows, fill, at_most=self.positions, multiple=self.training.pad_to_multiple
        )

    def _packed(self, rows: Features) -> Features:
        """Rows joined, in order, as long as they fit; names joined by `+`."""
        made: Features = {name: [] for name in rows}
        for row in (
            dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)
        ):
            fits = bool(made["length"]) and made["length"][-1] + row["length"] <= self.positions
            for name, value in row.items():
                if not fits:
                    made[name].append(value)
                elif name == "index":
                    made[name][-1] += f"+{value}"
                else:
                    made[name][-1] = made[name][-1] + value
        return made

    def _aligned(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits[:, -labels.shape[1] :]  # prompt tuning puts its own positions in front
        return logits[:, :-1], labels[:, 1:]


def make_instruction(
    task: InstructionTask,
    tokenizer: PreTrainedTokenizerBase,
    training: TrainingConfig,
    *,
    kind: Kind,
) -> InstructionObjective:
    """Text to text for encoder-decoders, one sequence for decoders.

    Raises:
        IncompatibleError: An encoder, which writes nothing; packing for an encoder-decoder; no room for text.
    """
    if kind == "encoder":
        raise IncompatibleError(
            f"task {task.name}: an encoder backbone cannot write a response; use an encoder-decoder or a decoder-only backbone"
        )
    make = TextToTextInstruction if kind == "encoder-decoder" else DecoderInstruction
    objective = make(task, tokenizer, training)
    for template in filter(None, (task.text_to_text, task.without_input)):
        _cut(tokenizer, template, _tail(template), training.max_length - 1, task)
    return objective


def _tail(template: str) -> str:
    """What stands after the last column."""
    parts = list(string.Formatter().parse(template))
    return parts[-1][0] if parts[-1][1] is None else ""


def _cut(
    tokenizer: PreTrainedTokenizerBase, prompt: str, tail: str, room: int, task: InstructionTask
) -> list[int]:
    """Tokens of a prompt to write on after; one longer than `room` tokens loses some before its tail.

    Raises:
        IncompatibleError: There is no room for the tail.
    """
    ids = prompt_ids(tokenizer, prompt)
    if len(ids) <= room:
        return ids
    end = plain_ids(tokenizer, tail)
    if len(end) >= room:
        raise IncompatibleError(
            f"task {task.name}: training.max_length leaves {room} tokens, no room for a prompt; raise it"
        )
    return [*ids[: room - len(end)], *end]
