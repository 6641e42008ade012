"""BitFit: only biases train.

Source: Ben Zaken et al., arXiv 2106.10199, section 3. T5 and Llama have no biases; the only
    published construction for them is the official code of LST (arXiv 2206.06522): add zero biases
    to q, k, v, o, wi, wo, to every RMSNorm and to the LM head, and train those: 282,496 on t5-base,
    the default here.
Deviations:
    - READ (arXiv 2305.15348, table 1) prints 0.06 % of t5-base and does not say what trains.
      `sites: [feed-forward, norm]` gives 139,776 (0.056 %), `[attention, norm]` gives 158,208
      (0.064 %); all linear maps and norms, 250,368, do not match.
    - `head` means maps outside the blocks that belong to the checkpoint (the LM head, BERT's
      pooler). The task head is trained whole by every method and is not BitFit's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from suite.backbones.base import Family
from suite.errors import IncompatibleError
from suite.petl.base import Architecture, Method, backbone_norms, freeze

Site = Literal["attention", "feed-forward", "norm", "head"]


class BitfitArchitecture(Architecture):
    """Hyperparameters of BitFit."""

    sites: Annotated[list[Site], Field(min_length=1)] = Field(
        ["attention", "feed-forward", "norm", "head"],
        description="where biases train; the default is LST's code",
    )


class Bitfit(Method[BitfitArchitecture]):
    description = "biases only; added at zero where the backbone has none"
    source = "Ben Zaken et al., arXiv 2106.10199, section 3; LST's code (arXiv 2206.06522) for T5"
    Config = BitfitArchitecture

    def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
        freeze(model)
        # a list, because the model changes while a generator would still walk over it
        modules = list(self._modules(model, family))
        if not modules:
            has = sorted({site for site, _ in _biased(model, family)})
            raise IncompatibleError(
                f"bitfit: sites {self.config.sites} do not exist in this {family.name} model, which"
                f" has {has}"
            )
        for module in modules:
            if getattr(module, "bias", None) is None:
                _add_bias(module)
            assert isinstance(module.bias, nn.Parameter)
            module.bias.requires_grad_(True)
        return model

    def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
        """One bias per output feature of every chosen map and norm."""
        return sum(_features(module) for module in self._modules(model, family))

    def _modules(self, model: PreTrainedModel, family: Family) -> Iterator[nn.Module]:
        for site, module in _biased(model, family):
            if site in self.config.sites:
                yield module


def _biased(model: PreTrainedModel, family: Family) -> Iterator[tuple[Site, nn.Module]]:
    """Every module that has or can have a bias, with its site; without the task head."""
    attention: set[nn.Module] = set()
    for attention_site in family.attention_sites(model):
        attention.update(attention_site.module.modules())
        # BERT keeps the output projection outside of the attention module
        attention.add(getattr(attention_site.owner, attention_site.o))
    blocks: set[nn.Module] = set()
    for stack in family.stacks(model):
        blocks.update(stack.blocks.modules())
    head = tuple(f"{name}." for name in family.head_names(model))
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)) or f"{name}.".startswith(head):
            continue
        if module in attention:
            yield "attention", module
        elif module in blocks:
            yield "feed-forward", module
        else:
            yield "head", module
    for norm in backbone_norms(model, family):
        yield "norm", norm


def _features(module: nn.Module) -> int:
    """Number of output features of a map, or length of a norm's scale."""
    assert isinstance(module.weight, Tensor)
    # Conv1D's weight is (in, out), a Linear's (out, in)
    return module.weight.shape[-1 if isinstance(module, Conv1D) else 0]


def _add_bias(module: nn.Module) -> None:
    assert isinstance(module.weight, Tensor)
    bias = nn.Parameter(
        torch.zeros(_features(module), dtype=module.weight.dtype, device=module.weight.device)
    )
    module.register_parameter("bias", bias)
    # Linear and LayerNorm add their bias themselves; an RMSNorm does not know of one
    if not isinstance(module, (nn.Linear, nn.LayerNorm)):
        module.register_forward_hook(_shift)


def _shift(module: Any, args: Any, output: Tensor) -> Tensor:
    shifted: Tensor = output + module.bias
    return shifted
