"""What ZeRO-3 adds to a step, in time and memory, with frozen weights kept whole or partitioned.

    python benchmarks/step.py [--methods lora,read,full] [--ranks 2] [--rows 16] [--tokens 48] [--device cuda]

Each method trains MiniLM (random weights of its shape) on random tokens. The peer is ZeRO stage 0
of the same engine. Sides alternate in rounds; a ratio is taken within a round. The peak is that of
rank 0's tensors, weights and optimizer included. On a GPU the precision is bf16 where it has that, each rank takes
a GPU, and the clock waits for it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from suite.backbones.loading import Head, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.config.training import TrainingConfig
from suite.meters import TensorPeak
from suite.petl.arm import build_arm
from suite.train.engine import Engine
from suite.train.process_group import close_process_group, free_port, init_process_group

WARM_UP_STEPS = 2
SHAPE = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
MIB = 2**20


@dataclass(frozen=True)
class Side:
    """One way to lay out the weights of a trial."""

    name: str
    stage: int
    frozen: str


SIDES = (
    Side("stage 0", 0, "resident"),
    Side("stage 3, frozen weights resident", 3, "resident"),
    Side("stage 3, all partitioned", 3, "partitioned"),
)


@dataclass(frozen=True)
class Work:
    """What every rank is told."""

    methods: tuple[str, ...]
    ranks: int
    rows: int
    tokens: int
    steps: int
    rounds: int
    device: str


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, and rank 0's peak in bytes."""

    step_s: float
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="lora,bitfit,adapter,prompt,read,lst,full")
    parser.add_argument("--ranks", type=int, default=2, help="each takes a GPU on cuda")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, default=16, help="of a rank's batch")
    parser.add_argument("--tokens", type=int, default=48, help="of a row")
    parser.add_argument("--steps", type=int, default=8, help="of a side in a round")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    work = Work(
        methods=tuple(given.methods.split(",")),
        ranks=given.ranks,
        rows=given.rows,
        tokens=given.tokens,
        steps=given.steps,
        rounds=given.rounds,
        device=given.device,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures"
        mp.spawn(rank_main, args=(free_port(), work, path), nprocs=work.ranks)
        figures = torch.load(path, weights_only=True)
    print(
        f"{work.device}, {work.ranks} ranks, {work.rows} x {work.tokens} tokens each, {work.rounds} rounds\n"
    )
    print("| method | side | step, s | / stage 0 (range) | peak, MiB | / stage 0 |")
    print("|---|---|---|---|---|---|")
    for method in work.methods:
        show(method, figures[method])


def show(method: str, rounds: Sequence[Sequence[Sequence[float]]]) -> None:
    """Print a method's lines from (seconds, bytes) by round and side."""
    for i, side in enumerate(SIDES):
        seconds = statistics.median(of_round[i][0] for of_round in rounds)
        ratios = [of_round[i][0] / of_round[0][0] for of_round in rounds]
        peak = rounds[0][i][1]
        print(
            f"| {method} | {side.name} | {seconds:.4f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {peak / MIB:.1f} | {peak / rounds[0][0][1]:.2f} |"
        )


def rank_main(rank: int, port: int, work: Work, path: Path) -> None:
    """Measure on one rank; rank 0 writes the figures."""
    torch.set_num_threads(1)
    if work.device == "cuda":
        torch.cuda.set_device(rank)
    init_process_group(
        rank=rank, world_size=work.ranks, local_rank=rank, address="127.0.0.1", port=port,
        device=work.device, timeout_s=300,
    )  # fmt: skip
    figures: dict[str, list[list[list[float]]]] = {}
    for method in work.methods:
        figures[method] = []
        for _ in range(work.rounds):
            sides = []
            for side in SIDES:
                found = measure(method, side, work, rank)
                sides.append([found.step_s, float(found.peak_bytes)])
            figures[method].append(sides)
    if rank == 0:
        torch.save(figures, path)
    close_process_group()


def measure(method: str, side: Side, work: Work, rank: int) -> Measured:
    """Build an engine, train some steps, and watch the memory of one more."""
    resolved = resolve(BackboneChoice(name="bert-base", config=SHAPE))
    torch.manual_seed(0)
    head = Head("classification", 2)
    arm = Arm(
        backbone=resolved.choice,
        attention=AttentionChoice(name="pretrained"),
        method=method,
        architecture={"init": "magnitude"} if method == "lst" else {},
    )
    model, _ = build_arm(resolved, head, arm)
    training = TrainingConfig(
        batch_size=work.rows * work.ranks, zero_stage=side.stage, frozen_weights=side.frozen
    )
    engine = Engine(model, training, world_size=work.ranks, device=work.device)
    engine.module.train()
    generator = torch.Generator().manual_seed(rank)
    shape = (work.rows, work.tokens)
    times = []
    for i in range(WARM_UP_STEPS + work.steps):
        made = {
            "input_ids": torch.randint(5, SHAPE["vocab_size"], shape, generator=generator),
            "attention_mask": torch.ones(shape, dtype=torch.long),
            "labels": torch.randint(0, 2, (work.rows,), generator=generator),
        }
        batch = {name: tensor.to(work.device) for name, tensor in made.items()}
        dist.barrier()
        wait_for(work.device)
        began = time.perf_counter()
        engine.step([(batch, 1.0)], 1e-4)
        wait_for(work.device)
        if i >= WARM_UP_STEPS:
            times.append(time.perf_counter() - began)
    peak_bytes = peak_of(partial(engine.step, [(batch, 1.0)], 1e-4), work.device)
    engine.release()
    del engine, model
    gc.collect()
    return Measured(statistics.median(times), peak_bytes)


def wait_for(device: str) -> None:
    """A GPU works on after a call has returned."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_of(work: Callable[[], object], device: str) -> int:
    """The most bytes of tensors that are alive at a time while something runs."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated()
    with TensorPeak() as watch:
        work()
    return watch.peak_bytes


if __name__ == "__main__":
    main()
