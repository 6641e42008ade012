"""The optimizer steps of one epoch, on one rank: the innermost loop of a trial."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from suite.petl._frozen import GivenPass
from suite.record.attempts import PreemptedError
from suite.train.batches import Part, Rows
from suite.train.engine import Engine, LocalBatch
from suite.train.lanes import LanesMeter, side_by_side
from suite.train.midway import Midway, Pace
from suite.train.running_trial import UNSCORED_STEPS, RunningTrial

MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class EpochStart:
    """Where a trial begins an epoch.

    Attributes:
        run: The trial.
        midway: Where an earlier attempt left it; None = at its first step.
        before_s, before_kwh, before_source: What training had cost before the epoch, and which
            source counted the energy.
    """

    run: RunningTrial
    midway: Midway | None
    before_s: float
    before_kwh: float | None
    before_source: str | None

    def energy_kwh(self, total_kwh: float | None, source: str | None) -> float | None:
        """What the epoch took of all that training took so far.

        None where one of the two is not known, or where another source counted what was before:
        the difference of an estimate and a measured energy is neither.
        """
        if total_kwh is None or self.before_kwh is None:
            return None
        if self.before_source not in (None, source):
            return None
        return total_kwh - self.before_kwh


class StepClock:
    """Times steps, each from the end of the one before it, so that making its batch counts too.

    On a GPU, kernels run behind Python. The GPU itself notes when it reaches the end of a step, so
    that no step has to wait for its kernels.
    """

    MOST_PENDING = 256
    """Steps after which the GPU is waited for, so that its notes do not pile up."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._marks = [self._mark()]
        self._scored: list[bool] = []
        self._seconds: list[float] = []

    def end_step(self, *, scored: bool) -> None:
        """Note the end of a step, which counts if it is `scored`."""
        self._marks.append(self._mark())
        self._scored.append(scored)
        if len(self._scored) >= self.MOST_PENDING:
            self._settle()

    def seconds(self) -> list[float]:
        """The times of the scored steps since the last call."""
        self._settle()
        seconds = self._seconds
        self._seconds = []
        return seconds

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
        for (began, ended), scored in zip(pairwise(self._marks), self._scored, strict=True):
            if not scored:
                continue
            if self._is_cuda:
                self._seconds.append(began.elapsed_time(ended) / MS_PER_S)
            else:
                self._seconds.append(ended - began)
        self._marks = self._marks[-1:]
        self._scored = []


@dataclass(slots=True, eq=False)
class _Lane:
    """A trial in the epoch.

    Attributes:
        total, half: Sum of its losses so far, and that of the epoch's first half. NaN once a
            gradient was not finite.
        skipped_before: Steps that its engine had skipped when the epoch began.
    """

    start: EpochStart
    total: torch.Tensor
    half: torch.Tensor
    skipped_before: int

    @property
    def run(self) -> RunningTrial:
        return self.start.run

    @property
    def engine(self) -> Engine:
        return self.run.warm.engine


def train_epoch(
    starts: Sequence[EpochStart],
    number: int,
    meter: LanesMeter,
    *,
    leaving: Callable[[], bool],
) -> list[float | None]:
    """Train one epoch, or the rest of one, of a trial or of several side by side. Collective.

    Args:
        starts: One for each trial, all at the same step.
        number: The epoch, counted from 1.
        meter: Runs while they train.
        leaving: Whether this rank was told to leave.

    Returns:
        By trial, the mean loss over steps and ranks; None for one of which a loss or gradient is
        not finite on some rank, which trains no further.

    Raises:
        PreemptedError: A rank is to leave, and a checkpoint of every trial is committed.
    """
    lanes = [_lane(start) for start in starts]
    # All lanes have the same batches.
    run = lanes[0].run
    batches = run.batches
    device = lanes[0].engine.device
    midway = lanes[0].start.midway
    first = 0
    if midway is not None:
        first = midway.step
    done_before = (number - 1) * len(batches)
    half_steps = len(batches) // 2
    # Last of all: what comes before may draw from the streams.
    if midway is not None:
        midway.resume_streams(dist.get_rank(), lanes[0].engine.world_size)
    pace = Pace(first)
    clock = StepClock(device)
    seed = partial(run.spec.stream, "order")
    alive = lanes
    timed = max(lane.run.progress.lanes for lane in lanes) == 1
    steps = batches.epoch(number, seed, first=first)
    for i, (parts, batch, rows) in enumerate(steps, first):
        # All ranks leave at the same step: those that stay would wait for one that left.
        if pace.is_due(i):
            finite, stay = pace.vote(
                i, finite=[bool(torch.isfinite(lane.total)) for lane in alive], stay=not leaving()
            )
            alive = [lane for lane, is_finite in zip(alive, finite, strict=True) if is_finite]
            if not alive:
                break
            if not stay:
                meter.settle()
                run.progress.step_s += clock.seconds()
                _leave(alive, number, i, new=i > first)
        inputs = [(_on(device, part), weight) for part, weight in parts]
        given = _given(run, parts, rows)
        for lane in alive:
            lane.engine.set_learning_rate(lane.run.learning_rate(done_before + i))
        # Of the whole batch: a rank that waits for another that watches would call its step timed.
        lengths, units = batches.lengths[batch], batches.units[batch]
        with meter.probe(int(lengths.max()), int(units.max())) as watched:
            _step(alive, inputs, given)
        if i + 1 == half_steps:
            for lane in alive:
                lane.half = lane.total.clone()
        # A step that the meter watches is slower than the others, and one of lanes is not theirs.
        is_scored = timed and i - first >= UNSCORED_STEPS and not watched
        clock.end_step(scored=is_scored)
        if is_scored:
            run.progress.step_tokens += int(lengths.sum())
    run.progress.step_s += clock.seconds()
    means: list[float | None] = []
    for lane in lanes:
        mean: float | None = None
        if lane in alive:
            mean = _mean(lane, number, half_steps)
        means.append(mean)
    return means


