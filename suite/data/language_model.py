"""Language modelling: running text in blocks to train on, perplexity over sliding windows.

Source: MHE (arXiv 2310.07911, appendix): perplexity with a stride of 256 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.task import LanguageModelTask
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED, pad
from suite.data.objective import Batch, Columns, Features, Objective
from suite.data.running_text import blocks, stream, windows
from suite.data.splits import SplitName
from suite.errors import IncompatibleError
from suite.metrics.text import perplexity

CHUNK_ITEMS = 1000


class LanguageModelObjective(Objective):
    """Every token from those before it. An item is a block of the training text, or a window of which the last tokens are scored.

    The rows of a split are one text; each row that is not empty ends with the end-of-text token, which is predicted like any
    other. The text starts after one token that is not scored: the tokenizer's start, else its end-of-text token.
    """

    head = Head("text")
    task: LanguageModelTask
    item_columns: ClassVar[tuple[str, str]] = ("tokens", "nll")

    def __init__(
        self,
        task: LanguageModelTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
        *,
        kind: Kind,
    ) -> None:
        super().__init__(task, tokenizer, training)
        if kind != "decoder":
            raise IncompatibleError(
                f"task {task.name}: perplexity needs every token predicted from those before it alone, which an {kind} backbone "
                "does not do; use a decoder-only backbone"
            )
        self.stride = training.stride or task.stride
        if self.stride >= training.max_length:
            raise IncompatibleError(
                f"task {task.name}: windows of training.max_length {training.max_length} tokens with stride {self.stride} leave the first "
                "tokens of a window without context; set training.stride below training.max_length"
            )

    def encode(self, columns: Columns) -> Features:
        """Token ids of rows, without special tokens; `features` makes items of them."""
        texts = list(columns[self.task.inputs[0]])
        return {
            "input_ids": self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        }

    def features(
        self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName
    ) -> Iterator[Features]:
        rows = (ids for _, columns in chunks for ids in self.encode(columns)["input_ids"])
        items = enumerate(self._blocks(rows) if split == "train" else self._windows(rows))
        while chunk := list(itertools.islice(items, CHUNK_ITEMS)):
            scored = [count for _, (_, count) in chunk]
            ids = [tokens for _, (tokens, _) in chunk]
            index = [f"{split}/{number}" for number, _ in chunk]
            yield {
                "index": index,
                "input_ids": ids,
                "gold": scored,
                "units": scored,
                "length": [len(tokens) for tokens in ids],
            }

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        labels = [
            [IGNORED] * (row["length"] - row["gold"]) + row["input_ids"][-row["gold"] :]
            for row in rows
        ]
        size = {"at_most": self.training.max_length, "multiple": self.training.pad_to_multiple}
        return {
            **self._padded(rows, {"input_ids": self.pad_id}),
            "labels": pad(labels, IGNORED, **size),
        }

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        """Negative log-likelihood of each window's scored tokens, in nats, summed; one forward pass, whatever `synced`."""
        length = batch["labels"].shape[1]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        logits = logits[:, -length:]  # prompt tuning puts its own positions in front
        sums = [
            summed_nll(row[:-1], wanted[1:])
            for row, wanted in zip(logits, batch["labels"], strict=True)
        ]
        answers: list[float] = torch.stack(sums).tolist()
        return answers

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        return {"perplexity": perplexity(predictions, golds)}

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "stride": self.stride}

    def _blocks(self, rows: Iterable[list[int]]) -> Iterator[tuple[list[int], int]]:
        for block in blocks(rows, self.training.max_length, separator=self.tokenizer.eos_token_id):
            yield block, len(block) - 1  # nothing comes before the first token of a block

    def _windows(self, rows: Iterable[list[int]]) -> Iterator[tuple[list[int], int]]:
        end = self.tokenizer.eos_token_id
        first = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else end
        tokens = itertools.chain([] if first is None else [first], stream(rows, separator=end))
        return windows(tokens, self.training.max_length, stride=self.stride)


def summed_nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed over the labels that are not ignored.

    Args:
        logits: (T, vocabulary).
        labels: (T,).
    """
    return cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
