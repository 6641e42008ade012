"""Warnings of peft that nobody can act on who runs a sweep."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

NOISE = (
    # peft's own default for it
    "`loftq_config` specified but will be ignored",
    # peft asks by transformers' old name
    "`is_gradient_checkpointing` is deprecated",
    # BOFT without CUDA's compiler is slower; where it would also be another method, it is refused
    "Failed to load the CUDA extension",
    "Setting boft_n_butterfly_factor to 1",
    # GPT-2's maps are stored transposed; peft corrects the option and says so each time
    "fan_in_fan_out is set",
)
"""How they begin."""


@contextmanager
def without_noise() -> Iterator[None]:
    """Hide them within the block."""
    with warnings.catch_warnings():
        for message in NOISE:
            warnings.filterwarnings("ignore", message=message)
        yield
