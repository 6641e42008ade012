"""Pre-training objectives: masked language modelling, causal language modelling and span corruption on blocks of packed text.

Sources:
    mlm: BERT (Devlin et al., arXiv 1810.04805, appendix A.1 and its code): 15% of a block's tokens, a fixed number, of which
        80% become the mask token, 10% any token, 10% stay.
    causal-lm: GPT-2 (Radford et al. 2019): documents joined by an end-of-text token.
    span-corruption: T5 (Raffel et al., arXiv 1910.10683, section 3.3.4 and its code): 15% of the tokens in spans of 3 on
        average; each span becomes a sentinel, the target lists sentinels and spans; blocks are as long as fills the input.
Deviations:
    - No next-sentence prediction: blocks are running text, as in RoBERTa. MHE names masked language modelling alone.
    - A tokenizer without a mask token masks with its first sentinel; one without sentinels takes the last tokens of its
      vocabulary for them, counting down, whatever they stand for.
    - Tokenizers without an own start or separator (bytes) put none around a block; the end token separates documents.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.hashing import derive_seed
from suite.config.task import ObjectiveName, PretrainTask
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED, pad
from suite.data.objective import Batch, Columns, Features, Objective
from suite.data.running_text import blocks
from suite.data.splits import SplitName
from suite.errors import IncompatibleError

OWN_OBJECTIVE: dict[Kind, ObjectiveName] = {
    "encoder": "mlm",
    "decoder": "causal-lm",
    "encoder-decoder": "span-corruption",
}
MASK_FRAC, RANDOM_FRAC = 0.8, 0.1
"""BERT, appendix A.1; the rest of the chosen tokens stays."""
CHUNK_ITEMS = 1000
Ids = np.ndarray[Any, np.dtype[np.int64]]


class PretrainingObjective(Objective):
    """Blocks of packed text, corrupted when they are put into a batch: differently in every pass, the same for every arm.

    Attributes:
        block_tokens: Tokens of running text in a block.
        separator: Put after every text of the corpus; None = nothing.
    """

    head = Head("text")
    splits: ClassVar[tuple[SplitName, ...]] = ("train", "validation")
    item_columns: ClassVar[tuple[str, str]] = ("tokens", "nll")
    task: PretrainTask
    block_tokens: int
    separator: int | None

    def encode(self, columns: Columns) -> Features:
        """Token ids of every text of the rows, without special tokens; `features` makes blocks of them."""
        texts = [
            text
            for row in zip(*(columns[column] for column in self.task.inputs), strict=True)
            for text in row
        ]
        return {
            "input_ids": self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        }

    def features(
        self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName
    ) -> Iterator[Features]:
        texts = (ids for _, columns in chunks for ids in self.encode(columns)["input_ids"])
        items = enumerate(blocks(texts, self.block_tokens, separator=self.separator))
        while chunk := list(itertools.islice(items, CHUNK_ITEMS)):
            ids = [block for _, block in chunk]
            predicted = [self.predicted_tokens(block) for block in ids]
            index = [f"{split}/{number}" for number, _ in chunk]
            yield {
                "index": index,
                "input_ids": ids,
                "gold": predicted,
                "units": predicted,
                "length": [self.training.max_length] * len(ids),
            }

    @abstractmethod
    def predicted_tokens(self, block: Sequence[int]) -> int:
        """How many tokens a block gives a loss for, however it is corrupted."""

    @abstractmethod
    def corrupt(self, block: Ids, draw: np.random.Generator) -> tuple[list[int], list[int]]:
        """What the model reads of a block, and its labels.

        Args:
            block: (block_tokens,).
            draw: Everything random comes from here.
        """

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Without `draw`, in validation, a block is corrupted the same way every time."""
        seeds = [
            row["draw"] if "draw" in row else derive_seed("validation", row["index"])
            for row in rows
        ]
        pairs = [
            self.corrupt(np.asarray(row["input_ids"]), np.random.default_rng(s))
            for row, s in zip(rows, seeds, strict=True)
        ]
        batch = self._padded([{"input_ids": ids} for ids, _ in pairs], {"input_ids": self.pad_id})
        size = {"at_most": self.training.max_length, "multiple": self.training.pad_to_multiple}
        return {**batch, "labels": pad([labels for _, labels in pairs], IGNORED, **size)}

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        """Negative log-likelihood of each block's predicted tokens, in nats, summed; one forward pass, whatever `synced`."""
        logits = self._aligned(model(**batch).logits)
        pairs = zip(logits.float(), self._wanted(batch), strict=True)
        sums = [
            cross_entropy(row, labels, ignore_index=IGNORED, reduction="sum")
            for row, labels in pairs
        ]
        answers: list[float] = torch.stack(sums).tolist()
        return answers

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        return {"loss": float(np.sum(predictions) / np.sum(golds))}

    def fingerprint(self) -> dict[str, Any]:
        own = self.task.model_dump(mode="json", include={"corrupted_frac", "mean_span_tokens"})
        return {
            **super().fingerprint(),
            **own,
            "block_tokens": self.block_tokens,
            "separator": self.separator,
        }

    def _aligned(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, T, vocabulary): where each label is predicted."""
        return logits

    def _wanted(self, batch: Batch) -> torch.Tensor:
        return batch["labels"]


class MaskedObjective(PretrainingObjective):
    """Some tokens of a block are hidden; an encoder finds them."""

    head = Head("masked")

    def __init__(
        self, task: PretrainTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.before = [] if tokenizer.cls_token_id is None else [tokenizer.cls_token_id]
        self.after = [] if tokenizer.sep_token_id is None else [tokenizer.sep_token_id]
        self.separator = (
            tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
        )
        self.mask = (
            sentinels(tokenizer, 1)[0]
            if tokenizer.mask_token_id is None
            else tokenizer.mask_token_id
        )
        self.block_tokens = training.max_length - len(self.before) - len(self.after)
        self.wanted = max(1, round(task.corrupted_frac * training.max_length))
        if self.block_tokens < 1:
            raise IncompatibleError(
                f"pretrain.max_length {training.max_length} leaves no room for text; raise it"
            )

    def predicted_tokens(self, block: Sequence[int]) -> int:
        return min(self.wanted, sum(token != self.separator for token in block))

    def corrupt(self, block: Ids, draw: np.random.Generator) -> tuple[list[int], list[int]]:
        chosen = draw.permutation(np.flatnonzero(block != self.separator))[: self.wanted]
        read, labels, kind = block.copy(), np.full_like(block, IGNORED), draw.random(len(chosen))
        labels[chosen] = block[chosen]
        read[chosen[kind < MASK_FRAC]] = self.mask
        other = chosen[(kind >= MASK_FRAC) & (kind < MASK_FRAC + RANDOM_FRAC)]
        read[other] = draw.integers(0, len(self.tokenizer), len(other))
        outside = [[IGNORED] * len(self.before), [IGNORED] * len(self.after)]
        return [*self.before, *read.tolist(), *self.after], [
            *outside[0],
            *labels.tolist(),
            *outside[1],
        ]


class CausalObjective(PretrainingObjective):
    """Every token of a block from those before it; nothing is corrupted."""

    def __init__(
        self, task: PretrainTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.separator, self.block_tokens = tokenizer.eos_token_id, training.max_length
        if self.block_tokens < 2:
            raise IncompatibleError("pretrain.max_length 1 leaves nothing to predict; raise it")

    def predicted_tokens(self, block: Sequence[int]) -> int:
        return len(block) - 1  # nothing comes before the first token of a block

    def corrupt(self, block: Ids, draw: np.random.Generator) -> tuple[list[int], list[int]]:
        return block.tolist(), [IGNORED, *block[1:].tolist()]

    def _aligned(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, :-1]

    def _wanted(self, batch: Batch) -> torch.Tensor:
        return batch["labels"][:, 1:]


class SpanObjective(PretrainingObjective):
    """Spans of a block become sentinels; an encoder-decoder writes them."""

    separator = None  # T5's code joins documents with nothing between

    def __init__(
        self, task: PretrainTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.block_tokens = self._longest_block()
        self.hidden, self.spans = self._spans(self.block_tokens)
        self.sentinels = np.asarray(sentinels(tokenizer, self.spans))

    def predicted_tokens(self, block: Sequence[int]) -> int:
        return self.hidden + self.spans + len(self.end)

    def corrupt(self, block: Ids, draw: np.random.Generator) -> tuple[list[int], list[int]]:
        kept = segments(len(block) - self.hidden, self.spans, draw)
        hidden = segments(self.hidden, self.spans, draw)
        bounds = np.cumsum(
            np.stack([kept, hidden], axis=1).ravel()
        )  # ends of kept, hidden, kept, hidden, ...
        parts = np.split(block, bounds[:-1])
        read = [
            token
            for part, sentinel in zip(parts[::2], self.sentinels, strict=True)
            for token in (*part, sentinel)
        ]
        target = [
            token
            for part, sentinel in zip(parts[1::2], self.sentinels, strict=True)
            for token in (sentinel, *part)
        ]
        return [*map(int, read), *self.end], [*map(int, target), *self.end]

    def _longest_block(self) -> int:
        """The most tokens of text that, once corrupted, fill `max_length` and no more."""
        longest, most = 0, self.training.max_length
        for tokens in range(2, 2 * most + 2):
            hidden, spans = self._spans(tokens)
            if tokens - hidden + spans + len(self.end) <= most and spans <= tokens - hidden:
                longest = tokens
        if not longest:
            raise IncompatibleError(f"pretrain.max_length {most} leaves no room for text; raise it")
        return longest

    def _spans(self, tokens: int) -> tuple[int, int]:
        """How many tokens of a block are hidden, in how many spans."""
        hidden = min(max(round(tokens * self.task.corrupted_frac), 1), tokens - 1)
        return hidden, max(round(hidden / self.task.mean_span_tokens), 1)


def segments(items: int, parts: int, draw: np.random.Generator) -> Ids:
    """Sizes, each at least 1, of a random cut of `items` into `parts`; every cut is equally likely. (parts,)."""
    cuts = np.sort(draw.permutation(items - 1)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=items)


def sentinels(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """Ids of `<extra_id_0>`, `<extra_id_1>`, ...; where a tokenizer has none, the last ids of its vocabulary, counting down.

    Raises:
        IncompatibleError: It has some, but fewer than `count`.
    """
    vocabulary = tokenizer.get_vocab()
    names = [f"<extra_id_{i}>" for i in range(count)]
    if names[0] not in vocabulary:
        return [len(tokenizer) - 1 - i for i in range(count)]
    lacking = [name for name in names if name not in vocabulary]
    if lacking:
        raise IncompatibleError(
            f"span-corruption needs {count} sentinels for a block, but the tokenizer lacks {lacking[0]}; lower pretrain.max_length"
        )
    return [vocabulary[name] for name in names]


OBJECTIVES: dict[ObjectiveName, type[PretrainingObjective]] = {
    "mlm": MaskedObjective,
    "causal-lm": CausalObjective,
    "span-corruption": SpanObjective,
}


def make_pretraining(
    task: PretrainTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig, *, kind: Kind
) -> PretrainingObjective:
    """The objective of a pretrain run.

    Raises:
        IncompatibleError: It is not one for this kind of backbone; `max_length` or the sentinels are too few.
    """
    if task.objective != OWN_OBJECTIVE[kind]:
        raise IncompatibleError(
            f"pretrain.objective {task.objective} does not go with an {kind} backbone; use {OWN_OBJECTIVE[kind]}, "
            "or leave it out: null is the backbone's own"
        )
    return OBJECTIVES[task.objective](task, tokenizer, training)
