"""Language modelling: blocks of running text to train on, perplexity over sliding windows.

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
from suite.config.task_base import SplitName
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED
from suite.data.objective import Batch, Columns, Features, Objective, lengths
from suite.data.running_text import blocks, named_chunks, stream, windows
from suite.data.tokenizer import start_ids
from suite.errors import IncompatibleError
from suite.metrics.text import perplexity


class LikelihoodObjective(Objective):
    """Scores an item by the likelihood of its labelled tokens."""

    head = Head("text")
    item_columns: ClassVar[tuple[str, str]] = ("tokens", "nll")

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        """Negative log-likelihood of each item, in nats, summed over its labelled tokens.

        It takes one forward pass, whatever `synced` says.
        """
        return summed_nll(model(**batch).logits, batch["labels"])

    def _rows(self, chunks: Iterable[tuple[list[str], Columns]]) -> Iterator[list[int]]:
        """Token ids of every text."""
        for _, columns in chunks:
            yield from self.encode(columns)["input_ids"]


class LanguageModelObjective(LikelihoodObjective):
    """Predicts every token from those before it.

    An item is a block of the training text, or a window whose last tokens are scored. The rows of
    a split are one text. Each row that is not empty ends with the end-of-text token, which is
    predicted like any other. The text starts after one token that is not scored: the tokenizer's
    start token, or its end-of-text token where it has no start token. With a tokenizer that has
    neither, rows follow one another with nothing between them, and the first token is not scored.
    """

    task: LanguageModelTask

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
                f"task {task.name}: perplexity needs every token predicted from those before it "
                f"alone, which an {kind} backbone does not do; use a decoder-only backbone"
            )
        self.stride = training.stride or task.stride
        if self.stride >= training.max_length:
            raise IncompatibleError(
                f"task {task.name}: windows of training.max_length {training.max_length} tokens "
                f"with stride {self.stride} leave the first tokens of a window without context; "
                "set training.stride below training.max_length"
            )

    def encode(self, columns: Columns) -> Features:
        """Token ids of rows, without special tokens; `features` cuts them into items."""
        texts = list(columns[self.task.inputs[0]])
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        return {"input_ids": encoded["input_ids"]}

    def features(
        self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName
    ) -> Iterator[Features]:
        rows = self._rows(chunks)
        # training needs each token once; scores need enough text before each token
        items = self._blocks(rows) if split == "train" else self._windows(rows)
        for names, chunk in named_chunks(items, split):
            ids = [tokens for tokens, _ in chunk]
            scored = [count for _, count in chunk]
            yield {
                "index": names,
                "input_ids": ids,
                "gold": scored,
                "units": scored,
                "length": lengths(ids),
            }

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        labelled = []
        for row in rows:
            ids = row["input_ids"]
            # what stands before the scored tokens is context alone
            context = row["length"] - row["gold"]
            labelled.append({"input_ids": ids, "labels": [IGNORED] * context + ids[context:]})
        return self._padded(labelled, {"input_ids": self.pad_id, "labels": IGNORED})

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        """Negative log-likelihood of each window's scored tokens, in nats, summed.

        It takes one forward pass, whatever `synced` says.
        """
        return next_token_nll(model, batch)

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        return {"perplexity": perplexity(predictions, golds)}

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "stride": self.stride}

    def _blocks(self, rows: Iterable[list[int]]) -> Iterator[tuple[list[int], int]]:
        for block in blocks(rows, self.training.max_length, separator=self.tokenizer.eos_token_id):
            # nothing comes before the first token of a block
            yield block, len(block) - 1

    def _windows(self, rows: Iterable[list[int]]) -> Iterator[tuple[list[int], int]]:
        # without a start the very first word would be in no score
        tokens = itertools.chain(
            start_ids(self.tokenizer), stream(rows, separator=self.tokenizer.eos_token_id)
        )
        return windows(tokens, self.training.max_length, stride=self.stride)


def next_token_nll(model: Any, batch: Batch) -> list[float]:
    """Negative log-likelihood of each row's labels in nats, summed, as a decoder predicts them.

    It takes one forward pass.

    Args:
        model: A decoder.
        batch: With labels, each at the place of its own token, (B, T).
    """
    labels = batch["labels"]
    # without labels, from which the model would compute a loss in float32 over the whole batch
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    # prompt tuning puts its own positions in front
    logits = logits[:, -labels.shape[1] :]  # (B, T, vocabulary)
    # the logits at one place predict the token at the next
    return summed_nll(logits[:, :-1], labels[:, 1:])


def summed_nll(logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Negative log-likelihood of each row in nats, summed over the labels that are not ignored.

    Args:
        logits: (B, T, vocabulary).
        labels: (B, T), each where it is predicted.
    """
    sums = []
    # a row at a time, because float32 logits of a whole batch may not fit into memory
    for row, wanted in zip(logits, labels, strict=True):
        sums.append(cross_entropy(row.float(), wanted, ignore_index=IGNORED, reduction="sum"))
    answers: list[float] = torch.stack(sums).tolist()
    return answers
