"""Ratios of one arm's costs to another's, with an interval where a quantity is noisy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median, stdev

from scipy.special import stdtrit

from suite.profiling.record import ArmProfile

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """`first / second` of one quantity.

    Attributes:
        quantity: Its name, with the unit; `estimate.` begins that of what was not measured.
        first, second: Values of the two arms; medians over rounds where the quantity is noisy.
        ratio: Their ratio; of a noisy quantity the geometric mean of the ratios of the rounds.
        exact: Whether the quantity repeats exactly, so that it needs no interval.
        low, high: Ends of the 95% interval, by Student's t on the logarithms of the rounds'
            ratios; None for what is exact, and for a single round.
        estimated: The ratio of the estimates of what was measured, where there are any.
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
    """Compare every quantity that both arms have and that is above 0, noisy ones first."""
    found = [_noisy_ratio(name, first, second) for name in _noisy_names(first, second)]
    # A measurement over an estimate would compare the two sources, not the arms.
    measured = first.memory is not None and second.memory is not None
    values = _exact_values(first, measured=measured)
    other_values = _exact_values(second, measured=measured)
    estimates = _memory_bytes(first, measured=False)
    other_estimates = _memory_bytes(second, measured=False)
    for name, value in values.items():
        if name not in other_values:
            continue
        estimated = None
        at = f"estimate.{name}"
        if at in estimates and at in other_estimates:
            estimated = estimates[at] / other_estimates[at]
        other = other_values[name]
        found.append(Ratio(name, value, other, value / other, exact=True, estimated=estimated))
    return found


def _noisy_names(first: ArmProfile, second: ArmProfile) -> list[str]:
    """Names of the quantities that every round of both arms has measured."""
    if not first.rounds or not second.rounds:
        return []
    names = []
    for name in first.rounds[0]:
        # Measured joules over estimated ones mean nothing.
        if name.startswith("energy") and first.energy_source != second.energy_source:
            continue
        if all(name in measured for measured in [*first.rounds, *second.rounds]):
            names.append(name)
    return names


def _noisy_ratio(name: str, first: ArmProfile, second: ArmProfile) -> Ratio:
    values = [measured[name] for measured in first.rounds]
    other_values = [measured[name] for measured in second.rounds]
    # An arm that died has fewer rounds than the other: only rounds of both are compared.
    pairs = zip(values, other_values, strict=False)
    logs = [math.log(value / other) for value, other in pairs]
    middle = fmean(logs)
    n = len(logs)
    low = None
    high = None
    if n > 1:
        # Student's t, because the deviation comes from a few rounds.
        half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * stdev(logs) / math.sqrt(n)
        low = math.exp(middle - half)
        high = math.exp(middle + half)
    return Ratio(
        name,
        median(values),
        median(other_values),
        math.exp(middle),
        exact=False,
        low=low,
        high=high,
    )


def _exact_values(arm: ArmProfile, *, measured: bool) -> dict[str, float]:
    """What repeats exactly and is above 0: bytes, parameters, operations."""
    found: dict[str, float] = _memory_bytes(arm, measured=measured)
    found["trainable_parameters"] = arm.trainable_parameters or 0
    if arm.estimate is not None:
        found["step_flops"] = arm.estimate.step_flops
    for inference in arm.inference:
        found[f"inference_peak_bytes[{inference.batch}]"] = inference.peak_bytes
    for decoding in arm.decoding:
        found[f"kv_bytes[{decoding.context_tokens}]"] = decoding.kv_bytes
    return {name: value for name, value in found.items() if value}


def _memory_bytes(arm: ArmProfile, *, measured: bool) -> dict[str, float]:
    """Bytes of training that are above 0; names say which are estimated."""
    source = "memory"
    memory = arm.memory
    if not measured:
        source = "estimate.memory"
        memory = None
        if arm.estimate is not None:
            memory = arm.estimate.memory
    if memory is None:
        return {}
    return {f"{source}.{name}": value for name, value in memory if value}
