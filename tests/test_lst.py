"""LST against its official code's numbers and against its construction written out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from suite.backbones.loading import Head, build, resolve
from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice
from suite.errors import DataError, IncompatibleError
from suite.petl import methods
from suite.petl._pruning import fixed_head, magnitude, prune_into_side, squared_gradients, top
from suite.petl.arm import count_arm
from suite.petl.base import head_parameters
from tests.decoding import both_ways, check_beams
from tests.tiny import tiny_choice
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

# width of the tiny backbones, of their side networks at reduction 2
D = 32
K = 16


def attached(family: str, answer: Any = "text", **architecture: Any) -> Any:
    model = build(resolved_tiny(family), make_head(answer))
    return attach_to(model, family, **architecture)


def attach_to(model: Any, family: str, **architecture: Any) -> Any:
    return lst(**architecture).attach(model, resolved_tiny(family).family)


def lst(**architecture: Any) -> Any:
    return methods.get("lst").configure(
        {"reduction": 2, "drop_every": 0, "init": "random", **architecture}
    )


def stack_of(model: Any, family: str, index: int = -1) -> Any:
    return resolved_tiny(family).family.stacks(model)[index]


@pytest.mark.parametrize(
    ("backbone", "architecture", "expected"),
    [
        ("t5-base", {}, 3_878_712),
        ("t5-large", {}, 9_057_328),
        ("t5-base", {"drop_every": 0}, 5_097_240),
        ("t5-base", {"layers": [1, 2, 3, 5, 6, 7, 9, 10, 11]}, 3_878_712),
        # 6 of 12 blocks at width 96: matrices 12 k², biases and norms 13 k a block; 7 down-projections, 12 gates, up-projection
        (
            "bert-base",
            {"drop_every": 2},
            6 * (12 * 96**2 + 13 * 96) + 7 * (768 * 96 + 96) + 12 + 96 * 768 + 768,
        ),
        (
            "gpt2",
            {"drop_every": 2},
            6 * (12 * 96**2 + 13 * 96) + 2 * 96 + 7 * (768 * 96 + 96) + 12 + 96 * 768 + 768,
        ),
    ],
)
def test_the_count_is_the_official_codes(
    backbone: str, architecture: dict[str, Any], expected: int
) -> None:
    head = Head("classification", 2) if backbone == "bert-base" else Head("text", 0)
    found = count_arm(
        resolve(BackboneChoice(name=backbone)),
        head,
        Arm(backbone=BackboneChoice(name=backbone), method="lst", architecture=architecture),
    )
    assert found.method == expected


@pytest.mark.parametrize(
    ("depth", "architecture", "kept"),
    [
        (12, {"drop_every": None}, (1, 2, 3, 5, 6, 7, 9, 10, 11)),
        (24, {"drop_every": None}, tuple(range(1, 24, 2))),
        (24, {"layers": [23]}, (23,)),
    ],
)
def test_kept_blocks_are_those_of_the_official_scripts(
    depth: int, architecture: dict[str, Any], kept: tuple[int, ...]
) -> None:
    resolved = resolve(tiny_choice("t5", num_layers=depth, num_decoder_layers=depth))
    model = lst(**architecture).attach(
        build(resolved, make_head("text"), meta=True), resolved.family
    )
    assert model.encoder.side.kept == model.decoder.side.kept == kept


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"layers": [2]}, r"layers \[2\].*from 0 to 1"),
        ({"layers": []}, "expected numbers"),
        ({"drop_every": 1}, "leaves none of the encoder's 2 blocks"),
        ({"reduction": 5}, "not divisible by the reduction factor 5"),
    ],
)
def test_impossible_side_networks_are_refused(architecture: dict[str, Any], message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        attached("t5", **architecture)


def test_gates_start_in_the_middle_and_mix_the_side_state_with_the_projected_state() -> None:
    side, phi, embedded = one_ladder()
    assert not side.alpha.any()
    entered = entries(side)
    output = side(embedded, phi, None, {"attention_mask": None})
    first = 0.5 * side.down[0](embedded) + 0.5 * side.down[1](phi[0])
    assert torch.allclose(entered[0], first, atol=1e-6)
    with torch.no_grad():
        side.alpha.copy_(torch.tensor([0.05, -0.02]))
    again = side(embedded, phi, None, {"attention_mask": None})
    gate = torch.sigmoid(torch.tensor(0.05 / 0.1))
    assert torch.allclose(
        entered[2], gate * side.down[0](embedded) + (1 - gate) * side.down[1](phi[0]), atol=1e-6
    )
    assert not torch.allclose(output, again)


def test_an_open_gate_keeps_the_backbones_states_out() -> None:
    side, phi, embedded = one_ladder()
    other = [torch.randn_like(state) for state in phi]
    assert not torch.allclose(
        side(embedded, phi, None, {"attention_mask": None}),
        side(embedded, other, None, {"attention_mask": None}),
    )
    with torch.no_grad():
        side.alpha.fill_(10.0)  # sigmoid(100) is 1 in fp32
    assert torch.equal(
        side(embedded, phi, None, {"attention_mask": None}),
        side(embedded, other, None, {"attention_mask": None}),
    )


@torch.no_grad()
def one_ladder() -> tuple[Any, list[Tensor], Tensor]:
    side = stack_of(attached("bert", "classification"), "bert").module.side.eval()
    return side, [torch.randn(2, 3, D) for _ in range(2)], torch.randn(2, 3, D)


def entries(side: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    for block in side.blocks:
        block.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    return seen


def test_the_side_decoder_attends_to_the_side_encoder_and_the_up_projection_feeds_the_head() -> (
    None
):
    model = attached("t5").eval()
    seen: dict[str, Any] = {}
    model.decoder.side.blocks[0].layer[1].EncDecAttention.k.register_forward_pre_hook(
        lambda _m, args: seen.update(keys=args[0])
    )
    model.encoder.side.dropout.register_forward_hook(
        lambda _m, _a, output: seen.update(encoder=output)
    )
    model.decoder.side.up.register_forward_hook(lambda _m, _a, output: seen.update(up=output))
    batch = make_batch(resolved_tiny("t5").family, make_head("text"), seed=0, size=4)
    logits = logits_of(model, batch)
    assert torch.equal(seen["keys"], seen["encoder"])
    scale = D**-0.5 if model.config.scale_decoder_outputs else 1.0
    assert torch.equal(logits, model.lm_head(seen["up"] * scale))
    assert model.config.scale_decoder_outputs  # t5 v1.0, as LST uses it


def test_side_positions_start_as_the_backbones_and_sit_in_the_first_side_block() -> None:
    resolved = resolve(tiny_choice("t5", num_layers=4, num_decoder_layers=4))
    model = lst(drop_every=4).attach(build(resolved, make_head("text")), resolved.family)
    for stack in (model.encoder, model.decoder):
        tables = {name: w for name, w in stack.side.blocks.named_parameters() if "relative" in name}
        assert list(tables) == ["0.layer.0.SelfAttention.relative_attention_bias.weight"]
        own = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        assert torch.equal(next(iter(tables.values())), own)
        assert next(iter(tables.values())).requires_grad and not own.requires_grad


def test_later_side_blocks_reuse_the_position_bias_of_the_first() -> None:
    model = attached("t5").eval()
    seen = []
    for block in model.encoder.side.blocks:
        block.layer[0].SelfAttention.register_forward_hook(
            lambda _m, _a, output: seen.append(output[1])
        )
    logits_of(model, make_batch(resolved_tiny("t5").family, make_head("text"), seed=0, size=4))
    assert len(seen) == 2 and seen[0].any()
    assert torch.equal(seen[0], seen[1])


def test_llamas_side_angles_are_those_of_its_narrow_heads() -> None:
    side: Any = stack_of(attached("llama"), "llama").module.side
    assert side.blocks[0].self_attn.head_dim == 4
    cos, _ = side.rotary(torch.zeros(1, 3, K), position_ids=torch.arange(3)[None])
    assert cos.shape == (1, 3, 4)


@pytest.mark.parametrize(("family", "answer"), CASES)
def test_the_backbone_runs_without_a_graph(family: str, answer: Any) -> None:
    model = attached(family, answer).train()
    seen: list[bool] = []
    for stack in resolved_tiny(family).family.stacks(model):
        for block in stack.blocks:
            hook = lambda _m, _a, output: seen.append(  # noqa: E731
                (output[0] if isinstance(output, tuple) else output).requires_grad
            )
            block.register_forward_hook(hook)
    loss_of(
        model, make_batch(resolved_tiny(family).family, make_head(answer), seed=0, size=4)
    ).backward()
    assert seen and not any(seen)
    assert all(
        parameter.grad is None
        for name, parameter in model.named_parameters()
        if ".side." not in name
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])
def test_decoding_token_by_token_gives_the_logits_of_one_pass(family: str, attention: str) -> None:
    model = build(resolved_tiny(family), make_head("text"))
    model.set_attn_implementation(attention)
    model = attach_to(model, family)
    disturb(model)
    stepwise, whole = both_ways(model.eval(), family)
    assert torch.allclose(stepwise, whole, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])
def test_beam_search_scores_are_those_of_the_sequences_it_returns(family: str) -> None:
    model = attached(family)
    disturb(model)
    check_beams(model.eval(), family)


def test_a_cache_that_cannot_grow_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="got a StaticCache, expected a DynamicCache"):
        attached("llama").generate(
            torch.full((1, 3), 20), max_new_tokens=3, cache_implementation="static"
        )


def test_pruning_carries_the_kept_coordinates_through_a_t5_block() -> None:
    model: Any = build(resolved_tiny("t5"), make_head("text"))
    block = model.encoder.block[0]
    attention = block.layer[0].SelfAttention
    forward = block.layer[1].DenseReluDense
    embedded, rows, stream, inner, last = (
        sorted(torch.randperm(n)[: n // 2].tolist()) for n in (D, D, D, 64, D)
    )
    with torch.no_grad():
        model.shared.weight[:, embedded] += 10
        for weight in (attention.q.weight, attention.k.weight, attention.v.weight):
            loud(weight, rows, embedded)
        loud(attention.o.weight, stream, rows)
        loud(forward.wi.weight, inner, stream)
        loud(forward.wo.weight, last, inner)
        for norm in (
            block.layer[0].layer_norm,
            block.layer[1].layer_norm,
            model.encoder.final_layer_norm,
        ):
            norm.weight.copy_(torch.randn(D))
    pruned: Any = attach_to(model, "t5", layers=[0], init="magnitude", walk="side")
    side = pruned.encoder.side
    narrow = side.blocks[0]
    for name in ("q", "k", "v"):
        assert torch.equal(
            getattr(narrow.layer[0].SelfAttention, name).weight,
            getattr(attention, name).weight[rows][:, embedded],
        )
    assert torch.equal(narrow.layer[0].SelfAttention.o.weight, attention.o.weight[stream][:, rows])
    assert torch.equal(
        narrow.layer[1].DenseReluDense.wi.weight, forward.wi.weight[inner][:, stream]
    )
    assert torch.equal(narrow.layer[1].DenseReluDense.wo.weight, forward.wo.weight[last][:, inner])
    assert torch.equal(
        narrow.layer[0].layer_norm.weight, block.layer[0].layer_norm.weight[embedded]
    )
    assert torch.equal(narrow.layer[1].layer_norm.weight, block.layer[1].layer_norm.weight[stream])
    assert torch.equal(side.norm.weight, model.encoder.final_layer_norm.weight[last])


def loud(weight: Tensor, rows: list[int], columns: list[int]) -> None:
    """Make `rows` win on `columns`; louder rows elsewhere must not be seen."""
    others = [c for c in range(weight.shape[1]) if c not in columns]
    wrong = [r for r in range(weight.shape[0]) if r not in rows]
    weight[torch.tensor(rows)[:, None], torch.tensor(columns)] += 10
    weight[torch.tensor(wrong)[:, None], torch.tensor(others)] += 100


@pytest.mark.parametrize("drop_every", [0, None])
def test_the_side_blocks_of_a_t5_start_as_an_independent_walk_of_the_official_code(
    drop_every: int | None,
) -> None:
    resolved = resolve(tiny_choice("t5", num_layers=4, num_decoder_layers=4))
    model: Any = build(resolved, make_head("text"))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    expected = official_walk(weights, {name: w.abs() for name, w in weights.items()}, depth=4)
    lst(drop_every=drop_every, init="magnitude").attach(model, resolved.family)
    compared = 0
    for role in ("encoder", "decoder"):
        side = getattr(model, role).side
        for layer, block in zip(side.kept, side.blocks, strict=True):
            for name, weight in block.named_parameters():
                if "relative_attention_bias" not in name:
                    assert torch.equal(weight, expected[f"{role}.block.{layer}.{name}"]), name
                    compared += 1
        final = f"{role}.final_layer_norm.weight"
        assert torch.equal(side.norm.weight, expected[final])
    assert compared == (84 if drop_every == 0 else 63)


def official_walk(
    weights: dict[str, Tensor], importance: dict[str, Tensor], *, depth: int
) -> dict[str, Tensor]:
    """One running set of kept indices over the names of a T5's matrices, as "fisher-v2" has it."""
    found: dict[str, Tensor] = {}
    kept = best_half(importance["shared.weight"].T)

    def together(names: list[str]) -> None:
        nonlocal kept
        product = torch.ones((), dtype=torch.float64)
        for name in names:
            product = product * importance[name][:, kept].double()
        rows = best_half(product)
        for name in names:
            found[name] = weights[name][:, kept][rows]
        kept = rows

    for role in ("encoder", "decoder"):
        kinds = ["SelfAttention"] if role == "encoder" else ["SelfAttention", "EncDecAttention"]
        for layer in range(depth):
            block = f"{role}.block.{layer}.layer"
            for number, kind in enumerate([*kinds, "DenseReluDense"]):
                norm = f"{block}.{number}.layer_norm.weight"
                found[norm] = weights[norm][kept]
                first, last = (["wi"], "wo") if kind == "DenseReluDense" else (["q", "k", "v"], "o")
                together([f"{block}.{number}.{kind}.{name}.weight" for name in first])
                together([f"{block}.{number}.{kind}.{last}.weight"])
        final = f"{role}.final_layer_norm.weight"
        found[final] = weights[final][kept]
    return found


