"""Cells and their studies, read from trial folders: what has been tried, what was best, what it cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from suite.train.folder import Home, TrialFolder
from suite.train.result import TrialResult
from suite.train.spec import Arm, Phase, TrialSpec


@dataclass(frozen=True, slots=True)
class Trial:
    """A handed-out trial; `result` is None while it has not finished."""

    folder: TrialFolder
    spec: TrialSpec
    result: TrialResult | None

    @property
    def utility(self) -> float | None:
        """The score on the scale on which more is better; None without a score."""
        score = None if self.result is None else self.result.score
        return None if score is None else self.spec.task.utility(score)


@dataclass(slots=True)
class Cell:
    """All trials of one arm on one task, search in trial-number order and confirm in seed order."""

    arm: Arm
    task: str
    search: list[Trial] = field(default_factory=list)
    confirm: list[Trial] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.arm.key}/{self.task}"

    def best_search(self) -> Trial | None:
        """The finished search trial with the best validation score; the lowest number wins a tie."""
        scored = [(utility, -t.spec.number, t) for t in self.search if (utility := t.utility) is not None]
        return max(scored, key=lambda found: found[:2], default=(0.0, 0, None))[2]


def read_cells(home: Home, sweep: str) -> dict[str, Cell]:
    """Every cell of a sweep that has at least one trial folder, by cell key."""
    return group_cells(
        Trial(folder, spec, folder.result()) for folder in home.trials() if (spec := folder.spec()) is not None and spec.sweep == sweep
    )


def group_cells(trials: Iterable[Trial]) -> dict[str, Cell]:
    """Trials by cell, in the order of their numbers and seeds."""
    cells: dict[str, Cell] = {}
    for trial in trials:
        cell = cells.setdefault(trial.spec.cell, Cell(trial.spec.arm, trial.spec.task.name))
        (cell.search if trial.spec.phase is Phase.SEARCH else cell.confirm).append(trial)
    for cell in cells.values():
        cell.search.sort(key=lambda t: t.spec.number)
        cell.confirm.sort(key=lambda t: t.spec.seed)
    return cells
