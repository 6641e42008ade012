"""Make DeepSpeed's configuration: precision, ZeRO, and how a batch is cut."""

from __future__ import annotations

from typing import Any

from suite.config.precision import precision_of
from suite.config.training import TrainingConfig, check_batch

LIVE_ELEMENTS = 10**9
"""Gathered elements that ZeRO-3 keeps for their next use instead of gathering them again."""


def engine_config(training: TrainingConfig, *, world_size: int, device: str) -> dict[str, Any]:
    """DeepSpeed's configuration, with everything that changes numbers or memory written out.

    If these are left out, DeepSpeed 0.19.8 clips at 1.0 and reserves buckets made for models a
    thousand times larger.
    """
    micro, accumulation = micro_batching(training, world_size)
    zero: dict[str, Any] = {
        "stage": training.zero_stage,
        "reduce_bucket_size": training.reduce_bucket_elements,
        "allgather_bucket_size": training.reduce_bucket_elements,
        # a CPU has no streams that could overlap
        "overlap_comm": device == "cuda",
        "contiguous_gradients": device == "cuda",
    }
    if training.zero_stage == 3:
        # Both bound how much is gathered at a time, and with it the peak of memory.
        zero["stage3_prefetch_bucket_size"] = training.reduce_bucket_elements
        zero["stage3_param_persistence_threshold"] = training.persistence_threshold_elements
        # DeepSpeed's defaults, because they decide how many gathered weights stay.
        zero["stage3_max_live_parameters"] = LIVE_ELEMENTS
        zero["stage3_max_reuse_distance"] = LIVE_ELEMENTS
        # The suite has its own (`suite.train.linear`).
        zero["memory_efficient_linear"] = False
    # On a CPU everything is where offloading would put it.
    if device == "cuda" and training.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if training.offload == "all":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_batch_size": training.batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": training.gradient_clipping,
        "bf16": {"enabled": uses_bf16(training, device)},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Never: DeepSpeed's own reports would go to the trial's log.
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        # Its timer waits for the GPU twice in every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }


def uses_bf16(training: TrainingConfig, device: str) -> bool:
    """Whether the forward weights are bf16."""
    return precision_of(training, device) == "bf16"


def micro_batching(training: TrainingConfig, world_size: int) -> tuple[int, int]:
    """Return the examples per forward pass, and the forward passes per step on each rank.

    Raises:
        IncompatibleError: The batch cannot be cut into equal parts.
    """
    check_batch(training, world_size, where="training")
    share = training.batch_size // world_size
    # Without a size of its own, a rank's share goes through in one pass.
    micro = training.micro_batch_size or share
    return micro, share // micro
