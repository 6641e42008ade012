"""One arm against another: ratios, with an interval where a quantity is noisy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from scipy.special import stdtrit

from suite.profile.record import ArmProfile

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """`first / second` of one quantity.

    Attributes:
        quantity: Its name, with the unit.
        first, second: Of both arms; of a noisy quantity the median over rounds.
        ratio: Of a noisy quantity the geometric mean of the rounds' own ratios.
        exact: Whether it repeats exactly, and needs no interval.
        low, high: 95% interval by Student's t on their logarithms; None for what is exact, and for a single round.
        estimated: The same ratio by the estimate, where there is one.
    """

    quantity: str
    first: float
    second: float
    ratio: float
    exact: bool
    low: float | None = None
    high: float | None = None
    estimated: float | None = None


def ratios(first: ArmProfile, second: ArmProfile) -> list[Ratio]:
    """Every quantity that both arms have and that is above 0, noisy ones first."""
    rounds = [*first.rounds, *second.rounds]
    names = (
        [name for name in first.rounds[0] if all(name in each for each in rounds)]
        if first.rounds and second.rounds
        else []
    )
    if first.energy_source != second.energy_source:
        names = [
            name for name in names if not name.startswith("energy")
        ]  # measured joules over estimated ones mean nothing
    noisy = [
        _of_rounds(name, [r[name] for r in first.rounds], [r[name] for r in second.rounds])
        for name in names
    ]
    estimates = _exact(first, estimated=True), _exact(second, estimated=True)
    ones, others = _exact(first), _exact(second)
    exact = [
        Ratio(
            name,
            ones[name],
            others[name],
            ones[name] / others[name],
            exact=True,
            estimated=_estimated(name, *estimates),
        )
        for name in ones
        if others.get(name)
    ]
    return noisy + exact


def _of_rounds(name: str, ones: Sequence[float], others: Sequence[float]) -> Ratio:
    logs = [math.log(one / other) for one, other in zip(ones, others, strict=False)]
    middle, n = fmean(logs), len(logs)
    half = (
        float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * stdev(logs) / math.sqrt(n) if n > 1 else None
    )
    ends = (None, None) if half is None else (math.exp(middle - half), math.exp(middle + half))
    return Ratio(name, median(ones), median(others), math.exp(middle), False, *ends)


def _exact(arm: ArmProfile, *, estimated: bool = False) -> dict[str, float]:
    """What repeats exactly: bytes, parameters, operations. Bytes are the estimate's if `estimated`, and where nothing was measured."""
    memory = (
        arm.estimate.memory
        if (estimated or arm.memory is None) and arm.estimate is not None
        else arm.memory
    )
    found: dict[str, float | None] = (
        {}
        if memory is None
        else {f"memory.{name}": value for name, value in memory.model_dump().items()}
    )
    if not estimated:
        found |= {
            "trainable_parameters": arm.trainable_parameters,
            "step_flops": arm.estimate.step_flops if arm.estimate else None,
        }
        found |= {f"inference_peak_bytes[{item.batch}]": item.peak_bytes for item in arm.inference}
        found |= {f"kv_bytes[{item.context_tokens}]": item.kv_bytes for item in arm.decoding}
    return {name: value for name, value in found.items() if value}


def _estimated(name: str, ones: dict[str, float], others: dict[str, float]) -> float | None:
    return ones[name] / others[name] if name in ones and name in others else None
