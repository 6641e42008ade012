"""What every PETL method must keep, on every family it claims; a new file in suite/petl/ is tested with no test edited."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from suite.backbones.heads import Head
from suite.backbones.loading import build, resolve
from suite.backbones.weights import cast_weights
from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice
from suite.errors import ConfigError, IncompatibleError, UnknownNameError
from suite.petl import get_method, methods
from suite.petl.arm import (
    build_arm,
    check_arm,
    count,
    count_arm,
    full_architecture,
    load_trained_state,
    task_head,
    trained_state,
)
from tests.tiny import served, tiny_choice
from tests.toy import (
    CASES,
    PAD,
    SMALL,
    Answer,
    Toy,
    disturb,
    logits_of,
    loss_of,
    make_arm,
    make_head,
    resolved_tiny,
    train,
)

PEFT = ("peft:ia3", "peft:prefix-tuning")
ARMS = [
    pytest.param(name, family, answer, id=f"{name}-{family}-{answer}")
    for name in (*methods.names(), *PEFT)
    for family, answer in CASES
    if family in served(get_method(name))
]
IDENTITY_AT_START = ("lora", "adapter", "bitfit")
every_arm = pytest.mark.parametrize(("method", "family", "answer"), ARMS)
every_text_arm = pytest.mark.parametrize(
    ("method", "family", "answer"), [arm for arm in ARMS if arm.values[2] == "text"]
)


@functools.cache
def shared(method: str, family: str, answer: Answer) -> Toy:
    """For tests that leave the arm as it is; what is trained is away from its start."""
    toy = make_arm(method, family, answer)
    disturb(toy.model)
    return toy


@every_arm
def test_every_trained_parameter_gets_a_gradient_and_changes_and_the_frozen_stay_bit_for_bit(
    method: str, family: str, answer: Answer
) -> None:
    toy = make_arm(method, family, answer)
    before = {name: tensor.clone() for name, tensor in everything(toy.model).items()}
    reached: set[str] = set()

    def look(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
            if parameter.grad is not None and parameter.grad.any():
                reached.add(name)

    # A map behind a zero one gets its first gradient in the second step.
    train(toy, steps=3, after_backward=look)
    trained = trained_state(toy.model).keys()
    changed = {
        name
        for name, tensor in everything(toy.model).items()
        if not torch.equal(tensor, before[name])
    }
    assert reached == trained, "by a gradient"
    assert changed == trained


@every_arm
def test_the_trained_count_is_the_methods_formula(method: str, family: str, answer: Answer) -> None:
    toy = make_arm(method, family, answer)
    backbone = build(toy.resolved, toy.head, meta=True)
    counted = count(toy.model, task_head(toy.model, toy.resolved))
    assert counted.method == toy.method.expected_trainable(backbone, toy.family) > 0
    assert (counted.head > 0) == (answer != "text")
    meta, _ = build_arm(
        toy.resolved,
        toy.head,
        Arm(backbone=toy.resolved.choice, method=method, architecture=SMALL.get(method, {})),
        meta=True,
    )
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    assert count(meta, task_head(meta, toy.resolved)) == counted


@every_arm
def test_saved_and_loaded_into_a_fresh_arm_it_answers_the_same(
    method: str, family: str, answer: Answer, tmp_path: Path
) -> None:
    toy = make_arm(method, family, answer)
    disturb(toy.model)
    save_file(trained_state(toy.model), tmp_path / "trained.safetensors")
    fresh = make_arm(method, family, answer)
    assert not torch.equal(logits_of(fresh.model, toy.batch()), logits_of(toy.model, toy.batch()))
    load_trained_state(fresh.model, load_file(tmp_path / "trained.safetensors"))
    assert torch.equal(logits_of(fresh.model, toy.batch()), logits_of(toy.model, toy.batch()))


# A method sees the same backbone of a decoder, whatever its head.
@pytest.mark.parametrize(
    ("method", "family", "answer"),
    [arm for arm in ARMS if arm.values[1:] not in (("gpt2", "text"), ("llama", "classification"))],
)
def test_loss_falls_on_a_toy_problem(method: str, family: str, answer: Answer) -> None:
    toy = make_arm(method, family, answer)
    # LST's up-projection starts near 0, so that a larger step overshoots on so narrow a model
    losses = train(toy, steps=40, learning_rate=2e-3 if method == "lst" else 5e-3)
    # the same four batches, nine rounds later; a random decoder's head lets a prompt or IA3 gain no more than half a percent
    assert sum(losses[-4:]) < 0.998 * sum(losses[:4])


@pytest.mark.parametrize(
    ("method", "family", "answer"), [arm for arm in ARMS if arm.values[0] != "peft:prefix-tuning"]
)  # peft: not with it
def test_gradient_checkpointing_changes_no_loss_and_no_gradient(
    method: str, family: str, answer: Answer
) -> None:
    toy = make_arm(method, family, answer)
    disturb(toy.model)
    plain = loss_and_gradients(toy)
    toy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = loss_and_gradients(toy)
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        assert torch.allclose(plain[name], checkpointed[name], rtol=1e-5, atol=1e-6), name


@every_arm
def test_padding_does_not_change_the_answer(method: str, family: str, answer: Answer) -> None:
    toy = shared(method, family, answer)
    batch = {key: value for key, value in toy.batch().items() if key != "labels" or family == "t5"}
    row = int(batch["attention_mask"].sum(1).argmin())
    length = int(batch["attention_mask"][row].sum())
    alone = {
        key: value[row : row + 1, :length] if key != "labels" else value[row : row + 1]
        for key, value in batch.items()
    }
    among = logits_of(toy.model, batch)[row]
    single = logits_of(toy.model, alone)[0]
    assert torch.allclose(among[: len(single)], single, atol=1e-5)


@every_text_arm
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_is_the_models_own_and_blind_to_padding(
    method: str, family: str, answer: Answer, beams: int
) -> None:
    toy = shared(method, family, answer)
    rows = [[11, 25, 17, 30, 44], [12, 33]]
    together = generate(toy, rows, beams=beams)
    for row, answered in zip(rows, together, strict=True):
        (alone,) = generate(toy, [row], beams=beams)
        assert answered == alone
        if beams == 1:
            assert answered == greedy_without_cache(toy, row)


@pytest.mark.parametrize(
    ("family", "shape", "numbers"),
    [
        ("t5", {"d_kv": 16}, 5 * 2 * 2 * 64),
        ("t5", {"num_decoder_layers": 3}, 5 * 3 * 2 * 32),
        ("t5", {"num_layers": 3}, 5 * 2 * 2 * 32),
        ("llama", {"head_dim": 16}, 5 * 2 * 2 * 32),
    ],
)
def test_a_prefix_has_the_shape_of_the_keys_and_values_that_it_is_put_before(
    family: str, shape: dict[str, int], numbers: int
) -> None:
    resolved = resolve(tiny_choice(family, **shape))
    head = make_head("text")
    arm = Arm(
        backbone=resolved.choice,
        method="peft:prefix-tuning",
        architecture=SMALL["peft:prefix-tuning"],
    )
    toy = Toy(*build_arm(resolved, head, arm), resolved, head)
    assert count(toy.model, ()).method == numbers
    losses = train(toy, steps=12)
    assert sum(losses[-4:]) < sum(losses[:4])
    row = [11, 25, 17, 30, 44]
    assert generate(toy, [row], beams=1) == [greedy_without_cache(toy, row)]


@pytest.mark.parametrize("method", IDENTITY_AT_START)
@pytest.mark.parametrize(("family", "answer"), CASES)
def test_at_start_it_answers_as_its_backbone_bit_for_bit(
    method: str, family: str, answer: Answer
) -> None:
    toy = make_arm(method, family, answer)
    torch.manual_seed(0)
    backbone = build(toy.resolved, toy.head)
    assert torch.equal(logits_of(toy.model, toy.batch()), logits_of(backbone, toy.batch()))


@pytest.mark.parametrize(
    ("family", "answer", "task"),
    [
        ("t5", "text", "SEQ_2_SEQ_LM"),
        ("gpt2", "text", "CAUSAL_LM"),
        ("llama", "text", "CAUSAL_LM"),
        ("gpt2", "classification", "SEQ_CLS"),
        ("llama", "classification", "SEQ_CLS"),
    ],
)
def test_a_prompt_answers_as_pefts_where_nothing_is_padded(
    family: str, answer: Answer, task: str
) -> None:
    toy = make_arm("prompt", family, answer)
    torch.manual_seed(0)
    config = PromptTuningConfig(
        task_type=TaskType(task), num_virtual_tokens=5, num_transformer_submodules=1
    )
    theirs = get_peft_model(build(toy.resolved, toy.head), config)
    own = toy.family.stacks(toy.model)[0].module.prompt  # type: ignore[arg-type]
    theirs.prompt_encoder["default"].embedding.weight.data.copy_(own.embedding.weight)
    batch = {
        key: value[:, :4] if value.dim() == 2 and family != "t5" else value
        for key, value in toy.batch().items()
    }
    expected = logits_of(theirs, batch)
    if answer == "text" and family != "t5":
        expected = expected[:, 5:]
    assert torch.allclose(logits_of(toy.model, batch), expected, atol=1e-6)


def test_berts_pooler_reads_cls_and_not_the_prompt() -> None:
    toy = make_arm("prompt", "bert", "classification")
    seen: list[Tensor] = []
    stack = toy.family.stacks(toy.model)[0].module  # type: ignore[arg-type]
    stack.pooler.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits_of(toy.model, toy.batch())
    assert seen[0].shape[1] == toy.batch()["input_ids"].shape[1]


def test_a_prompt_that_leaves_no_positions_says_so() -> None:
    toy = make_arm("prompt", "gpt2", "text", architecture={"length": 125})
    with pytest.raises(IncompatibleError, match=r"125 vectors and 10 tokens .* 128 positions"):
        logits_of(toy.model, toy.batch())


def test_a_throw_away_method_is_found_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "petl").mkdir()
    (tmp_path / "petl" / "only_norms.py").write_text(ONLY_NORMS)
    monkeypatch.setenv("SUITE_PATH", str(tmp_path))
    assert "only-norms" in methods.names()
    toy = make_arm("only-norms", "t5", "text", architecture={})
    losses = train(toy, steps=12)
    assert sum(losses[-4:]) < sum(losses[:4])
    monkeypatch.delenv("SUITE_PATH")
    with pytest.raises(UnknownNameError, match="only-norms"):
        get_method("only-norms")


def test_unknown_names_offer_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean lora"):
        get_method("lorra")
    with pytest.raises(UnknownNameError, match="did you mean peft:ia3"):
        get_method("peft:ia4")


@pytest.mark.parametrize(
    ("method", "architecture", "message"),
    [
        ("lora", {"rnak": 8}, "unknown key 'rnak'; did you mean rank"),
        ("lora", {"rank": 0}, "rank"),
        ("lora", {"rank": "8"}, "rank"),
        (
            "peft:ia3",
            {"target_module": ["q"]},
            "unknown key 'target_module'; did you mean target_modules",
        ),
        ("peft:lora", {"r": 0}, r"refuses it|positive"),
        ("lora", {"sites": ["decoder-cross"]}, "do not exist in a bert backbone"),
        (
            "peft:ia3",
            {"target_modules": ["nothing_like_it"]},
            r"cannot attach.*target_modules: \[...\].*LayerNorm, .*query",
        ),
        (
            "peft:lora",
            {"trainable_token_indices": [384]},
            "trainable_token_indices: got 384, expected 0 to 383",
        ),
        ("peft:trainable-tokens", {"token_indices": [-1]}, "token_indices: got -1, expected 0"),
        ("peft:lora", {"rank_pattern": {"(": 2}}, r"rank_pattern: got '\(', expected a regular"),
        ("peft:lora", {"lora_alpha": 0}, "lora_alpha: got 0, .* never train"),
        ("peft:vera", {"d_initial": 0}, "d_initial: got 0, .* never train"),
        ("peft:dora", {"lora_dropout": 1.0}, "lora_dropout: got 1.0, expected .* below 1"),
        ("peft:pissa", {"r": 33}, "pissa: r 33 needs 33 directions, but there are only 32"),
        ("peft:ln-tuning", {}, "with some of LayerNorm, "),
    ],
)
def test_wrong_architectures_are_refused_before_weights_are_read(
    method: str, architecture: dict[str, Any], message: str
) -> None:
    choice = resolved_tiny("bert")
    with pytest.raises(ConfigError, match=message):
        check_arm(
            choice,
            make_head("classification"),
            Arm(backbone=choice.choice, method=method, architecture=architecture),
        )


def test_biases_of_maps_that_are_not_there_are_refused() -> None:
    # a classifier of GPT-2 has neither a language model's head nor a pooler
    with pytest.raises(IncompatibleError, match=r"sites \['head'\] do not exist .*'attention'"):
        make_arm("bitfit", "gpt2", "classification", architecture={"sites": ["head"]})


@pytest.mark.parametrize(
    ("method", "reason"), [("peft:adalora", "training loop of its own"), ("peft:poly", "task ids")]
)
def test_pefts_methods_that_need_more_than_batches_are_refused(method: str, reason: str) -> None:
    with pytest.raises(IncompatibleError, match=reason):
        get_method(method)


@pytest.mark.parametrize("method", ["peft:prompt-tuning", "peft:p-tuning"])
@pytest.mark.parametrize(
    ("answer", "fault"),
    [("classification", "wrong position"), ("text", "counts a batch's padding")],
)
def test_a_prompt_of_pefts_is_refused_on_decoders(method: str, answer: Answer, fault: str) -> None:
    with pytest.raises(IncompatibleError, match=f"{fault}.* of llama; use method prompt"):
        make_arm(method, "llama", answer, architecture={"num_virtual_tokens": 3})


@pytest.mark.parametrize(
    ("architecture", "warning"),
    [
        (
            {"target_modules": ["query", "valeu"]},
            "peft:lora: target_modules: the backbone has no module valeu, and peft passes over it;"
            " did you mean value?",
        ),
        (
            {"rank_pattern": {"nothing_like_it": 2}},
            "peft:lora: rank_pattern: the backbone has no module nothing_like_it, and peft passes"
            " over it; it has LayerNorm, dense, key, query, value",
        ),
        (
            {"target_modules": ["query"], "layers_to_transform": [1, 99]},
            "peft:lora: layers_to_transform: the backbone has no layer 99, only 2",
        ),
        ({"target_modules": ["query"], "rank_pattern": {"layer.0.*query": 2}}, None),
    ],
)
def test_what_peft_passes_over_is_said_once(
    architecture: dict[str, Any], warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        make_arm("peft:lora", "bert", "classification", architecture=architecture)
    assert [record.message for record in caplog.records] == [warning] * (warning is not None)


def test_the_shadow_of_a_model_that_compares_choices_is_refused() -> None:
    choice = resolved_tiny("gpt2")
    with pytest.raises(IncompatibleError, match="peft:shadow: its network reads one text"):
        build_arm(choice, Head("choice"), Arm(backbone=choice.choice, method="peft:shadow"))


def test_pefts_methods_that_compute_with_the_weights_are_counted_without_them() -> None:
    toy = make_arm("peft:adamss", "bert", "classification", architecture={})
    counted = count_arm(
        toy.resolved, toy.head, Arm(backbone=toy.resolved.choice, method="peft:adamss")
    )
    assert counted == count(toy.model, task_head(toy.model, toy.resolved))


@pytest.mark.parametrize("method", ["peft:adamss", "peft:vera", "peft:ia3"])
def test_pefts_methods_compute_in_the_dtype_that_weights_are_cast_to(method: str) -> None:
    toy = make_arm(method, "bert", "classification", architecture={})
    cast_weights(toy.model, torch.bfloat16)
    loss_of(toy.model, toy.batch(seed=0, size=2)).backward()
    assert all(p.grad is not None for p in toy.model.parameters() if p.requires_grad)


def test_a_method_that_does_not_serve_the_family_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(methods.get("lora"), "families", frozenset({"t5"}))
    with pytest.raises(
        IncompatibleError,
        match="method lora does not work on bert-base, a bert backbone; it works on t5",
    ):
        check_arm(
            resolved_tiny("bert"),
            make_head("classification"),
            Arm(backbone=tiny_choice("bert"), method="lora"),
        )


@pytest.mark.parametrize("method", [*methods.names(), *PEFT, "peft:lora", "peft:vera"])
def test_a_complete_architecture_stays_what_it_is(method: str) -> None:
    complete = full_architecture(method, SMALL.get(method, {}))
    assert full_architecture(method, complete) == complete
    assert "__dict__" not in str(complete)


@pytest.mark.parametrize("method", methods.names())
def test_every_method_says_what_it_is(method: str) -> None:
    cls = get_method(method)
    assert cls.name == method and cls.description and cls.source
    assert BackboneChoice(name=method)  # a name that is safe as a path


def everything(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, shared ones once."""
    return {**{name: p.data for name, p in model.named_parameters()}, **dict(model.named_buffers())}


