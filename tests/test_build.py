"""The model of a trial: what its forward keeps, beside what the profile of the same arm measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from suite.backbones.heads import Head
from suite.meters import TensorPeak, release_memory
from suite.petl._frozen import hidden_of
from suite.profiling.batches import forward_options, training_batch
from suite.train.build import build_model
from tests.tiny import FAMILIES
from tests.toy import resolved_tiny
from tests.trained import trained_spec


def model_of(method: str, family: str) -> Any:
    head = Head("classification", 2) if family == "bert" else Head("text")
    model, _ = build_model(trained_spec(method, family), resolved_tiny(family), head, weights=None)
    return model


def peak_bytes(model: Any, batch: dict[str, Any]) -> int:
    """Most bytes of tensors in a forward and a backward pass, beyond what was there before."""
    model.zero_grad(set_to_none=True)
    release_memory()
    with TensorPeak() as peak:
        before = peak.live_bytes
        model(**batch).loss.backward()
    return peak.peak_bytes - before


@pytest.mark.parametrize("method", ["full", "read", "lst"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trials_peak_is_the_one_that_its_profile_measures(family: str, method: str) -> None:
    model = model_of(method, family).train()
    of = resolved_tiny(family).family
    batch = training_batch(of, 384, rows=4, tokens=32, target=16)
    assert peak_bytes(model, batch) == peak_bytes(model, batch | forward_options(of))


@pytest.mark.parametrize("method", ["full", "read", "lst"])
@pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])
def test_generation_keeps_its_cache_and_writes_the_same(family: str, method: str) -> None:
    model = model_of(method, family).eval()
    block = resolved_tiny(family).family.stacks(model)[-1].blocks[0]
    widths: list[int] = []
    block.register_forward_hook(
        lambda _module, _args, output: widths.append(hidden_of(output).shape[1])
    )
    ids = torch.randint(10, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    asked = {"input_ids": ids, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    written = model.generate(**asked)
    assert widths[1:] == [1] * 4, "one new token a step: the others are cached"
    assert written.equal(model.generate(**asked, use_cache=False))
