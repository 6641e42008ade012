"""Counts of attention weights and caches, against the figures that the papers print and their formulas, and on the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from suite.attention import variants
from suite.attention.counts import AttentionCount, count_attention
from suite.backbones.loading import Head, build, resolve
from suite.cli import main
from suite.config.sweep import AttentionChoice, BackboneChoice

ANYWHERE = {"sites": "all"}
MQA = {**ANYWHERE, "init": "random"}
BERT_BASE = {
    "sha": 8_847_360,
    "mhe-add": 8_875_008,
    "mhe-mul": 8_875_008,
    "mqa": 15_335_424,
    "skv": 21_233_664,
    "el": 14_155_776,
    "mha": 28_311_552,
    "fnet": 0,
    "linear": 12 * (512**2 + 768**2),
}
GPT3 = {
    "mha": 43_486_543_872,
    "el": 14_495_514_624,
    "mqa": 14_797_504_512,
    "skv": 28_991_029_248,
    "mhe-add": 456_523_776,
    "mhe-mul": 456_523_776,
    "sha": 452_984_832,
}
WMT = {
    "sha": 6.49,
    "mha": 18.87,
    "el": 9.44,
    "mqa": 10.62,
    "skv": 14.16,
    "mhe-add": 6.52,
    "mhe-mul": 6.52,
}
"""Millions, as MHE's table 3 prints them for 6 + 6 layers with 18 attention sublayers."""


def counted(
    backbone: str, attention: str, options: dict[str, Any] | None = None, **how: Any
) -> AttentionCount:
    resolved = resolve(BackboneChoice(name=backbone), only_shape=True)
    head = Head("classification", 2) if resolved.family.kind == "encoder" else Head("text")
    return count_attention(
        resolved, head, AttentionChoice(name=attention, options=options or {}), **how
    )


def options_of(attention: str) -> dict[str, Any]:
    return MQA if attention == "mqa" else {}


@pytest.mark.parametrize(("attention", "weights"), BERT_BASE.items())
def test_bert_base_has_the_attention_weights_of_mhes_table_1(attention: str, weights: int) -> None:
    found = counted("bert-base", attention, options_of(attention))
    assert found.with_output_projection == weights
    assert (found.kv_bytes_per_token, found.cross_kv_bytes_per_token, found.kv_fraction) == (
        None,
        None,
        None,
    )


def test_mhe_adds_27648_numbers_to_sha_on_bert_base() -> None:
    assert counted("bert-base", "mhe-add").extra_over_base == 12 * 3 * 12 * 64 == 27_648
    assert counted("bert-base", "sha").extra_over_base == 0


@pytest.mark.parametrize(("attention", "weights"), GPT3.items())
def test_gpt3_has_the_attention_weights_of_the_paper_without_output_projection(
    attention: str, weights: int
) -> None:
    found = counted("gpt3", attention, options_of(attention))
    assert found.without_output_projection == weights
    assert found.with_output_projection == weights + 96 * (96 * 128) ** 2


@pytest.mark.parametrize(("attention", "millions"), WMT.items())
def test_the_translation_model_has_the_attention_weights_of_mhes_table_3(
    attention: str, millions: float
) -> None:
    assert (
        round(
            counted("wmt-transformer", attention, options_of(attention)).with_output_projection
            / 1e6,
            2,
        )
        == millions
    )


@pytest.mark.parametrize("backbone", ["bert-large", "gpt2-medium"])
def test_per_sublayer_the_weights_follow_mhes_table_4(backbone: str) -> None:
    n = 16
    d = 64
    layers = 24
    table = {
        "sha": 3 * d**2 * n,
        "mha": 3 * d**2 * n**2,
        "el": d**2 * n**2,
        "mqa": d**2 * n**2 + 2 * d**2 * n,
        "skv": 2 * d**2 * n**2,
        "mhe-add": 3 * d**2 * n + 3 * d * n,
        "mhe-mul": 3 * d**2 * n + 3 * d * n,
    }
    found = {
        attention: counted(backbone, attention, options_of(attention)).without_output_projection
        for attention in table
    }
    assert found == {attention: layers * weights for attention, weights in table.items()}


@pytest.mark.parametrize(
    ("backbone", "attention", "extra"),
    [
        ("t5-small", "wgqa", 192),
        ("t5-base", "gqa", 0),
        ("t5-base", "pretrained", 0),
    ],
)
def test_wgqa_adds_as_many_weights_as_its_totals_say(
    backbone: str, attention: str, extra: int
) -> None:
    assert counted(backbone, attention).extra_over_base == extra


