"""The optimizer steps of one epoch, on one rank: the innermost loop of a trial."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from suite.record.attempts import PreemptedError
from suite.train.midway import Midway, Pace
from suite.train.process_group import gather_objects
from suite.train.running_trial import UNSCORED_STEPS, RunningTrial


def train_epoch(
    run: RunningTrial,
    number: int,
    *,
    midway: Midway | None,
    spent: tuple[float, float | None],
    leaving: Callable[[], bool],
) -> float | None:
    """Train one epoch, or the rest of one. Collective.

    Args:
        number: From 1.
        midway: Where an earlier attempt left it.
        spent: Seconds and kWh of training before it.
        leaving: Whether this rank was told to leave.

    Returns:
        Mean loss over steps and ranks, or None as soon as it is not finite anywhere.

    Raises:
        PreemptedError: A rank is to leave, and a checkpoint is committed.
    """
    engine, batches = run.warm.engine, run.batches
    engine.check_mask()
    engine.module.train()
    first, sums = (
        (0, (0.0, 0.0))
        if midway is None
        else (midway.step, midway.sums(dist.get_rank(), engine.world_size))
    )
    total, half = (torch.tensor(value, device=engine.device) for value in sums)
    step, half_steps = (number - 1) * len(batches), len(batches) // 2
    if midway is not None:
        midway.resume_streams(dist.get_rank(), engine.world_size)
    pace = Pace(first)
    for i, (parts, lengths) in enumerate(
        batches.epoch(number, partial(run.spec.stream, "order"), first=first), first
    ):
        if pace.is_due(i):
            finite, stay = pace.vote(i, finite=bool(torch.isfinite(total)), stay=not leaving())
            if not finite:
                return None
            if not stay:
                _leave(
                    run,
                    number,
                    Midway.gather(i, total, half, before_s=spent[0], before_kwh=spent[1]),
                    new=i > first,
                )
        began = _now(engine.device)
        inputs = [
            ({name: t.to(engine.device, non_blocking=True) for name, t in part.items()}, weight)
            for part, weight in parts
        ]
        with run.meter.probe(int(lengths.max())) as watched:
            total += engine.step(inputs, run.learning_rate(step + i))
        if i + 1 == half_steps:
            half = total.clone()
        if i - first >= UNSCORED_STEPS and not watched:
            run.progress.step_s.append(_now(engine.device) - began)
            run.progress.step_tokens += int(lengths.sum())
    return _mean(run, number, total, half, half_steps)


def _mean(
    run: RunningTrial, number: int, total: torch.Tensor, half: torch.Tensor, half_steps: int
) -> float | None:
    """The epoch's mean loss; that of the first epoch's first half is noted."""
    world_size = run.warm.engine.world_size
    if number == 1 and half_steps:
        dist.all_reduce(half)
        run.progress.first_half_loss = float(half) / half_steps / world_size
    dist.all_reduce(total)
    mean = float(total) / len(run.batches) / world_size
    return mean if math.isfinite(mean) else None


def _leave(run: RunningTrial, number: int, midway: Midway, *, new: bool) -> None:
    """Leave an epoch, with a checkpoint in the epoch's own place if anything is `new` since the last one. Collective."""
    if new:
        progress, states = run.progress, gather_objects(run.meter.state())
        progress.meters |= {str(rank): state for rank, state in enumerate(states)}
        progress.midway = midway.to_json()
        run.checkpoints.save(run.warm.engine, number, progress.to_json())
    raise PreemptedError(
        f"left after step {midway.step} of {len(run.batches)} of epoch {number}, as asked; a checkpoint is committed"
    )


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
