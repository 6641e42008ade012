"""The smallest backbone of every family that still has all its parts: random weights, byte tokenizer, no files."""

from __future__ import annotations

from typing import Any

from suite.backbones import all_families
from suite.backbones.fit import served_families
from suite.config.sweep import BackboneChoice

FAMILIES = ("t5", "bert", "gpt2", "llama")
"""One family of each build; every contract runs on them."""
OTHERS = ("deberta", "gemma2", "gemma3", "mistral", "modernbert", "qwen2", "qwen3", "roberta")
"""The other families, most of them built like one of the four; `tests/contracts/test_families.py` runs on them."""
_PRESETS = {
    "t5": "t5-small",
    "bert": "bert-base",
    "gpt2": "gpt2",
    "llama": "llama3-8b",
    "deberta": "deberta-v3-small",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-270m",
    "mistral": "mistral-7b",
    "modernbert": "modernbert-base",
    "qwen2": "qwen2.5-0.5b",
    "qwen3": "qwen3-0.6b",
    "roberta": "roberta-base",
}
_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
# a window of four tokens, so that rows of six are longer than it
_GEMMA = {
    **_LLAMA,
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
_BERT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_heads": 4,
        "num_layers": 2,
        "num_decoder_layers": 2,
    },
    "bert": _BERT,
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128},
    "llama": {**_LLAMA, "head_dim": 8},
    "deberta": _BERT,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "mistral": {**_LLAMA, "head_dim": 8},
    "modernbert": {
        **_BERT,
        "local_attention": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 8},
    "roberta": {**_BERT, "max_position_embeddings": 130},
}
_DROPOUTS: dict[str, tuple[str, ...]] = {
    "t5": ("dropout_rate",),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "modernbert": ("embedding_dropout", "attention_dropout", "mlp_dropout"),
}


def _dropouts(family: str) -> tuple[str, ...]:
    if family in ("roberta", "deberta"):
        return _DROPOUTS["bert"]
    return _DROPOUTS.get(family, ("attention_dropout",))  # Llama's is built into most decoders


def served(plug_in: type) -> list[str]:
    """Those of `FAMILIES` that a method or an attention variant works on, sorted."""
    return [name for name in served_families(plug_in, all_families()) if name in FAMILIES]


def tiny_choice(family: str, *, dropout: float = 0.0, **changes: Any) -> BackboneChoice:
    """d = 32, 2 blocks (T5: 2 + 2), 4 heads (Llama: 2 key-value heads), vocabulary 384."""
    config = {
        "vocab_size": 384,
        **_SHAPES[family],
        **dict.fromkeys(_dropouts(family), dropout),
        **changes,
    }
    return BackboneChoice(name=_PRESETS[family], config=config, tokenizer="bytes")
