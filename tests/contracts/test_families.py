"""Every family beside the four of the other contracts meets each attention variant and each method once: it works, or is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification

from suite.attention import variants
from suite.attention._cache import cache_bytes
from suite.backbones import families
from suite.backbones.base import Family, has_windows
from suite.backbones.fit import method_refusal, variant_refusal
from suite.backbones.loading import Head, build, resolve
from suite.backbones.presets import PRESETS
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.errors import BackboneError, IncompatibleError
from suite.petl import get_method, methods
from suite.petl._frozen import FrozenPass
from suite.petl.arm import build_arm, check_arm, count, task_head, trained_state
from suite.record.folder import Home
from tests.attention import answer_of, batch_of, converted
from tests.decoding import both_ways
from tests.test_adding import blocks
from tests.test_export import exported, same_answers
from tests.tiny import OTHERS
from tests.toy import (
    SMALL,
    disturb,
    logits_of,
    loss_of,
    make_arm,
    make_head,
    resolved_tiny,
    train,
)
from tests.trained import trained_spec

ENCODERS = ("deberta", "modernbert", "roberta")
DECODERS = tuple(name for name in OTHERS if name not in ENCODERS)
PEFT = ("peft:ia3", "peft:prefix-tuning")
SMALLER: dict[str, dict[str, Any]] = {
    **SMALL,
    # peft knows no default for ModernBERT, and everybody has a feed-forward output
    "peft:ia3": {"target_modules": ["Wo", "down_proj", "output.dense"], "feedforward_modules": []},
}
OF_THE_SHAPE = {
    ("gemma2", "cla"): "see a window",
    ("gemma2", "shared"): "see a window",
    ("gemma2", "window"): "window of their own",
    ("gemma3", "cla"): "see a window",
    ("gemma3", "shared"): "see a window",
    ("gemma3", "window"): "window of their own",
}
"""Pairs that the configuration forbids and not the family: without windows they would work."""
TOLERANCE = 1e-5
"""Sums of fp32 in another order: a cached token by itself, a row without its padding."""


def check_refused(family: str, reason: str, **choice: Any) -> None:
    resolved = resolved_tiny(family)
    arm = Arm(backbone=resolved.choice, **choice)
    assert reason, "every message holds an empty one"
    with pytest.raises(IncompatibleError, match=re.escape(reason)) as refused:
        check_arm(resolved, make_head(answer_of(family)), arm)
    assert family in str(refused.value) or "layer 0" in str(refused.value)


@pytest.mark.parametrize("variant", variants.names())
@pytest.mark.parametrize("family", OTHERS)
def test_a_variant_attends_caches_and_folds_or_is_refused(family: str, variant: str) -> None:
    reason = variant_refusal(variants.get(variant), families.get(family)())
    reason = OF_THE_SHAPE.get((family, variant), reason)
    if reason is not None:
        choice = AttentionChoice(name=variant)
        check_refused(family, reason, attention=choice, method="full")
        return
    model, found, cut = converted(variant, family)
    disturb(model, seed=8)
    batch = batch_of(found)
    loss = model(**batch).loss
    loss.backward()
    lonely = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert torch.isfinite(loss) and lonely == []
    before = logits_of(model, batch)
    if found.kind == "decoder":
        check_cache(model, found, cut)
    cut.fold(model, found)
    assert torch.allclose(logits_of(model, batch), before, atol=TOLERANCE)


def check_cache(model: Any, family: Family, variant: Any) -> None:
    """Token by token it answers as in one pass, beyond Gemma's windows of four too; and its size is the formula's."""
    stepped, whole = both_ways(model, family.name)
    assert torch.allclose(stepped, whole, atol=TOLERANCE)
    resolved = resolved_tiny(family.name)
    plain = build(resolved, make_head("text"), meta=True)
    sites = list(family.attention_sites(plain))
    ids = torch.full((2, 3), 20)
    for tokens in (ids, torch.full((2, 9), 20)):
        with torch.no_grad():
            cache = model(input_ids=tokens, use_cache=True).past_key_values
        floats = 0
        for site in sites:
            most = variant.cached_tokens(site, family)
            kept = tokens.shape[1] if most is None else min(most, tokens.shape[1])
            floats += kept * variant.cached_floats(site, family)
        assert cache_bytes(cache) == len(tokens) * floats * 4


@pytest.mark.parametrize("family", DECODERS)
def test_as_many_groups_as_heads_are_the_familys_own_attention(family: str) -> None:
    """Soft caps, windows, and norms of queries and keys stay where they are when a variant is cut in."""
    own, found, _ = converted("pretrained", family)
    cut, _, _ = converted("gqa", family, {"kv_heads": 2})
    batch = batch_of(found)
    assert torch.allclose(logits_of(cut, batch), logits_of(own, batch), atol=TOLERANCE)


@pytest.mark.parametrize("method", [*methods.names(), *PEFT])
@pytest.mark.parametrize("family", OTHERS)
def test_a_method_trains_what_it_says_or_is_refused(family: str, method: str) -> None:
    reason = method_refusal(get_method(method), families.get(family)())
    if reason is not None:
        check_refused(family, reason, method=method, architecture=SMALL[method])
        return
    toy = make_arm(method, family, answer_of(family), architecture=SMALLER.get(method, {}))
    counted = count(toy.model, task_head(toy.model, toy.resolved))
    plain = build(toy.resolved, toy.head, meta=True)
    assert counted.method == toy.method.expected_trainable(plain, toy.family) > 0
    tensors = {**dict(toy.model.named_parameters()), **dict(toy.model.named_buffers())}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    train(toy, steps=3)
    changed = {n for n, tensor in tensors.items() if not torch.equal(tensor, before[n])}
    assert changed == set(trained_state(toy.model))
    check_padding(toy)
    if not toy.method.backward_through_backbone:
        check_frozen_pass(toy)


def check_padding(toy: Any) -> None:
    """Shortest row alone against the same row among longer ones."""
    batch = toy.batch()
    shown = {name: batch[name] for name in ("input_ids", "attention_mask")}
    row = int(shown["attention_mask"].sum(1).argmin())
    length = int(shown["attention_mask"][row].sum())
    alone = {name: values[row : row + 1, :length] for name, values in shown.items()}
    single = logits_of(toy.model, alone)[0]
    among = logits_of(toy.model, shown)[row][: len(single)]
    assert torch.allclose(among, single, atol=TOLERANCE)


def check_frozen_pass(toy: Any) -> None:
    """A replayed pass of the frozen stack gives the loss and the gradients of the recorded one."""
    shared = FrozenPass()
    # trials switch a decoder's cache off; an encoder has none
    without_cache = {"use_cache": False} if toy.family.kind == "decoder" else {}
    losses = []
    gradients = []
    toy.model.train()
    for part in (shared.recording, shared.replaying):
        toy.model.zero_grad()
        torch.manual_seed(3)
        with part():
            loss = loss_of(toy.model, {**toy.batch(), **without_cache})
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad.clone() for p in toy.model.parameters() if p.requires_grad])
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("method", ["lora", "prompt", "read"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_answers_alike_however_far_its_batch_is_padded(family: str, method: str) -> None:
    """Greedy answers to a short text alone and padded on the left; a prompt stays within a window then."""
    toy = make_arm(method, family, "text")
    disturb(toy.model)
    toy.model.eval()
    answers = []
    for padding in (0, 3):
        ids = torch.tensor([[0] * padding + [12, 33]])
        mask = torch.tensor([[0] * padding + [1, 1]])
        made = toy.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False
        )  # type: ignore[operator]
        answers.append(made[0, padding + 2 :].tolist())
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_classifies_by_its_last_token(family: str) -> None:
    toy = make_arm("lora", family, "classification")
    losses = train(toy, steps=3)
    assert all(torch.isfinite(torch.tensor(losses)))
    check_padding(toy)


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_marks_spans_and_fills_masks(family: str) -> None:
    for kind in ("span", "masked"):
        model = build(resolved_tiny(family), Head(kind), meta=True)  # type: ignore[arg-type]
        found = families.get(family)()
        head = {name.split(".")[0] for name, _ in model.named_parameters()}
        head -= {model.base_model_prefix}
        assert {name.split(".")[0] for name in found.head_names(model)} >= head != set()


@pytest.mark.parametrize("family", OTHERS)
def test_a_family_finds_the_parts_of_its_models(family: str) -> None:
    found = families.get(family)()
    model: Any = build(resolved_tiny(family), make_head("classification"))
    (stack,) = found.stacks(model)
    assert (len(stack.blocks), stack.width, stack.role) == (2, 32, found.kind)
    sites = list(found.attention_sites(model))
    outputs = [sublayer.output for sublayer in found.sublayers(model)]
    assert len(sites) == 2 and len(outputs) == 4
    for site in sites:
        query = site.module.get_submodule(site.q)
        times = 3 if site.fused else 1
        assert query.weight.shape == (times * site.heads * site.head_dim, 32)  # type: ignore[union-attr]
        assert site.owner.get_submodule(site.o) in outputs
        for name in filter(None, (site.q_norm, site.k_norm)):
            assert site.module.get_submodule(name).weight.shape == (site.head_dim,)  # type: ignore[union-attr]
    norms = {id(norm) for _, norm in found.norms(model)}
    assert norms == {id(m) for m in model.modules() if "Norm" in type(m).__name__}
    base = {id(p) for p in model.base_model.parameters()}
    heads = {name.split(".")[0] for name, p in model.named_parameters() if id(p) not in base}
    assert heads == set(found.head_names(model))


@pytest.mark.parametrize("family", OTHERS)
def test_folded_attention_and_lora_are_exported_for_the_libraries(
    family: str, tmp_path: Path
) -> None:
    """A folded model is plain weights with few heads where the configuration can say so; LoRA is peft's adapter."""
    cut = variant_refusal(variants.get("wgqa"), families.get(family)()) is None
    choice = AttentionChoice(name="wgqa" if cut else "pretrained")
    home = Home(tmp_path / "home")
    restored, written = exported(
        home, trained_spec("full", family, attention=choice), tmp_path / "a"
    )
    assert written.description.format == "transformers"
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "a")
    same_answers(restored.model, theirs, restored, atol=TOLERANCE)
    if family in DECODERS:
        assert theirs.config.num_key_value_heads == 1
    restored, written = exported(home, trained_spec("lora", family), tmp_path / "b")
    assert written.description.format == "peft"
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "b" / "base")
    same_answers(restored.model, PeftModel.from_pretrained(base, str(tmp_path / "b")), restored)


