"""How a trial trains: everything that changes numbers.

All of it is explicit, and equal for all arms of a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from suite.config.loader import Strict
from suite.config.numbers import Amount, Count, PositiveAmount, WholeNumber
from suite.errors import IncompatibleError

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
"""How much AdamW keeps of a mean; with all of it the mean would never change."""
Precision = Literal["fp32", "bf16", "bf16-autocast"]
"""What a trial computes in; bf16-autocast keeps fp32 weights."""
LEAST_STAGE = {"none": 0, "optimizer": 1, "all": 3}
"""The ZeRO stage from which DeepSpeed can move to CPU memory what `offload` names."""


FrozenWeights = Literal["resident", "partitioned"]


class TrainingConfig(Strict):
    """Hyperparameters other than the learning rate, and settings of the ZeRO engine.

    Where READ (arXiv 2305.15348, appendix D) states a value, it is the default. What no paper
    states is marked "ours".
    """

    epochs: Count = Field(30, description="upper bound on epochs (READ: 30)")
    epoch_steps: Count | None = Field(
        None,
        description="steps from one validation and checkpoint to the next, over pass after pass; "
        "null = one pass over the data",
    )
    patience: Count | None = Field(
        3,
        description="epochs without a better validation score before stopping; "
        "null = never stop (READ: 'stops improving', number ours)",
    )
    keep: Literal["best", "last"] = Field(
        "best",
        exclude_if=lambda value: value == "best",
        description="epoch whose weights are scored: the best on validation, or the last",
    )
    batch_size: Count = Field(
        96, description="examples per optimizer step over all workers (READ: 96)"
    )
    micro_batch_size: Count | None = Field(
        None, description="examples per worker and forward pass; null = batch_size / workers"
    )
    eval_batch_size: Count = Field(
        96, description="examples per worker and forward pass in evaluation"
    )
    max_length: Count = Field(128, description="tokens kept of an input (LST's code: 128)")
    target_max_length: Count = Field(
        16, description="tokens kept of a text target (ours; GLUE label words are shorter)"
    )
    max_new_tokens: Count | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="tokens written at most where text is generated; null = target_max_length",
    )
    stride: Count | None = Field(
        None,
        description="tokens from one scored window of running text to the next; null = the task's",
    )
    beams: Count | None = Field(
        None, description="beams where text is generated, 1 = greedy; null = the task's"
    )
    pad_to_multiple: Count = Field(
        8,
        description="round lengths up to a multiple of so many tokens (8: for tensor cores)",
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="learning rate after warm-up (ours; READ is silent)"
    )
    warmup_frac: Fraction = Field(
        0.06, description="share of steps with a rising learning rate (ours)"
    )
    weight_decay: Amount = Field(0.0, description="AdamW's decoupled decay (ours)")
    adam_beta1: Beta = 0.9
    adam_beta2: Beta = 0.999
    adam_eps: PositiveAmount = 1e-8
    gradient_clipping: Amount = Field(1.0, description="global gradient norm; 0 = off (ours)")
    precision: Literal[Precision, "auto"] = Field(
        "auto",
        description="bf16 = weights and sums of gradients in bf16, Adam in fp32; bf16-autocast = "
        "fp32 weights and sums, products of matrices in bf16; auto = bf16 on a GPU that has it, "
        "bf16-autocast on a CPU with AMX or AVX-512 for bf16, fp32 elsewhere",
    )
    zero_stage: Annotated[int, Field(ge=0, le=3)] | Literal["auto"] = Field(
        3,
        description="DeepSpeed ZeRO stage; auto = the lowest at which the sweep's largest arm fits",
    )
    frozen_weights: Literal["auto", FrozenWeights] = Field(
        "auto",
        description="whether every rank keeps all frozen weights, or ZeRO-3 gathers them in every "
        "step; auto = resident where the sweep's largest arm fits",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="what moves to CPU memory: nothing, optimizer states, or also parameters",
    )
    frozen_dropout: bool = Field(
        True,
        exclude_if=lambda value: value is True,
        description="off = no dropout in the stacks of methods without gradients in the backbone "
        "(READ, LST), whose states are then computed once per example and kept; all other methods "
        "train as with on",
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass"
    )
    reduce_bucket_elements: Count = Field(
        5_000_000,
        description="ZeRO's reduce and prefetch bucket (DeepSpeed's 5e8 would dwarf a small model)",
    )
    persistence_threshold_elements: WholeNumber = Field(
        0,
        description="parameters up to this size stay gathered under ZeRO-3; "
        "0 = all are partitioned, for every arm alike",
    )
    threads_per_worker: Count | None = Field(
        None, description="CPU threads of a worker; null = its share of CPUs"
    )

    @model_validator(mode="after")
    def _last_epoch_is_reached(self) -> TrainingConfig:
        if self.keep == "last" and self.patience is not None:
            raise ValueError(
                f"keep: last scores the last of {self.epochs} epochs, and patience {self.patience} "
                "may end a trial before it; set patience: null"
            )
        return self

    @model_validator(mode="after")
    def _offload_has_its_stage(self) -> TrainingConfig:
        least = LEAST_STAGE[self.offload]
        if self.zero_stage != "auto" and self.zero_stage < least:
            raise ValueError(
                f"offload: {self.offload} needs ZeRO stage {least} or higher, "
                f"got zero_stage {self.zero_stage}; set zero_stage: auto, or offload: none"
            )
        return self

    @model_validator(mode="after")
    def _micro_batch_divides(self) -> TrainingConfig:
        check_micro_batch(self.batch_size, self.micro_batch_size)
        return self


def check_micro_batch(batch_size: int, micro_batch_size: int | None) -> None:
    """Check that a batch is a whole number of micro-batches.

    Raises:
        ValueError: The rest would make a smaller step than all others, with another mean of the
            loss.
    """
    if micro_batch_size is not None and batch_size % micro_batch_size:
        raise ValueError(
            f"batch_size {batch_size} is not divisible by micro_batch_size {micro_batch_size}"
        )


def batch_unit(training: TrainingConfig, workers: int) -> int:
    """The smallest batch that so many workers can share; every other one is a multiple of it."""
    # A batch is workers x micro batch x a whole number of accumulation steps.
    return workers * (training.micro_batch_size or 1)


def check_batch(training: TrainingConfig, workers: int, *, where: str) -> None:
    """Check that every worker gets an equal share of a batch, in whole micro-batches.

    Args:
        training: Its `batch_size` and `micro_batch_size` are read.
        workers: Those of one trial.
        where: What an error names; it ends in the key of the section, `training` or `pretrain`.

    Raises:
        IncompatibleError: The batch cannot be cut into equal parts.
    """
    unit = batch_unit(training, workers)
    if training.batch_size % unit == 0:
        return
    # The nearest batch that divides, never zero.
    near = unit * max(1, round(training.batch_size / unit))
    key = where.rpartition(": ")[2]
    parts = f"{workers} workers"
    others = "the number of workers (resources.workers of a sweep)"
    if training.micro_batch_size:
        parts += f" x micro_batch_size {training.micro_batch_size}"
        others += f" or {key}.micro_batch_size"
    raise IncompatibleError(
        f"{where}.batch_size: got {training.batch_size}, expected a multiple of {unit} "
        f"({parts}); set {key}.batch_size={near}, or change {others}"
    )


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How ZeRO lays out the weights of a trial: what `auto` stands for.

    Attributes:
        zero_stage: DeepSpeed's ZeRO stage, 0 to 3.
        frozen_weights: Whether every rank keeps all frozen weights, or ZeRO-3 gathers them.
    """

    zero_stage: int = 3
    frozen_weights: FrozenWeights = "resident"

    def applied_to(self, training: TrainingConfig) -> TrainingConfig:
        """The settings with this in the place of every `auto`."""
        decided: dict[str, Any] = {}
        if training.zero_stage == "auto":
            decided["zero_stage"] = self.zero_stage
        if training.frozen_weights == "auto":
            decided["frozen_weights"] = self.frozen_weights
        return training.model_copy(update=decided)
