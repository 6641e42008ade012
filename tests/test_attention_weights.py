"""How far the learned weights of the WGQA family are from their start."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from scipy.stats import ttest_1samp

from suite.attention._weighted import WeightedLinear
from suite.attention.weights import weight_changes
from suite.petl import get_method
from suite.petl.arm import count
from suite.petl.base import head_parameters
from tests.attention import arm, converted, projection, weighted_in
from tests.toy import SMALL


def test_changes_are_measured_against_the_mean() -> None:
    model, found, _ = converted("wgqa", "t5")
    site = next(
        site
        for site in found.attention_sites(model)
        if site.site == "decoder-cross" and site.layer == 1
    )
    weights = cast(WeightedLinear, projection(site, "v")).head_weight
    moves = torch.tensor([0.1, -0.2, 0.3, 0.4])
    with torch.no_grad():
        weights.add_(moves)
    changes = {
        (change.site, change.layer, change.projection): change
        for change in weight_changes(model, found)
    }
    assert len(changes) == 8
    found_change = changes["decoder-cross", 1, "v"]
    assert found_change.start == 0.5
    assert found_change.mean_abs_difference == pytest.approx(0.25, abs=1e-6)
    assert found_change.mean_difference == pytest.approx(0.15, abs=1e-6)
    assert found_change.mean_abs_difference_by_head == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-6)
    assert found_change.t == pytest.approx(
        0.15 / (float(moves.double().std()) / 4**0.5), rel=1e-5
    )  # weights are fp32
    assert found_change.p_value == pytest.approx(ttest_1samp(moves.numpy(), 0.0).pvalue, rel=1e-5)
    still = changes["decoder-self", 0, "k"]
    assert (still.mean_abs_difference, still.t, still.p_value) == (0.0, None, None)


@pytest.mark.parametrize(("name", "weights"), [("col-wgqa", 8), ("row-wgqa", 32)])
def test_a_heads_change_is_the_mean_over_its_weights(name: str, weights: int) -> None:
    model, found, _ = converted(name, "llama")
    module = weighted_in(model)[0]
    assert module.head_weight.shape == (2, weights)
    with torch.no_grad():
        module.head_weight[1, : weights // 2] += 1.0
        module.head_weight[1, weights // 2 :] -= 0.5
    change = weight_changes(model, found)[0]
    assert (change.projection, change.layer) == ("k", 0)
    assert change.mean_abs_difference_by_head == pytest.approx([0.0, 0.75])


def test_weights_that_started_at_random_are_measured_against_their_own_start() -> None:
    model, found, _ = converted("wgqa", "gpt2", {"init": "random"})
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"h.0.attn.c_attn.k.head_weight started at random"):
        weight_changes(model, found)
    with torch.no_grad():
        for module in weighted_in(model):
            module.head_weight.add_(0.25)
    assert all(
        change.mean_abs_difference == pytest.approx(0.25, abs=1e-6)
        for change in weight_changes(model, found, start)
    )


def test_changes_are_found_inside_of_a_methods_wrapper() -> None:
    model, found, _ = arm("wgqa", "lora", "t5")
    assert len(weight_changes(cast(Any, model), found)) == 8


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("name", ["wgqa", "row-wgqa"])
def test_lora_counts_the_features_that_a_weighted_map_returns(name: str, family: str) -> None:
    model, found, variant = arm(name, "lora", family)
    backbone, _, _ = converted(name, family)
    new = sum(p.numel() for p in variant.new_parameters(backbone, found))
    lora = get_method("lora").configure(SMALL["lora"])
    expected = lora.expected_trainable(backbone, found) + new
    assert count(model, head_parameters(model, found)).method == expected


def test_models_without_learned_weights_have_no_changes() -> None:
    for name in ("pretrained", "gqa"):
        model, found, _ = converted(name, "gpt2")
        assert weight_changes(model, found) == []
