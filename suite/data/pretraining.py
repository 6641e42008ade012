"""Pre-training objectives on blocks of packed text.

There are three: masked language modelling, causal language modelling and span corruption.

Sources:
    mlm: BERT (Devlin et al., arXiv 1810.04805, appendix A.1 and its code): 15% of a block's tokens,
        a fixed number, of which 80% become the mask token, 10% any token, 10% stay.
    causal-lm: GPT-2 (Radford et al. 2019): documents joined by an end-of-text token.
    span-corruption: T5 (Raffel et al., arXiv 1910.10683, section 3.3.4 and its code): 15% of the
        tokens in spans of 3 on average. Each span becomes a sentinel, and the target lists
        sentinels and spans. Blocks are as long as fills the input.
Deviations:
    - No next-sentence prediction: blocks are running text, as in RoBERTa. MHE names masked language
      modelling alone.
    - A tokenizer without a mask token masks with its first sentinel. One without sentinels takes
      the last tokens of its vocabulary for them, counting down, whatever they stand for.
    - Tokenizers without a start or separator of their own (bytes) put none around a block; the end
      token separates documents.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.hashing import derive_seed
from suite.config.task import ObjectiveName, PretrainTask
from suite.config.task_base import SplitName
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED
from suite.data.language_model import LikelihoodObjective, next_token_nll
from suite.data.objective import Batch, Columns, Features, rows_of
from suite.data.running_text import blocks, named_chunks
from suite.data.tokenizer import end_ids
from suite.errors import IncompatibleError

OWN_OBJECTIVE: dict[Kind, ObjectiveName] = {
    "encoder": "mlm",
    "decoder": "causal-lm",
    "encoder-decoder": "span-corruption",
}
# BERT, appendix A.1; the rest of the chosen tokens stays as it is
MASK_FRAC = 0.8
RANDOM_FRAC = 0.1
Ids = np.ndarray[Any, np.dtype[np.int64]]


class PretrainingObjective(LikelihoodObjective):
    """Blocks of packed text, corrupted when they are put into a batch.

    The corruption differs in every pass and is the same for every arm.

    Attributes:
        block_tokens: Tokens of running text in a block.
        separator: Token put after every text of the corpus; None = none.
    """

    splits: ClassVar[tuple[SplitName, ...]] = ("train", "validation")
    kept_splits: ClassVar[tuple[SplitName, ...]] = ()  # every pass corrupts a block anew
    task: PretrainTask
    block_tokens: int
    separator: int | None

    def encode(self, columns: Columns) -> Features:
        """Token ids of every text, without special tokens; `features` makes blocks of them."""
        # the columns of a row follow one another as texts of their own
        texts = list(itertools.chain.from_iterable(rows_of(columns, self.task.inputs)))
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        return {"input_ids": encoded["input_ids"]}

    def features(
        self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName
    ) -> Iterator[Features]:
        items = blocks(self._rows(chunks), self.block_tokens, separator=self.separator)
        for names, ids in named_chunks(items, split):
            # counted here: the corruption is drawn later, but it never changes how many tokens it
            # hides
            predicted = [self.predicted_tokens(block) for block in ids]
            yield {
                "index": names,
                "input_ids": ids,
                "gold": predicted,
                "units": predicted,
                # corrupted and with its special tokens, a block fills the input
                "length": [self.training.max_length] * len(ids),
            }

    @abstractmethod
    def predicted_tokens(self, block: Sequence[int]) -> int:
        """How many tokens of a block have a loss, however the block is corrupted."""

    @abstractmethod
    def corrupt(self, block: Ids, draw: np.random.Generator) -> tuple[list[int], list[int]]:
        """What the model reads of a block, and its labels.

        Args:
            block: (block_tokens,).
            draw: The only source of chance.
        """

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        corrupted = []
        for row in rows:
            # validation has no `draw`: there a block is corrupted in the same way every time
            seed = row["draw"] if "draw" in row else derive_seed("validation", row["index"])
            block = np.asarray(row["input_ids"])
            read, wanted = self.corrupt(block, np.random.default_rng(seed))
            corrupted.append({"input_ids": read, "labels": wanted})
        return self._padded(corrupted, {"input_ids": self.pad_id, "labels": IGNORED})

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        # per token, as blocks may differ in how many they predict
        return {"loss": float(np.sum(predictions) / np.sum(golds))}

    def fingerprint(self) -> dict[str, Any]:
        own = self.task.model_dump(mode="json", include={"corrupted_frac", "mean_span_tokens"})
        return {
            **super().fingerprint(),
            **own,
            "block_tokens": self.block_tokens,
            "separator": self.separator,
        }


class MaskedObjective(PretrainingObjective):
    """Some tokens of a block are hidden, and an encoder finds them."""

    head = Head("masked")

    def __init__(
        self, task: PretrainTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.before: list[int] = []
        self.after: list[int] = []
        # used where the tokenizer has no separator of its own
        self.separator = tokenizer.eos_token_id
        if tokenizer.cls_token_id is not None:
            self.before = [tokenizer.cls_token_id]
        if tokenizer.sep_token_id is not None:
            self.after = [tokenizer.sep_token_id]
            self.separator = tokenizer.sep_token_id
        self.mask = tokenizer.mask_token_id
        if self.mask is None:
            self.mask = sentinels(tokenizer, 1)[0]
        self.block_tokens = training.max_length - len(self.before) - len(self.after)
        # at least one, or there would be no loss
        self.wanted = max(1, round(task.corrupted_frac * training.max_length))
        if self.block_tokens < 1:
            raise IncompatibleError(
                f"pretrain.max_length {training.max_length} leaves no room for text; raise it"
            )

    def predicted_tokens(self, block: Sequence[int]) -> int:
        # separators are never hidden
        words = sum(token != self.separator for token in block)
        return min(self.wanted, words)

    def corrupt(self, block: Ids, draw: np.random.Generator) -> tuple[list[int], list[int]]:
        # a fixed number of tokens, not each with some chance, as in BERT's code
        chosen = draw.permutation(np.flatnonzero(block != self.separator))[: self.wanted]
        # one draw per token decides among mask, any token and no change
        fate = draw.random(len(chosen))
        labels = np.full_like(block, IGNORED)
        labels[chosen] = block[chosen]
        read = block.copy()
        read[chosen[fate < MASK_FRAC]] = self.mask
        replaced = chosen[(fate >= MASK_FRAC) & (fate < MASK_FRAC + RANDOM_FRAC)]
        # any token of the vocabulary, special ones included
        read[replaced] = draw.integers(0, len(self.tokenizer), len(replaced))
        before = [IGNORED] * len(self.before)
        after = [IGNORED] * len(self.after)
        return (
            [*self.before, *read.tolist(), *self.after],
            [*before, *labels.tolist(), *after],
        )


class CausalObjective(PretrainingObjective):
    """Every token of a block is predicted from those before it; nothing is corrupted."""

    def __init__(
        self, task: PretrainTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.separator = tokenizer.eos_token_id
        self.block_tokens = training.max_length
        if self.block_tokens < 2:
            raise IncompatibleError("pretrain.max_length 1 leaves nothing to predict; raise it")

    def predicted_tokens(self, block: Sequence[int]) -> int:
        return len(block) - 1  # nothing comes before the first token of a block

    def corrupt(self, block: Ids, draw: np.random.Generator) -> tuple[list[int], list[int]]:
        return block.tolist(), [IGNORED, *block[1:].tolist()]

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        return next_token_nll(model, batch)


class SpanObjective(PretrainingObjective):
    """Spans of a block become sentinels, and an encoder-decoder writes the spans."""

    separator = None  # T5's code joins documents with nothing between

    def __init__(
        self, task: PretrainTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.end = end_ids(tokenizer)
        self.block_tokens = self._longest_block()
        self.hidden, self.spans = self._spans(self.block_tokens)
        self.sentinels = sentinels(tokenizer, self.spans)

    @property
    def trained_targets(self) -> int:
        return self.hidden + self.spans + len(self.end)

    def predicted_tokens(self, block: Sequence[int]) -> int:
        return self.trained_targets

    def corrupt(self, block: Ids, draw: np.random.Generator) -> tuple[list[int], list[int]]:
        # a block starts with a kept stretch and ends with a hidden one, as in T5's code
        kept = segments(len(block) - self.hidden, self.spans, draw)
        hidden = segments(self.hidden, self.spans, draw)
        # ends of a kept stretch, a hidden one, a kept one, ...
        ends = np.cumsum(np.stack([kept, hidden], axis=1).ravel())
        parts = np.split(block, ends[:-1])
        read: list[int] = []
        target: list[int] = []
        for number, sentinel in enumerate(self.sentinels):
            read += [*parts[2 * number].tolist(), sentinel]
            target += [sentinel, *parts[2 * number + 1].tolist()]
        return read + self.end, target + self.end

    def _longest_block(self) -> int:
        """The most tokens of text that, once corrupted, fill `max_length` and no more.

        Raises:
            IncompatibleError: The spans cannot be kept apart, or there is no room for any.
        """
        most = self.training.max_length
        hidden_frac, span = self.task.corrupted_frac, self.task.mean_span_tokens
        if hidden_frac / span > 1 - hidden_frac:
            raise IncompatibleError(
                f"pretrain.corrupted_frac {hidden_frac} in spans of {span} tokens leaves less than "
                "one token between two spans; lower it, or raise pretrain.mean_span_tokens"
            )
        # a block may be longer than the input, because each span shrinks to one sentinel
        read_frac = 1 - hidden_frac + hidden_frac / span
        # rounding may drop one hidden token, and half a span
        for tokens in range(int((most + 2) / read_frac) + 1, 1, -1):
            hidden, spans = self._spans(tokens)
            if tokens - hidden + spans + len(self.end) <= most and spans <= tokens - hidden:
                return tokens
        raise IncompatibleError(f"pretrain.max_length {most} leaves no room for text; raise it")

    def _spans(self, tokens: int) -> tuple[int, int]:
        """How many tokens of a block are hidden, and in how many spans."""
        # at least one token is hidden, and at least one is kept
        hidden = min(max(round(tokens * self.task.corrupted_frac), 1), tokens - 1)
        return hidden, max(round(hidden / self.task.mean_span_tokens), 1)


def segments(items: int, parts: int, draw: np.random.Generator) -> Ids:
    """The sizes, each at least 1, of a random cut of `items` into `parts`, (parts,).

    Every cut is equally likely.
    """
    # cuts differ and stand between two items, so that no part is empty
    cuts = np.sort(draw.permutation(items - 1)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=items)


def sentinels(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """Ids of `<extra_id_0>`, `<extra_id_1>`, ...

    Where a tokenizer has none of these, the last ids of its vocabulary, counting down.

    Raises:
        IncompatibleError: The tokenizer has some sentinels, but fewer than `count`.
    """
    vocabulary = tokenizer.get_vocab()
    if "<extra_id_0>" not in vocabulary:
        last = len(tokenizer) - 1
        return list(range(last, last - count, -1))
    ids = []
    for number in range(count):
        name = f"<extra_id_{number}>"
        if name not in vocabulary:
            raise IncompatibleError(
                f"span-corruption needs {count} sentinels for a block, but the tokenizer lacks "
                f"{name}; lower pretrain.max_length"
            )
        ids.append(vocabulary[name])
    return ids


OBJECTIVES: dict[ObjectiveName, type[PretrainingObjective]] = {
    "mlm": MaskedObjective,
    "causal-lm": CausalObjective,
    "span-corruption": SpanObjective,
}


def make_pretraining(
    task: PretrainTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig, *, kind: Kind
) -> PretrainingObjective:
    """The objective of a pre-training run.

    Raises:
        IncompatibleError: The objective does not go with this kind of backbone, or `max_length` or
            the number of sentinels is too small.
    """
    if task.objective != OWN_OBJECTIVE[kind]:
        raise IncompatibleError(
            f"pretrain.objective {task.objective} does not go with an {kind} backbone; "
            f"use {OWN_OBJECTIVE[kind]}, or leave it out: null is the backbone's own"
        )
    return OBJECTIVES[task.objective](task, tokenizer, training)
