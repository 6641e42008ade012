"""What the decoders built like Llama share: rotary positions, RMSNorm, gated feed-forward.

A family says what its paper changes: the class of its norms, norms of queries and keys, windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

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
from suite.errors import IncompatibleError


class RotaryDecoder(Family):
    """Base of the families whose models are laid out as Llama's; the task head is `score`.

    Attributes:
        norm_class: The class of its norms.
        normed_heads: Whether queries and keys of each head are normalised before they are rotated.
    """

    kind = "decoder"
    rotates = True
    norm_class: ClassVar[type[nn.Module]]
    normed_heads: ClassVar[bool] = False

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
                kv_heads=config.num_key_value_heads,  # often fewer than heads
                head_dim=attention.head_dim,
                q_norm="q_norm" if self.normed_heads else "",
                k_norm="k_norm" if self.normed_heads else "",
            )

    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        for i, block in enumerate_blocks(self.stacks(model)[0].blocks):
            yield Sublayer("decoder", "self", i, block.self_attn.o_proj)
            yield Sublayer("decoder", "feed-forward", i, block.mlp.down_proj)

    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        classes = (self.norm_class, nn.LayerNorm, nn.RMSNorm)
        return modules_of_class(model, self.model_types, classes)

    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        return names_of_children(model, self.model_types, ("score",))

    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        known: Any = config
        widths = ["hidden_size", "intermediate_size"]
        # where head_dim has no key of its own (Qwen 2), it follows from the width
        if getattr(known, "head_dim", None) is not None:
            widths.append("head_dim")
        scaled = divide(config, widths, factor)
        head_dim = getattr(scaled, "head_dim", None)
        if head_dim is None:
            heads = scaled.num_attention_heads
            check_heads(config, width=scaled.hidden_size, heads=heads, factor=factor)
            head_dim = scaled.hidden_size // heads
        if head_dim % 2:
            raise IncompatibleError(
                f"{config.model_type}: head_dim {head_dim} (reduction factor {factor}) is odd;"
                " rotary positions need pairs"
            )
        return scaled


class AlternatingDecoder(RotaryDecoder):
    """A decoder some of whose layers see a window, and some the whole text."""

    refused_methods = {
        "lst": "because its layers alternate between a window and the whole text, and LST's side"
        " blocks share one mask",
        "peft:prefix-tuning": "because the cache of a layer with a window loses the prefix",
    }
