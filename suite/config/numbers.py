"""Ranges of the numbers that a person types: far above what anybody means, below what overflows."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_COUNT = 2**31 - 1
MOST_SEED = 2**32 - 1
"""The largest seed of NumPy's and scikit-learn's generators."""
MOST_SECONDS = 366 * 86400.0
"""A year; waits of some 300 years overflow in Python's own clocks."""
MOST_AMOUNT = 1e9
"""Of CPUs, GiB, a norm, ...; so many GiB are 1e18 bytes, which 64 bits hold."""

Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
WholeNumber = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
Amount = Annotated[float, Field(ge=0, le=MOST_AMOUNT)]
PositiveAmount = Annotated[float, Field(gt=0, le=MOST_AMOUNT)]
