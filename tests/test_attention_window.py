"""Sliding windows: exactness, what is hidden, sinks behind padding, and a cache that stops growing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from suite.attention import variants
from suite.attention._cache import cache_bytes
from suite.attention.counts import count_attention
from suite.attention.window import WindowLayer
from suite.backbones.loading import Head, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.errors import IncompatibleError
from suite.petl.arm import check_arm
from tests.attention import backbone, batch_of, converted
from tests.tiny import FAMILIES, tiny_choice
from tests.toy import logits_of, make_head, resolved_tiny

SMALL: dict[str, Any] = {"window": 4, "sinks": 2}
every_decoder = pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2", "qwen3", "mistral", "roberta"])
def test_texts_within_the_window_give_the_checkpoints_numbers_bit_for_bit(family: str) -> None:
    model, found, _ = converted("window", family, {"window": 10})
    plain, _ = backbone(family)
    batch = batch_of(found)
    assert torch.equal(logits_of(model, batch), logits_of(plain, batch))
    narrow, _, _ = converted(
        "window", family, {"window": 2, "sinks": 0, "sites": self_site(family)}
    )
    assert not torch.allclose(logits_of(narrow, batch), logits_of(plain, batch), atol=1e-3)


def self_site(family: str) -> list[str]:
    return ["encoder-self" if family in ("bert", "roberta", "t5") else "decoder-self"]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_it_is_full_attention_under_the_windows_mask(family: str, sinks: int) -> None:
    model, _, _ = converted("window", family, {"window": 4, "sinks": sinks})
    plain, _ = backbone(family)
    ids = torch.randint(10, 50, (3, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.zeros(12, 12, dtype=torch.bool)
    for query in range(12):
        for key in range(12):
            near = abs(query - key) < 4 or key < sinks
            mask[query, key] = near and (family == "bert" or key <= query)
    by_hand = mask.expand(3, 1, 12, 12)
    expected = logits_of(plain, {"input_ids": ids, "attention_mask": by_hand})
    assert torch.allclose(logits_of(model, {"input_ids": ids}), expected, atol=1e-5)


# ---- the cache ---------------------------------------------------------------------------------------------------------


def written(model: Any, ids: Tensor, mask: Tensor, **how: Any) -> Any:
    return model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=14,
        min_new_tokens=14,
        do_sample=False,
        return_dict_in_generate=True,
        **how,
    )


@every_decoder
@pytest.mark.parametrize("sinks", [0, 2])
def test_the_cache_stops_growing_and_the_text_is_the_one_without_a_cache(
    family: str, sinks: int
) -> None:
    model, found, variant = converted("window", family, {"window": 4, "sinks": sinks})
    ids = torch.randint(10, 50, (2, 9), generator=torch.Generator().manual_seed(6))
    output = written(model, ids, torch.ones_like(ids))
    again = written(model, ids, torch.ones_like(ids), use_cache=False)
    assert torch.equal(output.sequences, again.sequences)
    layers = getattr(output.past_key_values, "self_attention_cache", output.past_key_values).layers
    # the last token that was made has not been fed back
    assert {layer.get_seq_length() for layer in layers} == {14 if family == "t5" else 9 + 13}
    assert {layer.keys.shape[-2] for layer in layers} == {4 + sinks}
    floats = 0
    for site in found.attention_sites(backbone(family)[0]):
        if site.role == "decoder":
            tokens = variant.cached_tokens(site, found) or 9
            floats += variant.cached_floats(site, found) * tokens
    assert cache_bytes(output.past_key_values) == 2 * floats * 4
    # no view of a longer tensor
    assert all(x.untyped_storage().nbytes() == 4 * x.numel() for x in (layers[0].keys,))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_sinks_are_the_first_tokens_behind_left_padding(family: str) -> None:
    model, _, _ = converted("window", family, SMALL)
    ids = torch.randint(10, 50, (2, 9), generator=torch.Generator().manual_seed(7))
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    together = written(model, ids, mask).sequences[1, 9:]
    alone = written(model, ids[1:, 4:], torch.ones(1, 5, dtype=torch.long)).sequences[0, 5:]
    assert torch.equal(together, alone)


def test_a_cache_that_has_dropped_tokens_is_not_cropped() -> None:
    layer = WindowLayer(window=2, sinks=1)
    layer.first = torch.zeros(1, 1, dtype=torch.long)
    tokens = torch.arange(5.0).view(1, 1, 5, 1)
    layer.update(tokens, tokens)
    assert layer.keys is not None
    assert layer.keys.flatten().tolist() == [0.0, 3.0, 4.0]
    with pytest.raises(IncompatibleError, match="has dropped tokens cannot be cropped"):
        layer.crop(-1)


def test_counts_say_how_many_tokens_are_kept() -> None:
    resolved = resolve(BackboneChoice(name="llama2-7b"), only_shape=True)
    choice = AttentionChoice(name="window", options={"window": 1020})
    found = count_attention(resolved, Head("text"), choice)
    assert (found.kv_bytes_per_token, found.kv_tokens) == (524_288, 1024)
    assert count_attention(resolved, Head("text"), AttentionChoice(name="gqa")).kv_tokens is None


def test_mistrals_own_window_is_counted() -> None:
    resolved = resolve(tiny_choice("mistral", sliding_window=4))
    choice = AttentionChoice(name="pretrained")
    assert count_attention(resolved, Head("text"), choice).kv_tokens == 3


# ---- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "method", "message"),
    [
        (
            "window",
            {"window": 129},
            "full",
            "129 tokens is longer than the backbone's 128 positions",
        ),
        ("window", {"sites": ["encoder-self"]}, "full", "do not exist in a llama backbone"),
        ("window", SMALL, "lst", "changes the projections or what is cached"),
        ("shared", {"over": "window"}, "full", "its layers drop other tokens"),
        ("cla", {"over": "window"}, "full", "its layers drop other tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(
    name: str, options: dict[str, Any], method: str, message: str
) -> None:
    resolved = resolved_tiny("llama")
    choice = AttentionChoice(name=name, options=options)
    with pytest.raises(IncompatibleError, match=message):
        check_arm(
            resolved,
            make_head("classification"),
            Arm(backbone=resolved.choice, attention=choice, method=method),
        )


def test_a_window_of_the_backbones_own_is_not_mixed_with() -> None:
    model, found = backbone("gemma3")
    with pytest.raises(IncompatibleError, match="see a window of their own"):
        variants.get("window").configure({}).convert(model, found)
