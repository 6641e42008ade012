"""ModernBERT: a pre-norm encoder with rotary positions, gated feed-forward and windows.

One layer in three sees the whole text, the others 64 tokens on either side. `Wqkv` gives queries,
keys and values, and `Wi` the two halves of the gated feed-forward. The task head is `head` (a
hidden layer that a checkpoint may bring along) with `classifier`, or `decoder` (masked language
modelling).

Source: Warner et al., ModernBERT (arXiv 2412.13663), section 2.1.
Deviations: none.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from suite.backbones._find import (
    base_model,
    check_heads,
    divide,
    enumerate_blocks,
    modules_of_class,
    names_of_children,
)
from suite.backbones.base import AttentionSite, Family, Stack, Sublayer


class ModernBert(Family):
    kind = "encoder"
    model_types = ("modernbert",)
    description = "ModernBERT: encoder with a classification or regression head"
    rotates = True
    fixed_attention = (
        "because one map (Wqkv) gives its queries, keys and values, and most of its layers have"
        " windows of their own, for which no variant is written"
    )
    refused_methods = {
        "lst": "because its feed-forward has gate and input in one map (Wi), whose halves LST's"
        " pruning would mix",
        "peft:prefix-tuning": "because its attention takes no keys and values in front of the text",
    }

    def stacks(self, model: PreTrainedModel) -> tuple[Stack, ...]:
        base = base_model(model, self.model_types)
        return (Stack("encoder", base, base.layers, base.final_norm, base.config.hidden_size),)

    def attention_sites(self, model: PreTrainedModel) -> Iterator[AttentionSite]:
        config = base_model(model, self.model_types).config
        for i, block in enumerate_blocks(self.stacks(model)[0].blocks):
            yield AttentionSite(
                role="encoder",
                kind="self",
                layer=i,
                module=block.attn,
                q="Wqkv",
                k="Wqkv",
                v="Wqkv",
                owner=block.attn,
                o="Wo",
                heads=config.num_attention_heads,
                kv_heads=config.num_attention_heads,
                head_dim=block.attn.head_dim,
                fused=True,
            )

    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        for i, block in enumerate_blocks(self.stacks(model)[0].blocks):
            yield Sublayer("encoder", "self", i, block.attn.Wo)
            yield Sublayer("encoder", "feed-forward", i, block.mlp.Wo)

    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        return modules_of_class(model, self.model_types, (nn.LayerNorm, nn.RMSNorm))

    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        return names_of_children(model, self.model_types, ("head", "classifier", "decoder"))

    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        scaled = divide(config, ("hidden_size", "intermediate_size"), factor)
        heads = scaled.num_attention_heads
        check_heads(config, width=scaled.hidden_size, heads=heads, factor=factor)
        return scaled
