"""Trained parameters of every method against the papers' numbers, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from suite.backbones.loading import Head, resolve
from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice
from suite.petl import get_method
from suite.petl.arm import build_arm, count_arm
from tests.toy import resolved_tiny

# READ: sections 1.2 and 4 of its paper; LST's rows: its official code. Every number is derived from the formula, not from our code.
PAPERS: list[tuple[str, str, dict[str, Any], int]] = [
    ("full", "t5-base", {}, 222_903_552),
    ("lora", "t5-base", {"rank": 32, "sites": ["encoder-self"]}, 1_179_648),
    ("lora", "t5-base", {"rank": 32}, 36 * 2 * 2 * 768 * 32),
    ("adapter", "t5-base", {"bottleneck": 64}, 2_379_264),
    ("adapter", "t5-base", {"bottleneck": 64, "placement": "every"}, 5_948_160),
    (
        "adapter",
        "t5-base",
        {"bottleneck": 48, "placement": "sublayer", "norms": True, "activation": "gelu_new"},
        3_625_728,
    ),
    ("bitfit", "t5-base", {}, 282_496),
    ("bitfit", "t5-base", {"sites": ["attention", "feed-forward", "norm"]}, 250_368),
    ("bitfit", "t5-base", {"sites": ["feed-forward", "norm"]}, 139_776),
    ("bitfit", "t5-base", {"sites": ["attention", "norm"]}, 158_208),
    ("prompt", "t5-base", {"length": 20}, 15_360),
    ("prompt", "t5-base", {"length": 100}, 76_800),
    ("read", "t5-base", {}, 1_972_224),
    ("read", "t5-large", {}, 2_497_536),
    ("lst", "t5-base", {}, 3_878_712),
    ("peft:lora", "t5-base", {"r": 32, "target_modules": ["q", "v"]}, 36 * 2 * 2 * 768 * 32),
]


@pytest.mark.parametrize(
    ("method", "backbone", "architecture", "expected"),
    PAPERS,
    ids=lambda value: str(value).replace(" ", ""),
)
def test_trained_parameters_are_the_papers(
    method: str, backbone: str, architecture: dict[str, Any], expected: int
) -> None:
    resolved = resolve(BackboneChoice(name=backbone))
    counted = count_arm(
        resolved,
        Head("text", 0),
        Arm(backbone=resolved.choice, method=method, architecture=architecture),
    )
    assert counted.method == counted.trainable == expected
    assert counted.head == 0
    # Embeddings that encoder, decoder and head share count once. These methods train no weight that
    # the backbone has already, but for the adapters that train its norms.
    added = 0 if method == "full" else counted.method
    adds = method in ("full", "lora", "adapter", "bitfit", "prompt")
    if backbone == "t5-base" and adds and not architecture.get("norms"):
        assert counted.total - added == 222_903_552


def test_weights_that_a_count_needs_are_tied_again() -> None:
    resolved = resolved_tiny("gpt2")
    totals = []
    for method in ("peft:lora", "peft:unilora"):
        arm = Arm(backbone=resolved.choice, method=method)
        counted = count_arm(resolved, Head("text", 0), arm)
        totals.append(counted.total - counted.method)
    assert totals[0] == totals[1]


def test_vectors_before_the_input_take_positions() -> None:
    for name, vectors in (("peft:prefix-tuning", 20), ("peft:lora", 0)):
        given = {"num_virtual_tokens": 20} if vectors else {}
        assert get_method(name).configure(given).extra_positions() == vectors


def test_a_count_on_the_meta_device_makes_no_weights() -> None:
    resolved = resolve(BackboneChoice(name="llama2-7b"))
    model, _ = build_arm(
        resolved, Head("text", 0), Arm(backbone=resolved.choice, method="lora"), meta=True
    )
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_the_task_head_is_counted_apart() -> None:
    resolved = resolve(BackboneChoice(name="bert-base"))
    counted = count_arm(
        resolved, Head("classification", 3), Arm(backbone=resolved.choice, method="prompt")
    )
    assert (counted.head, counted.method) == (3 * 768 + 3, 20 * 768)
    assert counted.trainable == counted.head + counted.method


def test_bert_has_biases_of_its_own_that_bitfit_only_unfreezes() -> None:
    resolved = resolve(BackboneChoice(name="bert-base"))
    counted = count_arm(
        resolved, Head("classification", 2), Arm(backbone=resolved.choice, method="bitfit")
    )
    assert (
        counted.total == 109_482_240 + 2 * 768 + 2
    )  # BERT-base and its classifier; nothing is added
    assert (
        counted.method == 12 * (4 * 768 + 3072 + 768 + 2 * 768) + 768 + 768
    )  # blocks, embedding norm, pooler


def test_every_method_class_names_its_source() -> None:
    for method in {row[0] for row in PAPERS}:
        assert get_method(method).source
