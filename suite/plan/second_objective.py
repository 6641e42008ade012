"""The second objective of a search: what a trial cost, and which trials nothing beats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from suite.config.sweep import SweepConfig
from suite.errors import ConfigError
from suite.record.cells import Trial
from suite.record.result import TrialResult

FIELDS = {"energy": "energy_kwh", "memory": "memory.allocated_max_bytes", "time": "seconds"}
"""The field of a trial's train phase that each objective reads; less is better.

Energy is in kWh of the group, memory in bytes of the largest rank, time in seconds.
"""


def check_measurable(config: SweepConfig, device: str, *, here: bool, where: str) -> None:
    """Check that the second objective can be measured, before a worker starts.

    On the machines of a cluster the first trial finds out.

    Args:
        config: The sweep.
        device: "cuda" or "cpu".
        here: Whether the trials train on this machine.
        where: The sweep's file, for errors.

    Raises:
        ConfigError: It cannot; the message says why.
    """
    # On processors the energy can always be estimated by their time.
    if config.search.second != "energy" or device != "cuda":
        return
    gpus = config.resources.gpus_per_worker
    # Also where this sweep runs one trial at a time: the rest of the board is for others.
    if gpus is not None and gpus < 1:
        raise ConfigError(
            f"{where}: search.objective: the energy of trials that share a GPU is not measured "
            f"(resources.gpus_per_worker: {gpus:g}); take whole GPUs, "
            "score alone, [score, time] or [score, memory]"
        )
    if not here:
        return
    from suite.meters import why_no_energy

    why = why_no_energy()
    if why is not None:
        raise ConfigError(
            f"{where}: search.objective: energy is not measured on this machine: {why}; "
            "take score alone, [score, time] or [score, memory]"
        )


def cost(result: TrialResult, objective: str) -> float | None:
    """The value of a second objective; None where it was not measured."""
    train = result.phases.get("train")
    if train is None:
        return None
    value: float | None = attrgetter(FIELDS[objective])(train)
    return value


def costs(trials: Iterable[Trial], objective: str | None) -> dict[int, float] | None:
    """The cost by number of the trials with a score; None without a second objective."""
    if objective is None:
        return None
    found: dict[int, float] = {}
    for trial in trials:
        # `as_trials` counts the others as the worst and the dearest.
        if trial.result is None or not trial.result.status.has_score:
            continue
        value = cost(trial.result, objective)
        if value is not None:
            found[trial.spec.number] = value
    return found


def unmeasured(trials: Iterable[Trial], objective: str | None) -> str | None:
    """Why the trials of a cell cannot be compared by the second objective; None where they can.

    It is not known of one with a score, or was measured in two ways.
    """
    if objective is None:
        return None
    scored = _scored(trials)
    for result in scored:
        if cost(result, objective) is not None:
            continue
        name = f"phases.train.{FIELDS[objective]}"
        why = result.missing.get(name, "its result has no such value")
        return (
            f"search.objective: {objective} was not measured in trial {result.trial} "
            f"({name}: {why}); give the sweep another name and objective: score, or run it in "
            "another home on machines that measure it"
        )
    return _two_sources(scored, objective)


def _scored(trials: Iterable[Trial]) -> list[TrialResult]:
    found = []
    for trial in trials:
        if trial.result is not None and trial.result.status.has_score:
            found.append(trial.result)
    return found


def _two_sources(scored: Sequence[TrialResult], objective: str) -> str | None:
    """Why there is no front: two costs were not measured in one way; None where all were."""
    measured = [result for result in scored if cost(result, objective) is not None]
    for result in measured[1:]:
        before = _source(measured[0], objective)
        source = _source(result, objective)
        if source != before:
            return (
                f"search.objective: {objective} has two sources in one cell, {before} in trial "
                f"{measured[0].trial} and {source} in trial {result.trial}, which have no common "
                "Pareto front; remove the folders of the trials with one of the two, and run the "
                "sweep on machines with the other, where these trials run again"
            )
    return None


def _source(result: TrialResult, objective: str) -> str:
    """The meter of a trial's cost, and the processor or board that it depends on."""
    # Another machine stores the same tensors.
    if objective == "memory":
        return "any machine"
    machine = result.machine or "an unknown machine"
    if objective == "energy":
        return f"{result.phases['train'].energy_source} on {machine}"
    return machine


def pareto(trials: Iterable[Trial], objective: str) -> list[dict[str, float | int]]:
    """The trials on the front, cheapest first; none where the costs have two sources.

    No other trial beats them in one of score and cost without losing in the other.
    """
    trials = list(trials)
    if _two_sources(_scored(trials), objective) is not None:
        return []
    points: list[tuple[float, float, Trial]] = []
    for trial in trials:
        if trial.result is None or trial.utility is None:
            continue
        value = cost(trial.result, objective)
        if value is not None:
            points.append((value, trial.utility, trial))
    front = [point for point in points if not _is_beaten(point, points)]
    # The number comes last, so that equal points have one order.
    front.sort(key=lambda point: (point[0], -point[1], point[2].spec.number))
    found = []
    for value, _, trial in front:
        assert trial.result is not None and trial.result.score is not None
        line: dict[str, float | int] = {
            "number": trial.spec.number,
            "learning_rate": trial.spec.learning_rate,
            "score": trial.result.score,
            objective: value,
        }
        found.append(line)
    return found


def _is_beaten(
    point: tuple[float, float, Trial], points: Iterable[tuple[float, float, Trial]]
) -> bool:
    """Whether another point is at least as good in both and better in one."""
    cost_, utility, _ = point
    for other_cost, other_utility, _ in points:
        # Equal points do not beat one another: both are on the front.
        same = other_cost == cost_ and other_utility == utility
        if other_cost <= cost_ and other_utility >= utility and not same:
            return True
    return False