def loss_and_gradients(toy: Toy) -> dict[str, Tensor]:
    toy.model.train()
    toy.model.zero_grad()
    torch.manual_seed(3)
    loss = loss_of(toy.model, toy.batch())
    loss.backward()
    return {
        "loss": loss.detach(),
        **{n: p.grad.clone() for n, p in toy.model.named_parameters() if p.grad is not None},
    }


def generate(toy: Toy, rows: list[list[int]], *, beams: int) -> list[list[int]]:
    """Up to four new tokens a row, without what follows the end token; decoders pad on the left."""
    width = max(len(row) for row in rows)
    left = toy.family.kind == "decoder"
    padded = [[PAD] * (width - len(r)) + r if left else r + [PAD] * (width - len(r)) for r in rows]
    shown = [
        [0] * (width - len(r)) + [1] * len(r) if left else [1] * len(r) + [0] * (width - len(r))
        for r in rows
    ]
    toy.model.eval()
    with torch.no_grad():
        output = toy.model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(shown),
            max_new_tokens=4,
            num_beams=beams,
            do_sample=False,
        )
    new = output[:, width:] if left else output[:, 1:]
    return [until_end(row, toy) for row in new.tolist()]


def greedy_without_cache(toy: Toy, row: list[int]) -> list[int]:
    """The same by four full forward passes."""
    start = (
        [toy.resolved.config.decoder_start_token_id]
        if toy.family.kind == "encoder-decoder"
        else row
    )
    tokens = list(start)
    for _ in range(4):
        ids = torch.tensor([tokens])
        inputs = (
            {"input_ids": torch.tensor([row]), "decoder_input_ids": ids}
            if toy.family.kind == "encoder-decoder"
            else {"input_ids": ids}
        )
        tokens.append(int(logits_of(toy.model, inputs)[0, -1].argmax()))
    return until_end(tokens[len(start) :], toy)


def until_end(tokens: list[int], toy: Toy) -> list[int]:
    end = toy.resolved.config.eos_token_id
    return tokens[: tokens.index(end)] if end in tokens else tokens


ONLY_NORMS = '''
"""Only norms train."""

from suite.petl.base import Architecture, Method, freeze


class OnlyNorms(Method[Architecture]):
    description = "norms only"
    source = "a test"
    Config = Architecture

    def attach(self, model, family):
        freeze(model)
        for _, norm in family.norms(model):
            norm.requires_grad_(True)
        return model

    def expected_trainable(self, model, family):
        return sum(p.numel() for _, norm in family.norms(model) for p in norm.parameters())
'''
