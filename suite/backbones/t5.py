"""T5: encoder-decoder with relative positions; answers are text, so there is no task head.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (arXiv 1910.10683).
Deviations: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.t5.modeling_t5 import T5LayerNorm

from suite.backbones._find import base_model, divide, modules_of, numbered
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
            for i, block in numbered(stack.blocks):
                yield self._site(stack.role, "self", i, block.layer[0].SelfAttention)
                if stack.role == "decoder":
                    yield self._site(stack.role, "cross", i, block.layer[1].EncDecAttention)

    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        for stack in self.stacks(model):
            for i, block in numbered(stack.blocks):
                yield Sublayer(stack.role, "self", i, block.layer[0].SelfAttention.o)
                if stack.role == "decoder":
                    yield Sublayer(stack.role, "cross", i, block.layer[1].EncDecAttention.o)
                yield Sublayer(stack.role, "feed-forward", i, block.layer[-1].DenseReluDense.wo)

    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        return modules_of(model, self.model_types, (T5LayerNorm, nn.LayerNorm, nn.RMSNorm))

    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        return ()

    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        return divide(config, ("d_model", "d_ff", "d_kv"), factor)

    @staticmethod
    def _stack(role: Role, stack: Any) -> Stack:
        return Stack(role, stack, stack.block, stack.final_layer_norm, stack.config.d_model)

    @staticmethod
    def _site(role: Role, kind: AttentionKind, layer: int, attention: Any) -> AttentionSite:
        heads, head_dim = attention.n_heads, attention.key_value_proj_dim
        return AttentionSite(
            role, kind, layer, attention, "q", "k", "v", attention, "o", heads, heads, head_dim
        )
