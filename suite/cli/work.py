"""How much computing a sweep may take, in device-hours, before any of it has run: an upper bound under stated assumptions.

A training step of an arm with N parameters, of which M train, costs for each token
    2 N                forward,
    2 N or 2 M         backward to the activations: through the backbone, or (READ, LST) through the new parts alone,
    2 M                gradients of weights;
a token passes through half of an encoder-decoder. Every example is taken as long as it is cut, every epoch and trial as
run; evaluation, loading and optimizer are left out. Once trials of the sweep have ended, their measured time takes the
place of the assumed speed: for their own cells as it is, for the others as the ratio of measured to assumed time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from suite.config.task import GeneratedData, HubData, LanguageModelTask, TaskConfig
from suite.config.training import TrainingConfig

if TYPE_CHECKING:
    from suite.config.arm import Arm
    from suite.config.sweep import LimitConfig, SweepConfig
    from suite.plan.plan import Plan, PlannedCell
    from suite.record.cells import Trial

GPU_TFLOPS = 40.0
"""Achieved, not peak: an eighth of an A100's 312 in bf16, a third of a V100's 125 in fp16; ours."""
CPU_TFLOPS = 0.05
"""Per worker of one core; ours."""
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Work:
    """Of one arm.

    Attributes:
        total: Parameters.
        trainable: Those that train.
        passed: Those that gradients pass through.
        encoder_decoder: Whether the input passes through one half of the parameters and the target through the other.
    """

    total: int
    trainable: int
    passed: int
    encoder_decoder: bool

    def flops(self, training: TrainingConfig) -> float:
        """Of an optimizer step with every example as long as it is cut."""
        tokens = (
            (training.max_length + training.target_max_length) / 2
            if self.encoder_decoder
            else training.max_length
        )
        return 2.0 * (self.total + self.passed + self.trainable) * tokens * training.batch_size


def steps_at_most(config: SweepConfig, task: TaskConfig) -> int | None:
    """Optimizer steps of a trial that never stops early; None where the training rows are unknown without reading data."""
    training = config.training
    if training.epoch_steps is not None:
        return training.epochs * training.epoch_steps
    examples = training_examples(task, config.limit, block=training.max_length)
    return None if examples is None else training.epochs * (examples // training.batch_size)


def training_examples(task: TaskConfig, limit: LimitConfig, *, block: int) -> int | None:
    """Examples of one pass over the training split, at most; None where that is not known without reading data.

    Args:
        block: Tokens of an example of running text.
    """
    if isinstance(task, LanguageModelTask):
        from suite.cli.sizes import published_tokens

        tokens = (
            published_tokens(task.data)
            if isinstance(task.data, HubData) and limit.train is None
            else None
        )
        return (
            None if tokens is None else tokens // block
        )  # a limit counts rows, of which the tokens are unknown
    rows = [limit.train] if limit.train is not None else []
    if (known := _rows(task)) is not None:
        rows.append(known)
    return min(rows, default=None)


def _rows(task: TaskConfig) -> int | None:
    if isinstance(task.data, GeneratedData):
        from suite.data.generators import generators

        return int(generators.get(task.data.generator).configure(task.data.options).options.train)
    from suite.cli.sizes import published_rows

    return published_rows(task.data) if isinstance(task.data, HubData) else None


def arm_work(plan: Plan, *, where: str) -> dict[str, Work]:
    """The computing of every arm by its key, counted on the meta device."""
    from suite.plan.plan import objectives

    found: dict[str, Work] = {}
    arms = {cell.arm.key: cell.arm for cell in plan.cells}
    for resolved, objective in objectives(plan.config, [plan.cells[0].task], where=where):
        for key, arm in arms.items():
            if arm.backbone == resolved.choice:
                found[key] = _work(resolved, objective.head, arm)
    return found


def _work(resolved: Any, head: Any, arm: Arm) -> Work:
    from suite.petl import get_method
    from suite.petl.arm import count_arm

    count = count_arm(
        resolved,
        head,
        arm,
    )
    passed = count.total if get_method(arm.method).backward_through_backbone else count.trainable
    return Work(count.total, count.trainable, passed, resolved.family.kind == "encoder-decoder")


def device_hours(
    plan: Plan, trials: Mapping[str, Iterable[Trial]], *, on_gpus: bool, where: str
) -> dict[str, Any]:
    """Hours of one device for all search trials and confirm runs, at most; null where a size is unknown.

    Args:
        trials: Those that already ran, by cell.
        on_gpus: What a worker computes on, for the assumed speed.
        where: The sweep's file, for errors.

    Returns:
        `device_hours_at_most` with `device_hours_pretrain` beside it, and `assumption`, one sentence.
    """
    tflops, device = (GPU_TFLOPS, "GPU") if on_gpus else (CPU_TFLOPS, "CPU worker")
    work = arm_work(plan, where=where)
    assumed = {
        cell.key: work[cell.arm.key].flops(plan.config.training) / (tflops * 1e12)
        for cell in plan.cells
    }
    measured = {
        key: step_s
        for key, ended in trials.items()
        if (step_s := _device_s_per_step(ended)) is not None
    }
    ratio = fmean(step_s / assumed[key] for key, step_s in measured.items()) if measured else 1.0
    hours = [
        _hours(plan, cell, measured.get(cell.key, ratio * assumed[cell.key])) for cell in plan.cells
    ]
    known = [h for h in hours if h is not None]
    basis = (
        f"from the measured steps of {len(measured)} of {len(plan.cells)} cells"
        if measured
        else f"assumes {tflops:g} TFLOP/s achieved by a {device}; examples as long as max_length allows"
    )
    return {
        "device": device,
        "device_hours_at_most": sum(known) if len(known) == len(hours) else None,
        "device_hours_pretrain": _pretrain_hours(plan, work, ratio / (tflops * 1e12)),
        "assumption": f"{basis}; every epoch run, evaluation left out",
    }


def _hours(plan: Plan, cell: PlannedCell, step_s: float) -> float | None:
    steps = steps_at_most(plan.config, cell.task)
    return None if steps is None else plan.trials_of(cell) * steps * step_s / SECONDS_PER_HOUR


def _device_s_per_step(trials: Iterable[Trial]) -> float | None:
    """Seconds of the train phase times workers per optimizer step, mean over a cell's ended trials."""
    spent = [
        (t.result.phases["train"].seconds * t.spec.world_size, t.result.epochs[-1].step)
        for t in trials
        if t.result is not None and t.result.epochs and "train" in t.result.phases
    ]
    steps = sum(s for _, s in spent)
    return sum(seconds for seconds, _ in spent) / steps if steps else None


def _pretrain_hours(plan: Plan, work: Mapping[str, Work], s_per_flop: float) -> float:
    """Of the pretrain stage: all weights train in every run."""
    total = 0.0
    for spec in plan.pretrains:
        arm = work[next(cell.arm.key for cell in plan.cells if cell.arm.pretrain == spec.hash)]
        whole = replace(arm, trainable=arm.total, passed=arm.total)
        total += (
            spec.training.epochs
            * (spec.training.epoch_steps or 0)
            * whole.flops(spec.training)
            * s_per_flop
        )
    return total / SECONDS_PER_HOUR
