"""The MHE paper's variants against their definitions, written out in plain torch, and against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from suite.attention import _surgery as surgery
from suite.attention._mhe import HeadEmbeddings
from suite.attention._mixers import Mixer
from suite.backbones.base import Absent, AttentionSite, Family
from suite.backbones.loading import Head, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.errors import BackboneError, IncompatibleError
from suite.petl.arm import build_arm, check_arm
from tests.attention import backbone, batch_of, converted
from tests.decoding import both_ways
from tests.tiny import FAMILIES
from tests.toy import disturb, logits_of, loss_of, make_head, resolved_tiny

PAPER = ("mha", "sha", "el", "skv", "mhe-add", "mhe-mul")
ONE_HEAD = ("sha", "mhe-add", "mhe-mul")
MIXERS = ("fnet", "linear")
HEADS = 4
HEAD_DIM = 8
every_family = pytest.mark.parametrize("family", FAMILIES)


def first_sites(model: Any, family: Family) -> list[AttentionSite]:
    """One site of every name."""
    return list(
        {site.site: site for site in reversed(list(family.attention_sites(model)))}.values()
    )


# ---- definitions -------------------------------------------------------------------------------------------------------


def heads_of(x: Tensor) -> Tensor:
    """(B, L, h·d) to (B, h, L, d)."""
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions with theta = 500,000, as Llama 3 has them; (B, h, L, d)."""
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[2])[:, None] * 500_000.0 ** (
        -torch.arange(half) / half
    )  # (L, d / 2)
    one = x[..., :half]
    two = x[..., half:]
    return torch.cat(
        [one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], dim=-1
    )


def defined(
    name: str, site: AttentionSite, x: Tensor, source: Tensor, *, rotates: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Q (of x), K and V (of the source) of all heads as the paper defines them, from the site's own weights: (B, 4, L, d) each."""
    maps: list[Any] = [site.module.get_submodule(n) for n in (site.q, site.k, site.v)]
    turn = rotated if rotates else lambda h: h
    if name in ONE_HEAD:
        q, k, v = (heads_of(m(part)) for m, part in zip(maps, (x, source, source), strict=True))
        q = turn(q)
        k = turn(k)
        if name == "sha":
            return tuple(part.repeat(1, HEADS, 1, 1) for part in (q, k, v))  # type: ignore[return-value]
        embeddings = site.module.heads  # type: ignore[union-attr]
        parts = zip((q, k, v), (embeddings.query, embeddings.key, embeddings.value), strict=True)  # type: ignore[union-attr]
        made = [
            [
                part[:, 0] + e[i] if name == "mhe-add" else part[:, 0] * (1 + e[i])
                for i in range(HEADS)
            ]
            for part, e in parts
        ]
        return tuple(torch.stack(heads, dim=1) for heads in made)  # type: ignore[return-value]
    slices = [source[..., i * HEAD_DIM : (i + 1) * HEAD_DIM] for i in range(HEADS)]
    shared = heads_of(maps[1](source)) if name == "skv" else torch.stack(slices, dim=1)
    shared = shared.repeat_interleave(
        HEADS // shared.shape[1], dim=1
    )  # the tiny Llama has two key heads
    return turn(heads_of(maps[0](x))), turn(shared), shared


def reference(name: str, site: AttentionSite, x: Tensor, source: Tensor, *, family: str) -> Tensor:
    """What the sublayer hands to its output projection, (B, L, 32)."""
    q, k, v = defined(name, site, x, source, rotates=family == "llama")
    scores = q @ k.transpose(-1, -2) * (1.0 if family == "t5" else HEAD_DIM**-0.5)  # (B, 4, L, L)
    return ((scores + bias_of(site, x.shape[1])).softmax(-1) @ v).transpose(1, 2).flatten(2)


def bias_of(site: AttentionSite, length: int) -> Tensor:
    """Causal mask and T5's position bias, (1, 1 or 4, L, L)."""
    module: Any = site.module
    bias = torch.zeros(1, 1, length, length)
    if site.role == "decoder" and site.kind == "self":
        bias = bias.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -1e9)
    return (
        bias + module.compute_bias(length, length)
        if getattr(module, "has_relative_attention_bias", False)
        else bias
    )


