"""BERT: an encoder with post-norm blocks.

The task head is `classifier`, or `cls` (masked language modelling) while the model is pre-trained.
The pooler belongs to the backbone, as it is pre-trained with it. Where a checkpoint lacks it
(masked-LM exports) its weights are new and count as task head:
`suite.backbones.loading.build` marks such a pooler with `is_new`.

Source: Devlin et al., BERT (arXiv 1810.04805).
Deviations: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from suite.backbones._find import (
    base_model,
    check_heads,
    divide,
    enumerate_blocks,
    find_backbone,
    modules_of_class,
    names_of_children,
)
from suite.backbones.base import AttentionSite, Family, Stack, Sublayer


class Bert(Family):
    """The family, and the base of those that are laid out as BERT.

    Attributes:
        maps: Names of the query, key and value projections.
        heads: Names that the parts of a task head have.
    """

    kind = "encoder"
    maps: ClassVar[tuple[str, str, str]] = ("query", "key", "value")
    heads: ClassVar[tuple[str, ...]] = ("classifier", "cls", "qa_outputs")
    model_types = ("bert",)
    description = "BERT and MiniLM: encoder with a classification or regression head"

    def stacks(self, model: PreTrainedModel) -> tuple[Stack, ...]:
        base = base_model(model, self.model_types)
        # no final norm: the last block ends with a norm of its own
        return (Stack("encoder", base, base.encoder.layer, None, base.config.hidden_size),)

    def attention_sites(self, model: PreTrainedModel) -> Iterator[AttentionSite]:
        for i, block in enumerate_blocks(self.stacks(model)[0].blocks):
            attention = block.attention.self
            q, k, v = self.maps
            # a token mixer (fnet, linear) in the attention's place has no projections
            if not hasattr(attention, q):
                continue
            yield AttentionSite(
                role="encoder",
                kind="self",
                layer=i,
                module=attention,
                q=q,
                k=k,
                v=v,
                owner=block.attention.output,  # BertSelfOutput, beside the attention
                o="dense",
                heads=attention.num_attention_heads,
                kv_heads=attention.num_attention_heads,
                head_dim=attention.attention_head_size,
            )

    def sublayers(self, model: PreTrainedModel) -> Iterator[Sublayer]:
        for i, block in enumerate_blocks(self.stacks(model)[0].blocks):
            yield Sublayer("encoder", "self", i, block.attention.output.dense)
            yield Sublayer("encoder", "feed-forward", i, block.output.dense)

    def norms(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        return modules_of_class(model, self.model_types, (nn.LayerNorm, nn.RMSNorm))

    def head_names(self, model: PreTrainedModel) -> tuple[str, ...]:
        names = names_of_children(model, self.model_types, self.heads)
        pooler = getattr(base_model(model, self.model_types), "pooler", None)
        # build() and load_weights() set the mark; a pre-trained pooler has none
        if pooler is not None and getattr(pooler, "is_new", False):
            return (*names, *self._names_of(model, pooler))
        return names

    def scale_config(self, config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
        scaled = divide(config, ("hidden_size", "intermediate_size"), factor)
        check_heads(
            config, width=scaled.hidden_size, heads=scaled.num_attention_heads, factor=factor
        )
        return scaled

    def _names_of(self, model: PreTrainedModel, wanted: nn.Module) -> list[str]:
        prefix, inside = find_backbone(model, self.model_types)
        return [name for name, module in inside.named_modules(prefix=prefix) if module is wanted]
