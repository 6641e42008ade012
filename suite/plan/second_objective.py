"""The second objective of a search: what a trial cost, and which trials nothing beats in both score and cost."""

from __future__ import annotations

from collections.abc import Iterable

from suite.errors import ConfigError
from suite.record.cells import Trial
from suite.record.result import TrialResult

FIELDS = {"energy": "energy_kwh", "memory": "memory.allocated_max_bytes", "time": "seconds"}
"""Of a trial's train phase; less is better. Energy in kWh of the group, memory in bytes of the largest rank, time in seconds."""


def check_measurable(objective: str | None, device: str, *, where: str) -> None:
    """Before a worker of this machine starts: that it can measure the second objective. Elsewhere the first trial shows it.

    Raises:
        ConfigError: It cannot, and why.
    """
    if (
        objective != "energy" or device != "cuda"
    ):  # of a processor there is always the estimate by its time
        return
    from suite.meters import why_no_energy

    why = why_no_energy()
    if why is not None:
        raise ConfigError(
            f"{where}: search.objective: energy is not measured on this machine: {why}; take score alone, [score, time] or [score, memory]"
        )


def cost(result: TrialResult, objective: str) -> float | None:
    """The value of a second objective; None where it was not measured."""
    train = result.phases.get("train")
    if train is None:
        return None
    values = {
        "energy": train.energy_kwh,
        "memory": train.memory.allocated_max_bytes,
        "time": train.seconds,
    }
    return values[objective]


def costs(trials: Iterable[Trial], objective: str | None) -> dict[int, float] | None:
    """By number, of the trials with a score; None without a second objective."""
    if objective is None:
        return None
    ended = [
        (t.spec.number, t.result)
        for t in trials
        if t.result is not None and t.result.status.has_score
    ]
    return {
        number: value for number, result in ended if (value := cost(result, objective)) is not None
    }


def unmeasured(trials: Iterable[Trial], objective: str | None) -> str | None:
    """Why the second objective of a trial with a score is unknown; None where all are known."""
    for trial in trials:
        result = trial.result
        if (
            objective is None
            or result is None
            or not result.status.has_score
            or cost(result, objective) is not None
        ):
            continue
        name = f"phases.train.{FIELDS[objective]}"
        why = result.missing.get(name, "its result has no such value")
        return (
            f"search.objective: {objective} was not measured in trial {result.trial} ({name}: {why}); give the sweep another name "
            "and objective: score, or run it in another home on machines that measure it"
        )
    return None


def pareto(trials: Iterable[Trial], objective: str) -> list[dict[str, float | int]]:
    """The trials that no other beats in one of score and cost without losing in the other, cheapest first."""
    points = [
        (value, utility, t)
        for t in trials
        if t.result is not None
        and (utility := t.utility) is not None
        and (value := cost(t.result, objective)) is not None
    ]
    front = [
        p
        for p in points
        if not any(q[0] <= p[0] and q[1] >= p[1] and q[:2] != p[:2] for q in points)
    ]
    return [
        {
            "number": t.spec.number,
            "learning_rate": t.spec.learning_rate,
            "score": t.result.score,
            objective: value,
        }
        for value, _, t in sorted(front, key=lambda p: (p[0], -p[1], p[2].spec.number))
        if t.result is not None and t.result.score is not None
    ]
