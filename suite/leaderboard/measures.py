"""Make the numbers of a row from the results of a cell's trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any

from suite.meters.record import ESTIMATE, PhaseRecord
from suite.record.result import MADE_BEFORE, TrialResult
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

    def of_search(self, name: str) -> float | None:
        """Sum of a number over all phases of all search trials; None where one has none.

        Energy is also None where it was estimated and that of the confirm runs measured, or the
        other way round: a row says once how its energy is known.

        A trial that failed or ran out of memory records no phases, so nobody knows what it cost.

        What was computed from the data before the first step counts once, whichever trial did it,
        and also where that trial has no result, or belongs to another sweep of the home.
        """
        costs: list[PhaseRecord | None] = []
        prepared: dict[tuple[str, str], PhaseRecord | None] = {}
        for result in self.searched:
            # Else a method that keeps running out of memory would look cheap to search.
            if not result.phases:
                costs.append(None)
            for phase, record in result.phases.items():
                if phase not in MADE_BEFORE:
                    costs.append(record)
            for made in result.made_before:
                prepared[made.key, made.made_by] = made.cost
        costs += prepared.values()
        trained = [run.phases.get("train") for run in self.confirmed]
        if name == "energy_kwh" and partly_estimated([*costs, *trained]):
            return None
        return _sum_of(name, costs)


def _sum_of(name: str, costs: Collection[PhaseRecord | None]) -> float | None:
    """Sum of a number over some phases; None where one has none."""
    # Measured and estimated energy are not added.
    if name == "energy_kwh" and partly_estimated(costs):
        return None
    return total(getattr(cost, name, None) for cost in costs)


def partly_estimated(costs: Iterable[PhaseRecord | None]) -> bool:
    """Whether the energy of some phases was estimated, and that of others measured."""
    return _of_both_kinds(cost.energy_source for cost in costs if cost is not None)


def mixes_energy(energy_source: str | None) -> bool:
    """Whether a row's `energy_source` names the estimate beside something that measures."""
    return _of_both_kinds((energy_source or "").split("+"))


def _of_both_kinds(names: Iterable[str | None]) -> bool:
    sources = {name for name in names if name}
    return ESTIMATE in sources and len(sources) > 1


Measure = Callable[[CellResults], Any]
"""A function that makes one value of a row; None where it was not measured."""


def mean_of_runs(read: Callable[[TrialResult], float | None]) -> Measure:
    """The mean over the confirm runs; None where one of them lacks the number."""

    def measure(results: CellResults) -> float | None:
        return mean(read(run) for run in results.confirmed)

    return measure


def energy_of_runs(read: Callable[[TrialResult], float | None]) -> Measure:
    """The same for an energy, which is also None where runs differ in that it was estimated."""

    def measure(results: CellResults) -> float | None:
        costs: list[PhaseRecord | None] = []
        for run in results.confirmed:
            costs += [run.phases.get("train"), *(made.cost for made in run.made_before)]
        # A mean of both would be neither a measurement nor an estimate.
        if partly_estimated(costs):
            return None
        return mean(read(run) for run in results.confirmed)

    return measure


def of_preparation(name: str) -> Callable[[TrialResult], float | None]:
    """A function that reads a number of what came before a trial's first step, whoever did it.

    It is None where nothing did.
    """

    def read(run: TrialResult) -> float | None:
        return _sum_of(name, [made.cost for made in run.made_before])

    return read


def from_scratch(name: str) -> Callable[[TrialResult], float | None]:
    """A function that adds a number of the preparation, in full, to that of the train phase."""
    prepared = of_preparation(name)

    def read(run: TrialResult) -> float | None:
        train = run.phases.get("train")
        if train is None:
            return None
        values = [getattr(train, name)]
        if run.made_before:
            values.append(prepared(run))
        # Measured and estimated energy are not added.
        if name == "energy_kwh" and why_no_preparation_energy(run) is not None:
            return None
        return total(values)

    return read


def why_no_preparation_energy(run: TrialResult) -> str | None:
    """Why the energy of what came before the first step cannot be added to that of training."""
    train = run.phases.get("train")
    for made in run.made_before:
        if made.cost is None:
            return made.missing.get("cost", "not measured")
        if made.cost.energy_kwh is None:
            return made.missing.get("energy_kwh", "not measured")
        if train is not None and train.energy_source != made.cost.energy_source:
            return f"measured by {made.cost.energy_source}, and training by {train.energy_source}"
    return None


def prepare_missing(results: CellResults) -> str | None:
    """The first reason of a confirm run for which its preparation's energy is not known."""
    for run in results.confirmed:
        reason = why_no_preparation_energy(run)
        if reason is not None:
            return reason
    return None


def validation_score(run: TrialResult) -> float | None:
    """Validation score of a trial's best epoch."""
    return run.validation_score


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


def machine(results: CellResults) -> str | None:
    """What the confirm runs computed on; their costs compare with those of the same model."""
    return join(run.machine for run in results.confirmed)


def frozen_dropout(results: CellResults) -> str | None:
    """What `training.frozen_dropout: off` did to the cell's runs; None where it was on."""
    return join(run.frozen_dropout for run in (*results.confirmed, *results.searched))


def peak_memory_bytes(results: CellResults) -> int | None:
    """The largest rank of the largest confirm run; None where one run has no number."""
    return _largest([*_train_bytes(results), *_prepare_bytes(results)])


def train_memory_bytes(results: CellResults) -> int | None:
    """The same of the train phase alone."""
    return _largest(_train_bytes(results))


def prepare_memory_bytes(results: CellResults) -> int | None:
    """The same of what the method prepared; None where it prepares nothing."""
    return _largest(_prepare_bytes(results))


def _train_bytes(results: CellResults) -> list[int | None]:
    return [_allocated_bytes(run.phases.get("train")) for run in results.confirmed]


def _prepare_bytes(results: CellResults) -> list[int | None]:
    peaks = []
    for run in results.confirmed:
        for made in run.made_before:
            peaks.append(_allocated_bytes(made.cost))
    return peaks


def _allocated_bytes(phase: PhaseRecord | None) -> int | None:
    if phase is None:
        return None
    return phase.memory.allocated_max_bytes


def _largest(peaks: Iterable[int | None]) -> int | None:
    # A run without a number may have been the largest, so then nothing is known.
    known = _all_known(peaks)
    if not known:
        return None
    return int(max(known))


def of_search(name: str) -> Measure:
    """A number of the whole search; None where one phase of it has none.

    Energy is also None where some of it was estimated and some measured.
    """

    def measure(results: CellResults) -> float | None:
        return results.of_search(name)

    return measure


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