def seen(model: Any, site: AttentionSite, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What the sublayer's query, key and output maps got, in one forward pass."""
    caught: list[Tensor] = []
    maps = (
        site.module.get_submodule(site.q),
        site.module.get_submodule(site.k),
        site.owner.get_submodule(site.o),
    )
    hooks = [
        module.register_forward_pre_hook(lambda _m, args: caught.append(args[0])) for module in maps
    ]
    logits_of(model, inputs)
    for hook in hooks:
        hook.remove()
    return (
        caught if len(caught) == 3 else [caught[0], caught[1], caught[-1]]
    )  # Llama's values take the key map once more


@every_family
@pytest.mark.parametrize("name", [name for name in PAPER if name != "mha"])
def test_a_sublayer_computes_what_the_paper_defines(name: str, family: str) -> None:
    model, found, _ = converted(name, family)
    disturb(model, seed=3, scale=0.2)
    ids = torch.randint(10, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if family == "t5" else {})}
    for site in first_sites(model, found):
        x, source, mixed = seen(model, site, inputs)
        assert mixed.std() > 1e-2
        assert torch.allclose(mixed, reference(name, site, x, source, family=family), atol=1e-5)


@every_family
@pytest.mark.parametrize("name", ["mhe-add", "mhe-mul"])
def test_mhe_with_zero_embeddings_is_sha(name: str, family: str) -> None:
    sha, found, _ = converted("sha", family)
    model, _, _ = converted(name, family)
    model.load_state_dict(sha.state_dict(), strict=False)
    different = logits_of(model, batch_of(found))
    for module in model.modules():
        if isinstance(module, HeadEmbeddings):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
    expected = logits_of(sha, batch_of(found))
    assert torch.allclose(logits_of(model, batch_of(found)), expected, atol=1e-5)
    assert not torch.allclose(different, expected, atol=1e-5)


@every_family
def test_the_gradient_of_an_added_key_embedding_is_zero_and_of_a_scaling_one_is_not(
    family: str,
) -> None:
    norms = {}
    for name in ("mhe-add", "mhe-mul"):
        model, found, _ = converted(name, family)
        disturb(model, scale=0.2)
        loss_of(model.train(), batch_of(found)).backward()
        heads = [module for module in model.modules() if isinstance(module, HeadEmbeddings)]
        norms[name] = [
            max(float(getattr(h, part).grad.norm()) for h in heads)
            for part in ("query", "key", "value")
        ]
    query, key, value = norms["mhe-add"]
    assert key < 1e-5 < 1e-3 < min(query, value)  # 0 up to the rounding of fp32
    assert min(norms["mhe-mul"]) > 1e-3


# ---- folding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
@pytest.mark.parametrize("name", ["mhe-add", "mhe-mul"])
def test_folded_every_head_attends_to_the_one_that_is_cached_with_the_same_function(
    name: str, family: str
) -> None:
    model, found, variant = converted(name, family)
    disturb(model, scale=0.2)  # embeddings as large as what they act on
    batch = batch_of(found)
    before = logits_of(model, batch)
    variant.fold(model, found)
    heads_made: set[int] = set()
    for module in model.modules():
        if hasattr(module, "heads") and hasattr(module, "routed_implementation"):
            module.heads.register_forward_hook(  # type: ignore[operator]
                lambda _module, _given, made: heads_made.update(
                    (made[1].shape[1], made[2].shape[1])
                )
            )
    assert torch.allclose(logits_of(model, batch), before, atol=1e-4)
    # the added embedding of a key counts where scores are capped: Gemma 2 stays as it was
    is_capped = name == "mhe-add" and family == "gemma2"
    assert heads_made == {HEADS if is_capped else 1}
    if found.kind != "encoder":
        stepped, whole = both_ways(model, family)
        assert torch.allclose(stepped, whole, atol=1e-4)


