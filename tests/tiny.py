"""The smallest backbone of every family that still has all its parts: random weights, byte tokenizer, no files."""

from __future__ import annotations

from typing import Any

from suite.config.sweep import BackboneChoice

FAMILIES = ("t5", "bert", "gpt2", "llama")
_PRESETS = {"t5": "t5-small", "bert": "bert-base", "gpt2": "gpt2", "llama": "llama3-8b"}
_SHAPES: dict[str, dict[str, Any]] = {
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_heads": 4,
        "num_layers": 2,
        "num_decoder_layers": 2,
    },
    "bert": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    },
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128},
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    },
}
_DROPOUTS: dict[str, tuple[str, ...]] = {
    "t5": ("dropout_rate",),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
}


def tiny_choice(family: str, *, dropout: float = 0.0, **changes: Any) -> BackboneChoice:
    """d = 32, 2 blocks (T5: 2 + 2), 4 heads (Llama: 2 key-value heads), vocabulary 384."""
    config = {
        "vocab_size": 384,
        **_SHAPES[family],
        **dict.fromkeys(_DROPOUTS[family], dropout),
        **changes,
    }
    return BackboneChoice(name=_PRESETS[family], config=config, tokenizer="bytes")
