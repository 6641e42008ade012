"""What all arms of a profile have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from suite.config.loader import Strict, validate
from suite.config.numbers import Count, Seconds
from suite.config.training import FrozenWeights, TrainingConfig
from suite.plan.gpus import local_gpus


class Setting(Strict):
    """Shapes, precision, ranks and how long to measure; equal for all arms of a table."""

    batch: Count = Field(96, description="examples per optimizer step over all ranks (READ: 96)")
    micro_batch: Count | None = Field(
        None, description="examples per rank and forward pass; null = batch / ranks"
    )
    seq: Count = Field(128, description="tokens of every example; none is padding")
    target: Count = Field(
        8,
        description=(
            "tokens of a text target, encoder-decoders only (GLUE's label words are shorter)"
        ),
    )
    ranks: Count = Field(1, description="processes that train together, a GPU each")
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        3, description="DeepSpeed ZeRO stage, as in a sweep"
    )
    frozen_weights: FrozenWeights = Field(
        "resident",
        description="whether every rank keeps all frozen weights, or ZeRO-3 gathers them in every "
        "step",
    )
    dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="precision of the forward weights and activations; Adam always keeps fp32",
    )
    device: Literal["cpu", "cuda"] = "cpu"
    rounds: Count = Field(
        3, description="visits to every arm, in alternating order; ratios are taken within a round"
    )
    seconds: Seconds = Field(
        3.0, description="duration of timed training steps per arm and round; at least 5 steps"
    )
    inference_batches: tuple[Count, ...] = Field(
        (1, 32), description="examples of a forward pass without gradients"
    )
    contexts: tuple[Count, ...] = Field(
        (128, 512), description="tokens in the cache when decoding is timed"
    )
    decoded: Count = Field(16, description="tokens decoded per timing")
    threads: Count | None = Field(
        None, description="CPU threads of a rank; null = the usable cores / ranks"
    )

    @model_validator(mode="after")
    def _divides(self) -> Setting:
        examples_per_rank = self.batch // self.ranks
        if self.batch % self.ranks or examples_per_rank % (self.micro_batch or 1):
            raise ValueError(
                f"batch {self.batch} cannot be cut into equal parts for {self.ranks} ranks"
                f" and micro_batch {self.micro_batch}"
            )
        return self

    @property
    def micro(self) -> int:
        """Examples of one forward pass."""
        return self.micro_batch or self.batch // self.ranks

    @property
    def accumulation(self) -> int:
        """Forward passes of a step on each rank."""
        return self.batch // self.ranks // self.micro

    @property
    def rank_threads(self) -> int:
        """CPU threads of a rank."""
        # Cores that this process may use: a container may have fewer than the machine.
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.ranks)

    @property
    def training(self) -> TrainingConfig:
        """The configuration for DeepSpeed's engine; all else is a sweep's default."""
        return TrainingConfig(
            batch_size=self.batch,
            micro_batch_size=self.micro,
            precision=self.dtype,
            zero_stage=self.zero,
            frozen_weights=self.frozen_weights,
        )


def make_setting(given: Mapping[str, Any]) -> Setting:
    """The setting, with what is left open filled in for this machine.

    Args:
        given: Keys of `Setting`. A batch or seconds of None, and `auto` for device and dtype, which
            are the defaults, are left open.

    Raises:
        ConfigError: The values do not go together.
    """
    import torch

    found = {"batch": None, "seconds": None, "device": "auto", "dtype": "auto", **given}
    if found["device"] == "auto":
        found["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = found["device"] == "cuda"
    if found["dtype"] == "auto":
        found["dtype"] = _gpu_dtype() if on_gpu else "fp32"
    if found["batch"] is None:
        found["batch"] = 96 if on_gpu else 8  # 96: READ's batch (arXiv 2305.15348)
    if found["seconds"] is None:
        # NVML's energy counter is refreshed every 20 to 100 ms, which must be little beside them.
        found["seconds"] = 10.0 if on_gpu else 3.0
    return validate(Setting, found, where="suite profile")


def _gpu_dtype() -> Literal["fp32", "bf16"]:
    """bf16, or fp32 where this machine's GPUs only emulate it.

    A machine without a GPU, which estimates for one that has some, takes bf16.
    """
    import torch

    # Another process asks: a GPU that this one opened would count it in every measurement.
    if torch.cuda.is_available() and local_gpus().bf16 is False:
        return "fp32"
    return "bf16"
