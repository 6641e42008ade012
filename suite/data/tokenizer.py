"""What tokenizers differ in, and token ids with or without special tokens."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from suite.config.hashing import canonical_json

CUE = " answer:"
"""What a decoder reads between the prompt and the answer to a task (ours); it is never cut off."""


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The SHA-256 of class, special tokens and the whole vocabulary with its rules.

    The name under which the tokenizer was loaded does not count.
    """
    # fast tokenizers keep their rules (merges, normalisation) in a backend
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = canonical_json(tokenizer.get_vocab())
    else:
        rules = _without_state(backend)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    parts = canonical_json([type(tokenizer).__name__, special, rules])
    return hashlib.sha256(parts.encode()).hexdigest()


def _without_state(backend: Any) -> str:
    """The rules without `padding` and `truncation`, which every call of the tokenizer changes."""
    rules = json.loads(backend.to_str())
    for name in ("padding", "truncation"):
        rules.pop(name, None)
    return canonical_json(rules)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text that a model continues: with the start token, without the end token."""
    # not verbose: what is too long is cut by the caller, and needs no warning
    ids = [*tokenizer(text, verbose=False)["input_ids"]]
    if ids and ids[-1] == tokenizer.eos_token_id:
        return ids[:-1]
    return ids


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text without any special ones."""
    return [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end token, or nothing where the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        return []
    return [int(tokenizer.eos_token_id)]


def start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """One token to predict the first one from: the start token, else the end token, if any."""
    if tokenizer.bos_token_id is None:
        return end_ids(tokenizer)
    return [int(tokenizer.bos_token_id)]


def as_written(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    """The text of tokens without special ones, as the model wrote it.

    Some checkpoints' tokenizers would take spaces before punctuation out, which the golds keep.
    """
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)
