"""Grouped queries and the WGQA family: start, pooling, weighting, counts and folding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from suite.attention import variants
from suite.attention._weighted import Form, WeightedLinear
from suite.backbones.base import Family
from suite.backbones.loading import Head, build, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.errors import ConfigError, IncompatibleError
from suite.petl.arm import check_arm, trained_state
from tests.attention import Options, arm, backbone, batch_of, converted, projection, weighted_in
from tests.tiny import FAMILIES, tiny_choice
from tests.toy import disturb, logits_of, loss_of, make_batch, make_head, resolved_tiny

GROUPED = ("wgqa", "col-wgqa", "row-wgqa")
TO_ONE = ("wmqa", "col-wmqa", "row-wmqa")
FORMS: tuple[Form, ...] = ("head", "column", "row")
every_family = pytest.mark.parametrize("family", FAMILIES)
every_form = pytest.mark.parametrize("form", FORMS)
every_weighted = pytest.mark.parametrize("name", [*GROUPED, *TO_ONE])
TOLERANCE = 1e-6
"""A sum of four fp32 products and a mean of four differ in the last bit."""


def plain_of(name: str) -> str:
    return "gqa" if name in GROUPED else "mqa"


def move_weights(model: nn.Module) -> None:
    """Head weights anywhere in 0.2 to 1.2, as after long training."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in weighted_in(model):
            module.head_weight.copy_(
                torch.rand(module.head_weight.shape, generator=generator) + 0.2
            )


# ---- pooling -----------------------------------------------------------------------------------------------------------


@every_family
def test_gqa_averages_consecutive_heads_with_their_biases(family: str) -> None:
    original, found = backbone(family)
    model, _, _ = converted("gqa", family, {"sites": "all"})
    for before, after in zip(
        found.attention_sites(original), found.attention_sites(model), strict=True
    ):
        groups = before.kv_heads // 2
        for name in ("k", "v"):
            full = _full(before, name)
            few = cast(nn.Linear, projection(after, name))
            heads = full.weight.view(before.kv_heads, before.head_dim, -1)
            expected = torch.cat([(heads[2 * g] + heads[2 * g + 1]) / 2 for g in range(groups)])
            assert torch.allclose(few.weight, expected, atol=TOLERANCE)
            if full.bias is not None:
                biases = full.bias.view(before.kv_heads, before.head_dim)
                assert torch.allclose(
                    few.bias,
                    torch.cat([(biases[2 * g] + biases[2 * g + 1]) / 2 for g in range(groups)]),
                    atol=TOLERANCE,
                )


def _full(site: Any, name: str) -> nn.Linear:
    """The k or v map of an unconverted site as a plain one, GPT-2's cut by hand."""
    if not site.fused:
        return cast(nn.Linear, projection(site, name))
    fused = site.module.c_attn
    width = site.heads * site.head_dim
    start = {"k": width, "v": 2 * width}[name]
    full = nn.Linear(width, width)
    full.weight, full.bias = (
        nn.Parameter(fused.weight[:, start : start + width].T),
        nn.Parameter(fused.bias[start : start + width]),
    )
    return full


@every_family
def test_a_group_of_equal_heads_changes_nothing(family: str) -> None:
    """Pooling heads that are the same is exact, so only groups of more than one, different head change the function."""
    plain, found = backbone(family)
    before = logits_of(plain, batch_of(found))
    pooled, _, _ = converted("gqa", family, {"sites": "all"})
    assert not torch.allclose(logits_of(pooled, batch_of(found)), before, atol=1e-3)
    equal, _, _ = converted("gqa", family, {"sites": "all"})
    widened, _ = backbone(family)
    for few, full in zip(found.attention_sites(equal), found.attention_sites(widened), strict=True):
        _set_repeated(full, few)
    again = copy.deepcopy(widened)
    variants.get("gqa").configure({"sites": "all"}).convert(again, found)
    assert torch.allclose(
        logits_of(again, batch_of(found)), logits_of(widened, batch_of(found)), atol=1e-5
    )


