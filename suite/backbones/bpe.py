"""Byte-pair tokenizers that are trained for a backbone from scratch.

They are named `bpe:SIZE:TASK`, after the task whose training text they are made from.

Source: Sennrich et al. 2016 (arXiv 1508.07909); one vocabulary for both languages of a translation
as in Vaswani et al. 2017 (arXiv 1706.03762), section 5.1, about 37,000 tokens, which MHE
(arXiv 2310.07911, appendix) follows. Ours: on bytes (GPT-2), so that there is no unknown token, and
SIZE is the whole vocabulary, with the 256 bytes and the special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from suite.errors import BackboneError

PREFIX = "bpe:"
PAD = "<pad>"
END = "</s>"
SMALLEST = 256 + 2  # every byte, and the two special tokens


@dataclass(frozen=True, slots=True)
class Bpe:
    """What `bpe:SIZE:TASK` says.

    Attributes:
        size: The largest number of tokens that the vocabulary may have.
        task: The task whose training text the tokenizer is made from.
    """

    size: int
    task: str


def parse_bpe(name: str | None, *, where: str = "") -> Bpe | None:
    """The parts of a name; None if it names another kind of tokenizer.

    Raises:
        BackboneError: It starts with `bpe:` but has another form, or its size is too small.
    """
    if name is None or not name.startswith(PREFIX):
        return None
    found = re.fullmatch(r"bpe:(\d+):(.+)", name)
    if found is None or int(found[1]) < SMALLEST:
        raise BackboneError(
            f"{where}tokenizer {name!r}: expected bpe:SIZE:TASK, SIZE at least {SMALLEST}"
            " (bpe:8000:multi30k-en-de)"
        )
    return Bpe(int(found[1]), found[2])


def train_bpe(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `size` tokens; the same texts give the same tokenizer.

    Padding is token 0. The end-of-text token, which ends every encoded text, is token 1.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # sorted, because the library returns the bytes in an order that changes from run to run
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return _for_transformers(backend)


def draft_bpe() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the same special tokens.

    It stands in for a tokenizer whose text is not read yet, while a plan is checked.
    """
    return train_bpe([], SMALLEST)


def _for_transformers(backend: Tokenizer) -> PreTrainedTokenizerFast:
    end = (END, backend.token_to_id(END))
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[end]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        model_input_names=["input_ids", "attention_mask"],
        pad_token=PAD,
        eos_token=END,
    )
