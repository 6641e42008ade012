"""Samples per second of our one-rank loop beside a plain PyTorch (+ PEFT) loop, in one run; ZeRO-3's own cost beside it.

    python benchmarks/throughput.py [--rounds 3]

MiniLM on the generated entailment task, batch 32, full fine-tuning and LoRA. Rounds alternate between the loops, so that a
noisy machine slows all of them; the ratio is of medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import plain
from suite.backbones.loading import load_tokenizer, resolve
from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice, LimitConfig
from suite.config.task import load_task
from suite.config.training import TrainingConfig
from suite.data.make_objective import make_objective
from suite.data.prepare import prepare
from suite.petl.arm import full_architecture
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.loop import Trainer
from suite.train.process_group import free_port

WANTED_RATIO = 0.95
LIMIT = LimitConfig(train=640, validation=40, test=40)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder))
        trainer = Trainer(Workspace(home), master_port=free_port())
        print(f"threads: {torch.get_num_threads()}; median samples/s of {options.rounds} rounds")
        print(f"{'method':8} {'plain':>8} {'stage 0':>8} {'ratio':>6} {'stage 3':>8} {'ratio':>6}")
        for method in ("full", "lora"):
            speeds: dict[str, list[float]] = {"plain": [], "0": [], "3": []}
            for round_ in range(options.rounds):
                speeds["plain"].append(plain_speed(spec_of(method, 0, round_), home))
                for stage in (0, 3):
                    speeds[str(stage)].append(our_speed(trainer, spec_of(method, stage, round_)))
            peer, ours, zero3 = (statistics.median(speeds[name]) for name in ("plain", "0", "3"))
            print(
                f"{method:8} {peer:8.1f} {ours:8.1f} {ours / peer:6.2f} {zero3:8.1f} {zero3 / peer:6.2f}",
                flush=True,
            )
            failed += [method] if ours / peer < WANTED_RATIO else []
        trainer.close()
    if failed:
        raise SystemExit(f"below {WANTED_RATIO} at stage 0: {failed}")


def spec_of(method: str, stage: int, round_: int) -> TrialSpec:
    architecture: dict[str, Any] = {"rank": 8} if method == "lora" else {}
    return TrialSpec(
        sweep=f"throughput-{round_}",
        arm=Arm(
            backbone=BackboneChoice(name="minilm"),
            method=method,
            architecture=full_architecture(method, architecture),
        ),
        task=load_task("entailment"),
        training=TrainingConfig(epochs=1, batch_size=32, max_length=32, zero_stage=stage),
        limit=LIMIT,
        learning_rate=1e-4,
    )


def our_speed(trainer: Trainer, spec: TrialSpec) -> float:
    trainer.start(spec)
    trainer.epoch()
    timing = trainer.finish().timing
    assert timing is not None
    assert timing.samples_per_s is not None
    return timing.samples_per_s


def plain_speed(spec: TrialSpec, home: Home) -> float:
    resolved = resolve(spec.arm.backbone)
    objective = make_objective(
        spec.task,
        kind="encoder",
        tokenizer=load_tokenizer(resolved),
        training=spec.training,
        decoder_objective="head",
    )
    data = prepare(spec.task, objective, limit=spec.limit, data_root=None, cache=home.cache)
    return plain.train(
        {name: data.split(name, confirm=False) for name in ("train", "validation")},
        folder=resolved.path,
        method=spec.arm.method,
        lora=spec.arm.architecture,
        learning_rate=spec.learning_rate,
        batch_size=spec.training.batch_size,
        seed=0,
        orders=[list(range(data.sizes["train"]))],
    ).samples_per_s


if __name__ == "__main__":
    main()