def _set_repeated(full: Any, few: Any) -> None:
    """Give every head of a group in `full` the weights of the group's head in `few`."""
    for name in ("k", "v"):
        source = cast(nn.Linear, projection(few, name))
        times = full.kv_heads * full.head_dim // source.out_features
        rows = [
            tensor.detach()
            .view(-1, full.head_dim, *tensor.shape[1:])
            .repeat_interleave(times, 0)
            .flatten(0, 1)
            for tensor in _own(source)
        ]
        if full.fused:
            width = full.heads * full.head_dim
            start = {"k": width, "v": 2 * width}[name]
            full.module.c_attn.weight.data[:, start : start + width] = rows[0].T
            full.module.c_attn.bias.data[start : start + width] = rows[1]
        else:
            for tensor, row in zip(
                _own(cast(nn.Linear, projection(full, name))), rows, strict=True
            ):
                tensor.data.copy_(row)


def _own(linear: nn.Linear) -> list[Tensor]:
    return list(linear.parameters())


@pytest.mark.parametrize("name", ["gqa", *GROUPED])
@every_family
def test_as_many_groups_as_heads_is_the_unconverted_model(name: str, family: str) -> None:
    plain, found = backbone(family)
    heads = next(found.attention_sites(plain)).kv_heads
    model, _, _ = converted(name, family, {"sites": "all", "kv_heads": heads})
    batch = batch_of(found)
    if family == "gpt2":  # its one fused product is cut in three
        assert torch.allclose(logits_of(model, batch), logits_of(plain, batch), atol=1e-5)
    else:
        assert torch.equal(logits_of(model, batch), logits_of(plain, batch))


@pytest.mark.parametrize("name", ["gqa", "mqa", *GROUPED, *TO_ONE])
def test_an_encoder_decoders_encoder_stays_untouched(name: str) -> None:
    plain, found = backbone("t5")
    model, _, _ = converted(name, "t5")
    before = plain.encoder.state_dict()
    after = model.encoder.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert {
        site.site
        for site in found.attention_sites(model)
        if cast(nn.Linear, projection(site, "k")).out_features < 32
    } == {
        "decoder-self",
        "decoder-cross",
    }


@pytest.mark.parametrize("name", ["gqa", "wgqa"])
def test_named_sites_alone_are_converted(name: str) -> None:
    model, found, variant = converted(name, "t5", {"sites": ["decoder-cross"]})
    few = {
        site.site: cast(nn.Linear, projection(site, "v")).out_features
        for site in found.attention_sites(model)
    }
    assert few == {"encoder-self": 32, "decoder-self": 32, "decoder-cross": 16}
    assert {
        site.site: variant.cached_floats(site, found) for site in found.attention_sites(model)
    } == {
        "encoder-self": 64,
        "decoder-self": 64,
        "decoder-cross": 32,
    }


@pytest.mark.parametrize(
    ("name", "kv_heads"), [("gqa", 3), ("wgqa", 3), ("row-wgqa", 8), ("col-wgqa", 5)]
)
def test_groups_that_do_not_divide_the_heads_are_refused_with_the_divisors(
    name: str, kv_heads: int
) -> None:
    message = rf"attention {name}: 4 key-value heads do not split into {kv_heads} groups; set options.kv_heads to one of \[1, 2, 4\]"
    with pytest.raises(IncompatibleError, match=message):
        converted(name, "t5", {"kv_heads": kv_heads})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wgqa", {"kv_heads": 0}, "kv_heads"),
        ("wmqa", {"kv_heads": 1}, "kv_heads"),
        ("wgqa", {"init": "uniform"}, "init"),
        ("gqa", {"sites": []}, "sites"),
    ],
)
def test_wrong_options_are_refused(name: str, options: Options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variants.get(name).configure(options)


def test_sites_that_a_backbone_lacks_are_refused() -> None:
    with pytest.raises(
        IncompatibleError,
        match=r"sites \['decoder-cross'\] do not exist in a llama backbone, which has \['decoder-self'\]",
    ):
        converted("wgqa", "llama", {"sites": ["decoder-cross"]})


# ---- weighting ---------------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize(("heads", "groups"), [(6, 3), (4, 1), (4, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_weighted_map_gives_the_weighted_sum_of_its_heads(
    form: Form, heads: int, groups: int, bias: bool
) -> None:
    torch.manual_seed(0)
    full = nn.Linear(10, heads * 5, bias=bias)
    x = torch.randn(2, 7, 10)
    made = WeightedLinear(full, heads=heads, groups=groups, form=form, init="random")
    weights = made.head_weight
    size = heads // groups
    expected = []
    for group in range(groups):
        given = torch.zeros(2, 7, 5)
        for head in range(group * size, (group + 1) * size):
            rows = full.weight[head * 5 : head * 5 + 5]
            shift = full.bias[head * 5 : head * 5 + 5] if bias else torch.zeros(5)
            by_input, by_output, by_bias = (
                (weights[head], 1, 1 / size) if form == "row" else (1, weights[head], weights[head])
            )
            given = given + (x * by_input) @ rows.T * by_output + shift * by_bias
        expected.append(given)
    assert made.out_features == groups * 5
    assert torch.allclose(made(x), torch.cat(expected, dim=-1), atol=1e-5)


