"""Gated attention: it starts as the checkpoint, the gate is the published one, and its weights are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from suite.attention.counts import count_attention
from suite.backbones.base import Family
from suite.backbones.loading import Head, resolve
from suite.config.sweep import AttentionChoice, BackboneChoice
from tests.attention import backbone, batch_of, converted
from tests.tiny import FAMILIES
from tests.toy import disturb, logits_of

every_form = pytest.mark.parametrize("form", ["element", "head"])


@every_form
@pytest.mark.parametrize("family", [*FAMILIES, "gemma3", "qwen3", "roberta"])
def test_it_starts_as_the_checkpoint_bit_for_bit(family: str, form: str) -> None:
    model, found, _ = converted("gated", family, {"form": form})
    plain, _ = backbone(family)
    assert torch.equal(logits_of(model, batch_of(found)), logits_of(plain, batch_of(found)))


@every_form
def test_the_gate_is_the_sigmoid_of_the_input_by_heads(form: str) -> None:
    model, found, variant = converted("gated", "llama", {"form": form})
    plain, _ = backbone("llama")
    before = output_input(plain, found)
    for weight in variant.new_parameters(model, found):
        disturb_one(weight)
    after = output_input(model, found)
    module: Any = next(found.attention_sites(model)).module
    hidden = layer_input(plain, found)  # (B, n, 32)
    gate = (hidden @ module.output_gate.map.weight.T).sigmoid()  # (B, n, 4 or 32)
    if form == "head":
        gate = gate.repeat_interleave(8, dim=-1)
    assert torch.allclose(after, before * gate, atol=1e-6)
    assert (gate - 0.5).abs().max() > 0.05


def disturb_one(weight: Tensor) -> None:
    with torch.no_grad():
        weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))


def output_input(model: Any, family: Family) -> Tensor:
    """What the first output projection gets."""
    site = next(family.attention_sites(model))
    return caught(model, family, site.owner.get_submodule(site.o))


def layer_input(model: Any, family: Family) -> Tensor:
    """What the first query projection gets."""
    site = next(family.attention_sites(model))
    return caught(model, family, site.module.get_submodule(site.q))


def caught(model: Any, family: Family, module: Any) -> Tensor:
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    logits_of(model, batch_of(family))
    handle.remove()
    return seen[0]


def test_no_gate_outlives_the_forward_pass() -> None:
    model, found, _ = converted("gated", "gpt2")
    disturb(model)
    logits_of(model, batch_of(found))
    assert not any("gate_values" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("form", "weights"), [("element", 32 * 4096 * 4096), ("head", 32 * 4096 * 32)]
)
def test_llama_2_gets_as_many_gate_weights_as_it_has_gates(form: str, weights: int) -> None:
    resolved = resolve(BackboneChoice(name="llama2-7b"), only_shape=True)
    choice = AttentionChoice(name="gated", options={"form": form})
    found = count_attention(resolved, Head("text"), choice)
    assert found.extra_over_base == weights
    assert (found.kv_bytes_per_token, found.kv_fraction) == (524_288, 1.0)
