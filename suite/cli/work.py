"""Estimates how much computing a sweep takes, in device-hours: at most, if the speed is right.

A training step of an arm with N parameters, of which M train, costs for each token
    2 N         forward,
    2 N or 2 M  backward to the activations: through the backbone, or, for READ and LST, through
                the new parts alone,
    2 M         gradients of weights;
a token passes through half of an encoder-decoder. The bound takes every example as long as the cut
allows, and every epoch and trial as run, with those that the edge guard may add; it leaves out
evaluation, loading and the optimizer. Once trials of the sweep have ended, their measured time
replaces the assumed speed: for their own cells as it is, for the others as the ratio of measured to
assumed time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from suite.config.task import (
    FileData,
    GeneratedData,
    HubData,
    LanguageModelTask,
    MultipleChoiceTask,
    TaskConfig,
)
from suite.config.training import TrainingConfig

if TYPE_CHECKING:
    from suite.config.arm import Arm
    from suite.config.sweep import LimitConfig, SweepConfig
    from suite.data.objective import Objective
    from suite.plan.plan import Plan, PlannedCell
    from suite.record.cells import Trial

GPU_TFLOPS = 40.0
"""Speed that a GPU achieves, our guess: an eighth of an A100's peak of 312 in bf16."""
CPU_TFLOPS = 0.05
"""Speed that a worker of one CPU core achieves, our guess."""
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes that decide how much one arm computes.

    Attributes:
        total: Parameters.
        trainable: Those that train.
        passed: Those that gradients pass through.
        encoder_decoder: Whether the input passes through one half of the parameters and the
            target through the other.
        tokens: The most that is read of an example, by task; of all others `max_length`.
    """

    total: int
    trainable: int
    passed: int
    encoder_decoder: bool
    tokens: dict[str, int] = field(default_factory=dict)

    def flops(self, training: TrainingConfig, task: str | None = None) -> float:
        """FLOPs of an optimizer step in which every example has its greatest length.

        Args:
            training: Lengths and batch size.
            task: The task's name; None = one that reads `max_length` tokens of an example.
        """
        tokens: float = training.max_length
        if task is not None:
            tokens = self.tokens.get(task, training.max_length)
        if self.encoder_decoder:
            # Each half of the parameters sees only its own side: (N/2)(T_in + T_out).
            tokens = (tokens + training.target_max_length) / 2
        # 2: a multiplication and an addition for each weight and token.
        return 2.0 * (self.total + self.passed + self.trainable) * tokens * training.batch_size


def steps_at_most(config: SweepConfig, task: TaskConfig) -> int | None:
    """Optimizer steps of a trial that never stops early; None where only the data tell."""
    training = config.training
    if training.epoch_steps is not None:
        return training.epochs * training.epoch_steps
    examples = training_examples(task, config.limit, block=training.max_length)
    if examples is None:
        return None
    # The last batch of an epoch is dropped where it is not full. Small batches make most steps.
    smallest = min(config.batch_sizes)
    return training.epochs * (examples // smallest)


def examples_at_most(config: SweepConfig, task: TaskConfig) -> int | None:
    """Examples of all steps of a trial that never stops early; None where only the data tell."""
    training = config.training
    if training.epoch_steps is not None:
        return training.epochs * training.epoch_steps * max(config.batch_sizes)
    examples = training_examples(task, config.limit, block=training.max_length)
    if examples is None:
        return None
    # Without what fills no batch, which is less at one size than at another.
    return training.epochs * max(examples // size * size for size in config.batch_sizes)


def training_examples(task: TaskConfig, limit: LimitConfig, *, block: int) -> int | None:
    """Examples of one pass over the training split, at most; None where only the data tell.

    Args:
        task: The task.
        limit: The sweep's limit on rows.
        block: Tokens of an example of running text.
    """
    if isinstance(task, LanguageModelTask):
        return _text_blocks(task, limit, block=block)
    rows = _rows(task)
    if limit.train is None:
        return rows
    if rows is None:
        return limit.train
    # A limit above the size of the data changes nothing.
    return min(rows, limit.train)


def _text_blocks(task: LanguageModelTask, limit: LimitConfig, *, block: int) -> int | None:
    """Blocks of running text in the training split; None where its tokens are unknown."""
    from suite.cli.sizes import published_tokens

    # A limit counts rows, and how many tokens a row of text has is unknown.
    if limit.train is not None or not isinstance(task.data, HubData):
        return None
    tokens = published_tokens(task.data)
    if tokens is None:
        return None
    return tokens // block


def _rows(task: TaskConfig) -> int | None:
    if isinstance(task.data, GeneratedData):
        from suite.data.generators import generators

        return int(generators.get(task.data.generator).configure(task.data.options).options.train)
    if isinstance(task.data, FileData):
        return _rows_of_files(task, task.data)
    from suite.cli.sizes import published_rows

    return published_rows(task.data)


def _rows_of_files(task: TaskConfig, data: FileData) -> int:
    """Training rows of files of one's own, less those that are held out."""
    from suite.config.own_data import read_file

    rows = read_file(data, "train").rows
    if task.splits.rule != "held-out":
        return rows
    held_out = task.splits.held_out
    if task.splits.test is None:
        held_out *= 2
    return rows - held_out


