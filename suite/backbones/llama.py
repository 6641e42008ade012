"""Llama 2 and 3: a decoder with rotary positions, RMSNorm, gated feed-forward and grouped KV heads.

The task head is `score`.

Source: Touvron et al., Llama 2 (arXiv 2307.09288); Grattafiori et al., The Llama 3 Herd of Models
(arXiv 2407.21783).
Deviations: none.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from suite.backbones._find import (
    base_model,
    divide,
    enumerate_blocks,
    modules_of_class,
    names_of_children,
)
from suite.backbones.base import AttentionSite, Family, Stack, Sublayer
from suite.errors import IncompatibleError


class Llama(Family):
    kind = "decoder"
    model_types = ("llama",)
    description = "Llama 2 and 3: causal decoder with a head on the last token, or text"
    rotates = True

    def stacks(self, model: PreTrainedModel) -> tuple[Stack, ...]:
        base = base_model(model, self.model_types)
        return (Stack("decoder", base, base.layers, base.norm, base.config.hidden_size),)

    def attention_sites(self, model: PreTrainedModel) -> Iterator[AttentionSite]:
        config = base_model(model, self.model_types).config
        for i, block in enumerate_blocks(self.stacks(model)[0].blocks):
            attention = block.self_attn
            yield AttentionSite(
                role="decoder",
                kind="self",
                layer=i,
                module=attention,
                q="q_proj",
                k="k_proj",
                v="v_proj",
                owner=attention,
                o="o_proj",
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,  # fewer than heads in 70B and Llama 3
                head_dim=attention.head_dim,
            )

    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        for i, block in enumerate_blocks(self.stacks(model)[0].blocks):
            yield Sublayer("decoder", "self", i, block.self_attn.o_proj)
            yield Sublayer("decoder", "feed-forward", i, block.mlp.down_proj)

    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        return modules_of_class(model, self.model_types, (LlamaRMSNorm, nn.LayerNorm, nn.RMSNorm))

    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        return names_of_children(model, self.model_types, ("score",))

    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        # head_dim has a key of its own here; elsewhere it follows from the width
        scaled = divide(config, ("hidden_size", "intermediate_size", "head_dim"), factor)
        if scaled.head_dim % 2:
            raise IncompatibleError(
                f"llama: head_dim {scaled.head_dim} (reduction factor {factor}) is odd;"
                " rotary positions need pairs"
            )
        return scaled
