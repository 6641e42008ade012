"""Byte-pair tokenizers trained for a backbone from scratch, named `bpe:SIZE:TASK` after the task whose training text they are made from.

Source: Sennrich et al. 2016 (arXiv 1508.07909); one vocabulary for both languages of a translation as in Vaswani et al. 2017
(arXiv 1706.03762), section 5.1, about 37,000 tokens, which MHE (arXiv 2310.07911, appendix) follows. Ours: on bytes (GPT-2), so
that there is no unknown token, and SIZE is the whole vocabulary, with the 256 bytes and the special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from suite.errors import BackboneError

PREFIX = "bpe:"
PAD, END = "<pad>", "</s>"
SMALLEST = 256 + 2


@dataclass(frozen=True, slots=True)
class Bpe:
    """What `bpe:SIZE:TASK` says.

    Attributes:
        size: Tokens of the vocabulary, at most.
        task: Whose training text it is made from.
    """

    size: int
    task: str


def parse_bpe(name: str | None, *, where: str = "") -> Bpe | None:
    """The parts of a name; None if it names another kind of tokenizer.

    Raises:
        BackboneError: It starts with `bpe:` but is not of the form, or too small.
    """
    if name is None or not name.startswith(PREFIX):
        return None
    found = re.fullmatch(r"bpe:(\d+):(.+)", name)
    if found is None or int(found[1]) < SMALLEST:
        raise BackboneError(
            f"{where}tokenizer {name!r}: expected bpe:SIZE:TASK, SIZE at least {SMALLEST} (bpe:8000:multi30k-en-de)"
        )
    return Bpe(int(found[1]), found[2])


def train_bpe(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `size` tokens; the same texts give the same tokenizer.

    Padding is token 0, the end-of-text token, which ends every encoded text, is 1.
    """
    backend = _backend()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return _wrapped(backend)


def draft_bpe() -> PreTrainedTokenizerFast:
    """What stands in for a tokenizer whose text has not been read, while a plan is checked: bytes, with the same special tokens."""
    return train_bpe([], SMALLEST)


def _backend() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    end = (END, backend.token_to_id(END))
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[end]
    )
    names = ["input_ids", "attention_mask"]
    special = {"pad_token": PAD, "eos_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **special)  # type: ignore[no-untyped-call]