@every_family
def test_new_maps_have_the_spread_of_those_they_replace_and_embeddings_that_of_berts(
    family: str,
) -> None:
    wide = {
        "t5": {"d_model": 512, "d_kv": 128},
        "bert": {"hidden_size": 512},
        "gpt2": {"n_embd": 512},
    }
    changes = wide.get(family, {"hidden_size": 512, "head_dim": 128})
    plain, found = backbone(family, **changes)
    model, _, _ = converted("mhe-mul", family, **changes)
    for old, new in zip(first_sites(plain, found), first_sites(model, found), strict=True):
        before = surgery.projections(old)
        after = surgery.projections(new)
        for one, other in ((before.q, after.q), (before.k, after.k), (before.v, after.v)):
            assert other.weight.shape == (128, 512)  # 65,536 draws
            assert spread(other.weight) == pytest.approx(spread(one.weight), rel=0.02)
    embeddings = [
        p for module in surgery.modules_in(model, HeadEmbeddings) for p in module.parameters()
    ]
    assert spread(torch.cat(embeddings)) == pytest.approx(0.02, rel=0.05)


def spread(x: Tensor | nn.Module) -> float:
    assert isinstance(x, Tensor)
    return float(x.detach().std())


@every_family
def test_mha_is_the_backbone_itself(family: str) -> None:
    plain, found = backbone(family)
    model, _, _ = converted("mha", family)
    assert torch.equal(logits_of(model, batch_of(found)), logits_of(plain, batch_of(found)))


@pytest.mark.parametrize("name", [name for name in PAPER if name != "mha"])
def test_only_the_sites_asked_for_change(name: str) -> None:
    model, found, variant = converted(name, "t5", {"sites": ["decoder-cross"]})
    plain, _ = backbone("t5")
    for new, old in zip(found.attention_sites(model), found.attention_sites(plain), strict=True):
        same = {n: p.shape for n, p in new.module.named_parameters()} == {
            n: p.shape for n, p in old.module.named_parameters()
        }
        assert same == (new.site != "decoder-cross")
        assert (variant.cached_floats(old, found) == 2 * HEADS * HEAD_DIM) == (
            old.site != "decoder-cross"
        )


def test_what_a_method_makes_of_the_key_map_holds_for_the_values_of_llamas_skv() -> None:
    torch.manual_seed(0)
    choice = AttentionChoice(name="skv")
    lora = {"rank": 4, "dropout": 0.0, "targets": ["k"]}
    resolved = resolved_tiny("llama")
    model, _ = build_arm(
        resolved,
        make_head("text"),
        Arm(backbone=resolved.choice, attention=choice, method="lora", architecture=lora),
    )
    disturb(model)
    site = next(resolved.family.attention_sites(model))  # type: ignore[arg-type]
    key, value = (site.module.get_submodule(name) for name in (site.k, site.v))
    x = torch.randn(2, 3, 32)
    assert isinstance(value, Absent)
    assert torch.equal(key(x), value(x))
    assert not torch.allclose(key(x), key.base_layer(x), atol=1e-3)  # type: ignore[operator,union-attr]


# ---- token mixers ------------------------------------------------------------------------------------------------------


def mixed_by(name: str) -> Mixer:
    """The first mixer of a converted BERT."""
    model, _, _ = converted(name, "bert")
    return next(module for module in model.modules() if isinstance(module, Mixer))


def mask_of(real: Tensor, kind: str) -> Tensor:
    """The mask that attentions get, (B, 1, L, L)."""
    wide = real[:, None, None, :].expand(-1, 1, real.shape[1], -1)
    return (
        wide
        if kind == "boolean"
        else torch.zeros(wide.shape).masked_fill(~wide, torch.finfo(torch.float32).min)
    )


def test_fnet_is_the_real_part_of_the_transform_over_tokens_and_features() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    waves = [
        torch.exp(-2j * torch.pi * torch.outer(torch.arange(n), torch.arange(n)) / n).to(
            torch.complex128
        )
        for n in (5, 6)
    ]
    expected = torch.einsum("mn,bnd,de->bme", waves[0], x.to(torch.complex128), waves[1]).real
    assert torch.allclose(mixed_by("fnet")(x.float())[0].double(), expected, atol=1e-5)


