"""Which attention variants and methods go together: every pair trains a step, or is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from suite.attention import variants
from suite.attention.base import Variant
from suite.backbones.base import AttentionSite, Family
from suite.backbones.loading import Head, build, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.errors import IncompatibleError
from suite.petl import arm as arms
from suite.petl import get_method, methods
from suite.petl.arm import build_arm, check_arm, count_arm, trained_state
from tests.tiny import FAMILIES, served, tiny_choice
from tests.toy import SMALL, Answer, Toy, loss_of, make_head, resolved_tiny, train

PEFT = ("peft:prefix-tuning",)
METHODS = (*methods.names(), *PEFT)
PAIRS = [(variant, method) for variant in variants.names() for method in METHODS]
HUB = BackboneChoice(name="bert-base")
"""A checkpoint: its configuration is known and nothing is downloaded to check it."""


def family_of(variant: str, method: str) -> str:
    """One family for each pair, another for the next pair, so that the whole table meets all of them."""
    both = [name for name in served(variants.get(variant)) if name in served(get_method(method))]
    return both[(variants.names().index(variant) + METHODS.index(method)) % len(both)]


def answer_of(family: str) -> Answer:
    return "text" if family == "t5" else "classification"


def arm(variant: str, method: str, family: str, *, pretrained: bool = False, **options: Any) -> Toy:
    torch.manual_seed(0)
    resolved = resolved_tiny(family)
    head = make_head(answer_of(family))
    choice = AttentionChoice(name=variant, options=options)
    model, petl = build_arm(
        resolved,
        head,
        Arm(
            backbone=resolved.choice,
            attention=choice,
            method=method,
            architecture=SMALL.get(method, {}),
        ),
        pretrained=pretrained,
    )
    toy = Toy(model, petl, resolved, head)
    if petl.needs_preparation:
        petl.prepare(model, toy.family, [toy.batch(seed=s, size=2) for s in range(2)], loss_of)
    return toy


def new_parameters(variant: str, family: str) -> list[nn.Parameter]:
    resolved = resolved_tiny(family)
    model = build(resolved, make_head(answer_of(family)))
    found = variants.get(variant).configure({})
    found.convert(model, resolved.family)
    return found.new_parameters(model, resolved.family)


def refusal(variant: str, method: str, family: str) -> str | None:
    """What the message says of a pair that does not go together; None where it does."""
    kind = variants.get(variant)
    petl = get_method(method)
    if petl.needs_projections and not kind.keeps_projections:
        return petl.needs_projections
    if not petl.backward_through_backbone and new_parameters(variant, family):
        return "would never train"
    if method == "lora" and not attentions(variant, family):
        return "left no attention projections to adapt"
    return None


def attentions(variant: str, family: str) -> list[AttentionSite]:
    resolved = resolved_tiny(family)
    model = build(resolved, make_head(answer_of(family)))
    variants.get(variant).configure({}).convert(model, resolved.family)
    return list(resolved.family.attention_sites(model))


@pytest.mark.parametrize(("variant", "method"), PAIRS)
def test_a_pair_trains_a_step_or_is_refused_with_the_reason(variant: str, method: str) -> None:
    family = family_of(variant, method)
    reason = refusal(variant, method, family)
    if reason is not None:
        with pytest.raises(IncompatibleError, match=reason) as refused:
            arm(variant, method, family)
        assert method in str(refused.value)
        return
    toy = arm(variant, method, family)
    before = {name: tensor.clone() for name, tensor in trained_state(toy.model).items()}
    (loss,) = train(toy, steps=1)
    assert torch.isfinite(torch.tensor(loss))
    assert any(
        not torch.equal(tensor, before[name]) for name, tensor in trained_state(toy.model).items()
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "pair",
    [("gqa", "lora"), ("shared", "lora"), ("cla", "lora"), ("shared", "read"), ("cla", "read")],
)
def test_the_pairs_that_were_asked_for_train(pair: tuple[str, str], family: str) -> None:
    toy = arm(*pair, family)
    losses = train(toy, steps=30)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_passes_over_projections_that_a_variant_does_without(family: str) -> None:
    counts = [
        count_arm(
            resolved_tiny(family),
            make_head(answer_of(family)),
            Arm(
                backbone=tiny_choice(family),
                attention=AttentionChoice(name="shared", options=options),
                method="lora",
                architecture={"rank": 4},
            ),
        ).method
        for options in ({"span": []}, {"span": "0-1", "drop_query": False}, {"span": "0-1"})
    ]
    query = 4 * (32 + 32)
    assert counts[0] - counts[2] == query
    assert counts[0] == counts[1]


def test_lora_says_where_a_variant_left_none_of_its_targets() -> None:
    with pytest.raises(IncompatibleError, match=r"has no projection of \['v'\] of its own"):
        check_arm(
            resolved_tiny("bert"),
            make_head("classification"),
            Arm(
                backbone=tiny_choice("bert"),
                attention=AttentionChoice(name="skv"),
                method="lora",
                architecture={"targets": ["v"]},
            ),
        )


@pytest.mark.parametrize(("length", "tokens"), [(200, 88), (200, None), (128, 1)])
def test_a_prompt_that_leaves_no_position_is_what_has_to_be_shorter(
    length: int, tokens: int | None
) -> None:
    arm = Arm(backbone=tiny_choice("bert"), method="prompt", architecture={"length": length})
    says = rf"the {length} positions of prompt leave none of the backbone's 128 .*; use fewer"
    with pytest.raises(IncompatibleError, match=says):
        check_arm(resolved_tiny("bert"), make_head("classification"), arm, max_length=tokens)


def scratch_names() -> list[str]:
    return [name for name in variants.names() if variants.get(name).start == "scratch"]


def test_there_are_variants_of_both_kinds() -> None:
    assert "mhe-add" in scratch_names()
    assert "gqa" not in scratch_names()


@pytest.mark.parametrize("variant", scratch_names())
def test_a_variant_from_scratch_on_a_checkpoint_wants_a_pretrain_stage_or_random_weights(
    variant: str,
) -> None:
    resolved = resolve(HUB)
    head = Head("classification", 2)
    arm = Arm(backbone=HUB, attention=AttentionChoice(name=variant), method="full")
    shape = BackboneChoice(name="bert-base", config={}, tokenizer="bytes")
    with pytest.raises(
        IncompatibleError,
        match=rf"attention {variant} starts from scratch.*pretrain: .*backbones: \[{{name: bert-base, config: {{}}}}\]",
    ):
        check_arm(resolved, head, arm)
    check_arm(resolved, head, arm, pretrained=True)
    check_arm(resolved, head, arm.model_copy(update={"pretrain": "0" * 16}))
    assert count_arm(resolved, head, arm, pretrained=True).trainable > 0
    check_arm(resolve(shape), head, arm.model_copy(update={"backbone": shape}))


def test_what_goes_over_a_variant_from_scratch_starts_from_scratch() -> None:
    resolved = resolve(HUB)
    head = Head("classification", 2)
    over = AttentionChoice(name="shared", options={"over": {"name": "mhe-add"}})
    with pytest.raises(IncompatibleError, match="attention shared starts from scratch"):
        check_arm(resolved, head, Arm(backbone=resolved.choice, attention=over, method="full"))


class Scaled(Variant[Any]):
    """Adds one parameter to a backbone: a factor on every query."""

    name = "scaled"
    description = source = "a test's"

    def convert(self, model: Any, family: Family) -> None:
        for site in family.attention_sites(model):
            site.module.get_submodule(site.q).register_module("factor", Factor())
            site.module.get_submodule(site.q).register_forward_hook(
                lambda module, _args, output: module.factor(output)
            )

    def new_parameters(self, model: Any, family: Family) -> list[nn.Parameter]:
        return [factor_of(site) for site in family.attention_sites(model)]


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def factor_of(site: AttentionSite) -> nn.Parameter:
    factor: Any = site.module.get_submodule(f"{site.q}.factor")
    weight: nn.Parameter = factor.weight
    return weight


@pytest.fixture
def _scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms.variants, "get", lambda name: Scaled)


@pytest.mark.usefixtures("_scaled")
@pytest.mark.parametrize("method", ["lora", "bitfit", "adapter", "prompt", "full", "peft:ia3"])
def test_what_a_variant_adds_trains_with_every_method_that_goes_back_through_the_backbone(
    method: str,
) -> None:
    toy = arm("scaled", method, "t5")
    added = [name for name in trained_state(toy.model) if name.endswith("factor.weight")]
    assert len(added) == 6
    before = {name: trained_state(toy.model)[name].clone() for name in added}
    train(toy, steps=2)
    assert all(not torch.equal(trained_state(toy.model)[name], before[name]) for name in added)


@pytest.mark.parametrize(
    ("variant", "method"),
    [
        ("gated", "lora"),
        ("gated", "peft:lora"),
        ("gated", "peft:boft"),  # which peft builds on the processor, and not on the meta device
        ("wgqa", "peft:ia3"),
    ],
)
def test_what_a_variant_adds_is_counted_as_it_trains(variant: str, method: str) -> None:
    arm = Arm(backbone=tiny_choice("bert"), attention=AttentionChoice(name=variant), method=method)
    resolved = resolved_tiny("bert")
    head = make_head("classification")
    model, _ = build_arm(resolved, head, arm)
    assert count_arm(resolved, head, arm) == arms.count(model, arms.task_head(model, resolved))


@pytest.mark.usefixtures("_scaled")
def test_read_refuses_what_it_could_not_train_unless_a_pretrain_stage_has_trained_it() -> None:
    with pytest.raises(
        IncompatibleError,
        match=r"read does not go with attention scaled.*without a backward pass.*pretrain: ",
    ):
        arm("scaled", "read", "t5")
    toy = arm("scaled", "read", "t5", pretrained=True)
    assert not any(name.endswith("factor.weight") for name in trained_state(toy.model))
