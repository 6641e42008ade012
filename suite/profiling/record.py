"""What a profile reports: one record per arm.

What was not measured is null, and `missing` says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from suite.meters.record import Record

SCHEMA = 1
NO_DECODING = "an encoder does not decode"


class Spread(Record):
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one measurement."""
        if len(values) == 1:  # `quantiles` asks for two
            return cls(median=values[0], low=values[0], high=values[0], count=1)
        # "inclusive" keeps the quartiles of few values within what was measured.
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high, count=len(values))


class TrainingTime(Record):
    """Seconds of one optimizer step on the slowest rank.

    The parts are timed in separate steps, which wait for the device after each part, so they
    need not add up to `step_s`.
    """

    step_s: Spread
    forward_s: Spread
    backward_s: Spread
    update_s: Spread
    samples_per_s: float


class Memory(Record):
    """Bytes on the fullest rank.

    The peak is not the sum of the parts: they are not all there at the same time.

    Attributes:
        peak_bytes: Most that was held at once during a step.
        parameters_bytes: Forward weights held between steps: whole, or this rank's share of them.
        optimizer_bytes: Adam's moments and fp32 copies.
        gradients_bytes: Gradients and the buffers that reduce them, after the backward pass.
        activations_bytes: What the forward pass keeps for the backward pass, and the weights
            that ZeRO gathered for it.
    """

    peak_bytes: int
    parameters_bytes: int
    optimizer_bytes: int
    gradients_bytes: int
    activations_bytes: int


class Inference(Record):
    """One forward pass without gradients: one device, whole weights, folded attention."""

    batch: int
    seconds: Spread
    peak_bytes: int


class Decoding(Record):
    """One more token of one sequence, with `context_tokens` tokens in the cache."""

    context_tokens: int
    token_s: Spread
    kv_bytes: int


class Estimate(Record):
    """What the formulas say about training, before anything runs."""

    memory: Memory
    forward_flops: int
    step_flops: int


Status = Literal["ok", "estimated", "oom", "incompatible", "failed"]


class ArmProfile(Record):
    """One arm: backbone x attention x method x architecture."""

    backbone: str
    attention: str
    method: str
    architecture: dict[str, Any] = Field(default_factory=dict)
    status: Status = "ok"
    reason: str | None = None
    total_parameters: int | None = None
    trainable_parameters: int | None = None
    attention_parameters: int | None = None
    kv_bytes_per_token: int | None = None
    estimate: Estimate | None = None
    time: TrainingTime | None = None
    energy_kwh_per_1000: float | None = None
    energy_source: str | None = None
    memory: Memory | None = None
    flops_per_s: float | None = None
    flops_utilisation: float | None = None
    inference: list[Inference] = Field(default_factory=list)
    decoding: list[Decoding] = Field(default_factory=list)
    rounds: list[dict[str, float]] = Field(
        default_factory=list, description="medians by round, for ratios"
    )
    missing: dict[str, str] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """`backbone/attention/method`, without the attention where it is the backbone's own."""
        if self.attention == "pretrained":
            return f"{self.backbone}/{self.method}"
        return f"{self.backbone}/{self.attention}/{self.method}"


class Profile(Record):
    """A table of arms, with all that is needed to repeat it."""

    schema_version: int = SCHEMA
    setting: dict[str, Any]
    device_name: str
    peak_flops: float | None = None
    peak_flops_source: str | None = None
    idle_watts: float | None = Field(
        None, description="of all boards that were used, together, before anything ran"
    )
    idle_watts_missing: str | None = None
    hardware: dict[str, Any]
    versions: dict[str, str | None]
    arms: list[ArmProfile]
    stopped: bool = Field(False, description="interrupted: some rounds are missing")
