"""What a trial checks about itself, so that a row of the leaderboard can be trusted.

The record is the result's `validity`, which the leaderboard judges. The frozen weights are checked
too (`suite.train.record`): a trial that changed them has failed.
"""

from __future__ import annotations

from suite.record.result import ValidityRecord
from suite.train.probe import Probe
from suite.train.running_trial import RunningTrial, TrialProgress

SHOWN = 5
HALVED_STEPS = 10
"""An epoch needs so many steps before its halves are compared.

Means over fewer batches tell the batches apart, not the training.
"""


def validity_of(run: RunningTrial, end: Probe) -> ValidityRecord:
    """Make the validity record of a trial that has a score."""
    warm = run.warm
    first: float | None = None
    last: float | None = None
    fell: bool | None = None
    losses = compared_losses(run.progress, len(run.batches))
    # Too short an epoch leaves all three at None: not judged.
    if losses is not None:
        first, last = losses
        fell = last < first
    return ValidityRecord(
        trainable_as_intended=not warm.strays,
        strays=warm.strays[:SHOWN],
        output_changed=end.sha256 != warm.start_output.sha256,
        output_start_sha256=warm.start_output.sha256,
        output_end_sha256=end.sha256,
        loss_fell=fell,
        loss_first=first,
        loss_last=last,
        no_nan=end.finite,
    )


def compared_losses(progress: TrialProgress, epoch_steps: int) -> tuple[float, float] | None:
    """Return two mean training losses: the first epoch's, and the lowest of all later epochs.

    A single epoch is cut into the first and the second half of its steps. None if it has fewer than
    `HALVED_STEPS`.
    """
    first, *later = [float(epoch["train_loss"]) for epoch in progress.epochs]
    if later:
        return first, min(later)
    first_half = progress.first_half_loss
    if first_half is None or epoch_steps < HALVED_STEPS:
        return None
    half = epoch_steps // 2
    # The epoch's loss is the mean of both halves by their steps; this is the other half.
    second_half = (first * epoch_steps - first_half * half) / (epoch_steps - half)
    return first_half, second_half
