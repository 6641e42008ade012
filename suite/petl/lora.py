"""LoRA: a trained low-rank product beside chosen attention projections.

Source: Hu et al., arXiv 2106.09685, section 4.1 (`W x + (alpha / rank) B A x`, B zero at first);
    through `peft`. Defaults rank 32, alpha 32, dropout 0.1 on q and v of every attention: the
    official code of LST (arXiv 2206.06522); READ (arXiv 2305.15348, table 8) also ends at rank 32.
Deviations:
    - A starts Kaiming-uniform, as in `peft`, in LST's code and in that of Hu et al., whose section
      4.1 says Gaussian.
    - GPT-2 fuses q, k and v in one matrix. Naming any of the three there adapts the whole fused
      matrix with one rank-r product, as `peft` does: k is adapted too and the three share A. For q
      and v the count is the same, 4 d r a layer.
    - No bias trains with it; LST's code trains all biases beside LoRA, Hu et al. do not.
    - READ prints 0.48 % for t5-base: 1,179,648 parameters, which is 24 matrices, not q and v of all
      36 attentions (3,538,944). It does not say which 24; `sites: [encoder-self]` is one reading
      that gives exactly this count (`[decoder-self]` and `[decoder-cross]` are the others that keep
      q and v).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from suite.backbones.base import Absent, AttentionSite, Family, SiteName
from suite.errors import IncompatibleError
from suite.petl._quiet import without_noise
from suite.petl.base import Architecture, Method, freeze, surplus


class LoraArchitecture(Architecture):
    """Hyperparameters of LoRA."""

    rank: Annotated[int, Field(ge=1)] = Field(32, description="r (READ table 8, LST's code: 32)")
    alpha: Annotated[float, Field(gt=0)] = Field(
        32.0, description="the product is scaled by alpha / rank (LST's code: 32)"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="on the product's input (LST's code: 0.1)"
    )
    targets: Annotated[list[Literal["q", "k", "v", "o"]], Field(min_length=1)] = Field(
        ["q", "v"], description="adapted projections (LST's code: q and v)"
    )
    sites: Annotated[list[SiteName], Field(min_length=1)] = Field(
        ["encoder-self", "decoder-self", "decoder-cross"],
        description="adapted attentions, as far as the backbone has them",
    )


class Lora(Method[LoraArchitecture]):
    description = "low-rank products beside attention projections"
    source = "Hu et al., arXiv 2106.09685, section 4.1; READ, arXiv 2305.15348, table 8"
    Config = LoraArchitecture

    def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
        targets = list(self._targets(model, family))
        names = {id(module): name for name, module in model.named_modules()}
        config = LoraConfig(
            r=self.config.rank,
            # peft only divides by it, so a float is as good as the int of its annotation
            lora_alpha=self.config.alpha,  # type: ignore[arg-type]
            lora_dropout=self.config.dropout,
            target_modules=[names[id(module)] for module in targets],
            fan_in_fan_out=isinstance(targets[0], Conv1D),
        )
        # a GPT-2 that is split in part holds Conv1D and Linear, which peft tells apart and says so
        with torch.device(targets[0].weight.device), without_noise():
            inject_adapter_in_model(config, model)
        freeze(model)
        for name, parameter in model.named_parameters():
            # peft's names: q.lora_A.default.weight
            parameter.requires_grad_(".lora_" in name)
        return model

    def peft_config(self, model: nn.Module, family: Family) -> PeftConfig | None:
        known: Any = model
        config: PeftConfig = copy.deepcopy(known.peft_config["default"])
        return config

    def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
        """r (in + out) per adapted matrix."""
        total = 0
        for module in self._targets(model, family):
            total += self.config.rank * _features(module)
        return total

    def _targets(self, model: PreTrainedModel, family: Family) -> Iterator[nn.Linear | Conv1D]:
        """The adapted modules, each once (a fused q, k, v is one).

        Raises:
            IncompatibleError: No attention is chosen, or a projection is not a plain linear map, or
                most of what it returns is dropped.
        """
        modules: dict[nn.Module, None] = {}  # a dictionary keeps their order, a set does not
        for site in family.attention_sites(model):
            if site.site in self.config.sites:
                modules.update(dict.fromkeys(self._projections(site)))
        if not modules:
            has = sorted({site.site for site in family.attention_sites(model)})
            if not has:
                raise IncompatibleError(
                    "lora: this attention variant left no attention projections to adapt; use"
                    " another method"
                )
            if set(has) & set(self.config.sites):
                raise IncompatibleError(
                    f"lora: this attention variant has no projection of {self.config.targets} of"
                    " its own; choose other targets"
                )
            raise IncompatibleError(
                f"lora: sites {self.config.sites} do not exist in a {family.name} backbone, which"
                f" has {has}"
            )
        for module in modules:
            if not isinstance(module, (nn.Linear, Conv1D)):
                raise IncompatibleError(
                    f"lora: cannot adapt a {type(module).__name__}; leave this projection out of"
                    " targets"
                )
            dropped = surplus(module)
            if dropped:
                raise IncompatibleError(
                    f"lora: this attention variant drops {dropped} of the {module.out_features}"
                    " features of its keys, so that weights for them would never train; leave k"
                    " out of targets"
                )
            yield module

    def _projections(self, site: AttentionSite) -> Iterator[nn.Module]:
        for target in self.config.targets:
            owner = site.owner if target == "o" else site.module
            projection = owner.get_submodule(getattr(site, target))
            # an attention variant may do without it
            if not isinstance(projection, Absent):
                yield projection


def _features(module: nn.Linear | Conv1D) -> int:
    """Input and output features together; a weighted map's weight has more rows than outputs."""
    if isinstance(module, Conv1D):
        return sum(module.weight.shape)
    return module.in_features + module.out_features