def test_positions_leave_out_robertas_first_rows() -> None:
    resolved = resolve(BackboneChoice(name="roberta-base"))
    assert resolved.family.positions(resolved.config) == 512
    with pytest.raises(IncompatibleError, match="513 tokens exceed the backbone's 512 positions"):
        check_arm(
            resolved,
            Head("classification", 2),
            Arm(backbone=resolved.choice, method="full"),
            max_length=513,
        )


def test_the_first_mistral_has_windows_and_so_no_sharing_and_no_ladder() -> None:
    choice = BackboneChoice(name="mistral-7b", config={"sliding_window": 4096}, tokenizer="bytes")
    resolved = resolve(choice)
    assert has_windows(resolved.config)
    for part in ({"method": "lst"}, {"method": "full", "attention": AttentionChoice(name="cla")}):
        with pytest.raises(IncompatibleError, match="see a window of the text"):
            check_arm(resolved, Head("text"), Arm(backbone=choice, **part))


@pytest.mark.parametrize("name", [n for n, p in PRESETS.items() if p.model_type == "qwen2"])
def test_a_decoder_without_padding_token_pads_with_its_end(name: str) -> None:
    config: Any = resolve(BackboneChoice(name=name)).config
    assert config.pad_token_id == config.eos_token_id == 151_643


@pytest.fixture
def gemma_folder(tmp_path: Path) -> Path:
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    config = GemmaConfig(vocab_size=384, **shape, **heads)
    GemmaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path


def test_a_new_model_type_names_the_nearest_and_the_file_of_the_docs_serves_it(
    gemma_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = BackboneChoice(name=str(gemma_folder / "model"), tokenizer="bytes")
    with pytest.raises(
        BackboneError, match=r"'gemma' belongs to no family; .* is gemma2, whose"
    ) as said:
        resolve(choice)
    assert "backbones/ of SUITE_PATH" in str(said.value)
    (gemma_folder / "backbones").mkdir()
    (gemma_folder / "backbones" / "gemma.py").write_text(
        next(block for block in blocks("python") if "RotaryDecoder" in block)
    )
    monkeypatch.setenv("SUITE_PATH", str(gemma_folder))
    resolved = resolve(choice)
    arm = Arm(backbone=choice, method="bitfit", attention=AttentionChoice(name="gqa"))
    model, _ = build_arm(resolved, Head("text"), arm)
    assert isinstance(model, nn.Module) and resolved.family.name == "gemma"
    assert torch.isfinite(loss_of(model, batch_of(resolved.family)))
