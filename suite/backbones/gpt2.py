"""GPT-2: decoder with fused q, k and v (`c_attn`, a `Conv1D` whose weight is (in, out)); the task head is `score`.

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
    modules_of,
    numbered,
    present_names,
)
from suite.backbones.base import AttentionSite, Family, SplitProjection, Stack, Sublayer


class GPT2(Family):
    kind = "decoder"
    model_types = ("gpt2",)
    description = "GPT-2: causal decoder with a head on the last token, or text"

    def stacks(self, model: PreTrainedModel) -> tuple[Stack, ...]:
        base = base_model(model, self.model_types)
        return (Stack("decoder", base, base.h, base.ln_f, base.config.n_embd),)

    def attention_sites(self, model: PreTrainedModel) -> Iterator[AttentionSite]:
        for i, block in numbered(self.stacks(model)[0].blocks):
            a = block.attn
            fused = not isinstance(a.c_attn, SplitProjection)
            q, k, v = ("c_attn",) * 3 if fused else ("c_attn.q", "c_attn.k", "c_attn.v")
            yield AttentionSite(
                "decoder",
                "self",
                i,
                a,
                q,
                k,
                v,
                a,
                "c_proj",
                a.num_heads,
                a.num_heads,
                a.head_dim,
                fused=fused,
            )

    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        for i, block in numbered(self.stacks(model)[0].blocks):
            yield Sublayer("decoder", "self", i, block.attn.c_proj)
            yield Sublayer("decoder", "feed-forward", i, block.mlp.c_proj)

    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        return modules_of(model, self.model_types, (nn.LayerNorm, nn.RMSNorm))

    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        return present_names(model, self.model_types, ("score",))

    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        inner = (
            ("n_inner",) if getattr(config, "n_inner", None) is not None else ()
        )  # None means 4 x n_embd
        scaled = divide(config, ("n_embd", *inner), factor)
        check_heads(config, width=scaled.n_embd, heads=scaled.n_head, factor=factor)
        return scaled
