"""What every attention variant must keep, on every family it claims; a new file in suite/attention/ is tested with no test edited."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from suite.attention import variants
from suite.attention._cache import cache_bytes
from suite.attention.base import Variant
from suite.backbones.base import Family
from suite.backbones.loading import build
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice
from suite.errors import IncompatibleError, UnknownNameError
from suite.petl.arm import build_arm, check_arm
from tests.attention import Options, answer_of, backbone, batch_of, converted, resolved_backbone
from tests.decoding import both_ways, check_beams
from tests.tiny import served, tiny_choice
from tests.toy import PAD, disturb, logits_of, loss_of, make_head

OPTIONS: dict[str, Options] = {"window": {"window": 3, "sinks": 1}}
"""Options of a variant whose defaults do not fit two layers of width 32 with four heads."""
DEAD = {"mhe-add": ".heads.key"}
"""How the names of parameters end that cannot learn: a shift of all keys cancels in the softmax."""
ROUNDING = 1e-5
"""Gradients that are 0 come out at up to 4e-7 here, all others above 8e-4."""
PAIRS = [(name, family) for name in variants.names() for family in served(variants.get(name))]
every_pair = pytest.mark.parametrize(("name", "family"), PAIRS)
every_decoder = pytest.mark.parametrize(
    ("name", "family"), [pair for pair in PAIRS if pair[1] != "bert"]
)
TOLERANCE = 1e-5
"""Sums of fp32 in another order: a cached token by itself, sdpa against eager, gradients (up to 7 here) of a second pass."""


def make(name: str, family: str, **how: Any) -> tuple[Any, Family, Variant[Any]]:
    return converted(name, family, OPTIONS.get(name, {}), **how)


@functools.cache
def shared(name: str, family: str) -> tuple[Any, Family, Variant[Any]]:
    """For tests that leave the model as it is; what the variant adds is away from its start."""
    model, found, variant = make(name, family)
    disturb(model, seed=8)
    return model, found, variant


@functools.cache
def unconverted(family: str) -> Any:
    """For tests that leave the model as it is."""
    return backbone(family)[0]


# ---- what it is --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", variants.names())
def test_every_variant_says_what_it_is(name: str) -> None:
    cls = variants.get(name)
    assert cls.name == name and cls.description and cls.source and served(cls)
    assert cls.start in ("converted", "scratch")
    options = cls.configure(OPTIONS.get(name, {})).config.model_dump(mode="json")
    assert (
        cls.configure(options).config.model_dump(mode="json") == options
    )  # complete options stay what they are


@every_pair
def test_in_shapes_only_it_has_the_same_parameters_in_the_backbones_type(
    name: str, family: str
) -> None:
    model, found, variant = shared(name, family)
    resolved = resolved_backbone(family)
    shapes: Any = build(resolved, make_head(answer_of(family)), meta=True)
    shapes = shapes.to(torch.bfloat16)
    before = torch.get_rng_state()
    variant.convert(shapes, found)
    assert torch.equal(torch.get_rng_state(), before)
    assert {n: p.shape for n, p in shapes.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert {(p.device.type, p.dtype) for p in shapes.parameters()} == {("meta", torch.bfloat16)}
    assert len(variant.new_parameters(shapes, found)) == len(variant.new_parameters(model, found))


@every_pair
def test_its_new_parameters_are_in_the_model_and_not_in_the_backbones(
    name: str, family: str
) -> None:
    model, found, variant = shared(name, family)
    names = {id(p): n for n, p in model.named_parameters()}
    new = {names[id(p)] for p in variant.new_parameters(model, found)}
    plain = unconverted(family)
    assert not new & dict(plain.named_parameters()).keys()


@every_pair
def test_a_conversion_depends_on_the_seed_alone(name: str, family: str) -> None:
    (first, found, _), (second, _, _) = make(name, family), make(name, family)
    one = first.state_dict()
    two = second.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(logits_of(first, batch_of(found)), logits_of(second, batch_of(found)))


@every_pair
def test_its_state_loads_into_a_fresh_conversion(name: str, family: str) -> None:
    model, found, _ = shared(name, family)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    fresh, _, _ = make(name, family, seed=1)
    batch = batch_of(found)
    assert not torch.allclose(logits_of(fresh, batch), logits_of(model, batch), atol=1e-3)
    fresh.load_state_dict(torch.load(stored, weights_only=True))
    assert torch.equal(logits_of(fresh, batch), logits_of(model, batch))


@every_pair
def test_a_copy_answers_the_same_and_is_independent(name: str, family: str) -> None:
    model, found, _ = make(name, family)
    before = logits_of(model, batch_of(found))
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin, batch_of(found)), before)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    loss_of(twin.train(), batch_of(found)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    disturb(twin)
    assert torch.equal(logits_of(model, batch_of(found)), before)
    disturb(
        model
    )  # the same moves: now both are the same again, unless one still answers with the other's tensors
    assert torch.equal(logits_of(model, batch_of(found)), logits_of(twin, batch_of(found)))


@every_pair
def test_folded_it_is_the_same_function(name: str, family: str) -> None:
    model, found, variant = make(name, family)
    disturb(model)
    before = logits_of(model, batch_of(found))
    variant.fold(model, found)
    assert torch.allclose(logits_of(model, batch_of(found)), before, atol=TOLERANCE)
    # what depends on the input, such as a gate, is in no plain map
    if type(variant).fold is not Variant.fold:
        assert variant.new_parameters(model, found) == []


# ---- gradients ---------------------------------------------------------------------------------------------------------


@every_pair
def test_every_parameter_gets_a_gradient(name: str, family: str) -> None:
    model, found, _ = make(name, family)
    disturb(model)
    loss_of(model.train(), batch_of(found)).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    biases = {
        id(getattr(site.module.get_submodule(site.k), "bias", None))
        for site in found.attention_sites(model)
    }
    small = {
        n
        for n, p in model.named_parameters()
        if p.grad.abs().max() < ROUNDING and id(p) not in biases
    }  # a key's bias is such a shift
    assert small == {
        n for n, _ in model.named_parameters() if n.endswith(DEAD.get(name, "no such name"))
    }


@every_pair
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_changes_no_loss_and_no_gradient(name: str, family: str) -> None:
    model, found, _ = make(name, family)
    disturb(model)
    plain = gradients(model, found)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = gradients(model, found)
    assert plain.keys() == checkpointed.keys()
    for key in plain:
        assert torch.allclose(plain[key], checkpointed[key], rtol=1e-5, atol=TOLERANCE), key


def gradients(model: Any, family: Family) -> dict[str, Tensor]:
    model.train().zero_grad()
    loss = loss_of(model, batch_of(family))
    loss.backward()
    return {
        "loss": loss.detach(),
        **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    }


# ---- masks -------------------------------------------------------------------------------------------------------------


@every_decoder
def test_a_later_token_changes_no_earlier_logit(name: str, family: str) -> None:
    model, _, _ = shared(name, family)
    ids, changed = later_token_changed()
    source = {"input_ids": ids} if family == "t5" else {}
    field = "decoder_input_ids" if family == "t5" else "input_ids"
    before, after = (logits_of(model, {**source, field: tokens}) for tokens in (ids, changed))
    assert torch.allclose(before[:, :5], after[:, :5], atol=TOLERANCE)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def later_token_changed() -> tuple[Tensor, Tensor]:
    """Two batches of nine tokens that differ at position 5 alone."""
    ids = torch.randint(10, 50, (3, 9), generator=torch.Generator().manual_seed(2))
    changed = ids.clone()
    changed[:, 5] += 7
    return ids, changed


SIDES = [
    (name, family, side)
    for name, family in PAIRS
    for side in (("left", "right") if family in ("gpt2", "llama") else ("right",))
]


@pytest.mark.parametrize(("name", "family", "side"), SIDES)
def test_what_stands_in_padding_changes_nothing(name: str, family: str, side: str) -> None:
    model, _, _ = shared(name, family)
    ids, mask = padded(side)
    answers = []
    for filler in (PAD, 33):
        batch = {
            "input_ids": ids.masked_fill(mask == 0, filler),
            "attention_mask": mask,
            **rest(family, mask),
        }
        logits = logits_of(model, batch)
        answers.append(logits if family in ("t5", "bert") else logits[mask.bool()])
    assert torch.isfinite(answers[0]).all()
    assert torch.allclose(answers[0], answers[1], atol=TOLERANCE)
    unmasked = logits_of(
        model,
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(mask),
            **rest(family, torch.ones_like(mask)),
        },
    )
    seen = unmasked if family in ("t5", "bert") else unmasked[mask.bool()]
    if family in ("t5", "bert") or side == "left":  # else nothing real comes after what is masked
        assert not torch.allclose(seen, answers[0], atol=1e-3)


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Rows of 8, 5 and 3 tokens and their mask."""
    ids = torch.randint(10, 50, (3, 8), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(8)[None] < torch.tensor([8, 5, 3])[:, None]).long()
    return ids, mask if side == "right" else mask.flip(1)


