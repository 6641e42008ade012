"""What tells one tokenizer from another."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from suite.config.hashing import canonical_json


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over class, special tokens and the whole vocabulary with its rules; not over the name it was loaded by."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    rules = (
        _without_state(backend) if backend is not None else canonical_json(tokenizer.get_vocab())
    )
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(
        canonical_json([type(tokenizer).__name__, special, rules]).encode()
    ).hexdigest()


def _without_state(backend: Any) -> str:
    """The rules without `padding` and `truncation`, which every call of the tokenizer changes."""
    rules = json.loads(backend.to_str())
    return canonical_json(
        {name: value for name, value in rules.items() if name not in ("padding", "truncation")}
    )


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens to write on after: with the tokenizer's start but not its end token."""
    ids = [*tokenizer(text, verbose=False)["input_ids"]]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens without any special ones."""
    return [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
