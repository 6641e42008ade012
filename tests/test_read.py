"""READ against Algorithm 1, written out by hand beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention._route import probabilities
from suite.backbones.loading import Head, build, resolve
from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice
from suite.petl import methods
from suite.petl._frozen import Trace, traced
from suite.petl.arm import count_arm
from suite.petl.read import Correction, DepthNetwork, ReadConfig, cell_inputs
from tests.decoding import both_ways, check_beams
from tests.tiny import FAMILIES, tiny_choice
from tests.toy import (
    CASES,
    disturb,
    logits_of,
    loss_of,
    make_arm,
    make_batch,
    make_head,
    resolved_tiny,
)

T5_BASE_PARAMETERS = 247_577_856  # with the separate output head that READ's percentages count
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


def counted(backbone: BackboneChoice, **architecture: Any) -> int:
    return count_arm(
        resolve(backbone),
        Head("text", 0),
        Arm(backbone=backbone, method="read", architecture=architecture),
    ).method


def attached(model: PreTrainedModel, family: str, **architecture: Any) -> Any:
    return (
        methods.get("read")
        .configure({"hidden": 16, **architecture})
        .attach(model, resolved_tiny(family).family)
    )


@pytest.mark.parametrize(
    ("backbone", "architecture", "expected", "percent"),
    [
        ("t5-base", {}, 1_972_224, 0.80),
        ("t5-large", {}, 2_497_536, None),
        ("t5-base", {"recurrent": False}, 12 * 1_972_224, 9.6),
        (
            "t5-base",
            {"cell": "lstm", "hidden": 128},
            2 * (768 + 4 * (768 * 128 + 128**2 + 2 * 128) + 128 * 768 + 768),
            None,
        ),
        (
            "t5-base",
            {"cell": "rnn", "hidden": 128},
            2 * (768 + 768 * 128 + 128**2 + 2 * 128 + 128 * 768 + 768),
            None,
        ),
        ("bert-base", {}, 1_972_224 // 2, None),
    ],
)
def test_the_count_is_the_papers(
    backbone: str, architecture: dict[str, Any], expected: int, percent: float | None
) -> None:
    answer = Head("classification", 2) if backbone == "bert-base" else Head("text", 0)
    found = count_arm(
        resolve(BackboneChoice(name=backbone)),
        answer,
        Arm(backbone=BackboneChoice(name=backbone), method="read", architecture=architecture),
    )
    assert found.method == expected
    if percent is not None:
        assert 100 * expected / T5_BASE_PARAMETERS == pytest.approx(
            percent, abs=0.05
        )  # printed with one or two digits


def test_the_count_does_not_depend_on_the_depth() -> None:
    shallow, deep = (tiny_choice("t5", num_layers=n, num_decoder_layers=n) for n in (1, 6))
    assert counted(shallow) == counted(deep)
    assert counted(deep, recurrent=False) == 6 * counted(shallow, recurrent=False)


@pytest.mark.parametrize("merge", ["before", "after"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "answer"), CASES)
def test_without_a_correction_the_logits_are_the_backbones_bit_for_bit(
    family: str, answer: Any, attention: str, merge: str
) -> None:
    model = build(resolved_tiny(family), make_head(answer))
    model.set_attn_implementation(attention)
    batch = make_batch(resolved_tiny(family).family, make_head(answer), seed=0, size=4)
    expected = logits_of(model, batch)
    assert torch.equal(
        logits_of(attached(model, family, zero_init=True, merge=merge), batch), expected
    )


@pytest.mark.parametrize("merge", ["before", "after"])
@pytest.mark.parametrize(("family", "answer"), CASES)
def test_the_backbone_runs_without_a_graph(family: str, answer: Any, merge: str) -> None:
    toy = make_arm("read", family, answer, architecture={"hidden": 16, "merge": merge})
    stacks = toy.family.stacks(toy.model)  # type: ignore[arg-type]
    seen: list[bool] = []
    for stack in stacks:
        for module in stack.blocks.modules():
            module.register_forward_hook(
                lambda _m, _a, output: seen.append(any(t.requires_grad for t in tensors(output)))
            )
    loss = loss_of(toy.model.train(), toy.batch())
    assert seen and not any(seen)
    assert torch.is_grad_enabled()
    loss.backward()
    trained = {
        name for name, parameter in toy.model.named_parameters() if parameter.grad is not None
    }
    assert {name for name in trained if ".read." not in name} <= {
        "classifier.weight",
        "classifier.bias",
        "score.weight",
    }


def test_what_autograd_keeps_does_not_grow_with_the_width_of_the_feed_forward_maps() -> None:
    kept = []
    for d_ff in (64, 1024):
        resolved = resolve(tiny_choice("t5", d_ff=d_ff))
        model = attached(build(resolved, make_head("text")), "t5").train()
        elements = [0]

        def count(tensor: Tensor, elements: list[int] = elements) -> Tensor:
            elements[0] += 0 if isinstance(tensor, nn.Parameter) else tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss_of(model, make_batch(resolved.family, make_head("text"), seed=0, size=4))
        kept.append(elements[0])
    assert kept[0] == kept[1] > 0


@pytest.mark.parametrize("merge", ["before", "after"])
def test_t5_follows_algorithm_1(merge: str) -> None:
    toy = make_arm("read", "t5", "text", architecture={"hidden": 16, "merge": merge})
    disturb(toy.model)
    model: Any = toy.model.eval()
    batch = toy.batch()
    logits, traces = by_hand(model, batch, merge)
    assert torch.allclose(logits_of(model, batch), logits, atol=1e-5)
    assert traces[1].scores[0].shape == (8, 4, 2, 9)  # (B, H, n, m)


@torch.no_grad()
def by_hand(model: Any, batch: dict[str, Tensor], merge: str) -> tuple[Tensor, list[Trace]]:
    """Algorithm 1 in loops over layers with `nn.GRUCell`, on an untouched backbone with the same weights and eager attention."""
    plain: Any = build(resolved_tiny("t5"), make_head("text"))
    plain.load_state_dict(model.state_dict(), strict=False)
    plain.set_attn_implementation("eager")
    plain.eval()
    crosses = [block.layer[1].EncDecAttention for block in plain.decoder.block]
    with traced(plain.encoder.block) as encoder, traced(plain.decoder.block, crosses) as decoder:
        plain(**batch)
    c_e = climb(model.encoder.read.networks[0], encoder.states)
    inputs = [
        phi + sigma.mean(dim=1) @ c_e
        for phi, sigma in zip(decoder.states, decoder.scores, strict=True)
    ]
    correction = climb(model.decoder.read.networks[0], inputs)
    norm = plain.decoder.final_layer_norm
    phi = decoder.states[-1]
    final = norm(phi + correction) if merge == "before" else norm(phi) + correction
    scale = model.config.d_model**-0.5 if model.config.scale_decoder_outputs else 1.0
    return plain.lm_head(final * scale), [encoder, decoder]


def climb(network: DepthNetwork, inputs: list[Tensor]) -> Tensor:
    cell = as_cell(network)
    state = torch.zeros(inputs[0][..., 0].numel(), cell.hidden_size)
    for x in inputs:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * network.norm.weight
        state = cell(normed.flatten(0, 1), state)
    return network.out(state).view(inputs[0].shape)


def as_cell(network: DepthNetwork) -> nn.GRUCell:
    cell = nn.GRUCell(network.cell.input_size, network.cell.hidden_size)
    cell.load_state_dict(
        {name.removesuffix("_l0"): tensor for name, tensor in network.cell.state_dict().items()}
    )
    return cell


@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn"])
def test_one_layer_is_one_call_of_the_cell(cell: str) -> None:
    network = DepthNetwork(8, ReadConfig(cell=cell, hidden=4), **CPU)  # type: ignore[arg-type]
    x = torch.randn(1, 2, 3, 8)
    kinds: dict[str, Any] = {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "rnn": nn.RNNCell}
    single = kinds[cell](8, 4)
    single.load_state_dict(
        {name.removesuffix("_l0"): tensor for name, tensor in network.cell.state_dict().items()}
    )
    state = single(network.norm(x[0]).flatten(0, 1))
    state = state[0] if cell == "lstm" else state
    assert torch.allclose(network(x), network.out(state).view(2, 3, 8), atol=1e-6)


def test_the_mean_state_is_the_mean_over_layers_of_the_cells_outputs() -> None:
    network = DepthNetwork(8, ReadConfig(hidden=4, state="mean"), **CPU)
    x = torch.randn(3, 2, 5, 8)
    prefixes = DepthNetwork(8, ReadConfig(hidden=4), **CPU)
    prefixes.load_state_dict(network.state_dict())
    expected = torch.stack([prefixes(x[: n + 1]) for n in range(3)]).mean(
        0
    )  # the output map is affine, so means commute with it
    assert torch.allclose(network(x), expected, atol=1e-6)


def test_without_recurrence_every_layer_has_a_network_and_the_outputs_are_summed() -> None:
    stack = resolved_tiny("bert").family.stacks(
        build(resolved_tiny("bert"), make_head("classification"))
    )[0]
    correction = Correction(stack, ReadConfig(hidden=4, recurrent=False, output_scale=0.5))
    states = [torch.randn(2, 3, stack.width) for _ in stack.blocks]
    expected = sum(network(x[None]) for network, x in zip(correction.networks, states, strict=True))
    assert len(correction.networks) == len(stack.blocks) == 2
    assert torch.allclose(correction(states), 0.5 * expected, atol=1e-6)


def test_permuting_tokens_permutes_the_encoders_correction() -> None:
    network = DepthNetwork(8, ReadConfig(hidden=4), **CPU)
    x = torch.randn(3, 2, 5, 8)
    order = torch.randperm(5)
    assert torch.allclose(network(x[:, :, order]), network(x)[:, order], atol=1e-6)


def test_uniform_attention_adds_the_mean_of_the_encoders_correction() -> None:
    phi = torch.randn(2, 3, 8)
    c_e = torch.randn(2, 5, 8)
    (x,) = cell_inputs(Trace(states=[phi], scores=[torch.full((2, 4, 3, 5), 1 / 5)]), c_e)
    assert torch.allclose(x, phi + c_e.mean(1, keepdim=True), atol=1e-6)


def test_padded_keys_get_no_probability_and_their_correction_reaches_nothing() -> None:
    toy = make_arm("read", "t5", "text")
    disturb(toy.model)
    batch = toy.batch()
    model = toy.model
    wiring: Any = model.decoder.read_wiring  # type: ignore[union-attr]
    with traced(wiring.stack.blocks, wiring.crosses) as trace:
        expected = logits_of(model, batch)
    padded = batch["attention_mask"] == 0
    assert padded.any()
    for sigma in trace.scores:
        assert not sigma.transpose(1, 3)[padded].any()
    changed = torch.where(padded, torch.full_like(padded, 77, dtype=torch.long), batch["input_ids"])
    assert torch.equal(logits_of(model, {**batch, "input_ids": changed}), expected)


def test_probabilities_are_those_before_dropout_also_in_training() -> None:
    resolved = resolve(tiny_choice("t5", dropout=0.5))
    model = attached(build(resolved, make_head("text")), "t5").train()
    wiring: Any = model.decoder.read_wiring
    with traced(wiring.stack.blocks, wiring.crosses) as trace:
        loss_of(model, make_batch(resolved.family, make_head("text"), seed=0, size=4))
    for sigma in trace.scores:
        assert torch.allclose(sigma.sum(-1), torch.ones(sigma.shape[:-1]), atol=1e-6)


def test_probabilities_repeat_grouped_keys_and_read_both_kinds_of_mask() -> None:
    query = torch.randn(2, 4, 3, 8)
    key = torch.randn(2, 2, 5, 8)
    allowed = torch.tensor([True, True, False, True, False]).expand(2, 1, 3, 5)
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    bias = torch.randn(1, 4, 3, 5)
    found = probabilities(nn.Module(), query, key, allowed, scaling=0.5, position_bias=bias)
    assert torch.equal(
        found, probabilities(nn.Module(), query, key, additive, scaling=0.5, position_bias=bias)
    )
    for head in range(4):
        scores = 0.5 * query[:, head] @ key[:, head // 2].transpose(-1, -2) + bias[:, head]
        expected = scores.masked_fill(~allowed[:, 0], -torch.inf).softmax(-1)
        assert torch.allclose(found[:, head], expected, atol=1e-6)


@pytest.mark.parametrize("merge", ["before", "after"])
@pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])
def test_decoding_token_by_token_gives_the_logits_of_one_pass(family: str, merge: str) -> None:
    toy = make_arm("read", family, "text", architecture={"hidden": 16, "merge": merge})
    disturb(toy.model)
    stepwise, whole = both_ways(toy.model.eval(), family)
    assert torch.allclose(stepwise, whole, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])
def test_beam_search_scores_are_those_of_the_sequences_it_returns(family: str) -> None:
    toy = make_arm("read", family, "text")
    disturb(toy.model)
    check_beams(toy.model.eval(), family)


def tensors(output: Any) -> list[Tensor]:
    items = output if isinstance(output, tuple) else (output,)
    return [item for item in items if isinstance(item, Tensor)]


def test_every_family_is_tested_here() -> None:
    assert {family for family, _ in CASES} == set(FAMILIES)