def rest(family: str, mask: Tensor) -> dict[str, Tensor]:
    """What a forward pass needs beside input and mask."""
    if family == "t5":
        return {"decoder_input_ids": torch.tensor([[0, 12, 27, 40]]).expand(len(mask), -1)}
    return {} if family == "bert" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


# ---- decoding ----------------------------------------------------------------------------------------------------------


@every_decoder
def test_decoding_token_by_token_gives_the_logits_of_one_pass(name: str, family: str) -> None:
    steps, whole = both_ways(shared(name, family)[0], family)
    assert torch.allclose(steps, whole, atol=TOLERANCE)


@every_decoder
def test_beams_carry_their_own_caches(name: str, family: str) -> None:
    check_beams(shared(name, family)[0], family)


@every_decoder
def test_the_cache_holds_as_many_bytes_as_the_formula_says(name: str, family: str) -> None:
    model, found, variant = shared(name, family)
    plain = unconverted(family)
    ids = torch.randint(10, 50, (2, 7), generator=torch.Generator().manual_seed(4))
    settings = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    cache = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **settings
    ).past_key_values
    fed = 5 if family == "t5" else 7 + 4  # the last token that was made has not been fed back
    floats = 0
    for site in found.attention_sites(plain):
        if site.role == "decoder":
            tokens = 7 if site.kind == "cross" else fed
            most = variant.cached_tokens(site, found)
            floats += variant.cached_floats(site, found) * min(tokens, most or tokens)
    assert cache_bytes(cache) == 2 * floats * 4  # rows, bytes of an fp32 number