def best_half(importance: Tensor) -> Tensor:
    sums = importance.double().sum(1)
    return sums.argsort()[len(sums) // 2 :].sort().values


def test_down_and_up_start_small_and_without_bias() -> None:
    model: Any = attached("t5")
    projections = [*model.encoder.side.down, *model.decoder.side.down, model.decoder.side.up]
    for projection in projections:
        assert not projection.bias.any()
        assert float(projection.weight.detach().std()) == pytest.approx(0.01, rel=0.25)


def test_the_walk_of_side_blocks_gives_cross_attention_what_the_side_encoder_kept() -> None:
    model: Any = build(resolved_tiny("t5"), make_head("text"))
    forward = model.encoder.block[1].layer[1].DenseReluDense
    cross = model.decoder.block[1].layer[1].EncDecAttention
    stream = sorted(torch.randperm(D)[:K].tolist())
    with torch.no_grad():
        forward.wo.weight[stream] += 10
        model.decoder.block[1].layer[0].SelfAttention.o.weight[:K] += 10
    narrow = (
        attach_to(model, "t5", layers=[1], init="magnitude", walk="side")
        .decoder.side.blocks[0]
        .layer[1]
        .EncDecAttention
    )
    own = list(range(K))
    rows = kept_rows(K, (cross.q.weight, own), (cross.k.weight, stream), (cross.v.weight, stream))
    assert torch.equal(narrow.q.weight, cross.q.weight[rows][:, own])
    assert torch.equal(narrow.k.weight, cross.k.weight[rows][:, stream])
    assert torch.equal(narrow.v.weight, cross.v.weight[rows][:, stream])


def test_pruning_follows_the_layouts_of_every_family() -> None:
    for family, answer in CASES[1:4]:
        model = attached(family, answer, layers=[1], init="magnitude", walk="side")
        stack = stack_of(model, family)
        memory = {"gpt2": gpt2_by_hand, "bert": bert_by_hand, "llama": llama_by_hand}[family]
        memory(model, stack.blocks[1], stack.module.side.blocks[0], stack.module.side)


def kept_rows(count: int, *pairs: tuple[Tensor, list[int]]) -> list[int]:
    """Rows with the largest product of L1 norms over given columns, one (matrix, columns) each."""
    score = torch.ones(pairs[0][0].shape[0], dtype=torch.float64)
    for matrix, columns in pairs:
        score = score * matrix[:, columns].abs().double().sum(1)
    return sorted(score.topk(count).indices.tolist())


def gpt2_by_hand(model: Any, block: Any, narrow: Any, side: Any) -> None:
    columns = sorted(model.transformer.wte.weight.abs().double().sum(0).topk(K).indices.tolist())
    q, k, v = block.attn.c_attn.weight.t().split(D)
    rows = kept_rows(K, (q, columns), (k, columns), (v, columns))
    expected = torch.cat([part[rows][:, columns] for part in (q, k, v)])
    assert torch.equal(narrow.attn.c_attn.weight.t(), expected)
    assert torch.equal(
        narrow.attn.c_attn.bias, torch.cat([part[rows] for part in block.attn.c_attn.bias.split(D)])
    )
    stream = kept_rows(K, (block.attn.c_proj.weight.t(), rows))
    assert torch.equal(narrow.attn.c_proj.weight.t(), block.attn.c_proj.weight.t()[stream][:, rows])
    assert torch.equal(narrow.ln_2.bias, block.ln_2.bias[stream])


def bert_by_hand(model: Any, block: Any, narrow: Any, side: Any) -> None:
    attention = block.attention.self
    columns = sorted(
        model.bert.embeddings.word_embeddings.weight.abs().double().sum(0).topk(K).indices.tolist()
    )
    rows = kept_rows(
        K, *((m.weight, columns) for m in (attention.query, attention.key, attention.value))
    )
    assert torch.equal(narrow.attention.self.key.weight, attention.key.weight[rows][:, columns])
    stream = kept_rows(K, (block.attention.output.dense.weight, rows))
    inner = kept_rows(32, (block.intermediate.dense.weight, stream))
    assert torch.equal(
        narrow.intermediate.dense.weight, block.intermediate.dense.weight[inner][:, stream]
    )
    assert torch.equal(
        narrow.output.dense.weight,
        block.output.dense.weight[kept_rows(K, (block.output.dense.weight, inner))][:, inner],
    )
    assert isinstance(side.norm, nn.Identity)


def llama_by_hand(model: Any, block: Any, narrow: Any, side: Any) -> None:
    attention = block.self_attn
    mlp = block.mlp
    columns = sorted(model.model.embed_tokens.weight.abs().double().sum(0).topk(K).indices.tolist())
    queries = kept_rows(16, (attention.q_proj.weight, columns))
    grouped = kept_rows(8, (attention.k_proj.weight, columns), (attention.v_proj.weight, columns))
    assert torch.equal(narrow.self_attn.v_proj.weight, attention.v_proj.weight[grouped][:, columns])
    stream = kept_rows(K, (attention.o_proj.weight, queries))
    assert torch.equal(narrow.self_attn.o_proj.weight, attention.o_proj.weight[stream][:, queries])
    inner = kept_rows(32, (mlp.gate_proj.weight, stream), (mlp.up_proj.weight, stream))
    assert torch.equal(narrow.mlp.up_proj.weight, mlp.up_proj.weight[inner][:, stream])


def test_fisher_importance_is_the_sum_of_squared_gradients() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    unused = nn.Parameter(torch.ones(1))
    found = squared_gradients(
        [weight, unused], ((weight * torch.tensor(x)).sum() for x in ([1.0, 2.0], [3.0, -1.0]))
    )
    assert torch.equal(found[weight], torch.tensor([10.0, 5.0]))
    assert not found[unused].any()
    assert weight.grad is None


@pytest.mark.parametrize(("family", "answer"), CASES[:4])
def test_fisher_pruning_is_by_single_examples_of_the_pretrained_models_loss(
    family: str, answer: Any
) -> None:
    plain: Any = build(resolved_tiny(family), make_head(answer)).eval()
    family_ = resolved_tiny(family).family
    head = make_head(answer)
    batches = [make_batch(family_, head, seed=s, size=3) for s in range(2)]
    model = attach_to(copy.deepcopy(plain), family, init="fisher")
    reference = attach_to(copy.deepcopy(plain), family, init="random")
    lst(init="fisher").prepare(model, family_, batches, loss_of)

    importance = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
    with fixed_head(plain, family_):
        for batch in batches:
            for i in range(3):
                plain.zero_grad()
                loss_of(plain, {key: value[i : i + 1] for key, value in batch.items()}).backward()
                for name, parameter in plain.named_parameters():
                    importance[name] += 0 if parameter.grad is None else parameter.grad.square()
    names = {parameter: name for name, parameter in reference.named_parameters()}
    prune_into_side(reference, family_, lambda parameter: importance[names[parameter]])
    found = stack_of(model, family).module.side.blocks
    expected = stack_of(reference, family).module.side.blocks
    assert all(
        torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True)
    )