@pytest.mark.parametrize(
    ("backbone", "attention", "kv", "cross", "fraction"),
    [
        ("t5-base", "pretrained", 12 * 2 * 768 * 2, 12 * 2 * 768 * 2, 1.0),
        ("t5-base", "sha", 12 * 2 * 64 * 2, 12 * 2 * 64 * 2, 1 / 12),
        ("t5-base", "skv", 12 * 768 * 2, 12 * 768 * 2, 0.5),
        ("gpt2", "el", 12 * 768 * 2, None, 0.5),
        ("gpt2", "mhe-mul", 12 * 2 * 64 * 2, None, 1 / 12),
        ("llama2-7b", "pretrained", 524_288, None, 1.0),
        (
            "llama2-7b",
            "skv",
            524_288,
            None,
            1.0,
        ),  # keys are rotated and values are not: both are kept
        ("llama2-7b", "mhe-add", 32 * 2 * 128 * 2, None, 1 / 32),
        (
            "llama3-8b",
            "el",
            524_288,
            None,
            4.0,
        ),  # as many slices as query heads, where the checkpoint has a quarter
    ],
)
def test_the_cache_per_token_follows_the_heads(
    backbone: str, attention: str, kv: int, cross: int | None, fraction: float
) -> None:
    found = counted(backbone, attention)
    assert (found.kv_bytes_per_token, found.cross_kv_bytes_per_token, found.kv_fraction) == (
        kv,
        cross,
        fraction,
    )


def test_the_cache_takes_twice_the_bytes_in_fp32() -> None:
    half, brain, full = (
        counted("gpt2", "mha", dtype=dtype).kv_bytes_per_token for dtype in ("fp16", "bf16", "fp32")
    )
    assert half == brain == 36_864 and full == 2 * 36_864


def test_biases_and_norms_do_not_count() -> None:
    resolved = resolve(BackboneChoice(name="bert-base"))
    model = build(resolved, Head("classification", 2), meta=True)
    weights = {
        id(p): p.numel()
        for n, p in model.named_parameters()
        if ".attention." in n and n.endswith("weight") and "LayerNorm" not in n
    }
    assert (
        sum(weights.values())
        == counted("bert-base", "pretrained").with_output_projection
        == BERT_BASE["mha"]
    )


# ---- command line ------------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as exit_:
        main(["params", *arguments, "--format", "json"])
    assert exit_.value.code in (0, None)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_params_prints_what_is_counted_of_a_variant_that_starts_from_scratch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(capsys, "--backbone", "gpt2", "--attention", "mhe-mul")
    assert found["attention.with_output_projection"] == BERT_BASE["mhe-mul"]
    assert found["attention.without_output_projection"] == BERT_BASE["mhe-mul"] - 12 * 768**2
    assert found["attention.extra_over_base"] == 27_648
    assert (found["kv_bytes_per_token"], found["kv_fraction"]) == (3072, 1 / 12)
    assert found["cross_kv_bytes_per_token"] is None
    assert found["method"] == "full" and found["trainable"] == found["total"]


def test_params_takes_options_of_the_variant_and_the_type_of_the_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (
        "--backbone",
        "llama2-7b",
        "--attention",
        "shared",
        "--set",
        "attention.options.span=23-30",
    )
    first = printed(capsys, *arguments)
    previous = printed(
        capsys, *arguments, "--set", "attention.options.anchor=previous", "--dtype", "fp32"
    )
    assert (first["kv_bytes_per_token"], first["kv_fraction"]) == (466_944, 0.890625)
    assert (previous["kv_bytes_per_token"], previous["kv_fraction"]) == (2 * 458_752, 0.875)


def test_params_counts_a_shape_that_has_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "--backbone", "wmt-transformer", "--attention", "sha")
    assert found["total"] == 63_001_088 - (18_874_368 - 6_488_064)


def test_list_attention_says_how_each_variant_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["list", "attention", "--format", "json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(variants.names())
    assert all(
        set(row) == {"name", "description", "source", "families", "start"} and all(row.values())
        for row in rows.values()
    )
    scratch = {name for name, row in rows.items() if row["start"] == "scratch"}
    assert scratch == {"mha", "sha", "el", "skv", "mhe-add", "mhe-mul", "fnet", "linear"}
    assert rows["fnet"]["families"] == ["bert", "roberta"]