@every_pair
def test_sdpa_and_eager_attention_agree(name: str, family: str) -> None:
    model, found, _ = shared(name, family)
    eager, _, _ = make(name, family, implementation="eager")
    disturb(eager, seed=8)
    assert torch.allclose(
        logits_of(eager, batch_of(found)), logits_of(model, batch_of(found)), atol=TOLERANCE
    )


# ---- plug-ins ----------------------------------------------------------------------------------------------------------

HALVED = '''
"""Every value head at half of its size."""

import torch

from suite.attention import _surgery as surgery
from suite.attention.base import Options, Variant


class Halved(Variant[Options]):
    description = "values halved"
    source = "a test"
    families = frozenset({"t5", "llama"})

    def convert(self, model, family):
        for site in family.attention_sites(model):
            maps = surgery.projections(site)
            maps.v = surgery.linear(maps.v.weight / 2, maps.v.bias)
            surgery.place(site, maps)
'''


@pytest.fixture
def halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "halved_values.py").write_text(HALVED)
    monkeypatch.setenv("SUITE_PATH", str(tmp_path))
    yield
    monkeypatch.delenv("SUITE_PATH")
    with pytest.raises(UnknownNameError, match="halved-values"):
        variants.get("halved-values")


def test_a_throw_away_variant_is_found_and_trains(halved: None) -> None:
    assert "halved-values" in variants.names()
    resolved = resolved_backbone("llama")
    head = make_head("classification")
    choice = AttentionChoice(name="halved-values")
    model, _ = build_arm(
        resolved,
        head,
        Arm(backbone=resolved.choice, attention=choice, method="lora", architecture={"rank": 2}),
    )
    plain, _ = build_arm(
        resolved, head, Arm(backbone=resolved.choice, method="lora", architecture={"rank": 2})
    )
    assert isinstance(model, nn.Module) and isinstance(plain, nn.Module)
    batch = {"input_ids": torch.full((2, 4), 20), "labels": torch.tensor([0, 1])}
    loss_of(model, batch).backward()
    assert all(
        parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad
    )


def test_a_variant_that_does_not_serve_the_family_is_refused(halved: None) -> None:
    choice = AttentionChoice(name="halved-values")
    head = make_head("classification")
    with pytest.raises(
        IncompatibleError,
        match=r"variant halved-values does not work on bert-base, .* works on llama, t5",
    ):
        check_arm(
            resolved_backbone("bert"),
            head,
            Arm(backbone=tiny_choice("bert"), attention=choice, method="full"),
        )