def arm_work(plan: Plan, *, where: str) -> dict[str, Work]:
    """The computing of every arm by its key, counted on the meta device."""
    from suite.plan.plan import objectives

    found: dict[str, Work] = {}
    arms = {cell.arm.key: cell.arm for cell in plan.cells}
    tasks = {cell.task.name: cell.task for cell in plan.cells}
    for resolved, objective in objectives(plan.config, tasks.values(), where=where):
        for key, arm in arms.items():
            if arm.backbone != resolved.choice:
                continue
            # One task is enough for the count: heads differ by a few thousand weights.
            if key not in found:
                found[key] = _work(resolved, objective.head, arm)
            found[key].tokens[objective.task.name] = _tokens(objective)
    return found


def _tokens(objective: Objective) -> int:
    """Tokens of the longest example: also of a decoder's target, and of every choice."""
    tokens = objective.trained_positions
    # A head scores every choice; where the answer is text, the right one alone is learnt.
    if objective.head.kind == "choice" and isinstance(objective.task, MultipleChoiceTask):
        tokens *= len(objective.task.choices)
    return tokens


def _work(resolved: Any, head: Any, arm: Arm) -> Work:
    from suite.petl import get_method
    from suite.petl.arm import count_arm

    count = count_arm(resolved, head, arm)
    # READ and LST stand beside the backbone: no gradient passes through it.
    if get_method(arm.method).backward_through_backbone:
        passed = count.total
    else:
        passed = count.trainable
    return Work(count.total, count.trainable, passed, resolved.family.kind == "encoder-decoder")


def device_hours(
    plan: Plan,
    work: Mapping[str, Work],
    *,
    trials: Mapping[str, Iterable[Trial]],
    on_gpus: bool,
) -> dict[str, Any]:
    """Hours of one device for all search trials and confirm runs, at most; null = unknown.

    Args:
        plan: The sweep.
        work: As `arm_work` gives it.
        trials: Trials that already ran, by cell.
        on_gpus: Whether a worker computes on a GPU, for the assumed speed.

    Returns:
        `device_hours_at_most` with `device_hours_pretrain` beside it, and `assumption`, one
        sentence.
    """
    device = "CPU worker"
    tflops = CPU_TFLOPS
    if on_gpus:
        device = "GPU"
        tflops = GPU_TFLOPS
    # Seconds of a device per example, by cell: where batch sizes are searched, trials differ in
    # their steps and hardly in their examples.
    assumed_s = {}
    measured_s = {}
    for cell in plan.cells:
        flops = work[cell.arm.key].flops(plan.config.training, cell.task.name)
        assumed_s[cell.key] = flops / plan.config.training.batch_size / (tflops * 1e12)
        example_s = _device_s_per_example(trials.get(cell.key, ()))
        if example_s is not None:
            measured_s[cell.key] = example_s
    # Cells without a measurement are off by as much as the measured ones were.
    ratio = 1.0
    basis = (
        f"if a {device} achieves {tflops:g} TFLOP/s, which is a guess; examples as long as "
        "max_length allows"
    )
    if measured_s:
        ratio = fmean(example_s / assumed_s[key] for key, example_s in measured_s.items())
        basis = f"from the measured steps of {len(measured_s)} of {len(plan.cells)} cells"
    known_hours = []
    for cell in plan.cells:
        hours = _hours(plan, cell, measured_s.get(cell.key, ratio * assumed_s[cell.key]))
        if hours is not None:
            known_hours.append(hours)
    # A sum without one cell would no longer be an upper bound.
    all_known = len(known_hours) == len(plan.cells)
    return {
        "device": device,
        "device_hours_at_most": sum(known_hours) if all_known else None,
        # Runs of the pretrain stage train on the same machines, at the same speed.
        "device_hours_pretrain": _pretrain_hours(plan, work, ratio / (tflops * 1e12)),
        "assumption": f"{basis}; every epoch run, evaluation left out",
    }


def _hours(plan: Plan, cell: PlannedCell, example_s: float) -> float | None:
    """Device-hours of all trials of a cell; None where its examples are unknown."""
    examples = examples_at_most(plan.config, cell.task)
    if examples is None:
        return None
    return plan.trials_at_most(cell) * examples * example_s / SECONDS_PER_HOUR


def _device_s_per_example(trials: Iterable[Trial]) -> float | None:
    """Seconds of the train phase times workers per example, over a cell's ended trials."""
    device_s = 0.0
    examples = 0
    for trial in trials:
        result = trial.result
        if result is not None and result.epochs and "train" in result.phases:
            # Times workers: a trial on four GPUs for an hour costs four device-hours.
            device_s += result.phases["train"].seconds * trial.spec.world_size
            examples += result.epochs[-1].step * trial.spec.training.batch_size
    if examples:
        return device_s / examples
    return None


def _pretrain_hours(plan: Plan, work: Mapping[str, Work], s_per_flop: float) -> float:
    """Device-hours of the pretrain stage, in which all weights train."""
    total_s = 0.0
    for spec in plan.pretrains:
        arm = work[next(cell.arm.key for cell in plan.cells if cell.arm.pretrain == spec.hash)]
        # Whatever method the arm trains with later, here every weight trains.
        whole = replace(arm, trainable=arm.total, passed=arm.total)
        steps = spec.training.epochs * (spec.training.epoch_steps or 0)
        total_s += steps * whole.flops(spec.training) * s_per_flop
    return total_s / SECONDS_PER_HOUR
