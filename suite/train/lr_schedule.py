"""The learning rate over the steps of a trial."""

from __future__ import annotations

import math

from suite.config.training import TrainingConfig


def lr_multiplier(training: TrainingConfig, step: int, total_steps: int) -> float:
    """Factor on the learning rate at a 0-based step.

    It rises linearly from 0 during the warm-up. Then the schedule takes it down to 0 at
    `total_steps`. The last step is never part of the warm-up: a trial of one step would train with
    a rate of 0.
    """
    warmup = min(math.ceil(training.warmup_frac * total_steps), total_steps - 1)
    if step < warmup:
        return step / warmup
    if training.schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, total_steps - warmup)
    if training.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - progress
