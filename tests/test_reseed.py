"""A trial that differs from the last one in its seed keeps the engine and starts as if it had built one anew, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from suite.backbones.heads import Head
from suite.backbones.loading import build, resolve
from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice, LimitConfig
from suite.config.training import TrainingConfig
from suite.petl.arm import full_architecture
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.initial import PREPARED
from suite.train.loop import Trainer
from suite.train.probe import digest_of
from suite.train.process_group import free_port
from suite.train.shards import shard_name
from tests.ranks import in_processes
from tests.test_loop import make_spec
from tests.tiny import tiny_choice

CASES = [
    ("lora", "fp32", 3),
    ("adapter", "fp32", 3),
    ("read", "fp32", 3),
    ("lst", "fp32", 3),
    ("full", "fp32", 3),
    ("full", "bf16", 3),
    ("lora", "bf16", 0),
]


def cases(world_size: int) -> list[tuple[str, str, int]]:
    """On two ranks those in fp32; on one what rounding does, and what LST prepares."""
    if world_size == 2:
        return [case for case in CASES if case[1] == "fp32"]
    return [case for case in CASES if case[1] == "bf16" or case[0] == "lst"]


def spec_of(folder: Path, case: tuple[str, str, int], *, seed: int, world_size: int) -> TrialSpec:
    """A trial of weights from a folder: only a fresh head, and what the method adds, are drawn."""
    method, precision, stage = case
    architecture: dict[str, Any] = {"lst": {"reduction": 4}}.get(method, {})
    training = TrainingConfig(
        epochs=1,
        batch_size=16,
        eval_batch_size=16,
        max_length=64,
        precision=precision,  # type: ignore[arg-type]
        zero_stage=stage,
    )
    return make_spec(
        arm=Arm(
            backbone=BackboneChoice(name=str(folder / "backbone"), tokenizer="bytes"),
            method=method,
            architecture=full_architecture(method, architecture),
        ),
        training=training,
        limit=LimitConfig(train=16, validation=4, test=4),
        world_size=world_size,
        seed=seed,
    )


def start(trainer: Trainer, spec: TrialSpec) -> dict[str, Any]:
    """What a trial starts from, and the loss of its first epoch."""
    trainer.start(spec)
    warm: Any = trainer._warm
    found = {
        "start": warm.initial_digest,
        "now": warm.engine.fingerprint(trained=True),
        "frozen": warm.engine.fingerprint(trained=False),
        "file": digest_of(load_file(warm.initial / shard_name(trainer.rank))).sha256,
        "output": warm.start_output.sha256,
    }
    report = trainer.epoch()
    assert report.record is not None
    found |= {"loss": report.record.train_loss, "score": report.record.validation_score}
    result = trainer.finish()
    found["end"] = warm.engine.fingerprint(trained=True)
    if result.preparation is not None:
        found["prepared"] = result.model_dump(mode="json")
    return found


def everything(number: int, folder: Path, world_size: int, port: int) -> str:
    """Each case cold, then with another seed, and with its own again; on this rank."""
    home = Home(folder / "home")
    trainer = Trainer(
        Workspace(home), rank=number, world_size=world_size, local_rank=number, master_port=port
    )
    found = []
    for case in cases(world_size):
        answers = []
        engines = []
        for seed in (2, 1, 2):
            answers.append(start(trainer, spec_of(folder, case, seed=seed, world_size=world_size)))
            engines.append(trainer._warm)
        found.append([answers, len({id(warm) for warm in engines})])
    trainer.close()
    return json.dumps(found)


def check_preparation(records: list[dict[str, Any]], world_size: int) -> None:
    """The first trial took the Fisher importances; the second reuses them, and knows what they cost.

    The third is the first once more, as after a kill: it finds its own work in the cache.
    """
    first, second, third = records
    cost = first["phases"]["prepare"]
    assert cost["seconds"] > 0 and cost["energy_kwh"] > 0
    assert cost["memory"]["allocated_max_bytes"] > 0
    assert cost["memory"]["allocated_sum_bytes"] >= world_size * 10_000
    made = first["preparation"]
    assert (made["made_by"], made["reused"], made["cost"]) == (first["trial"], False, cost)
    assert (made["world_size"], made["hardware"]) == (world_size, first["provenance"]["hardware"])
    assert second["preparation"] == made | {"reused": True}
    assert "prepare" not in second["phases"]
    assert (third["preparation"], third["phases"]["prepare"]) == (made, cost)
    assert "phases.prepare.read_energy_kwh" in third["missing"]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_another_seed_on_a_warm_engine_equals_a_cold_start(world_size: int, tmp_path: Path) -> None:
    torch.manual_seed(7)
    whole = build(resolve(tiny_choice("bert", dropout=0.1)), Head("classification", 2))
    whole.base_model.save_pretrained(tmp_path / "backbone")
    for written in in_processes(everything, tmp_path, world_size, free_port(), count=world_size):
        for case, (answers, engines) in zip(cases(world_size), json.loads(written), strict=True):
            prepared = [answer.pop("prepared", None) for answer in answers]
            cold, other, again = answers
            assert again == cold, case
            if case[0] == "lst":
                check_preparation(prepared, world_size)
            else:
                assert prepared == [None] * 3, case
            for name in ("start", "file", "output", "loss", "end"):
                assert other[name] != cold[name], (case, name)
            assert engines == 1, case
    # of LST's three trials one took the Fisher importances
    assert len(list((tmp_path / "home" / "cache").rglob(PREPARED))) == 1
