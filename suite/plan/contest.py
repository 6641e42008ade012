"""Decide which architecture of a method is confirmed: READ, arXiv 2305.15348, appendix D.

The choices of a search space share a study per task, or have one each with the same budget. A
choice is as good as the mean over tasks of what its study expects of its best learning rate, in
points, and the best one wins for all tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from suite.plan.plan import PlannedCell
from suite.record.looks import Looks


class Studied(Protocol):
    """A cell with a study; `suite.plan.cell_state.CellState` is one."""

    cell: PlannedCell

    @property
    def search_done(self) -> bool: ...

    @property
    def quality(self) -> float | None: ...

    @property
    def own_looks(self) -> Looks: ...


@dataclass(slots=True)
class Contest:
    """All cells of one backbone, attention and method: its architectures by its tasks."""

    cells: list[Studied] = field(default_factory=list)
    _winner: str | None = None

    @property
    def open_studies(self) -> int:
        """Studies that the decision waits for."""
        return sum(not cell.search_done for cell in self.cells)

    def winner(self) -> str | None:
        """Key of the arm that is confirmed; None while a study is open."""
        # A decision stays: within a run no study opens again.
        if self._winner is None and self.open_studies == 0:
            choices: dict[str, list[Studied]] = {}
            for cell in self.cells:
                choices.setdefault(cell.cell.arm.key, []).append(cell)
            # Of equal choices `max` takes the first, as the search space lists them.
            self._winner = max(choices, key=lambda arm: quality(choices[arm]))
        return self._winner


def quality(cells: Iterable[Studied]) -> tuple[int, float]:
    """How good a choice is: tasks with a score, then the mean of its qualities there."""
    utilities = []
    for cell in cells:
        found = cell.quality
        if found is not None:
            utilities.append(found)
    if not utilities:
        return 0, 0.0
    # The count comes first: a choice that fails on a hard task must not win by its mean over the
    # easy ones.
    return len(utilities), fmean(utilities)


def contests(states: Iterable[Studied]) -> dict[str, Contest]:
    """The contests of a plan by their names; a method with one choice is in none."""
    found: dict[str, Contest] = {}
    for state in states:
        if state.cell.contest is not None:
            found.setdefault(state.cell.contest, Contest()).cells.append(state)
    return found
