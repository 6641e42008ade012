"""Two ZeRO-3 ranks train what one process trains in plain PyTorch: every method on every family, clipping on and off, and
attention variants with parameters or tensors where the backbone has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from suite.backbones.loading import Head, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice
from suite.config.training import TrainingConfig
from suite.petl import get_method, methods
from suite.petl.arm import build_arm
from suite.train.engine import Engine
from tests.ranks import asked_for, on_ranks
from tests.tiny import FAMILIES, served, tiny_choice

BATCH = 8
STEPS = 3
LEARNING_RATE = 1e-2
ADAM_EPS = 1e-3
"""AdamW divides a gradient by its own size: with a small epsilon, rounding where the true gradient is 0 (key biases) becomes a step."""
TOLERANCE = 1e-5
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4, "dropout": 0.0},
    "lst": {"reduction": 2},
    "read": {"hidden": 8},
}
Case = tuple[str, str, float, int, str]
"""Method, family, clipping norm (0 = none), persistence threshold in elements, attention variant."""
PAIRS = [
    (method, family)
    for method in methods.names()
    for family in FAMILIES
    if family in served(get_method(method))
]
ATTENTION: list[Case] = [
    ("lora", "t5", 0.05, 0, "wgqa"),
    ("full", "gpt2", 0.05, 0, "row-wgqa"),
    ("full", "llama", 0.05, 0, "mhe-mul"),
    ("full", "gpt2", 0.05, 0, "mhe-add"),
    ("full", "t5", 0.05, 0, "sha"),
    ("full", "llama", 0.05, 0, "skv"),
    ("full", "bert", 0.05, 0, "linear"),
    ("full", "t5", 0.05, 0, "cla"),
    ("full", "llama", 0.05, 0, "shared"),
    ("full", "llama", 0.05, 0, "mla"),
    ("lora", "t5", 0.05, 0, "gated"),
]
CHECKPOINTED = ("shared",)
"""Attention variants whose ranks recompute their blocks in the backward pass; the plain process does not."""
CLIPPED: list[Case] = [(*pair, 0.05, 0, "pretrained") for pair in PAIRS]
"""With all parameters partitioned."""
UNCLIPPED: list[Case] = [(method, "t5", 0.0, 100_000, "pretrained") for method in methods.names()]
"""With small parameters kept gathered, another code path of DeepSpeed."""
QUICK = [*CLIPPED[::5], *UNCLIPPED[::4], *ATTENTION[::4]]
"""Every method and every family is among them; the others are `slow`."""
CASES = [
    *QUICK,
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (*CLIPPED, *UNCLIPPED, *ATTENTION)
        if case not in QUICK
    ),
]


def model_of(method: str, family: str, attention: str = "pretrained") -> nn.Module:
    resolved = resolve(tiny_choice(family))
    head = Head("text") if family == "t5" else Head("classification", 2)
    torch.manual_seed(3)
    choice = AttentionChoice(name=attention)
    model, petl = build_arm(
        resolved,
        head,
        Arm(
            backbone=resolved.choice,
            attention=choice,
            method=method,
            architecture=ARCHITECTURES.get(method, {}),
        ),
    )
    if petl.needs_preparation:
        batch = batch_of(family, 99)
        rows = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(4)]
        petl.prepare(model, resolved.family, iter(rows), lambda m, b: m(**b).loss)
    return model


def batch_of(family: str, step: int) -> dict[str, torch.Tensor]:
    """A whole batch; every second row is padded."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, 259, (BATCH, 10), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1::2, 7:] = 0
    tokens = tokens * mask  # the pad id is 0 for the byte tokenizer
    labels = (
        torch.randint(3, 259, (BATCH, 3), generator=generator)
        if family == "t5"
        else torch.randint(0, 2, (BATCH,), generator=generator)
    )
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def train_plainly(
    method: str, family: str, clip: float, attention: str = "pretrained"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = model_of(method, family, attention).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, eps=ADAM_EPS)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(family, step)).loss
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {
        name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
    }


def train_on_rank(
    rank: int, cases: list[Case]
) -> list[tuple[list[float], Mapping[str, torch.Tensor]]]:
    return [train_case(rank, *case) for case in cases]


def train_case(
    rank: int, method: str, family: str, clip: float, threshold: int, attention: str
) -> tuple[list[float], Mapping[str, torch.Tensor]]:
    training = TrainingConfig(
        batch_size=BATCH,
        gradient_clipping=clip,
        adam_eps=ADAM_EPS,
        persistence_threshold_elements=threshold,
    )
    model = model_of(method, family, attention)
    if attention in CHECKPOINTED:
        cast(PreTrainedModel, model).gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    engine = Engine(model, training, world_size=2, device="cpu")
    engine.module.train()
    losses = []
    for step in range(STEPS):
        mine = {
            name: tensor[rank::2].contiguous() for name, tensor in batch_of(family, step).items()
        }
        losses.append(float(engine.step([(mine, 1.0)], LEARNING_RATE)))
    state = engine.trained_state()
    engine.release()
    return losses, state


@pytest.fixture(scope="module")
def two_ranks(
    request: pytest.FixtureRequest,
) -> dict[Case, tuple[list[float], Mapping[str, torch.Tensor]]]:
    """The cases that are asked for, in one pair of processes."""
    cases = asked_for(request, "case")
    first, second = on_ranks(train_on_rank, cases)
    return {
        case: ([(a + b) / 2 for a, b in zip(x[0], y[0], strict=True)], x[1])
        for case, x, y in zip(cases, first, second, strict=True)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_zero3_ranks_equal_one_plain_process(case: Case, two_ranks: Any) -> None:
    method, family, clip, _, attention = case
    losses, state = two_ranks[case]
    expected_losses, expected_state = train_plainly(method, family, clip, attention)
    assert losses == pytest.approx(expected_losses, abs=TOLERANCE)
    assert set(state) == set(expected_state)
    for name, tensor in expected_state.items():
        torch.testing.assert_close(
            state[name], tensor, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_quick_cases_leave_no_method_and_no_family_out() -> None:
    assert {case[0] for case in QUICK} == set(methods.names())
    assert {case[1] for case in QUICK} == set(FAMILIES)


def test_clipping_changes_the_training() -> None:
    free = train_plainly("full", "bert", 0.0)
    clipped = train_plainly("full", "bert", 1e-9)
    assert free[0] != clipped[0]
