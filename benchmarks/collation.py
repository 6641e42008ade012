"""What share of a training step goes into making its batch, which a background thread could hide.

    python benchmarks/collation.py [--methods full,lora,read] [--task entailment] [--data-root DIR]

One process with one thread, ZeRO-3, MiniLM, batches of 32 as a trial draws them: rows read from
disk, collated and padded. Processor seconds of both parts, so that work beside it changes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from suite.backbones.loading import load_tokenizer, resolve
from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice, LimitConfig
from suite.config.task import load_task
from suite.config.training import TrainingConfig
from suite.data.make_objective import make_objective
from suite.data.prepare import prepare
from suite.petl.arm import build_arm
from suite.train.batches import TrainBatches
from suite.train.engine import Engine
from suite.train.process_group import close_process_group, free_port, init_process_group

TRAINING = TrainingConfig(batch_size=32, max_length=128)
LIMIT = LimitConfig(train=1280, validation=40, test=40)
WARM_UP_STEPS = 3
MS_PER_S = 1000.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="full,lora,read")
    parser.add_argument("--task", default="entailment")
    parser.add_argument("--data-root", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    init_process_group(
        rank=0, world_size=1, local_rank=0, address="127.0.0.1", port=free_port(), device="cpu",
        timeout_s=300,
    )  # fmt: skip
    print("| method | tokens of a row | batch, ms | step, ms | share |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for method in given.methods.split(","):
            measure(method, given.task, given.data_root, Path(folder))
    close_process_group()


def measure(method: str, task_name: str, data_root: Path | None, cache: Path) -> None:
    """Train one epoch of a method, and print its line: medians, and the share of the sums."""
    resolved = resolve(BackboneChoice(name="minilm"))
    task = load_task(task_name)
    objective = make_objective(
        task,
        kind="encoder",
        tokenizer=load_tokenizer(resolved),
        training=TRAINING,
        decoder_objective="head",
    )
    data = prepare(task, objective, limit=LIMIT, data_root=data_root, cache=cache)
    torch.manual_seed(0)
    arm = Arm(backbone=resolved.choice, method=method, architecture={})
    model, _ = build_arm(resolved, objective.head, arm)
    engine = Engine(model, TRAINING, world_size=1, device="cpu")
    engine.module.train()
    batches = TrainBatches(
        data.split("train", confirm=False),
        objective.collate,
        batch_size=TRAINING.batch_size,
        micro_batch_size=TRAINING.batch_size,
        rank=0,
        world_size=1,
    )
    batch_s = []
    step_s = []
    tokens = []
    began = time.process_time()
    for parts, _, _ in batches.epoch(1, lambda number: number):
        made = time.process_time()
        engine.step(parts, 1e-4)
        ended = time.process_time()
        batch_s.append(made - began)
        step_s.append(ended - made)
        tokens.append(parts[0][0]["input_ids"].shape[1])
        began = time.process_time()
    engine.release()
    batch_s = batch_s[WARM_UP_STEPS:]
    step_s = step_s[WARM_UP_STEPS:]
    share = sum(batch_s) / (sum(batch_s) + sum(step_s))
    print(
        f"| {method} | {statistics.mean(tokens):.0f} | {statistics.median(batch_s) * MS_PER_S:.2f} "
        f"| {statistics.median(step_s) * MS_PER_S:.0f} | {share:.2%} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
