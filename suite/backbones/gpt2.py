"""GPT-2: a decoder with fused q, k and v; the task head is `score`.

The fused projection is `c_attn`, a `Conv1D` whose weight is (in, out).

Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019).
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
from suite.backbones.base import AttentionSite, Family, SplitProjection, Stack, Sublayer


class GPT2(Family):
    kind = "decoder"
    model_types = ("gpt2",)
    description = "GPT-2: causal decoder with a head on the last token, or text"

    def stacks(self, model: PreTrainedModel) -> tuple[Stack, ...]:
        base = base_model(model, self.model_types)
        # ln_f stands after the last block, inside the model's forward
        return (Stack("decoder", base, base.h, base.ln_f, base.config.n_embd),)

    def attention_sites(self, model: PreTrainedModel) -> Iterator[AttentionSite]:
        for i, block in enumerate_blocks(self.stacks(model)[0].blocks):
            attention = block.attn
            split = isinstance(attention.c_attn, SplitProjection)
            if split:
                q, k, v = "c_attn.q", "c_attn.k", "c_attn.v"
            else:
                q = k = v = "c_attn"  # one Conv1D, (d, 3 d)
            yield AttentionSite(
                role="decoder",
                kind="self",
                layer=i,
                module=attention,
                q=q,
                k=k,
                v=v,
                owner=attention,
                o="c_proj",
                heads=attention.num_heads,
                kv_heads=attention.num_heads,  # GPT-2 shares none
                head_dim=attention.head_dim,
                fused=not split,
            )

    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        for i, block in enumerate_blocks(self.stacks(model)[0].blocks):
            yield Sublayer("decoder", "self", i, block.attn.c_proj)
            yield Sublayer("decoder", "feed-forward", i, block.mlp.c_proj)

    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        return modules_of_class(model, self.model_types, (nn.LayerNorm, nn.RMSNorm))

    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        return names_of_children(model, self.model_types, ("score",))

    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        widths = ["n_embd"]
        # n_inner None means 4 x n_embd, which shrinks with n_embd
        if getattr(config, "n_inner", None) is not None:
            widths.append("n_inner")
        scaled = divide(config, widths, factor)
        check_heads(config, width=scaled.n_embd, heads=scaled.n_head, factor=factor)
        return scaled
