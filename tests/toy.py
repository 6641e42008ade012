"""Toy arms and batches: tiny backbones on the CPU and a problem that each can learn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from suite.backbones.base import Family
from suite.backbones.loading import Head, ResolvedBackbone, resolve
from suite.config.arm import Arm
from suite.petl.arm import build_arm
from suite.petl.base import Method
from tests.tiny import tiny_choice

Answer = Literal["classification", "regression", "text"]
Batch = dict[str, Tensor]
CASES: tuple[tuple[str, Answer], ...] = (
    ("t5", "text"),
    ("bert", "classification"),
    ("gpt2", "classification"),
    ("llama", "classification"),
    ("gpt2", "text"),
    ("llama", "text"),
)
SMALL: dict[str, dict[str, Any]] = {
    "prompt": {"length": 5},
    "adapter": {"bottleneck": 8},
    "lora": {"rank": 4, "dropout": 0.0},
    "read": {"hidden": 16},
    "lst": {"reduction": 4},
    "peft:prefix-tuning": {"num_virtual_tokens": 5},
}
"""Architectures that suit tiny backbones; a method without an entry takes its defaults."""
FIRST_TOKEN = 10
TOKENS = 40
PAD = 0


@dataclass(frozen=True, slots=True)
class Toy:
    """A built arm and what is needed to train it."""

    model: nn.Module
    method: Method[Any]
    resolved: ResolvedBackbone
    head: Head

    @property
    def family(self) -> Family:
        return self.resolved.family

    def batch(self, seed: int = 0, size: int = 8) -> Batch:
        return make_batch(self.family, self.head, seed=seed, size=size)


@functools.cache
def resolved_tiny(family: str) -> ResolvedBackbone:
    return resolve(tiny_choice(family))


def make_head(answer: Answer) -> Head:
    return Head(answer, {"classification": 2, "regression": 1, "text": 0}[answer])


def make_arm(
    method: str,
    family: str,
    answer: Answer,
    *,
    seed: int = 0,
    architecture: dict[str, Any] | None = None,
) -> Toy:
    """An arm with random frozen weights that depend on `seed` alone, prepared if its method asks for it."""
    torch.manual_seed(seed)
    resolved = resolved_tiny(family)
    head = make_head(answer)
    options = SMALL.get(method, {}) if architecture is None else architecture
    model, petl = build_arm(
        resolved, head, Arm(backbone=resolved.choice, method=method, architecture=options)
    )
    toy = Toy(model, petl, resolved, head)
    if petl.needs_preparation:
        petl.prepare(model, toy.family, [toy.batch(seed=s, size=2) for s in range(2)], loss_of)
    return toy


def make_batch(family: Family, head: Head, *, seed: int, size: int) -> Batch:
    """Right-padded rows; the answer is whether the first token belongs to the lower half.

    Returns:
        input_ids, attention_mask (B, T); labels (B,) for heads, (B, 2) for encoder-decoders, (B, T) for text decoders.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_TOKEN, FIRST_TOKEN + TOKENS, (size, 9), generator=generator)
    lengths = torch.randint(4, 10, (size,), generator=generator)
    mask = (torch.arange(9)[None] < lengths[:, None]).long()
    answer = (ids[:, 0] < FIRST_TOKEN + TOKENS // 2).long()
    batch = {"input_ids": ids * mask + PAD * (1 - mask), "attention_mask": mask}
    if head.kind != "text":
        return {**batch, "labels": answer if head.kind == "classification" else answer.float()}
    words = answer + FIRST_TOKEN + TOKENS
    if family.kind == "encoder-decoder":
        return {**batch, "labels": torch.stack([words, torch.ones_like(words)], dim=1)}
    return _append(batch, words, lengths)


def _append(batch: Batch, words: Tensor, lengths: Tensor) -> Batch:
    """The answer as the row's next token, the only one with a label."""
    ids = torch.cat([batch["input_ids"], torch.full((len(words), 1), PAD)], dim=1)
    rows = torch.arange(len(words))
    labels = torch.full_like(ids, -100)
    ids[rows, lengths] = labels[rows, lengths] = words
    mask = (torch.arange(ids.shape[1])[None] <= lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(**batch).logits
    return logits


def train(
    toy: Toy,
    *,
    steps: int,
    learning_rate: float = 1e-2,
    after_backward: Callable[[nn.Module], None] = lambda model: None,
) -> list[float]:
    """AdamW on one batch per step, in plain torch; the losses."""
    optimizer = torch.optim.AdamW(
        [p for p in toy.model.parameters() if p.requires_grad], lr=learning_rate, weight_decay=0.0
    )
    toy.model.train()
    losses = []
    for step in range(steps):
        loss = loss_of(toy.model, toy.batch(seed=step % 4))
        optimizer.zero_grad()
        loss.backward()
        after_backward(toy.model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def disturb(model: nn.Module, *, seed: int = 7, scale: float = 0.1) -> None:
    """Move every trained parameter, so that no method is the identity any more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def learn(model: nn.Module, batch: Mapping[str, Tensor], *, learning_rate: float = 1e-2) -> None:
    """Train on one batch until it is known by heart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    loss = torch.inf
    steps = 0
    while loss > 0.02:
        optimizer.zero_grad()
        (found := model(**batch).loss).backward()
        optimizer.step()
        loss = found.item()
        steps = steps + 1
        assert steps < 400, f"the loss is still {loss}"