def test_linear_is_a_matrix_over_positions_and_one_over_features() -> None:
    mixer: Any = mixed_by("linear")
    disturb(mixer, scale=0.3)
    x = torch.randn(2, 5, 32)
    expected = torch.einsum("mn,bnd,ed->bme", mixer.sequence[:5, :5], x, mixer.hidden)
    assert torch.allclose(mixer(x)[0], expected, atol=1e-5)
    assert (mixer.sequence.shape, mixer.hidden.shape) == ((128, 128), (32, 32))


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_row_mixes_as_if_it_were_alone_however_far_its_batch_is_padded(
    name: str, kind: str
) -> None:
    mixer = mixed_by(name)
    disturb(mixer, scale=0.3)
    rows = [torch.randn(1, length, 32) for length in (7, 4, 2)]
    alone = [mixer(row)[0] for row in rows]
    for length in (7, 11):
        batch = torch.full((3, length, 32), 50.0)
        real = torch.zeros(3, length, dtype=torch.bool)
        for i, row in enumerate(rows):
            batch[i, : row.shape[1]] = row[0]
            real[i, : row.shape[1]] = True
        together = mixer(batch, mask_of(real, kind))[0]
        for i, expected in enumerate(alone):
            # sums of up to 224 terms of size 1
            assert torch.allclose(together[i, : expected.shape[1]], expected[0], atol=1e-4)
        assert torch.isfinite(together).all()


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixing_encoder_does_not_see_how_far_its_batch_is_padded(name: str) -> None:
    model, _, _ = converted(name, "bert")
    disturb(model, scale=0.2)
    ids = torch.randint(10, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    answers = []
    for length in (6, 9, 20):
        padded = torch.full((2, length), 44)
        padded[:, :6] = ids
        answers.append(
            logits_of(
                model,
                {
                    "input_ids": padded,
                    "attention_mask": (torch.arange(length)[None] < 6).long().expand(2, -1),
                },
            )
        )
    assert torch.allclose(answers[0], answers[1], atol=1e-5) and torch.allclose(
        answers[0], answers[2], atol=1e-5
    )


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("placement", ["block", "sublayer"])
def test_a_mixing_encoder_has_no_output_projection_and_takes_adapters_in_its_place(
    name: str, placement: str
) -> None:
    torch.manual_seed(0)
    resolved = resolved_tiny("bert")
    head = make_head("classification")
    settings = {"bottleneck": 8, "placement": placement}
    model, _ = build_arm(
        resolved,
        head,
        Arm(
            backbone=resolved.choice,
            attention=AttentionChoice(name=name),
            method="adapter",
            architecture=settings,
        ),
    )
    assert not [
        n
        for n, _ in model.named_parameters()
        if "attention.output.dense" in n and "adapter" not in n
    ]
    assert list(resolved.family.attention_sites(model)) == []  # type: ignore[arg-type]
    loss_of(model, batch_of(resolved.family)).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


# ---- refusals ----------------------------------------------------------------------------------------------------------


def check(name: str, choice: BackboneChoice, *, method: str = "full", **options: Any) -> None:
    resolved = resolve(choice)
    head = Head("classification", 2) if resolved.family.kind != "encoder-decoder" else Head("text")
    check_arm(
        resolved,
        head,
        Arm(
            backbone=resolved.choice,
            attention=AttentionChoice(name=name, options=options),
            method=method,
        ),
    )


@pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_token_mixer_on_a_causal_model_is_refused_with_the_reason(name: str, family: str) -> None:
    with pytest.raises(
        IncompatibleError,
        match=rf"variant {name} does not work on .* mixes all positions, later ones too.*works on bert",
    ):
        check(name, resolved_tiny(family).choice)


def test_el_needs_heads_that_fill_the_hidden_state() -> None:
    with pytest.raises(IncompatibleError, match="4 heads of 16 do not fill the hidden state of 32"):
        check(
            "el",
            resolved_tiny("t5").choice.model_copy(
                update={"config": {**(resolved_tiny("t5").choice.config or {}), "d_kv": 16}}
            ),
        )


def test_lora_says_that_a_token_mixer_leaves_it_nothing_to_adapt() -> None:
    with pytest.raises(IncompatibleError, match="no attention projections to adapt"):
        check("fnet", resolved_tiny("bert").choice, method="lora")


@pytest.mark.parametrize("name", ["gpt3", "wmt-transformer"])
def test_a_shape_without_published_weights_says_so_where_weights_are_asked_for(name: str) -> None:
    with pytest.raises(
        BackboneError, match=rf"{name} is a shape without published weights.*config: \{{\}}"
    ):
        resolve(BackboneChoice(name=name))
    assert resolve(BackboneChoice(name=name, config={})).origin == "random"
