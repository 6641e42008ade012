"""What a trial costs as one of K lanes over a shared frozen pass, against a trial alone.

    python benchmarks/lanes.py [--methods read,lst] [--lanes 1,4,8,16,32] [--rows 32] [--tokens 30] [--device cuda]

One process, ZeRO-3, MiniLM's shape with random weights, random tokens. Each round takes one step of
a trial alone and one step of K lanes, on the same batch; a ratio is (step of K lanes / K) / (step
alone), taken within a round. The losses of the first lane and of the trial alone are compared before
anything is timed: bit for bit on a CPU; for a GPU both are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.step import SHAPE
from suite.backbones.loading import Head, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.config.training import TrainingConfig
from suite.petl.arm import build_arm
from suite.train.engine import Engine
from suite.train.lanes import side_by_side
from suite.train.process_group import close_process_group, free_port, init_process_group

WARM_UP_ROUNDS = 2
LEARNING_RATE = 1e-4
Batch = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="read,lst")
    parser.add_argument("--lanes", default="1,4,8,16,32")
    parser.add_argument("--rows", type=int, default=32, help="of a batch")
    parser.add_argument("--tokens", type=int, default=30, help="of a row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    init_process_group(
        rank=0, world_size=1, local_rank=0, address="127.0.0.1", port=free_port(),
        device=given.device, timeout_s=300,
    )  # fmt: skip
    shape = (given.rows, given.tokens)
    print(
        f"{given.device}, {given.rows} x {given.tokens} tokens, {given.threads} thread, {given.rounds} rounds\n"
    )
    print("| method | lanes | step alone, s | a lane's share, s | ratio (range) |")
    print("|---|---|---|---|---|")
    for method in given.methods.split(","):
        alone = engine_of(method, given.rows, given.device)
        first = engine_of(method, given.rows, given.device)
        check_equal(alone, first, shape)
        lanes = [first]
        for count in map(int, given.lanes.split(",")):
            while len(lanes) < count:
                lanes.append(first.beside())
                lanes[-1].module.train()
            show(method, measure(alone, lanes[:count], shape, given.rounds), count)
        for engine in (alone, *lanes):
            engine.release()
    close_process_group()


def engine_of(method: str, rows: int, device: str) -> Engine:
    resolved = resolve(BackboneChoice(name="bert-base", config=SHAPE))
    torch.manual_seed(0)
    architecture = {}
    if method == "lst":
        # There are no examples here from which Fisher importances could be taken.
        architecture = {"init": "magnitude"}
    arm = Arm(
        backbone=resolved.choice,
        attention=AttentionChoice(name="pretrained"),
        method=method,
        architecture=architecture,
    )
    model, _ = build_arm(resolved, Head("classification", 2), arm)
    engine = Engine(model, TrainingConfig(batch_size=rows), world_size=1, device=device, lanes=True)
    engine.module.train()
    return engine


def batch_of(shape: tuple[int, int], number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return {
        "input_ids": torch.randint(5, SHAPE["vocab_size"], shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": torch.randint(0, 2, shape[:1], generator=generator),
    }


def step(engine: Engine, batch: Batch) -> torch.Tensor:
    on_device = {name: tensor.to(engine.device) for name, tensor in batch.items()}
    return engine.step([(on_device, 1.0)], LEARNING_RATE)


def check_equal(alone: Engine, first: Engine, shape: tuple[int, int]) -> None:
    """Check that a lane beside others computes what a trial alone computes."""
    other = first.beside()
    other.module.train()
    for number in range(2):
        batch = batch_of(shape, number)
        torch.manual_seed(number)
        expected = step(alone, batch)
        torch.manual_seed(number)
        found = side_by_side([other, first], lambda engine, batch=batch: step(engine, batch))
        if alone.device == "cuda":
            print(f"loss alone {expected.item():.6f}, of a lane {found[1].item():.6f}")
        else:
            assert torch.equal(found[1], expected), "a lane's loss differs from that of one alone"
    other.release()


def measure(
    alone: Engine, lanes: Sequence[Engine], shape: tuple[int, int], rounds: int
) -> list[tuple[float, float]]:
    """By round: seconds of a step alone, and of a lane's share of a step."""
    found = []
    for number in range(WARM_UP_ROUNDS + rounds):
        batch = batch_of(shape, number)
        began = now_s(alone.device)
        step(alone, batch)
        between = now_s(alone.device)
        side_by_side(lanes, lambda engine, batch=batch: step(engine, batch))
        ended = now_s(alone.device)
        if number >= WARM_UP_ROUNDS:
            found.append((between - began, (ended - between) / len(lanes)))
    return found


def now_s(device: str) -> float:
    """A GPU works on after a call has returned."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def show(method: str, found: Sequence[tuple[float, float]], count: int) -> None:
    alone_s = statistics.median(pair[0] for pair in found)
    share_s = statistics.median(pair[1] for pair in found)
    ratios = [share / alone for alone, share in found]
    print(
        f"| {method} | {count} | {alone_s:.4f} | {share_s:.4f} "
        f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) |",
        flush=True,
    )


if __name__ == "__main__":
    main()