@every_weighted
@every_family
def test_at_the_start_it_is_the_mean_pooled_model(name: str, family: str) -> None:
    weighted, found, _ = converted(name, family, {"sites": "all"})
    pooled, _, _ = converted(plain_of(name), family, {"sites": "all"})
    assert weighted_in(weighted)
    assert torch.allclose(
        logits_of(weighted, batch_of(found)), logits_of(pooled, batch_of(found)), atol=1e-5
    )


@every_weighted
def test_the_start_folds_to_the_very_bits_of_the_mean(name: str) -> None:
    weighted, _, _ = converted(name, "t5")
    pooled, _, _ = converted(plain_of(name), "t5")
    few = dict(pooled.named_parameters())
    for place, module in weighted.named_modules():
        if isinstance(module, WeightedLinear):  # halves and quarters are exact in fp32
            assert torch.equal(module.folded_weight(), few[f"{place}.weight"])


@every_weighted
def test_random_weights_differ_from_the_mean_and_between_seeds(name: str) -> None:
    mean, found, _ = converted(name, "t5")
    first, again, other = (
        converted(name, "t5", {"init": "random"}, seed=seed)[0] for seed in (0, 0, 1)
    )
    weights = [
        torch.cat([module.head_weight.flatten() for module in weighted_in(model)])
        for model in (first, again, other)
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert (
        abs(weights[0].mean()) < 4 / len(weights[0]) ** 0.5 and 0.5 < weights[0].std() < 1.5
    )  # four standard errors
    assert not torch.allclose(
        logits_of(first, batch_of(found)), logits_of(mean, batch_of(found)), atol=1e-3
    )


@every_weighted
def test_random_weights_draw_nothing_on_the_meta_device(name: str) -> None:
    resolved = resolved_tiny("t5")
    model = build(resolved, make_head("text"), meta=True)
    before = torch.get_rng_state()
    variants.get(name).configure({"init": "random"}).convert(model, resolved.family)
    assert torch.equal(torch.get_rng_state(), before)
    assert {module.head_weight.device.type for module in weighted_in(model)} == {"meta"}


@pytest.mark.parametrize(
    ("preset", "name", "extra"),
    [
        ("t5-base", "wgqa", 576),
        ("t5-base", "wmqa", 576),
        ("t5-base", "col-wgqa", 36_864),
        ("t5-base", "col-wmqa", 36_864),
        ("t5-base", "row-wgqa", 442_368),
        ("t5-base", "row-wmqa", 442_368),
        ("t5-small", "wgqa", 192),
    ],
)
def test_the_added_weights_are_as_many_as_the_paper_counts(
    preset: str, name: str, extra: int
) -> None:
    resolved = resolve(BackboneChoice(name=preset))
    model = build(resolved, Head("text"), meta=True)
    variant = variants.get(name).configure({})
    before = sum(p.numel() for p in model.parameters())
    variant.convert(model, resolved.family)
    new = variant.new_parameters(model, resolved.family)
    assert (
        sum(p.numel() for p in new) == extra == sum(p.numel() for p in model.parameters()) - before
    )
    assert {p.device.type for p in new} == {"meta"}


@pytest.mark.parametrize(
    ("name", "kept"), [("gqa", 32), ("wgqa", 32), ("mqa", 16), ("row-wmqa", 16)]
)
def test_the_cache_shrinks_to_the_share_of_the_groups(name: str, kept: int) -> None:
    model, found, variant = converted(name, "t5")
    sites = [site for site in found.attention_sites(model) if site.role == "decoder"]
    assert {variant.cached_floats(site, found) for site in sites} == {kept}
    assert {2 * site.kv_heads * site.head_dim for site in sites} == {64}


# ---- folding -----------------------------------------------------------------------------------------------------------


@every_weighted
@every_family
def test_folded_it_is_a_grouped_model_with_the_same_function(
    name: str, family: str, tmp_path: Path
) -> None:
    model, found, variant = converted(name, family)
    move_weights(model)
    batch = batch_of(found)
    before = logits_of(model, batch)
    variant.fold(model, found)
    assert torch.equal(logits_of(model, batch), before)
    assert not weighted_in(model)
    plain, _, _ = converted(plain_of(name), family)
    assert [type(module) for module in model.modules()] == [
        type(module) for module in plain.modules()
    ]
    save_file(
        {key: tensor.clone() for key, tensor in model.state_dict().items()},
        tmp_path / "folded.safetensors",
    )
    plain.load_state_dict(load_file(tmp_path / "folded.safetensors"))
    assert torch.equal(logits_of(plain, batch), before)


@pytest.mark.parametrize("name", ["gqa", "mqa"])
def test_a_grouped_model_has_nothing_to_fold(name: str) -> None:
    model, found, variant = converted(name, "t5")
    modules = list(model.modules())
    variant.fold(model, found)
    assert list(model.modules()) == modules
    assert variant.new_parameters(model, found) == []


METHODS = [(m, f) for m in ("full", "lora", "bitfit", "adapter") for f in FAMILIES] + [
    ("peft:ia3", "t5"),
    ("peft:ia3", "llama"),
]


@pytest.mark.parametrize(("method", "family"), METHODS)
def test_methods_train_around_the_weights_and_fold_leaves_their_part_alone(
    method: str, family: str
) -> None:
    model, found, variant = arm("wgqa", method, family)
    own = {name for name in trained_state(model) if not name.endswith("head_weight")}
    _train_once(model, found)
    disturb(model)
    batch = _batch(found)
    before = logits_of(model, batch)
    variant.fold(model, found)
    assert not weighted_in(model)
    assert torch.allclose(logits_of(model, batch), before, atol=TOLERANCE)
    assert set(trained_state(model)) == own


@every_weighted
def test_the_weights_train_with_a_method_that_freezes_the_backbone(name: str) -> None:
    model, found, variant = arm(name, "lora", "t5")
    new = variant.new_parameters(model, found)
    before = [parameter.clone() for parameter in new]
    assert len(new) == 8 and all(parameter.requires_grad for parameter in new)
    _train_once(model, found)
    assert all(not torch.equal(a, b) for a, b in zip(before, new, strict=True))
    assert not any(module.weight.requires_grad for module in weighted_in(model))


@pytest.mark.parametrize("form", FORMS)
def test_bitfit_gives_every_head_a_bias_that_is_pooled_with_it(form: Form) -> None:
    model, _, _ = arm(
        {"head": "wgqa", "column": "col-wgqa", "row": "row-wgqa"}[form], "bitfit", "t5"
    )
    module = weighted_in(model)[0]
    assert module.bias.shape == (module.heads * module.head_dim,)
    nn.init.ones_(module.bias)
    assert torch.allclose(
        module(torch.zeros(1, 32)), torch.ones(1, module.out_features), atol=TOLERANCE
    )


@pytest.mark.parametrize(
    ("method", "architecture"),
    [
        ("peft:loha", {}),
        ("peft:hra", {}),
        ("peft:adamss", {}),
        ("peft:corda", {}),
        ("peft:deft", {}),
        ("peft:frod", {}),
        ("peft:lora-ga", {}),
        ("peft:lora", {"init_lora_weights": "corda", "corda_config": {}}),
        ("peft:rslora", {"init_lora_weights": "lora_ga", "lora_ga_config": {}}),
    ],
)
def test_methods_that_compute_with_the_unfolded_weight_are_refused_before_a_worker_starts(
    method: str, architecture: dict[str, Any]
) -> None:
    choice = AttentionChoice(name="wgqa")
    message = rf"{method}: at .*value it computes with a weight of 32 rows, which are folded to 16"
    with pytest.raises(IncompatibleError, match=message):
        check_arm(
            resolved_tiny("bert"),
            make_head("classification"),
            Arm(
                backbone=tiny_choice("bert"),
                attention=choice,
                method=method,
                architecture=architecture,
            ),
        )


def _batch(family: Family) -> dict[str, Tensor]:
    return make_batch(
        family, make_head("text" if family.name == "t5" else "classification"), seed=0, size=4
    )


def _train_once(model: nn.Module, family: Family) -> None:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    for _ in range(2):  # a map behind a zero one gets its first gradient in the second step
        loss_of(model.train(), _batch(family)).backward()
        optimizer.step()
        optimizer.zero_grad()
