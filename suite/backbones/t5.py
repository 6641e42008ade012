"""T5: an encoder-decoder with relative positions; it answers in text, so there is no task head.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer (arXiv 1910.10683).
Deviations: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.t5.modeling_t5 import T5LayerNorm

from suite.backbones._find import base_model, divide, enumerate_blocks, modules_of_class
from suite.backbones.base import AttentionKind, AttentionSite, Family, Role, Stack, Sublayer


class T5(Family):
    kind = "encoder-decoder"
    model_types = ("t5",)
    description = "T5 v1.0 and v1.1: encoder-decoder, text to text"
    position_bias = True

    def stacks(self, model: PreTrainedModel) -> tuple[Stack, ...]:
        base = base_model(model, self.model_types)
        return self._stack("encoder", base.encoder), self._stack("decoder", base.decoder)

    def attention_sites(self, model: PreTrainedModel) -> Iterator[AttentionSite]:
        for stack in self.stacks(model):
            for i, block in enumerate_blocks(stack.blocks):
                yield self._site(stack.role, "self", i, block.layer[0].SelfAttention)
                if stack.role == "decoder":
                    yield self._site(stack.role, "cross", i, block.layer[1].EncDecAttention)

    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        for stack in self.stacks(model):
            for i, block in enumerate_blocks(stack.blocks):
                yield Sublayer(stack.role, "self", i, block.layer[0].SelfAttention.o)
                if stack.role == "decoder":
                    yield Sublayer(stack.role, "cross", i, block.layer[1].EncDecAttention.o)
                # the feed-forward is layer[1] of an encoder block and layer[2] of a decoder block
                yield Sublayer(stack.role, "feed-forward", i, block.layer[-1].DenseReluDense.wo)

    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        return modules_of_class(model, self.model_types, (T5LayerNorm, nn.LayerNorm, nn.RMSNorm))

    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        return ()  # lm_head is pre-trained, so it belongs to the backbone

    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        return divide(config, ("d_model", "d_ff", "d_kv"), factor)

    @staticmethod
    def _stack(role: Role, stack: Any) -> Stack:
        return Stack(role, stack, stack.block, stack.final_layer_norm, stack.config.d_model)

    @staticmethod
    def _site(role: Role, kind: AttentionKind, layer: int, attention: Any) -> AttentionSite:
        return AttentionSite(
            role=role,
            kind=kind,
            layer=layer,
            module=attention,
            q="q",
            k="k",
            v="v",
            owner=attention,
            o="o",
            heads=attention.n_heads,
            kv_heads=attention.n_heads,  # T5 shares none
            head_dim=attention.key_value_proj_dim,  # d_kv; T5-3b: heads x d_kv is not d_model
        )
