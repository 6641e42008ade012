"""What a meter reports: the cost of a phase, in one record whatever measured it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

ESTIMATE = "cpu-time-estimate"
"""The energy source that is no measurement (docs/metrics.md)."""
READ = "read-eq16"
"""The energy source that samples READ's equation 16 (arXiv 2305.15348)."""


class Record(BaseModel):
    """Base of result records: frozen, and strict when read back."""

    # extra="forbid": an unknown field is a file of another version, which nobody should half-read
    model_config = ConfigDict(frozen=True, extra="forbid")


class MemoryPeak(Record):
    """Peak memory of one phase in bytes, as the maximum and the sum over ranks.

    A number is None where it cannot be measured.
    """

    allocated_max_bytes: int | None = None
    allocated_sum_bytes: int | None = None
    reserved_max_bytes: int | None = None
    reserved_sum_bytes: int | None = None
    rss_max_bytes: int | None = None
    rss_sum_bytes: int | None = None


class PhaseRecord(Record):
    """Cost of one phase (load, prepare, train, eval, ...), summed over its visits.

    Energy is the sum over all ranks' devices.
    """

    seconds: float
    energy_kwh: float | None = None
    energy_source: str | None = Field(
        None, description="nvml | nvml-sampled | rapl | cpu-time-estimate"
    )
    read_energy_kwh: float | None = Field(
        None, description="READ eq. 16: utilisation x TDP, sampled"
    )
    memory: MemoryPeak = MemoryPeak()
