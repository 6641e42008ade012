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
from suite.train.running_trial import UNSCORED_STEPS, RunningTrial


def train_epoch(
    run: RunningTrial,
    number: int,
    *,
    midway: Midway | None,
    before_s: float,
    before_kwh: float | None,
    leaving: Callable[[], bool],
) -> float | None:
    """Train one epoch, or the rest of one. Collective.

    Args:
        number: The epoch, counted from 1.
        midway: Where an earlier attempt left the epoch.
        before_s, before_kwh: What training had cost before the epoch.
        leaving: Whether this rank was told to leave.

    Returns:
        Mean loss over steps and ranks, or None as soon as it is not finite on any rank.

    Raises:
        PreemptedError: A rank is to leave, and a checkpoint is committed.
    """
    engine = run.warm.engine
    batches = run.batches
    engine.check_mask()
    # The evaluation before left the model in evaluation mode.
    engine.module.train()
    first = 0
    total_so_far = 0.0
    half_so_far = 0.0
    if midway is not None:
        first = midway.step
        total_so_far, half_so_far = midway.sums(dist.get_rank(), engine.world_size)
    # On the device: reading the loss at every step would make a GPU wait.
    total = torch.tensor(total_so_far, device=engine.device)
    half = torch.tensor(half_so_far, device=engine.device)
    done_before = (number - 1) * len(batches)
    half_steps = len(batches) // 2
    # Last of all: what comes before may draw from the streams.
    if midway is not None:
        midway.resume_streams(dist.get_rank(), engine.world_size)
    pace = Pace(first)
    seed = partial(run.spec.stream, "order")
    for i, (parts, lengths) in enumerate(batches.epoch(number, seed, first=first), first):
        # All ranks leave at the same step: those that stay would wait for one that left.
        if pace.is_due(i):
            finite, stay = pace.vote(i, finite=bool(torch.isfinite(total)), stay=not leaving())
            if not finite:
                return None
            if not stay:
                left = Midway.gather(i, total, half, before_s=before_s, before_kwh=before_kwh)
                _leave(run, number, left, new=i > first)
        began = _now(engine.device)
        inputs = []
        for part, weight in parts:
            moved = {name: t.to(engine.device, non_blocking=True) for name, t in part.items()}
            inputs.append((moved, weight))
        with run.meter.probe(int(lengths.max())) as watched:
            total += engine.step(inputs, run.learning_rate(done_before + i))
        if i + 1 == half_steps:
            half = total.clone()
        # A step that the meter watches is slower than the others.
        if i - first >= UNSCORED_STEPS and not watched:
            run.progress.step_s.append(_now(engine.device) - began)
            run.progress.step_tokens += int(lengths.sum())
    return _mean(run, number, total, half, half_steps)


def _mean(
    run: RunningTrial, number: int, total: torch.Tensor, half: torch.Tensor, half_steps: int
) -> float | None:
    """Return the epoch's mean loss. In the first epoch, note that of its first half too."""
    world_size = run.warm.engine.world_size
    # Only a trial of one epoch is judged by its halves (`suite.train.validity`).
    if number == 1 and half_steps:
        dist.all_reduce(half)
        run.progress.first_half_loss = float(half) / half_steps / world_size
    dist.all_reduce(total)
    # Each rank holds its part of every loss; their mean is the loss of the whole batch.
    mean = float(total) / len(run.batches) / world_size
    if not math.isfinite(mean):
        return None
    return mean


def _leave(run: RunningTrial, number: int, midway: Midway, *, new: bool) -> None:
    """Leave an epoch. Collective.

    A checkpoint takes the epoch's own place, if anything is `new` since the last one.
    """
    if new:
        run.note_meters()
        run.progress.midway = midway.to_json()
        run.checkpoints.save(run.warm.engine, number, run.progress.to_json())
    raise PreemptedError(
        f"left after step {midway.step} of {len(run.batches)} of epoch {number}, as asked; "
        "a checkpoint is committed"
    )


def _now(device: str) -> float:
    if device == "cuda":
        # Kernels run behind Python: without this only their launch would be timed.
        torch.cuda.synchronize()
    return time.perf_counter()