@pytest.mark.parametrize(("family", "answer"), CASES[1:4])
def test_fisher_pruning_does_not_depend_on_what_the_head_drew(family: str, answer: Any) -> None:
    plain: Any = build(resolved_tiny(family), make_head(answer))
    family_ = resolved_tiny(family).family
    sides = []
    for seed in (1, 2):
        model = attach_to(copy.deepcopy(plain), family, init="fisher")
        # a head's vectors start alike for every seed
        head = [parameter for parameter in head_parameters(model, family_) if parameter.ndim > 1]
        with torch.no_grad():
            for parameter in head:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.manual_seed(seed)))
        before = [parameter.clone() for parameter in head]
        batches = [make_batch(family_, make_head(answer), seed=0, size=3)]
        lst(init="fisher").prepare(model, family_, batches, loss_of)
        assert all(map(torch.equal, head, before)), "the head is as it was"
        sides.append(stack_of(model, family).module.side.blocks)
    assert all(map(torch.equal, sides[0].parameters(), sides[1].parameters()))


def test_preparation_leaves_everything_but_the_side_blocks_as_it_was() -> None:
    model = attached("t5", init="fisher").train()
    before = {
        name: (tensor.clone(), tensor.requires_grad) for name, tensor in model.named_parameters()
    }
    asked = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        asked.append(len(batch["input_ids"]))
        assert not model.training
        return loss_of(model, batch)

    batches = [
        make_batch(resolved_tiny("t5").family, make_head("text"), seed=0, size=4) for _ in range(2)
    ]
    lst(init="fisher", fisher_examples=5).prepare(model, resolved_tiny("t5").family, batches, loss)
    assert asked == [1] * 5
    assert model.training
    changed = {
        name
        for name, tensor in model.named_parameters()
        if not torch.equal(tensor, before[name][0])
    }
    assert changed and all(".side.blocks." in name for name in changed)
    assert all(
        tensor.requires_grad == before[name][1] and tensor.grad is None
        for name, tensor in model.named_parameters()
    )
    assert loss_of(model, batches[0]).requires_grad  # the side networks are back


def test_preparation_without_an_example_says_so() -> None:
    with pytest.raises(DataError, match="got no training example"):
        lst(init="fisher").prepare(
            attached("t5", init="fisher"), resolved_tiny("t5").family, [], loss_of
        )


def test_the_magnitude_start_depends_on_no_random_number() -> None:
    plain = build(resolved_tiny("t5"), make_head("text"))
    sides = [
        attach_to(copy.deepcopy(plain), "t5", init="magnitude").decoder.side.blocks
        for _ in range(2)
    ]
    assert all(
        torch.equal(a, b) for a, b in zip(sides[0].parameters(), sides[1].parameters(), strict=True)
    )
    toy = make_arm("lst", "t5", "text", architecture={"reduction": 2, "init": "magnitude"})
    before = copy.deepcopy(toy.model.state_dict())
    prune_into_side(toy.model, toy.family, magnitude)  # type: ignore[arg-type]
    assert all(torch.equal(tensor, before[name]) for name, tensor in toy.model.state_dict().items())


def test_top_keeps_the_largest_in_ascending_order() -> None:
    assert top(torch.tensor([3.0, 9.0, 1.0, 5.0]), 2).tolist() == [1, 3]
