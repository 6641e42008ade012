"""Find the runs whose preparation was not measured, so that it never counts as nothing."""

from __future__ import annotations

from dataclasses import replace

from suite.config.arm import Arm
from suite.errors import EVERYWHERE, ConfigError
from suite.record.cells import Trial
from suite.record.result import PreparationRecord

TOLD_APART_SINCE = 2
"""Version of a trial's record from which on it says what its method prepared."""
WHY = (
    "recorded before preparation was measured; to know it, remove the trial's folder "
    f"({EVERYWHERE}) and run the sweep again"
)


def with_known_gap(trial: Trial) -> Trial:
    """The same trial; if its record is too old to say what was prepared, it says that now."""
    result = trial.result
    if result is None or result.schema_version >= TOLD_APART_SINCE or not _prepares(trial.spec.arm):
        return trial
    # It lies in the `load` phase of whichever trial did it, where nobody can tell it apart.
    gap = PreparationRecord(key="", made_by="", cost=None, missing={"cost": WHY})
    return replace(trial, result=result.model_copy(update={"preparation": gap}))


def _prepares(arm: Arm) -> bool:
    """Whether the arm's method prepares something from training data, or nobody can say."""
    # Imports torch, which a leaderboard of newer records never needs.
    from suite.petl import get_method

    try:
        return get_method(arm.method).configure(arm.architecture).needs_preparation
    except ConfigError:
        # A plug-in that is not here, or has other settings now.
        return True
