"""BERT: encoder with post-norm blocks; the task head is `classifier`, and `cls` (masked language modelling) while it is pre-trained.

The pooler belongs to the backbone, as it is pre-trained with it. Where a checkpoint lacks it (RoBERTa-style or masked-LM
exports) its weights are new and count as task head: `suite.backbones.loading.build` marks such a pooler with `is_new`.

Source: Devlin et al., BERT (arXiv 1810.04805).
Deviations: none.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from suite.backbones._find import (
    backbone,
    base_model,
    check_heads,
    divide,
    modules_of,
    numbered,
    present_names,
)
from suite.backbones.base import AttentionSite, Family, Stack, Sublayer


class Bert(Family):
    kind = "encoder"
    model_types = ("bert",)
    description = "BERT and MiniLM: encoder with a classification or regression head"

    def stacks(self, model: PreTrainedModel) -> tuple[Stack, ...]:
        base = base_model(model, self.model_types)
        return (Stack("encoder", base, base.encoder.layer, None, base.config.hidden_size),)

    def attention_sites(self, model: PreTrainedModel) -> Iterator[AttentionSite]:
        for i, block in numbered(self.stacks(model)[0].blocks):
            inner, output = block.attention.self, block.attention.output
            if not hasattr(inner, "query"):  # a token mixer stands there
                continue
            heads, head_dim = inner.num_attention_heads, inner.attention_head_size
            yield AttentionSite(
                "encoder",
                "self",
                i,
                inner,
                "query",
                "key",
                "value",
                output,
                "dense",
                heads,
                heads,
                head_dim,
            )

    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        for i, block in numbered(self.stacks(model)[0].blocks):
            yield Sublayer("encoder", "self", i, block.attention.output.dense)
            yield Sublayer("encoder", "feed-forward", i, block.output.dense)

    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        return modules_of(model, self.model_types, (nn.LayerNorm, nn.RMSNorm))

    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        names = present_names(model, self.model_types, ("classifier", "cls", "qa_outputs"))
        pooler = base_model(model, self.model_types).pooler
        return (
            (*names, *self._names_of(model, pooler)) if getattr(pooler, "is_new", False) else names
        )

    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        scaled = divide(config, ("hidden_size", "intermediate_size"), factor)
        check_heads(
            config, width=scaled.hidden_size, heads=scaled.num_attention_heads, factor=factor
        )
        return scaled

    def _names_of(self, model: PreTrainedModel, wanted: nn.Module) -> list[str]:
        prefix, inside = backbone(model, self.model_types)
        return [name for name, module in inside.named_modules(prefix=prefix) if module is wanted]
