"""Layers that take from one another: exactness, gradients, caches, gradient checkpointing and ZeRO-3."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from suite.attention import variants
from suite.attention._cache import cache_bytes
from suite.attention.base import Variant
from suite.backbones.base import Absent, AttentionSite, Family
from suite.backbones.loading import ResolvedBackbone, build, resolve
from suite.config.sweep import BackboneChoice
from suite.errors import ConfigError, IncompatibleError, UnknownNameError
from tests.decoding import both_ways, check_beams
from tests.tiny import FAMILIES, tiny_choice
from tests.toy import Answer, Batch, disturb, logits_of, loss_of, make_batch, make_head

DEPTH = 4
SHARED: dict[str, Any] = {"span": "1-3"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("shared", SHARED),
    ("shared", {**SHARED, "anchor": "previous"}),
    ("shared", {**SHARED, "drop_query": False}),
    ("shared", {**SHARED, "over": {"name": "gqa", "options": {"sites": "all"}}}),
    ("cla", {}),
    ("cla", {"factor": 3}),
    ("cla", {"over": "mqa"}),
    ("shared", {**SHARED, "over": "mhe-add"}),
    ("shared", {**SHARED, "over": "sha"}),
    ("shared", {**SHARED, "over": "wgqa"}),
    ("cla", {"over": "mhe-mul"}),
    ("cla", {"over": "skv"}),
    ("cla", {"over": "col-wgqa"}),
]
every_case = pytest.mark.parametrize(
    ("name", "options"),
    CASES,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
some_cases = pytest.mark.parametrize(
    ("name", "options"),
    [CASES[i] for i in (1, 3, 5, 7)],
    ids=["previous", "over-gqa", "cla-3", "over-mhe"],
)
every_family = pytest.mark.parametrize("family", FAMILIES)
every_decoder = pytest.mark.parametrize("family", [name for name in FAMILIES if name != "bert"])


@functools.cache
def resolved_deep(family: str, dropout: float, depth: int) -> ResolvedBackbone:
    return resolve(deep_choice(family, dropout=dropout, depth=depth))


def deep_choice(family: str, *, dropout: float = 0.0, depth: int = DEPTH) -> BackboneChoice:
    sizes = {"t5": ("num_layers", "num_decoder_layers"), "gpt2": ("n_layer",)}.get(
        family, ("num_hidden_layers",)
    )
    return tiny_choice(family, dropout=dropout, **dict.fromkeys(sizes, depth))


def answer_of(family: str) -> Answer:
    return "classification" if family == "bert" else "text"


def base(family: str, *, dropout: float = 0.0, depth: int = DEPTH) -> tuple[Any, Family]:
    """A backbone of four blocks whose attention is far from uniform, the same at every call."""
    torch.manual_seed(0)
    resolved = resolved_deep(family, dropout, depth)
    model = build(resolved, make_head(answer_of(family)))
    disturb(model, scale=0.2)
    return model.eval(), resolved.family


def converted(
    name: str, options: dict[str, Any], family: str, **how: Any
) -> tuple[Any, Family, Variant[Any]]:
    model, found = base(family, **how)
    variant = variants.get(name).configure(options)
    variant.convert(model, found)
    return model, found, variant


def batch_of(family: Family, *, size: int = 4) -> Batch:
    return make_batch(family, make_head(answer_of(family.name)), seed=0, size=size)


def sites_of(model: Any, family: Family) -> list[AttentionSite]:
    """The self-attentions that share by default."""
    role = "encoder" if family.kind == "encoder" else "decoder"
    return [
        site for site in family.attention_sites(model) if (site.role, site.kind) == (role, "self")
    ]


# ---- the function ------------------------------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize(
    ("name", "options"),
    [("shared", {"span": []}), ("shared", {"span": "2-2"}), ("cla", {"factor": 1})],
    ids=["empty", "one", "factor-1"],
)
def test_sharing_among_no_layers_is_the_base_model_bit_for_bit(
    name: str, options: dict[str, Any], family: str
) -> None:
    model, found, _ = converted(name, options, family)
    assert torch.equal(
        logits_of(model, batch_of(found)), logits_of(base(family)[0], batch_of(found))
    )


@every_family
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shared", {"span": "1-2"}),
        ("shared", {"span": "2-2", "anchor": "previous"}),
        ("cla", {"factor": 3}),
    ],
)
def test_between_identical_layers_with_the_same_input_sharing_is_exact(
    name: str, options: dict[str, Any], family: str
) -> None:
    plain, found = base(family, depth=3)
    twins(plain, found, giver=0 if name == "cla" else 1)
    variant = variants.get(name).configure(options)
    different = copy.deepcopy(plain)
    for site in sites_of(different, found)[2:]:  # the twins' likeness is what makes it exact
        nn.init.normal_(site.module.get_submodule(site.q if name == "shared" else site.k).weight)  # type: ignore[arg-type]
    for model, exact in ((plain, True), (different, False)):
        expected = logits_of(model, batch_of(found))
        variant.convert(model, found)
        assert torch.allclose(logits_of(model, batch_of(found)), expected, atol=1e-5) == exact


def twins(model: Any, family: Family, *, giver: int) -> None:
    """Make all layers after the giver copies of it, and let none up to the last add anything to the stream before the last one."""
    stack = family.stacks(model)[-1]
    with torch.no_grad():
        for _, norm in family.norms(model):
            norm.weight.fill_(1.0)  # type: ignore[operator]
            if getattr(norm, "bias", None) is not None:
                norm.bias.zero_()  # type: ignore[operator]
        for layer in range(giver + 1, len(stack.blocks)):
            own = {
                name: w
                for name, w in stack.blocks[giver].state_dict().items()
                if "relative_attention_bias" not in name
            }
            stack.blocks[layer].load_state_dict(own)
        for sublayer in family.sublayers(model):
            if sublayer.role == stack.role and sublayer.layer < len(stack.blocks) - 1:
                for parameter in sublayer.output.parameters():
                    parameter.zero_()


@every_family
def test_sharing_changes_other_models(family: str) -> None:
    plain, found = base(family)
    expected = logits_of(plain, batch_of(found))
    for name, options in CASES:
        model, _, _ = converted(name, options, family)
        assert not torch.allclose(logits_of(model, batch_of(found)), expected, atol=1e-2), (
            name,
            options,
        )


@every_family
def test_what_is_shared_are_probabilities_of_all_heads_that_respect_the_mask(family: str) -> None:
    model, found, _ = converted("shared", SHARED, family)
    stack = found.stacks(model)[-1]
    seen: list[Tensor] = []
    for block in stack.blocks:
        block.register_forward_pre_hook(
            lambda _m, _a, kwargs: (
                seen.append(kwargs["from_layer"]) if "from_layer" in kwargs else None
            ),
            with_kwargs=True,
        )
    batch = batch_of(found)
    logits_of(model, batch)
    assert len(seen) == 2 and seen[0] is seen[1]
    (rows, heads, n, m) = seen[0].shape
    assert (rows, heads, n) == (4, 4, m)
    assert torch.allclose(seen[0].sum(-1), torch.ones(rows, heads, n), atol=1e-6)
    if stack.role == "decoder":
        assert not seen[0].triu(1).any()
    if family != "t5":  # whose decoder has no padding here
        padding = batch["attention_mask"] == 0
        assert padding.any() and not seen[0].transpose(1, 3)[padding].any()


@every_family
@pytest.mark.parametrize("anchor", ["first", "previous"])
def test_the_gradient_reaches_the_anchors_query_and_key_through_the_sharing_layers(
    anchor: str, family: str
) -> None:
    model, found, variant = converted("shared", {"span": "2-3", "anchor": anchor}, family)
    sites = sites_of(model, found)
    giver = sites[2 if anchor == "first" else 1]
    assert set(variant.taken_from(DEPTH).values()) == {giver.layer}  # type: ignore[attr-defined]
    output = giver.owner.get_submodule(giver.o)
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.zero_()  # so that the anchor's own output tells nothing about its queries and keys
    loss_of(model.train(), batch_of(found)).backward()
    for name in (giver.q, giver.k):
        weight = giver.module.get_submodule(name).weight
        width = weight.shape[0] if not giver.fused else 32
        assert (
            weight.grad is not None
            and (weight.grad[:, : 2 * width] if giver.fused else weight.grad).abs().max() > 1e-6
        )  # type: ignore[union-attr, index, operator]


@every_family
def test_sharing_layers_lose_exactly_what_they_do_without(family: str) -> None:
    plain, found = base(family)
    before = plain.num_parameters()
    site = sites_of(plain, found)[0]
    bias = family in ("bert", "gpt2")
    query, key = (32 * heads * 8 + bias * heads * 8 for heads in (site.heads, site.kv_heads))
    for name, options, lost in (
        ("shared", SHARED, 2 * (query + key)),
        ("shared", {**SHARED, "drop_query": False}, 2 * key),
        ("shared", {**SHARED, "anchor": "previous"}, 3 * (query + key)),
        ("cla", {}, 2 * 2 * key),
        ("cla", {"factor": 3}, 2 * 2 * key),
    ):
        model, _, _ = converted(name, options, family)
        assert before - model.num_parameters() == lost, (name, options)
        assert any(isinstance(module, Absent) for module in model.modules())


def test_an_encoder_of_an_encoder_decoder_can_share() -> None:
    model, found, variant = converted("shared", {**SHARED, "site": "encoder-self"}, "t5")
    absent = {
        site.site
        for site in found.attention_sites(model)
        if isinstance(site.module.get_submodule(site.k), Absent)
    }
    assert absent == {"encoder-self"}
    assert {
        variant.cached_floats(site, found)
        for site in found.attention_sites(model)
        if site.role == "decoder"
    } == {2 * 4 * 8}
    loss_of(model.train(), batch_of(found)).backward()


@every_case
def test_every_weight_that_is_left_is_used(name: str, options: dict[str, Any]) -> None:
    model, found, _ = converted(name, options, "llama")
    loss_of(model.train(), batch_of(found)).backward()
    kept = {"q_proj"} if options.get("drop_query") is False else set()  # as the official code does
    unused = {place for place, weight in model.named_parameters() if weight.grad is None}
    assert {place.split(".")[-2] for place in unused} <= kept, unused


# ---- decoding ----------------------------------------------------------------------------------------------------------


@every_case
@every_decoder
def test_decoding_token_by_token_gives_the_logits_of_one_pass(
    name: str, options: dict[str, Any], family: str
) -> None:
    model, _, _ = converted(name, options, family)
    stepwise, whole = both_ways(model, family)
    assert torch.allclose(
        stepwise, whole, atol=2e-5
    )  # other shapes, other order of sums, over four layers with large weights


@some_cases
@every_decoder
def test_beams_carry_their_own_caches(name: str, options: dict[str, Any], family: str) -> None:
    model, _, _ = converted(name, options, family)
    disturb(model, seed=3, scale=0.3)  # once more: now different sources get different answers
    check_beams(model, family)


@every_case
@every_decoder
def test_the_cache_holds_what_the_formula_says(
    name: str, options: dict[str, Any], family: str
) -> None:
    model, found, variant = converted(name, options, family)
    batch = batch_of(found)
    rows, tokens = batch["input_ids"].shape
    steps = {"decoder_input_ids": batch["input_ids"][:, :5]} if family == "t5" else {}
    output = model(input_ids=batch["input_ids"], use_cache=True, **steps)
    plain, _ = base(family)
    expected = 0
    for site in found.attention_sites(plain):
        if site.role == "decoder":
            length = 5 if family == "t5" and site.kind == "self" else tokens
            expected += 4 * rows * length * variant.cached_floats(site, found)
    assert cache_bytes(output.past_key_values) == expected


def test_a_cache_that_was_filled_by_another_model_is_not_thrown_away() -> None:
    plain, found = base("llama")
    ids = batch_of(found)["input_ids"]
    filled = plain(input_ids=ids, use_cache=True).past_key_values
    model, _, _ = converted("shared", SHARED, "llama")
    with pytest.raises(IncompatibleError, match="came with keys and values in layer 2"):
        model(input_ids=ids[:, :1], past_key_values=filled)


def test_grouped_and_shared_savings_multiply() -> None:
    plain, found = base("gpt2")
    variant = variants.get("shared").configure(
        {**SHARED, "over": {"name": "gqa", "options": {"kv_heads": 1}}}
    )
    assert [variant.cached_floats(site, found) for site in sites_of(plain, found)] == [16, 16, 8, 8]


# ---- training ----------------------------------------------------------------------------------------------------------


@some_cases
@every_family
def test_gradient_checkpointing_gives_the_same_gradients_with_dropout(
    name: str, options: dict[str, Any], family: str
) -> None:
    found: list[dict[str, Tensor]] = []
    for checkpointed in (False, True):
        model, kind, _ = converted(name, options, family, dropout=0.1)
        if checkpointed:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        torch.manual_seed(5)
        loss_of(model.train(), batch_of(kind)).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    for name in plain:
        assert torch.allclose(plain[name], recomputed[name], atol=1e-6), name


@every_family
def test_every_sharing_layer_drops_out_probabilities_of_its_own(family: str) -> None:
    model, found = base(family, dropout=0.5)
    twins(model, found, giver=1)
    variants.get("shared").configure(SHARED).convert(model, found)
    attended: list[Tensor] = []
    for site in sites_of(model, found)[2:]:
        site.owner.get_submodule(site.o).register_forward_pre_hook(
            lambda _m, args: attended.append(args[0])
        )
    model(**batch_of(found))
    assert torch.allclose(attended[0], attended[1], atol=1e-6)  # equal values of an equal stream
    model.train()(**batch_of(found))
    assert not torch.allclose(attended[2], attended[3], atol=1e-2)


@pytest.mark.parametrize("name", ["shared", "cla"])
def test_a_copy_of_a_model_shares_among_its_own_layers(name: str) -> None:
    model, found, _ = converted(name, {}, "llama")
    twin = copy.deepcopy(model)
    for made in (model, twin):
        stack: Any = found.stacks(made)[0].module
        takers = [block for block in found.stacks(made)[0].blocks if hasattr(block, "taken_from")]
        assert takers and all(block.exchange is stack.exchange for block in takers)
    first, second = (found.stacks(made)[0].module.exchange for made in (model, twin))  # type: ignore[union-attr]
    assert first is not second
    disturb(twin, scale=0.2)
    batch = batch_of(found)
    expected = logits_of(model, batch)
    assert not torch.equal(logits_of(twin, batch), expected)
    assert torch.equal(logits_of(model, batch), expected)


@pytest.mark.parametrize("name", ["shared", "cla"])
def test_nothing_shared_stays_alive_after_a_forward_pass_even_a_failed_one(name: str) -> None:
    model, found, _ = converted(name, {}, "gpt2")
    stack = found.stacks(model)[0]
    logits_of(model, batch_of(found))
    exchange: Any = stack.module.exchange
    assert not exchange.given and not exchange.is_open
    stack.blocks[-1].register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        logits_of(model, batch_of(found))
    assert not exchange.given and not exchange.is_open


@pytest.mark.parametrize("name", ["shared", "cla"])
def test_a_layer_that_is_given_nothing_says_so(name: str) -> None:
    model, found, _ = converted(name, {}, "llama")
    for site in sites_of(model, found):
        vars(site.module).pop("gives", None)
    with pytest.raises(AssertionError, match=r"no layer gave the (probabilities|key_value) that"):
        logits_of(model, batch_of(found))


# ---- options -----------------------------------------------------------------------------------------------------------


def test_the_default_span_is_the_last_quarter_and_at_least_two_layers() -> None:
    shared: Any = variants.get("shared").configure({})
    assert shared.taken_from(32) == dict.fromkeys(range(25, 32), 24)
    assert shared.taken_from(6) == {5: 4}
    assert shared.taken_from(2) == {1: 0}
    assert shared.taken_from(1) == {}


def test_spans_are_written_as_text_or_as_two_numbers() -> None:
    for span in ("23-30", "23 - 30", [23, 30]):
        shared: Any = variants.get("shared").configure({"span": span})
        assert shared.taken_from(32) == dict.fromkeys(range(24, 31), 23)
        assert shared.config.model_dump(mode="json")["span"] == [23, 30]


def test_the_last_run_is_shorter_where_the_factor_does_not_divide_the_layers() -> None:
    cla: Any = variants.get("cla").configure({"factor": 3})
    taken_from = cla.taken_from(20)
    assert 20 - len(taken_from) == 7
    assert taken_from[17] == 15 and taken_from[19] == 18


MISTAKES = [
    pytest.param("shared", {"span": "3-1"}, "3-1", id="backwards"),
    pytest.param("shared", {"span": "2-4"}, "set options.span within 0-3", id="outside"),
    pytest.param(
        "shared",
        {"span": "0-2", "anchor": "previous"},
        "nothing precedes layer 0",
        id="nothing-before",
    ),
    pytest.param("shared", {"span": "last"}, "expected first-last, such as 23-30", id="no-span"),
    pytest.param("shared", {"span": [1, 2, 3]}, "expected two layer numbers", id="three"),
    pytest.param("shared", {"span": [-2, -1]}, "greater than or equal to 0", id="negative"),
    pytest.param("shared", {"site": "encoder-self"}, "do not exist in a llama backbone", id="site"),
    pytest.param(
        "shared", {"over": "cla"}, "both let layers take from one another", id="shared-over-cla"
    ),
    pytest.param(
        "cla", {"over": "shared"}, "both let layers take from one another", id="cla-over-shared"
    ),
    pytest.param(
        "cla",
        {"over": {"name": "gqa", "options": {"kv_heads": 3}}},
        "do not split into 3 groups",
        id="inner-option",
    ),
    pytest.param("shared", {"over": "skv"}, "whose values are its keys", id="values-are-keys"),
    pytest.param("shared", {"over": "el"}, "whose values are its keys", id="values-are-states"),
    pytest.param(
        "shared", {"over": "fnet"}, "works on bert, roberta, not on llama", id="inner-family"
    ),
    pytest.param("cla", {"factor": 0}, "greater than or equal to 1", id="factor"),
]


@pytest.mark.parametrize(("name", "options", "message"), MISTAKES)
def test_options_that_cannot_be_used_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        converted(name, options, "llama")


def test_an_unknown_variant_under_another_says_where_it_was_written() -> None:
    with pytest.raises(
        UnknownNameError, match=r"options of attention shared: over.*did you mean gqa"
    ):
        variants.get("shared").configure({"over": "gqaa"})


def test_an_implementation_without_probabilities_is_refused() -> None:
    model, found = base("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(
        IncompatibleError, match=r"flash_attention_2.*cannot give attention probabilities"
    ):
        variants.get("shared").configure({}).convert(model, found)
