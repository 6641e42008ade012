"""The figures of a report, for notebooks and papers.

    report = suite.report.read("runs", "my-sweep")
    figures.score_against_energy(report)                        # a plotly figure
    figures.score_against_energy(report, backend="matplotlib")  # the same on paper

Every function takes `backend`: "plotly" gives a `plotly.graph_objects.Figure`, "matplotlib" a
`matplotlib.figure.Figure`. Every function raises StatisticsError where the sweep has nothing to
draw yet; the message says what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

from suite.errors import StatisticsError, UnknownNameError
from suite.report import charts, curves
from suite.report.chart import Chart
from suite.report.data import Report

Backend = Literal["plotly", "matplotlib"]
_DRAWERS = {"plotly": "suite.report.interactive", "matplotlib": "suite.report.static"}


def score_against_energy(
    report: Report, task: str | None = None, *, backend: Backend = "plotly"
) -> Any:
    """Test score over the energy of a training run, with 95% intervals and the Pareto front.

    Args:
        report: What `suite.report.read` returned.
        task: A task, or "mean"; None = the mean where there is one, or else the first task.
        backend: "plotly" or "matplotlib".
    """
    chart = charts.score_against_energy(report, _place(report, task))
    return drawn([chart], backend, "no arm has a test score and a known energy yet")


def score_against_memory(
    report: Report, task: str | None = None, *, backend: Backend = "plotly"
) -> Any:
    """Test score over peak memory in training; arguments as in `score_against_energy`."""
    chart = charts.score_against_memory(report, _place(report, task))
    return drawn([chart], backend, "no arm has a test score and a known memory yet")


def score_heat_map(report: Report, *, backend: Backend = "plotly") -> Any:
    """Test score of every arm on every task."""
    return drawn([charts.score_heat_map(report)], backend, "no arm has a test score yet")


def energy_by_phase(report: Report, *, backend: Backend = "plotly") -> Any:
    """Energy of a confirm run of every arm, by phase."""
    missing = "no confirm run has ended whose energy is known in all phases"
    return drawn([charts.energy_by_phase(report)], backend, missing)


def search_cost(report: Report, *, backend: Backend = "plotly") -> Any:
    """Energy to tune and to confirm every arm."""
    return drawn([charts.search_cost(report)], backend, "no energy of any run is known yet")


def beside_the_paper(report: Report, *, backend: Backend = "plotly") -> Any:
    """Our scores and the printed ones, for a sweep with `reference`."""
    return drawn([charts.beside_the_paper(report)], backend, "the sweep carries no printed numbers")


def learning_rate_curves(
    report: Report, task: str | None = None, *, backend: Backend = "plotly"
) -> Any:
    """Validation score by learning rate, a panel per cell.

    The chosen rate is ringed, the searched range is shaded, and failures are crosses.

    Args:
        report: What `suite.report.read` returned.
        task: A task; None = all.
        backend: "plotly" or "matplotlib".
    """
    if task is not None:
        # For its error: an unknown name would look like a task without curves.
        task = _place(report, task)
    found = curves.learning_rate_curves(report, task)
    return drawn(found, backend, "no search trial has ended yet")


def training_curves(report: Report, task: str | None = None, *, backend: Backend = "plotly") -> Any:
    """Training loss and validation score by epoch of the confirm runs.

    The arguments are those of `learning_rate_curves`.
    """
    tasks = report.tasks
    if task is not None:
        tasks = [_place(report, task)]
    found = []
    for name in tasks:
        found += curves.training_curves(report, name)
    return drawn(found, backend, "no confirm run has ended yet")


def drawn(found: Sequence[Chart | None], backend: str, missing: str) -> Any:
    """Draw the charts as one figure.

    Raises:
        StatisticsError: There are no charts; the message is `missing`.
        UnknownNameError: There is no such backend.
    """
    if backend not in _DRAWERS:
        raise UnknownNameError("backend", backend, _DRAWERS)
    there = [chart for chart in found if chart is not None]
    if not there:
        raise StatisticsError(f"nothing to draw: {missing}")
    # Imported here: a notebook needs one of the two libraries.
    return import_module(_DRAWERS[backend]).draw(there)


def _place(report: Report, task: str | None) -> str:
    """Check the task asked for; without one, take the first place of the report.

    Raises:
        UnknownNameError: The sweep has no such task.
    """
    places = report.places
    # The mean comes first where it has scores.
    if task is None and places:
        return places[0]
    if task not in places:
        raise UnknownNameError("task", str(task), places, where=f"sweep {report.sweep}")
    return str(task)
