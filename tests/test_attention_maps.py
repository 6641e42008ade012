"""`suite analyze`: similarity and variance of attention against maps made by hand, and the commands around them."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from suite.attention import variants
from suite.attention._route import probabilities
from suite.attention.maps import reach, self_attentions, watched
from suite.backbones.loading import Head, build, resolve
from suite.cli.analyze import observed
from suite.errors import IncompatibleError
from suite.metrics.attention_maps import AttentionMaps, MapStatistics, Reach, valid_pairs
from tests.commands import Suite, suite
from tests.tiny import FAMILIES, tiny_choice
from tests.toy import disturb, logits_of, make_batch, make_head, resolved_tiny

__all__ = ["suite"]
DIAGONAL = [[1.0, 0.0], [0.0, 1.0]]
FIRST = [[1.0, 0.0], [1.0, 0.0]]
UNIFORM = [[1.0, 0.0], [0.5, 0.5]]
"""Causal maps of two tokens: each looks at itself, at the first, at all it may see."""
TINY_SET = {
    "bert": "backbone.config={hidden_size: 32, num_hidden_layers: 3, num_attention_heads: 2, intermediate_size: 64}",
    "t5": "backbone.config={d_model: 32, d_kv: 8, d_ff: 64, num_heads: 2, num_layers: 2, vocab_size: 384}",
}


def layer(*heads: list[list[float]]) -> Tensor:
    """Maps of one input, (1, H, T, T)."""
    return torch.tensor(heads)[None]


def of(*layers: Tensor, causal: bool = True, mask: Tensor | None = None) -> MapStatistics:
    maps = AttentionMaps(causal=causal)
    maps.add(layers, torch.ones(layers[0].shape[0], layers[0].shape[-1]) if mask is None else mask)
    return maps.statistics()


# ---- numbers -----------------------------------------------------------------------------------------------------------


def test_cosines_are_those_computed_by_hand() -> None:
    found = of(layer(DIAGONAL), layer(FIRST), layer(UNIFORM))
    expected = torch.tensor(
        [
            [1, 0.5, 1.5 / math.sqrt(3)],
            [0.5, 1, 1.5 / math.sqrt(3)],
            [1.5 / math.sqrt(3), 1.5 / math.sqrt(3), 1],
        ]
    )
    for measure in ("padded", "valid"):
        assert torch.allclose(found.head_mean[measure].float(), expected)
        assert torch.allclose(found.by_head[measure][0].float(), expected)


def test_less_uniform_attention_opposite_patterns_are_opposite_and_uniform_ones_are_like_nothing() -> (
    None
):
    found = of(layer(DIAGONAL), layer(FIRST), layer(UNIFORM)).head_mean["centred"]
    assert torch.allclose(
        found.float(),
        torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        atol=1e-6,
    )


def test_heads_are_compared_with_their_own_kind_and_their_mean_apart() -> None:
    found = of(layer(DIAGONAL, FIRST), layer(FIRST, DIAGONAL))
    assert torch.allclose(found.by_head["valid"][:, 0, 1], torch.full((2,), 0.5).double())
    assert found.head_mean["valid"][0, 1].item() == pytest.approx(1.0)


def test_averaging_over_inputs_hides_what_differs_between_them() -> None:
    maps = AttentionMaps(causal=True)
    for first, second in ((DIAGONAL, FIRST), (FIRST, DIAGONAL)):
        maps.add([layer(first), layer(second)], torch.ones(1, 2))
    found = maps.statistics()
    assert found.inputs == 2
    assert found.head_mean["padded"][0, 1].item() == pytest.approx(1.0)
    assert found.head_mean["valid"][0, 1].item() == pytest.approx(0.5)


def test_shorter_inputs_are_padded_with_zeros() -> None:
    maps = AttentionMaps(causal=True)
    maps.add([layer([[1.0]]), layer([[1.0]])], torch.ones(1, 1))
    maps.add([layer(DIAGONAL), layer(FIRST)], torch.ones(1, 2))
    summed = torch.tensor([[2.0, 0.0, 0.0, 1.0], [2.0, 0.0, 1.0, 0.0]])  # zero-padded to 2 x 2
    expected = torch.nn.functional.cosine_similarity(summed[0], summed[1], dim=0).item()
    assert maps.statistics().head_mean["padded"][0, 1].item() == pytest.approx(expected)
    assert maps.statistics().head_mean["valid"][0, 1].item() == pytest.approx((1.0 + 0.5) / 2)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_and_the_future_do_not_count(causal: bool) -> None:
    maps = [torch.rand(2, 3, 4, 4).softmax(-1) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    pairs = mask.bool()[:, :, None] & mask.bool()[:, None]
    allowed = (pairs.tril() if causal else pairs)[:, None]
    littered = [torch.where(allowed, one, torch.full_like(one, 7.0)) for one in maps]
    clean, dirty = (of(*layers, causal=causal, mask=mask) for layers in (maps, littered))
    for measure in clean.by_head:
        assert torch.equal(clean.by_head[measure], dirty.by_head[measure])
    assert torch.equal(clean.variance, dirty.variance)


def test_variance_runs_over_the_pairs_that_may_attend_and_sums_over_later_layers() -> None:
    found = of(layer(DIAGONAL), layer(FIRST), layer(UNIFORM))
    of_each = [
        2 / 3 - (2 / 3) ** 2,
        2 / 3 - (2 / 3) ** 2,
        1.5 / 3 - (2 / 3) ** 2,
    ]  # of (1, 0, 1), (1, 1, 0), (1, 1/2, 1/2)
    assert found.variance[:, 0].tolist() == pytest.approx(of_each, abs=1e-6)
    assert found.downstream_sum.tolist() == pytest.approx(
        [sum(of_each[k:]) for k in range(3)], abs=1e-6
    )
    assert found.downstream_mean.tolist() == pytest.approx(
        [sum(of_each[k:]) / (3 - k) for k in range(3)], abs=1e-6
    )


def test_batches_may_be_cut_anywhere() -> None:
    maps = [torch.rand(4, 2, 3, 3).softmax(-1) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    whole = of(*maps, mask=mask)
    parts = AttentionMaps(causal=True)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 4)):
        parts.add([one[rows] for one in maps], mask[rows])
    for measure in whole.by_head:
        assert torch.allclose(
            whole.by_head[measure], parts.statistics().by_head[measure], atol=1e-6
        )
    assert torch.allclose(whole.variance, parts.statistics().variance, atol=1e-6)


def test_no_maps_have_no_statistics() -> None:
    with pytest.raises(ValueError, match="at least one input"):
        AttentionMaps(causal=True).statistics()


# ---- watching a model --------------------------------------------------------------------------------------------------


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = build(resolved_tiny(family), make_head("text" if family == "t5" else "classification"))
    disturb(model, scale=0.2)
    return model.eval()


def batch_of(family: str) -> dict[str, Tensor]:
    return make_batch(
        resolved_tiny(family).family,
        make_head("text" if family == "t5" else "classification"),
        seed=0,
        size=3,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_watched_probabilities_are_those_of_eager_attention_and_nothing_else_changes(
    family: str,
) -> None:
    model = model_of(family)
    found = resolved_tiny(family).family
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    expected = logits_of(model, batch_of(family))
    seen_by_hand = []
    for sites in self_attentions(eager, found).values():
        for site in sites:
            site.module.register_forward_hook(
                lambda _m, _a, output: seen_by_hand.append(output[-1])
            )
    logits_of(eager, batch_of(family))
    sites = self_attentions(model, found)
    with watched(sites) as seen:
        assert torch.equal(logits_of(model, batch_of(family)), expected)
    by_layer = [one for name in sites for one in seen[name]]
    assert len(by_layer) == len(seen_by_hand) == (4 if family == "t5" else 2)
    for ours, theirs in zip(by_layer, seen_by_hand, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.equal(logits_of(model, batch_of(family)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_share_are_alike_and_others_are_not(family: str) -> None:
    role = "encoder-self" if family == "bert" else "decoder-self"
    for name, alike in (("pretrained", False), ("shared", True)):
        model = model_of(family)
        variants.get(name).configure({}).convert(model, resolved_tiny(family).family)
        found = observed(model, resolved_tiny(family).family, [batch_of(family)])
        assert found[role].inputs == 3
        for measure in ("padded", "valid", "centred"):
            assert (found[role].by_head[measure][:, 0, 1].min().item() > 1 - 1e-6) == alike


@pytest.mark.parametrize(
    ("family", "window"),
    [
        *((family, None) for family in ("modernbert", "gemma2", "gemma3", "mistral", "llama")),
        ("bert", 3),
        ("gpt2", 3),
    ],
)
def test_pairs_beyond_a_window_are_not_valid(family: str, window: int | None) -> None:
    resolved = resolve(
        tiny_choice(family, **({"sliding_window": 4} if family == "mistral" else {}))
    )
    model = build(resolved, make_head("classification")).eval()
    if window is not None:
        options = {"window": window, "sinks": 1}
        variants.get("window").configure(options).convert(model, resolved.family)
    batch = make_batch(resolved.family, make_head("classification"), seed=0, size=3)
    sites = self_attentions(model, resolved.family)
    with watched(sites) as seen:
        logits_of(model, batch)
    (name,) = sites
    assert batch["attention_mask"].sum(-1).max() > 4, "longer than any window"
    for site, maps in zip(sites[name], seen[name], strict=True):
        valid = valid_pairs(
            batch["attention_mask"], causal=site.role == "decoder", reach=reach(site)
        )
        weights = maps * batch["attention_mask"][:, None, :, None]  # queries that are tokens
        assert torch.equal((weights != 0).any(1), valid)
    windows = [reach(site).window for site in sites[name]]
    assert any(windows) == (family != "llama")


def test_a_window_that_merely_spreads_out_is_like_nothing() -> None:
    band = torch.ones(6, 6).tril().triu(-1)
    windowed = (band / band.sum(-1, keepdim=True))[None, None]
    maps = AttentionMaps(causal=True, reach=[Reach(2), Reach(2)])
    maps.add([windowed, windowed], torch.ones(1, 6))
    found = maps.statistics()
    assert found.head_mean["centred"][0, 1].abs() < 1e-6
    of_pairs = band[band > 0] * windowed[0, 0][band > 0]
    assert found.variance[0, 0].item() == pytest.approx(of_pairs.var(correction=0).item())


def test_each_choice_of_a_row_is_an_input_of_its_own() -> None:
    family = resolved_tiny("bert").family
    torch.manual_seed(0)
    model = build(resolved_tiny("bert"), Head("choice")).eval()
    texts = make_batch(family, make_head("classification"), seed=0, size=4)
    rows = {name: texts[name].view(2, 2, -1) for name in ("input_ids", "attention_mask")}
    found = observed(model, family, [rows])
    alone = observed(model, family, [{name: each[:1] for name, each in rows.items()}])
    assert (found["encoder-self"].inputs, alone["encoder-self"].inputs) == (4, 2)


def test_an_implementation_without_probabilities_cannot_be_watched() -> None:
    model = model_of("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(IncompatibleError, match="cannot give attention probabilities"):
        self_attentions(model, resolved_tiny("llama").family)


# ---- the commands ------------------------------------------------------------------------------------------------------


def test_the_command_writes_numbers_and_figures(suite: Suite, tmp_path: Path) -> None:
    choice = (
        "--backbone",
        "t5-small",
        "--task",
        "acceptability",
        "--rows",
        6,
        "--set",
        TINY_SET["t5"],
    )
    code, out, err = suite(
        "analyze", "attention", *choice, "--out", tmp_path / "a", "--format", "json"
    )
    assert code == 0, err
    rows = json.loads(out)
    assert [(row["site"], row["layer"]) for row in rows] == [
        (f"{role}-self", i) for role in ("encoder", "decoder") for i in range(2)
    ]
    assert all(0 < row["variance"] < 0.25 for row in rows)
    similarity = pd.read_parquet(tmp_path / "a" / "similarity.parquet")
    assert (
        len(similarity) == 2 * 3 * (2 + 1) * 4
    )  # sites, measures, heads and their mean, pairs of layers
    picked = similarity.query(
        "site == 'encoder-self' and measure == 'valid' and head.isna() and layer == 0 and other == 1"
    )
    assert picked.cosine.item() == rows[0]["valid_next"]
    assert len(pd.read_parquet(tmp_path / "a" / "variance.parquet")) == 2 * 2 * 2
    stored = json.loads((tmp_path / "a" / "analysis.json").read_text())
    assert (
        stored["sites"]["decoder-self"]["inputs"] == 6 and stored["backbone"]["origin"] == "random"
    )
    figures = sorted(path.name for path in (tmp_path / "a").glob("*.png"))
    assert figures == sorted(
        f"{kind}-{role}-self.png"
        for kind in ("similarity", "similarity-heads", "variance")
        for role in ("encoder", "decoder")
    )
    assert all((tmp_path / "a" / name).read_bytes().startswith(b"\x89PNG") for name in figures)


@pytest.mark.slow
def test_the_same_command_gives_the_same_numbers(suite: Suite, tmp_path: Path) -> None:
    choice = (
        "--backbone",
        "bert-base",
        "--attention",
        "gqa",
        "--task",
        "acceptability",
        "--rows",
        5,
        "--set",
        TINY_SET["bert"],
    )
    for folder in ("a", "b"):
        assert suite("analyze", "attention", *choice, "--out", tmp_path / folder)[0] == 0
    first, second = (
        (tmp_path / folder / "similarity.parquet").read_bytes() for folder in ("a", "b")
    )
    assert first == second


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--task", "acceptabilty"), "did you mean acceptability"),
        (("--attention", "shared", "--set", "attention.options.span=1-9"), "leaves the 3 layers"),
        (("--attention", "gqqa"), "did you mean gqa"),
        (("--attention", "fnet"), "mixes tokens without attention probabilities"),
        (("--set", "rank=3"), "unknown key 'rank'"),
        (("--out", __file__), "got a file, expected a folder"),
    ],
)
def test_mistakes_end_with_a_message(
    change: tuple[str, ...], message: str, suite: Suite, tmp_path: Path
) -> None:
    choice = [
        "--backbone",
        "bert-base",
        "--task",
        "acceptability",
        "--rows",
        "2",
        "--out",
        str(tmp_path / "a"),
        "--set",
        TINY_SET["bert"],
    ]
    code, _, err = suite("analyze", "attention", *choice, *change)
    assert code == 2 and message in err
    assert not (tmp_path / "a").exists()


def test_the_head_weights_of_a_trial_are_compared_with_their_start(
    suite: Suite, tmp_path: Path
) -> None:
    small = [
        text
        for key in (
            "attention.options.init=random",
            "training={epochs: 1, batch_size: 16}",
            "limit={train: 32, validation: 16, test: 16}",
            "learning_rate=1.0e-2",
        )
        for text in ("--set", key)
    ]
    choice = (
        "--backbone",
        "bert-base",
        "--attention",
        "wgqa",
        "--method",
        "full",
        "--task",
        "acceptability",
        "--set",
        TINY_SET["bert"],
    )
    code, _, err = suite("trial", *choice, *small, "--test", "--home", tmp_path)
    assert code == 0, err
    (folder,) = (tmp_path / "trials").iterdir()
    code, out, err = suite("analyze", "weights", "--trial", folder, "--format", "json")
    assert code == 0, err
    changes = json.loads(out)
    assert [(row["layer"], row["projection"]) for row in changes] == [
        (i, p) for i in range(3) for p in "kv"
    ]
    steps = 32 // 16  # AdamW moves a weight by at most about the learning rate a step
    assert all(0 < row["mean_abs_difference"] < 2 * steps * 1e-2 for row in changes)


def test_a_folder_that_is_no_trial_is_refused(suite: Suite, tmp_path: Path) -> None:
    for folder in (tmp_path, Path("/"), Path("/nonexistent")):
        code, _, err = suite("analyze", "weights", "--trial", folder)
        assert code == 2 and "expected a finished trial of the confirm phase" in err


def test_probabilities_keep_the_type_of_queries_where_the_position_bias_has_another() -> None:
    query = torch.randn(1, 2, 3, 4).bfloat16()
    key = torch.randn(1, 1, 3, 4).bfloat16()
    bias = torch.zeros(1, 2, 3, 3)
    seen = probabilities(torch.nn.Identity(), query, key, None, position_bias=bias)
    assert seen.dtype == torch.bfloat16 and seen.shape == (1, 2, 3, 3)