def _lane(start: EpochStart) -> _Lane:
    engine = start.run.warm.engine
    engine.check_mask()
    # The evaluation before left the model in evaluation mode.
    start.run.warm.training_mode()
    total = 0.0
    half = 0.0
    if start.midway is not None:
        total, half = start.midway.sums(dist.get_rank(), engine.world_size)
    # On the device: reading the loss at every step would make a GPU wait.
    return _Lane(
        start,
        torch.tensor(total, device=engine.device),
        torch.tensor(half, device=engine.device),
        engine.skipped_steps,
    )


def _given(
    run: RunningTrial, parts: Sequence[Part], rows: Sequence[Rows]
) -> list[GivenPass | None]:
    """What the frozen stacks give for each micro-batch; None where they must run."""
    states = run.warm.states
    if states is None:
        return [None] * len(parts)
    given: list[GivenPass | None] = []
    for (inputs, _), numbers in zip(parts, rows, strict=True):
        given.append(states.given("train", numbers.tolist(), inputs))
    return given


def _step(
    lanes: list[_Lane], inputs: Sequence[LocalBatch], given: Sequence[GivenPass | None]
) -> None:
    """Take one optimizer step of every lane, and add its loss to the lane's sum. Collective."""
    losses = [torch.zeros((), device=lanes[0].engine.device) for _ in lanes]
    for (batch, weight), frozen in zip(inputs, given, strict=True):

        def micro_step(
            lane: _Lane, batch: Mapping[str, torch.Tensor] = batch, weight: float = weight
        ) -> torch.Tensor:
            return lane.engine.micro_step(batch, weight)

        # The lanes share the frozen pass of this micro-batch, which is forgotten after it.
        for k, loss in enumerate(side_by_side(lanes, micro_step, frozen)):
            losses[k] += loss
    for lane, loss in zip(lanes, losses, strict=True):
        # DeepSpeed divides the gradients by the number of micro-batches as well.
        lane.total += loss / len(inputs)
        if lane.engine.skipped_steps > lane.skipped_before:
            # A lost update ends the trial as a loss that is not finite does.
            lane.total.fill_(math.nan)


def _mean(lane: _Lane, number: int, half_steps: int) -> float | None:
    """Return the epoch's mean loss. In the first epoch, note that of its first half too."""
    run = lane.run
    world_size = lane.engine.world_size
    # Only a trial of one epoch is judged by its halves (`suite.train.validity`).
    if number == 1 and half_steps:
        dist.all_reduce(lane.half)
        run.progress.first_half_loss = float(lane.half) / half_steps / world_size
    # Where a gradient that is not finite reaches the weights, no loss tells it of the last step.
    if not lane.engine.is_finite:
        lane.total.fill_(math.nan)
    dist.all_reduce(lane.total)
    # Each rank holds its part of every loss; their mean is the loss of the whole batch.
    mean = float(lane.total) / len(run.batches) / world_size
    if not math.isfinite(mean):
        return None
    return mean


def _leave(lanes: list[_Lane], number: int, step: int, *, new: bool) -> None:
    """Leave an epoch. Collective.

    A checkpoint takes the epoch's own place, if anything is `new` since the last one.
    """
    for lane in lanes:
        run = lane.run
        if new:
            midway = Midway.gather(
                step,
                lane.total,
                lane.half,
                before_s=lane.start.before_s,
                before_kwh=lane.start.before_kwh,
                before_source=lane.start.before_source,
            )
            run.note_meters()
            run.progress.midway = midway.to_json()
            run.checkpoints.save(run.warm.engine, number, run.progress.to_json())
    raise PreemptedError(
        f"left after step {step} of {len(lanes[0].run.batches)} of epoch {number}, as asked; "
        "a checkpoint is committed"
    )


def _on(device: str, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch on the device, whose copy there need not have ended."""
    if device == "cpu":
        return dict(batch)
    # From memory that may be paged out, a copy would wait for the kernels before it.
    pinned = {name: tensor.pin_memory() for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in pinned.items()}
