"""What a sweep sends to the tracking store in addition to its numbers.

The command line and the environment say where the store is.
"""

from __future__ import annotations

from pydantic import Field

from suite.config.loader import Strict


class TrackingConfig(Strict):
    """Nothing here is part of a trial's identity."""

    artifacts: bool = Field(
        False,
        description="upload each trial's spec, result, predictions and lm-eval record, "
        "files of at most 10 MiB",
    )
