"""The pretrain stage of a plan: which arms need a model first, and the run that makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from suite.config.arm import Arm
from suite.config.pretrain import PretrainConfig
from suite.config.sweep import AttentionChoice, LimitConfig, SweepConfig
from suite.config.task import PretrainTask, TaskConfig, load_task
from suite.config.training import TrainingConfig
from suite.errors import IncompatibleError
from suite.record.spec import Phase, TrialSpec

if TYPE_CHECKING:
    from suite.backbones.loading import ResolvedBackbone

# All sweeps of a home share a pretrain run, so it bears no sweep's name.
OF_NO_SWEEP = "pretrained"
ENGINE = (
    "precision",
    "zero_stage",
    "offload",
    "gradient_checkpointing",
    "reduce_bucket_elements",
    "persistence_threshold_elements",
    "pad_to_multiple",
    "threads_per_worker",
)
"""Settings that a pretrain run takes over from the sweep's `training`; all others are its own."""


def pretrain_run(
    config: SweepConfig,
    resolved: ResolvedBackbone,
    attention: AttentionChoice,
    *,
    world_size: int,
    where: str,
) -> TrialSpec | None:
    """The pretrain run that one backbone and attention of a sweep need, or None.

    Args:
        resolved: One of the sweep's backbones.
        attention: One of its variants.
        world_size: Workers.
        where: The sweep's file, for errors.

    Raises:
        UnknownNameError: No such corpus or variant.
        IncompatibleError: Uptraining of a backbone without a checkpoint.
    """
    stage = config.pretrain
    if stage is None:
        return None
    # Here, because variants load torch, which reading a plan does without.
    from suite.attention import variants
    from suite.petl.own_code import own_code

    variant = variants.get(attention.name, where=f"{where}: attention")
    scratch = variant.configure(attention.options).start == "scratch"
    # This variant starts from the checkpoint's weights and needs no run.
    if not scratch and stage.attention == "scratch":
        return None
    uptrained = not scratch and stage.fraction is not None
    if uptrained and resolved.origin == "random":
        raise IncompatibleError(
            f"{where}: pretrain.fraction: attention {attention.name} would be uptrained from a "
            f"checkpoint, but backbone {resolved.choice.name} has random weights (config: ...); "
            "leave fraction out, or take a backbone with weights"
        )
    steps = stage.steps
    start = "random"
    if uptrained:
        steps = stage.uptraining_steps
        start = "checkpoint"
    corpus = load_task(stage.corpus, where=f"{where}: pretrain.corpus")
    return TrialSpec(
        sweep=OF_NO_SWEEP,
        arm=Arm(
            backbone=resolved.choice,
            attention=attention,
            method="full",
            code=own_code(resolved.choice, attention, "full", where=where),
        ),
        task=_task(stage, corpus, resolved, start=start),
        training=_training(stage, config.training, steps),
        limit=LimitConfig(train=stage.limit, validation=stage.validation_limit),
        world_size=world_size,
        phase=Phase.PRETRAIN,
        learning_rate=stage.learning_rate,
        seed=stage.seed,
    )


def _task(
    stage: PretrainConfig, corpus: TaskConfig, resolved: ResolvedBackbone, *, start: str
) -> PretrainTask:
    from suite.data.pretraining import OWN_OBJECTIVE

    return PretrainTask.model_validate(
        {
            **corpus.model_dump(include={"name", "source", "version", "data", "splits", "group"}),
            "description": f"the text of {corpus.name}",
            "code": corpus.code and corpus.code.model_copy(update={"score": False}),
            "inputs": corpus.text_columns,
            "objective": stage.objective or OWN_OBJECTIVE[resolved.family.kind],
            "start": start,
            **stage.model_dump(include={"corrupted_frac", "mean_span_tokens"}),
        }
    )


def _training(stage: PretrainConfig, engine: TrainingConfig, steps: int) -> TrainingConfig:
    # An epoch of this run is the stretch between two checkpoints, so it resumes like a trial.
    every = min(stage.checkpoint_every_steps, steps)
    shared = stage.model_dump(
        include=set(TrainingConfig.model_fields) & set(PretrainConfig.model_fields)
    )
    return TrainingConfig(
        **engine.model_dump(include=set(ENGINE)),
        **shared,
        epochs=steps // every,
        epoch_steps=every,
        # The number of steps is the budget, so nothing ends the run early.
        patience=None,
    )
