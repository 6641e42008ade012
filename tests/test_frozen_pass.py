"""Side networks that share one frozen pass compute what each of them computes alone, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from suite.backbones.loading import resolve
from suite.petl import methods
from suite.petl._frozen import FrozenPass, GivenPass, frozen_states, without_dropout
from suite.train.frozen_weights import copy_beside, keep_whole
from tests.test_parity import batch_of, model_of
from tests.tiny import FAMILIES, served, tiny_choice

PAIRS = [
    (name, family)
    for name in methods.names()
    if not methods.get(name).backward_through_backbone
    for family in FAMILIES
    if family in served(methods.get(name))
]
CASES = [
    *((*pair, "pretrained") for pair in PAIRS),
    # Their blocks take from an attention, which does not run in a pass that is replayed.
    ("read", "llama", "cla"),
    ("read", "t5", "shared"),
    ("read", "bert", "shared"),
]
every_case = pytest.mark.parametrize(("method", "family", "attention"), CASES)
SEED = 7


def two_models(
    method: str, family: str, attention: str = "pretrained"
) -> tuple[nn.Module, nn.Module]:
    """Two copies of an arm over the same frozen tensors; the second has trained otherwise."""
    first = model_of(method, family, attention)
    for module in first.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
        # tiny models have no dropout of their own
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    keep_whole(first, "cpu")
    second = copy_beside(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(0.01)
    return first.train(), second.train()


def result_of(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Loss and gradients, and where the random stream is after them."""
    loss = model(**batch).loss
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = [loss.detach()]
    for parameter in model.parameters():
        found.append(torch.zeros(()) if parameter.grad is None else parameter.grad.clone())
    return [*found, torch.get_rng_state()]


@every_case
def test_a_replayed_pass_gives_what_an_own_one_gives(
    method: str, family: str, attention: str
) -> None:
    first, second = two_models(method, family, attention)
    shared = FrozenPass()
    for step in range(2):
        batch = batch_of(family, step)
        torch.manual_seed(SEED)
        alone = result_of(second, batch)
        torch.manual_seed(SEED)
        with shared.recording():
            result_of(first, batch)
        torch.manual_seed(SEED)
        with shared.replaying():
            together = result_of(second, batch)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
        assert not torch.equal(alone[0], result_of(first, batch)[0])


@every_case
def test_states_that_are_kept_give_what_a_pass_without_dropout_gives(
    method: str, family: str, attention: str
) -> None:
    first, second = two_models(method, family, attention)
    found = resolve(tiny_choice(family)).family
    stacks = found.stacks(first)  # type: ignore[arg-type]
    for step in range(2):
        batch = batch_of(family, step)
        torch.manual_seed(SEED)
        with_dropout = result_of(first.train(), batch)
        without_dropout(stack.module for stack in stacks)
        torch.manual_seed(SEED)
        alone = result_of(first, batch)
        kept = frozen_states(second.eval(), batch, len(stacks))
        torch.manual_seed(SEED)
        with GivenPass(kept).replaying():
            replayed = result_of(first, batch)
        assert all(torch.equal(a, b) for a, b in zip(alone, replayed, strict=True))
        # Llama has no dropout to switch off
        assert torch.equal(alone[0], with_dropout[0]) == (family == "llama")
    other = {name: values[:1] for name, values in batch.items()}
    with pytest.raises(AssertionError, match="of another batch"), GivenPass(kept).replaying():
        first(**other)


def test_trials_that_draw_differently_are_refused() -> None:
    first, second = two_models("read", "bert")
    shared = FrozenPass()
    with shared.recording():
        first(**batch_of("bert", 0))
    torch.manual_seed(SEED)
    with pytest.raises(AssertionError, match="drew different numbers"), shared.replaying():
        second(**batch_of("bert", 0))
