"""Make the numbers of a row from the results of a cell's trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any

from suite.meters.record import PhaseRecord
from suite.record.result import TrialResult
from suite.stats.significance import two_sided


@dataclass(frozen=True, slots=True)
class CellResults:
    """The results that a number of a row can be made from.

    Attributes:
        confirmed: Results of the confirm runs that have a score, by seed.
        searched: Results of the search trials that have ended, by number.
    """

    confirmed: Sequence[TrialResult]
    searched: Sequence[TrialResult]

    @property
    def phases(self) -> list[PhaseRecord]:
        """All phases of all search trials."""
        phases: list[PhaseRecord] = []
        for result in self.searched:
            phases += result.phases.values()
        return phases


Measure = Callable[[CellResults], Any]
"""A function that makes one value of a row; None where it was not measured."""


def mean_of_runs(read: Callable[[TrialResult], float | None]) -> Measure:
    """The mean over the confirm runs; None where one of them lacks the number."""

    def measure(results: CellResults) -> float | None:
        return mean(read(run) for run in results.confirmed)

    return measure


def of_train(name: str) -> Callable[[TrialResult], float | None]:
    """A function that reads a number of a trial's train phase."""

    def read(run: TrialResult) -> float | None:
        phase = run.phases.get("train")
        if phase is None:
            return None
        value: float | None = getattr(phase, name)
        return value

    return read


def samples_per_s(run: TrialResult) -> float | None:
    """Training speed of a trial."""
    if run.timing is None:
        return None
    return run.timing.samples_per_s


def parameter_count(name: str) -> Measure:
    """A number of `ParameterCount`, which is the same for all trials."""

    def measure(results: CellResults) -> int | None:
        # Confirm runs are the ones that the row shows; before there is one, the latest trial.
        for result in (*results.confirmed, *reversed(results.searched)):
            if result.parameters is not None:
                value: int | None = getattr(result.parameters, name)
                return value
        return None

    return measure


def of_pretrain(name: str) -> Measure:
    """A number of the one pretrain run that gave all trials of the cell their weights."""

    def measure(results: CellResults) -> float | None:
        # All trials of a cell share the run, so the first that names it will do.
        for result in (*results.confirmed, *results.searched):
            if result.pretrain is not None:
                value: float | None = getattr(result.pretrain, name)
                return value
        return None

    return measure


def energy_source(results: CellResults) -> str | None:
    """How the energy of the confirm runs' train phases was measured."""
    sources = []
    for run in results.confirmed:
        if "train" in run.phases:
            sources.append(run.phases["train"].energy_source)
    return join(sources)


def precision(results: CellResults) -> str | None:
    """What the confirm runs computed in, or the search trials while there is no confirm run."""
    return join(run.precision for run in results.confirmed or results.searched)


def peak_memory_bytes(results: CellResults) -> int | None:
    """The largest rank of the largest confirm run; None where one run has no number."""
    largest: int | None = None
    for run in results.confirmed:
        train = run.phases.get("train")
        # A run without a number may have been the largest.
        if train is None or train.memory.allocated_max_bytes is None:
            return None
        largest = max(largest or 0, train.memory.allocated_max_bytes)
    return largest


def search_energy_kwh(results: CellResults) -> float | None:
    """Energy of all phases of the search; None where one of them has none."""
    return total(phase.energy_kwh for phase in results.phases)


def search_s(results: CellResults) -> float | None:
    """Duration of all phases of the search, as far as trials measured them."""
    return total(phase.seconds for phase in results.phases)


def loss_fall(results: CellResults) -> float | None:
    """By how much the training loss fell, mean over the confirm runs."""
    return mean(_loss_fall(run) for run in results.confirmed)


def loss_fall_p(results: CellResults) -> float | None:
    """The p-value of no change of the training loss; None for fewer than two confirm runs."""
    falls = _all_known(_loss_fall(run) for run in results.confirmed)
    count = len(falls)
    if count < 2:
        return None
    return float(two_sided(fmean(falls), 0.0, variance(falls) / count, count - 1))


def _loss_fall(run: TrialResult) -> float | None:
    """First epoch less last, or first half less second half of a single epoch."""
    # The lowest of several later epochs would lie below the first one by luck alone.
    if len(run.epochs) > 1:
        return run.epochs[0].train_loss - run.epochs[-1].train_loss
    checked = run.validity
    if checked is None or checked.loss_first is None or checked.loss_last is None:
        return None
    return checked.loss_first - checked.loss_last


def last_end_s(results: CellResults) -> float | None:
    """When the last of the trials ended, seconds since 1970."""
    ends = []
    for result in (*results.confirmed, *results.searched):
        ends.append(result.finished_at)
    return max(ends, default=None)


def mean(values: Iterable[float | None]) -> float | None:
    """The mean, or None where there is no value or one of them is missing."""
    known = _all_known(values)
    # `_all_known` gives an empty list where one value is missing.
    if not known:
        return None
    return fmean(known)


def total(values: Iterable[float | None]) -> float | None:
    """The sum, or None where there is no value or one of them is missing."""
    known = _all_known(values)
    if not known:
        return None
    # `fsum` is exact, so the sum does not depend on the order of the phases.
    return math.fsum(known)


def spread(values: Collection[float]) -> float | None:
    """The sample standard deviation (n - 1); None for fewer than two values."""
    if len(values) < 2:
        return None
    return stdev(values)


def _all_known(values: Iterable[float | None]) -> list[float]:
    known = []
    for value in values:
        if value is None:
            # A mean or a sum over the rest would pass for the whole.
            return []
        known.append(value)
    return known


def join(names: Iterable[str | None]) -> str | None:
    """Distinct names in one text, such as `nvml+rapl`; None where there is none."""
    return "+".join(sorted({name for name in names if name})) or None
