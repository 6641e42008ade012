"""The least partitioned layout at which a sweep's largest arm fits, by estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from suite.backbones.loading import Head, ResolvedBackbone, build
from suite.config.arm import Arm
from suite.config.task import MultipleChoiceTask
from suite.config.training import Partitioning, TrainingConfig
from suite.data.objective import Objective
from suite.errors import gib
from suite.petl.arm import ArmCount, build_arm, count_arm
from suite.plan.partitioning import USABLE_FRAC, Decision, candidates
from suite.plan.plan import Plan, objectives, pretrain_objective
from suite.profiling.estimate import estimate_model
from suite.profiling.setting import Setting
from suite.train.engine_config import uses_bf16


@dataclass(frozen=True, slots=True)
class Case:
    """An arm of a sweep, or a run of its pretrain stage, on one task.

    Attributes:
        resolved: The backbone.
        objective: The task, as it is put to the backbone.
        arm: The arm.
        training: How it trains.
        ranks: The fewest that it may train on.
        pretrains: Whether it is a run of the pretrain stage.
    """

    resolved: ResolvedBackbone
    objective: Objective
    arm: Arm
    training: TrainingConfig
    ranks: int
    pretrains: bool = False

    def counted(self) -> ArmCount:
        return count_arm(self.resolved, self.objective.head, self.arm, pretrained=self.pretrains)

    def weight_bytes(self, device: str) -> int:
        """Bytes of a weight that is computed with."""
        if uses_bf16(self.training, device):
            return 2
        return 4

    def needed_bytes(self, partitioning: Partitioning, *, device: str) -> int:
        """Bytes on the fullest rank, by estimate."""
        task = self.objective.task
        head = self.objective.head
        choices = 1
        if head.kind == "choice" and isinstance(task, MultipleChoiceTask):
            choices = len(task.choices)
        # New heads are so small that one stands for all; a language model's logits are not.
        if head.kind not in ("text", "masked"):
            head = Head("classification", 2)
        training = self.training
        micro = training.micro_batch_size or training.batch_size // self.ranks
        setting = Setting(
            batch=training.batch_size * choices,
            micro_batch=micro * choices,
            # a decoder reads prompt and target in one sequence
            seq=self.objective.trained_positions,
            target=self.objective.trained_targets,
            ranks=self.ranks,
            zero=partitioning.zero_stage,
            frozen_weights=partitioning.frozen_weights,
            dtype="bf16" if uses_bf16(training, device) else "fp32",
            device="cuda" if device == "cuda" else "cpu",
        )
        model, _ = build_arm(self.resolved, head, self.arm, meta=True, pretrained=self.pretrains)
        numel = sum(parameter.numel() for parameter in model.parameters())
        memory = estimate_model(
            model,
            self.resolved.family,
            head,
            setting,
            recompute=training.gradient_checkpointing,
        ).memory
        peak = memory.peak_bytes
        if device == "cuda":
            if training.offload != "none":
                peak -= memory.optimizer_bytes
            # DeepSpeed moves the whole model to every GPU before it is cut.
            return max(peak, self.weight_bytes(device) * numel)
        # Every rank builds the whole model in fp32 before it is cut.
        return max(peak, 4 * numel)


def lanes_that_fit(
    plan: Plan,
    partitioning: Partitioning,
    *,
    device: str,
    worker_bytes: int,
    where: str,
    cache: Path | None = None,
    data_root: Path | None = None,
) -> dict[str, int]:
    """How many search trials of an arm fit side by side on a worker, by the arm's key.

    They share the frozen weights; all else each has for itself. Arms of which one trial trains at a
    time are left out.

    Args:
        plan: The sweep.
        partitioning: How its weights are laid out.
        device, worker_bytes, where, cache, data_root: As in `first_that_fits`.
    """
    wanted: dict[str, int] = {}
    # ZeRO-3 cannot gather a weight for one engine while another one reads it.
    if partitioning.applied_to(plan.config.training).frozen_weights == "resident":
        for cell in plan.cells:
            if plan.lanes(cell) > 1:
                wanted[cell.arm.key] = plan.lanes(cell)
    if not wanted:
        return wanted
    for case in _cases(plan, where=where, cache=cache, data_root=data_root):
        if case.arm.key not in wanted or case.pretrains:
            continue
        count = case.counted()
        shared = (count.total - count.trainable) * case.weight_bytes(device)
        own = max(1, case.needed_bytes(partitioning, device=device) - shared)
        fit = (USABLE_FRAC * worker_bytes - shared) // own
        wanted[case.arm.key] = max(1, min(wanted[case.arm.key], int(fit)))
    return wanted


def most_parameters(
    plan: Plan, *, where: str, cache: Path | None = None, data_root: Path | None = None
) -> int:
    """The parameters of a sweep's largest backbone, without what methods add.

    The arguments are those of `first_that_fits`.
    """
    most = 0
    # One task is enough, as for the counts below.
    for resolved, objective in objectives(
        plan.config, [plan.cells[0].task], where=where, cache=cache, data_root=data_root
    ):
        model = build(resolved, objective.head, meta=True)
        most = max(most, sum(parameter.numel() for parameter in model.parameters()))
    return most


def first_that_fits(
    plan: Plan,
    *,
    device: str,
    worker_bytes: int,
    where: str,
    cache: Path | None = None,
    data_root: Path | None = None,
) -> Decision:
    """The first of the layouts left open at which the largest arm fits; the last if none does.

    Args:
        plan: The sweep.
        device: "cuda" or "cpu".
        worker_bytes: Memory of one worker.
        where: The sweep's file, for errors.
        cache, data_root: As in `objectives`.
    """
    cases = list(_cases(plan, where=where, cache=cache, data_root=data_root))
    counts: dict[tuple[str, bool], ArmCount] = {}
    for case in cases:
        key = case.arm.key, case.pretrains
        # One task is enough: heads differ by a few thousand weights.
        if key not in counts:
            counts[key] = case.counted()
    *tried, last = candidates(plan.config.training)
    why = ""
    for partitioning in tried:
        largest = max(
            counts, key=lambda key: _states_bytes(counts[key], partitioning, plan.world_size)
        )
        needed = 0
        for case in cases:
            if (case.arm.key, case.pretrains) == largest:
                needed = max(needed, case.needed_bytes(partitioning, device=device))
        why = f"the largest arm needs about {gib(needed)} of a worker's {gib(worker_bytes)}"
        if needed <= USABLE_FRAC * worker_bytes:
            return Decision(partitioning, why)
    return Decision(last, f"less partitioned, {why}")


def _states_bytes(count: ArmCount, partitioning: Partitioning, ranks: int) -> float:
    """Weights, gradients and optimizer of an arm, near enough to find the largest one."""
    trained = 20.0 * count.trainable
    if partitioning.zero_stage:
        trained /= ranks
    return 4.0 * (count.total - count.trainable) + trained


def _cases(plan: Plan, *, where: str, cache: Path | None, data_root: Path | None) -> Iterator[Case]:
    """Every arm on every kind of task that asks for another memory, and every pretrain run."""
    config = plan.config
    tasks = {cell.task.name: cell.task for cell in plan.cells}
    arms = {cell.arm.key: cell for cell in plan.cells}
    seen = set()
    for resolved, objective in objectives(
        config, tasks.values(), where=where, cache=cache, data_root=data_root
    ):
        task = objective.task
        choices = len(task.choices) if isinstance(task, MultipleChoiceTask) else 1
        for key, cell in arms.items():
            kind = key, objective.head.kind, choices, objective.trained_positions
            if cell.arm.backbone != resolved.choice or kind in seen:
                continue
            seen.add(kind)
            ranks = plan.workers(cell)
            if config.resources.min_workers is not None:
                ranks = min(ranks, config.resources.min_workers)
            yield Case(resolved, objective, cell.arm, config.training, ranks)
    for spec in plan.pretrains:
        resolved, objective = pretrain_objective(spec, cache=cache, data_root=data_root)
        # The sweep's, of which a caller may know already what `auto` comes to.
        training = spec.training.model_copy(update={"precision": config.training.precision})
        yield Case(resolved, objective, spec.arm, training, spec.world_size, pretrains=True)
