"""What a profile reports: one record per arm; what could not be measured is null, with the reason in `missing`."""

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
        low, median, high = (
            statistics.quantiles(values, n=4, method="inclusive")
            if len(values) > 1
            else [values[0]] * 3
        )
        return cls(median=median, low=low, high=high, count=len(values))


class TrainingTime(Record):
    """Seconds of one optimizer step, the slowest rank's; its parts are timed in steps of their own, which wait after each part."""

    step_s: Spread
    forward_s: Spread
    backward_s: Spread
    update_s: Spread
    samples_per_s: float


class Memory(Record):
    """Bytes on one rank: the fullest. The peak is no sum of its parts, which are not all there at the same time.

    Attributes:
        peak_bytes: Most that was held at once during a step.
        parameters_bytes: Forward weights held between steps: whole, or this rank's share of them.
        optimizer_bytes: Adam's moments and fp32 copies.
        gradients_bytes: Gradients and the buffers in which they are reduced, after the backward pass.
        activations_bytes: What the forward pass keeps for the backward pass, with weights that ZeRO gathered for it.
    """

    peak_bytes: int
    parameters_bytes: int
    optimizer_bytes: int
    gradients_bytes: int
    activations_bytes: int


class Inference(Record):
    """One forward pass without gradients, on one device with whole weights, attention folded."""

    batch: int
    seconds: Spread
    peak_bytes: int


class Decoding(Record):
    """One more token with a cache of `context_tokens`, one sequence."""

    context_tokens: int
    token_s: Spread
    kv_bytes: int


class Estimate(Record):
    """What the formulas say of training, before anything runs."""

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
        parts = (
            self.backbone,
            *([] if self.attention == "pretrained" else [self.attention]),
            self.method,
        )
        return "/".join(parts)


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
    versions: dict[str, str]
    arms: list[ArmProfile]
    stopped: bool = Field(False, description="interrupted: some rounds are missing")
