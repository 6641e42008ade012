"""What a trial checks about itself, so that a row of the leaderboard can be trusted: recorded as `validity`, judged by `suite.tracking`.

The frozen weights are checked too (`suite.train.record`): a trial that changed them has failed.
"""

from __future__ import annotations

from suite.record.result import ValidityRecord
from suite.train.probe import Probe
from suite.train.running_trial import RunningTrial, TrialProgress

SHOWN = 5
HALVED_STEPS = 10
"""From so many steps on the halves of a single epoch are compared: means over fewer batches tell the batches apart, not the training."""


def validity_of(run: RunningTrial, end: Probe) -> ValidityRecord:
    """The record of a trial that has a score."""
    warm, losses = run.warm, compared_losses(run.progress, len(run.batches))
    first, last = losses or (None, None)
    return ValidityRecord(
        trainable_as_intended=not warm.strays,
        strays=warm.strays[:SHOWN],
        output_changed=end.sha256 != warm.start_output.sha256,
        output_start_sha256=warm.start_output.sha256,
        output_end_sha256=end.sha256,
        loss_fell=None if first is None or last is None else last < first,
        loss_first=first,
        loss_last=last,
        no_nan=end.finite,
    )


def compared_losses(progress: TrialProgress, epoch_steps: int) -> tuple[float, float] | None:
    """Mean training loss at first and later: of the first epoch, and the lowest of a later one.

    With a single epoch, of the first and the second half of its steps; None where it has fewer than `HALVED_STEPS`.
    """
    first, *later = [float(epoch["train_loss"]) for epoch in progress.epochs]
    if later:
        return first, min(later)
    if progress.first_half_loss is None or epoch_steps < HALVED_STEPS:
        return None
    half = epoch_steps // 2
    return progress.first_half_loss, (first * epoch_steps - progress.first_half_loss * half) / (
        epoch_steps - half
    )
