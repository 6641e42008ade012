"""Precision: what `auto` takes on which processor, what autocast leaves alone, and that a trial under it is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.backbones.heads import Head
from suite.backbones.weights import cast_weights
from suite.config import precision
from suite.config.precision import precision_of
from suite.config.training import TrainingConfig
from suite.plan.gpus import Gpus
from suite.profiling import estimate, setting
from suite.profiling.batches import training_batch
from suite.profiling.setting import make_setting
from suite.record.folder import Home
from suite.storage.workspace import Workspace
from suite.train import linear
from suite.train.build import build_model
from suite.train.frozen_weights import copy_beside, keep_whole
from suite.train.linear import PartitionedLinear
from suite.train.loop import Trainer
from suite.train.precision import autocast_forwards
from suite.train.process_group import free_port
from tests.ranks import in_processes
from tests.test_loop import TRAINING, make_spec, run
from tests.tiny import FAMILIES
from tests.toy import loss_of, make_arm, resolved_tiny
from tests.trained import trained_spec


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("fpu avx512f avx512_bf16 amx_tile", "bf16-autocast"),
        ("fpu amx_bf16", "bf16-autocast"),
        ("fpu avx2 avx512f", "fp32"),
        ("", "fp32"),
    ],
)
def test_auto_takes_autocast_where_the_processor_multiplies_bf16(
    flags: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: amx_bf16 in a name\nflags\t\t: {flags}\n")
    monkeypatch.setattr(precision, "CPU_INFO", info)
    assert precision_of(TrainingConfig(), "cpu") == found
    assert precision_of(TrainingConfig(), "cuda") == "bf16"
    assert precision_of(TrainingConfig(precision="fp32"), "cpu") == "fp32"
    info.unlink()
    assert precision_of(TrainingConfig(), "cpu") == "fp32"


@pytest.mark.parametrize(("in_hardware", "found"), [(True, "bf16"), (False, "fp32")])
def test_auto_takes_bf16_only_on_a_gpu_that_does_not_emulate_it(
    in_hardware: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: in_hardware or including_emulation,
    )
    assert precision_of(TrainingConfig(), "cuda") == found
    monkeypatch.setattr(setting, "local_gpus", lambda: Gpus(bf16=in_hardware))
    assert make_setting({"batch": None}).dtype == found
    assert make_setting({"device": "cpu"}).dtype == "fp32"


@pytest.mark.parametrize("method", ["full", "lora", "read", "lst", "peft:prefix-tuning"])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_multiplies_in_bf16_and_keeps_weights_and_gradients_in_fp32(
    family: str, method: str
) -> None:
    head = Head("classification", 2) if family == "bert" else Head("text")
    model: Any
    model, _ = build_model(trained_spec(method, family), resolved_tiny(family), head, weights=None)
    batch: dict[str, Any]
    batch = training_batch(resolved_tiny(family).family, 384, rows=4, tokens=16, target=8)
    expected = float(model(**batch).loss.detach())
    autocast_forwards(model, "cpu")
    found = model(**batch)
    assert found.logits.dtype is torch.bfloat16
    # 2%: bf16 has 8 bits of mantissa
    loss = float(found.loss.detach())
    assert loss == pytest.approx(expected, rel=0.02) and loss != expected
    found.loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype is p.grad.dtype is torch.float32 for p in trained if p.grad is not None)
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises((TypeError, ValueError)):
        model(**batch, inputs_embeds=object())
    assert not torch.is_autocast_enabled("cpu")
    if family != "bert":
        written = model.generate(input_ids=batch["input_ids"], max_new_tokens=3, do_sample=False)
        assert written.shape[0] == 4


@pytest.mark.parametrize("method", ["lora", "peft:vera", "peft:loha"])
def test_deberta_masks_its_scores_under_autocast_whatever_its_maps_return(method: str) -> None:
    toy = make_arm(method, "deberta", "classification", architecture={})
    autocast_forwards(toy.model, "cpu")
    loss_of(toy.model, toy.batch(seed=0, size=2)).backward()
    assert all(p.grad is not None for p in toy.model.parameters() if p.requires_grad)


def test_a_partitioned_map_has_the_gradients_of_its_forward_passs_precision() -> None:
    """Whatever autocast's own default is by then, as it is fp16 on a GPU."""
    torch.manual_seed(0)
    x = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(4, 8, requires_grad=True)
    found = []
    before = torch.get_autocast_dtype("cpu")
    for default in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", torch.bfloat16):
            product = PartitionedLinear.apply(x, weight, None)  # type: ignore[no-untyped-call]
        torch.set_autocast_dtype("cpu", default)
        try:
            found.append(torch.autograd.grad(product.square().sum(), (x, weight)))
        finally:
            torch.set_autocast_dtype("cpu", before)
    for usual, other in zip(*found, strict=True):
        assert usual.equal(other)


def test_the_map_of_stage_3_takes_the_names_of_pytorchs_own() -> None:
    """Some of peft's layers call it by keyword, as `peft:hra`."""
    x, weight = torch.randn(5, 8), torch.randn(4, 8)
    expected = F.linear(input=x, weight=weight, bias=None)
    linear.use()
    try:
        assert F.linear(input=x, weight=weight, bias=None).equal(expected)
        weight.ds_id = 1  # type: ignore[attr-defined]  # as a partitioned one has
        assert F.linear(input=x, weight=weight, bias=None).equal(expected)
    finally:
        linear.leave()
    with estimate.patched("linear", estimate._linear_of_stage_3):
        assert F.linear(input=x, weight=nn.Parameter(weight), bias=None).equal(expected)


def test_a_backbone_without_parameters_tells_its_device_and_dtype() -> None:
    """As where all that trains lies outside of it; transformers asks its first parameter."""
    toy = make_arm("peft:prefix-tuning", "bert", "classification")
    backbone = toy.model.get_base_model()  # type: ignore[operator]
    before = type(backbone)
    for parameter in backbone.parameters():
        parameter.requires_grad = False
    keep_whole(toy.model, "cpu")
    assert not list(backbone.parameters())
    assert (backbone.device, backbone.dtype) == (torch.device("cpu"), torch.float32)
    assert isinstance(backbone, before) and type(backbone).__name__ == before.__name__
    assert copy_beside(backbone).dtype is torch.float32


def test_rotary_frequencies_stay_fp32_where_weights_become_bf16() -> None:
    resolved = resolved_tiny("llama")
    model, _ = build_model(trained_spec("lora", "llama"), resolved, Head("text"), weights=None)
    before = {n: b.clone() for n, b in model.named_buffers() if n.endswith("inv_freq")}
    cast_weights(model, torch.bfloat16)
    assert before and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(model.get_buffer(name).equal(buffer) for name, buffer in before.items())


def trials(number: int, folder: Path) -> str:
    """The same trial in fp32 and under autocast, on one rank under ZeRO-3."""
    home = Home(folder / "home")
    trainer = Trainer(Workspace(home), master_port=free_port())
    found = []
    for name in ("auto", "bf16-autocast"):
        training = TRAINING.model_copy(update={"precision": name, "epochs": 1})
        result = run(trainer, make_spec(training=training))
        found.append([result.precision, result.epochs[0].train_loss, result.score])
    trainer.close()
    return json.dumps(found)


def test_a_trial_records_what_it_computed_in(tmp_path: Path) -> None:
    (written,) = in_processes(trials, tmp_path)
    (plain, loss, _), (cast, cast_loss, score) = json.loads(written)
    assert plain == precision_of(TRAINING, "cpu") and cast == "bf16-autocast"
    assert cast_loss == pytest.approx(loss, rel=0.02) and score is not None
