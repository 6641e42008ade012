"""Multi-head latent attention: exactness, the best factors, rotation of a part, what the cache holds, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from suite.attention._surgery import modules_in
from suite.attention.counts import count_attention
from suite.attention.mla import FromLatent, factors
from suite.backbones.loading import Head, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.errors import IncompatibleError
from suite.petl.arm import check_arm
from tests.attention import backbone, batch_of, converted
from tests.decoding import both_ways, check_beams
from tests.toy import disturb, logits_of, make_head, resolved_tiny

EXACT: dict[str, dict[str, Any]] = {
    "t5": {"rank": 32, "sites": "all"},
    "bert": {"rank": 32},
    "gpt2": {"rank": 32},
    "llama": {"rank": 16, "rotary": 8},
    "qwen2": {"rank": 16, "rotary": 8},
    "qwen3": {"rank": 16},
    "gemma3": {"rank": 16},
    "mistral": {"rank": 16, "rotary": 8},
    "roberta": {"rank": 32},
}


@pytest.mark.parametrize("family", EXACT)
def test_at_full_rank_it_is_the_checkpoints_function(family: str) -> None:
    model, found, _ = converted("mla", family, EXACT[family])
    plain, _ = backbone(family)
    expected = logits_of(plain, batch_of(found))
    assert torch.allclose(logits_of(model, batch_of(found)), expected, atol=2e-5)
    less, _, _ = converted("mla", family, {**EXACT[family], "rank": 8})
    assert not torch.allclose(logits_of(less, batch_of(found)), expected, atol=1e-2)


@pytest.mark.parametrize(("rotary", "rank"), [(0, 32), (4, 24)])
def test_at_full_rank_with_a_part_of_the_rotation_only_the_rest_is_not_rotated(
    rotary: int, rank: int
) -> None:
    model, found, _ = converted("mla", "llama", {"rank": rank, "rotary": rotary})
    plain, _ = backbone("llama")
    for site in found.attention_sites(plain):
        site.module.register_forward_pre_hook(rotate_first(rotary), with_kwargs=True)
    batch = batch_of(found)
    assert torch.allclose(logits_of(model, batch), logits_of(plain, batch), atol=2e-5)


def rotate_first(rotary: int) -> Any:
    """Leave angles to the first features of either half."""
    is_kept = torch.tensor([i % 4 < rotary // 2 for i in range(8)])

    def changed(_module: Any, args: Any, kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        angles = (torch.where(is_kept, cos, 1.0), torch.where(is_kept, sin, 0.0))
        return args, {**kwargs, "position_embeddings": angles}

    return changed


def test_the_factors_are_the_nearest_of_their_rank() -> None:
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    for rank in (1, 8, 16):
        up, down = factors(weight, rank)
        lost = (weight - up @ down).double().norm()
        left_out = torch.linalg.svdvals(weight.double())[rank:].norm()
        assert torch.allclose(lost, left_out, atol=1e-4)
    # the signs follow the maps to the latent, which a change of all signs leaves alone
    assert torch.allclose(factors(-weight, 4)[1], factors(weight, 4)[1], atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", {"rank": 16}),
        ("t5", {"rank": 16}),
        ("llama", {"rank": 8}),
        ("llama", {"rank": 16, "rotary": 0}),
        ("qwen2", {"rank": 8}),
        ("mistral", {"rank": 8}),
        ("gemma2", {"rank": 8}),
    ],
)
def test_folded_a_step_of_decoding_makes_no_keys_and_values_of_the_latents(
    family: str, options: dict[str, Any]
) -> None:
    model, found, variant = converted("mla", family, options)
    disturb(model, seed=8)
    stepped, _ = both_ways(model, family)
    variant.fold(model, found)
    made: list[int] = []
    for heads in modules_in(model, FromLatent):
        heads.register_forward_hook(lambda _module, given, _made: made.append(given[0].shape[2]))
    absorbed, whole = both_ways(model, family)
    assert made and 1 not in made  # only the pass over all tokens makes them
    assert torch.allclose(absorbed, stepped, atol=1e-4)
    assert torch.allclose(absorbed, whole, atol=1e-4)
    if family != "t5":
        check_beams(model, family)


def test_folded_t5_answers_in_bf16_though_its_position_bias_may_be_in_fp32() -> None:
    model, found, variant = converted("mla", "t5", {"rank": 16, "sites": "all"})
    variant.fold(model, found)
    heads = next(modules_in(model, FromLatent)).to(torch.bfloat16)
    query = torch.randn(2, 4, 1, 8, dtype=torch.bfloat16)
    latent = torch.randn(2, 1, 5, 16, dtype=torch.bfloat16)
    bias = torch.zeros(2, 4, 1, 5)
    output, seen = heads.attend(heads, query, latent[..., :0], latent, None, position_bias=bias)
    assert output.dtype == seen.dtype == torch.bfloat16
    assert output.shape == (2, 1, 4, 8)


def test_where_a_method_changed_the_maps_from_the_latent_nothing_is_absorbed() -> None:
    model, found, variant = converted("mla", "llama", {"rank": 8})
    (changed, left) = modules_in(model, FromLatent)
    changed.value_up = nn.Sequential(changed.value_up)
    variant.fold(model, found)
    assert not changed.absorbs and left.absorbs


# ---- the cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "shapes"),
    [
        ("gpt2", {"rank": 8}, {(2, 1, 11, 0), (2, 1, 11, 8)}),
        ("llama", {"rank": 8}, {(2, 2, 11, 2), (2, 1, 11, 8)}),
        ("llama", {"rank": 16, "rotary": 8}, {(2, 2, 11, 8), (2, 1, 11, 16)}),
    ],
)
def test_the_cache_holds_latents_and_rotated_features(
    family: str, options: dict[str, Any], shapes: set[tuple[int, ...]]
) -> None:
    model, found, variant = converted("mla", family, options)
    ids = torch.randint(10, 50, (2, 7), generator=torch.Generator().manual_seed(4))
    cache = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        return_dict_in_generate=True,
    ).past_key_values
    held: list[Tensor] = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    assert {tuple(x.shape) for x in held} == shapes
    (floats,) = {variant.cached_floats(s, found) for s in found.attention_sites(model)}
    assert sum(x.numel() for x in held) == 2 * 11 * 2 * floats  # layers, tokens, rows


@pytest.mark.parametrize(
    ("backbone_name", "options", "floats"),
    [
        ("llama2-7b", {}, 16 * 128 + 32 * 32),
        ("llama2-7b", {"rank": 512, "rotary": 16}, 512 + 32 * 16),
        ("llama3-8b", {"rank": 512, "rotary": 32}, 512 + 8 * 32),
        ("gpt2", {"rank": 192}, 192),
    ],
)
def test_the_cache_is_rank_and_rotated_features_per_token_and_layer(
    backbone_name: str, options: dict[str, Any], floats: int
) -> None:
    resolved = resolve(BackboneChoice(name=backbone_name), only_shape=True)
    choice = AttentionChoice(name="mla", options=options)
    found = count_attention(resolved, Head("text"), choice)
    config: Any = resolved.config
    assert found.kv_bytes_per_token == config.num_hidden_layers * floats * 2


def test_llama_2_has_the_weights_of_the_formula() -> None:
    resolved = resolve(BackboneChoice(name="llama2-7b"), only_shape=True)
    choice = AttentionChoice(name="mla", options={"rank": 512, "rotary": 16})
    found = count_attention(resolved, Head("text"), choice)
    up = 512 * (32 * 112 + 4096)  # keys that are not rotated, and values
    down = 512 * 4096
    rotated = 32 * 16 * 4096
    assert found.extra_over_base == 32 * up
    assert found.without_output_projection == 32 * (4096**2 + rotated + down + up)


# ---- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("bert", {"rank": 40}, r"a rank of 40 is over 32, .* replaces 64 numbers .* at most 32"),
        ("llama", {"rank": 24, "rotary": 8}, r"a rank of 24 is over 16"),
        ("gpt2", {"rank": 12}, r"12 is no multiple of the heads' width, 8; .* at most 32"),
        ("t5", {"rotary": 4}, "a t5 backbone rotates no keys"),
        ("llama", {"rotary": 3}, r"rotary 3: .* even number up to 8"),
        ("llama", {"rotary": 10}, r"rotary 10: .* even number up to 8"),
        ("llama", {"sites": ["decoder-cross"]}, "do not exist in a llama backbone"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    family: str, options: dict[str, Any], message: str
) -> None:
    check("mla", options, family, message)


@pytest.mark.parametrize("name", ["cla", "shared"])
def test_layers_do_not_take_latents_from_one_another(name: str) -> None:
    check(name, {"over": "mla"}, "llama", "maps of its own")


def check(name: str, options: dict[str, Any], family: str, message: str) -> None:
    resolved = resolved_tiny(family)
    head = make_head("text" if family == "t5" else "classification")
    choice = AttentionChoice(name=name, options=options)
    with pytest.raises(IncompatibleError, match=message):
        check_arm(resolved, head, Arm(backbone=resolved.choice, attention=choice, method="full"))


@pytest.mark.parametrize(
    ("method", "architecture", "message"),
    [
        ("lora", {"targets": ["q", "k"]}, r"lora: .* drops 12 of the 16 features .* leave k out"),
        ("peft:lora", {"target_modules": ["k_proj"]}, r"k_proj .* drops 12 of 16 .* other maps"),
        ("peft:ia3", {}, r"k_proj .* drops 12 of 16 features"),
    ],
)
def test_weights_for_the_features_that_keys_do_not_have_are_refused(
    method: str, architecture: dict[str, Any], message: str
) -> None:
    resolved = resolved_tiny("llama")
    choice = AttentionChoice(name="mla")
    arm = Arm(backbone=resolved.choice, attention=choice, method=method, architecture=architecture)
    with pytest.raises(IncompatibleError, match=message):
        check_arm(resolved, make_head("text"), arm)


def test_keys_with_a_norm_are_compressed_only_whole() -> None:
    check("mla", {"rotary": 4}, "qwen3", r"layer 0 normalises .* options.rotary to 8")
    _, found, variant = converted("mla", "qwen3")
    (floats,) = {
        variant.cached_floats(s, found) for s in found.attention_sites(backbone("qwen3")[0])
    }
    assert floats == 8 + 2 * 8
