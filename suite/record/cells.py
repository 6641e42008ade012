"""Read cells from their trial folders: what was tried, and what was best."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from suite.config.arm import Arm
from suite.record.folder import SPEC, Home, TrialFolder
from suite.record.looks import Looks
from suite.record.result import Status, TrialResult
from suite.record.spec import Phase, TrialSpec, cell_key


@dataclass(frozen=True, slots=True)
class Trial:
    """A handed-out trial; `result` is None while it has not finished."""

    folder: TrialFolder
    spec: TrialSpec
    result: TrialResult | None

    @property
    def utility(self) -> float | None:
        """The score on the scale on which more is better; None without a score."""
        if self.result is None or self.result.score is None:
            return None
        return self.spec.task.utility(self.result.score)

    @property
    def feedback(self) -> float | None:
        """What a sampler learns from: the utility, also that of a pruned trial's best epoch.

        A pruned trial is never chosen.
        """
        result = self.result
        if result is None or result.status is not Status.PRUNED or result.validation_score is None:
            return self.utility
        return self.spec.task.utility(result.validation_score)

    def outcome(self) -> Trial:
        """The same trial, with only that part of its result on which other trials depend.

        A driver remembers this of each trial for as long as it runs.
        """
        if self.result is None:
            return self
        # The second objective of a search reads what training cost, and on which machine.
        train = {name: phase for name, phase in self.result.phases.items() if name == "train"}
        environment = {
            name: fact
            for name, fact in self.result.provenance.items()
            if name in ("device", "hardware", "machine")
        }
        rest: dict[str, Any] = {
            "phases": train,
            "epochs": [],
            "scores": {},
            "splits": {},
            "provenance": environment,
        }
        rest |= dict.fromkeys(("timing", "parameters", "validity"))
        # `model_copy` does not check the values again, and these come from a checked record.
        return replace(self, result=self.result.model_copy(update=rest))


@dataclass(slots=True)
class Cell:
    """All trials of one arm on one task, search in trial-number order and confirm in seed order.

    Attributes:
        learning_rate: The one that its search chose; None where that is not known here.
        batch_size: The same for the batch size.
        looks: From which sets of confirm runs its test score was read, where a plan can tell.
        seeds: How many seeds its sweep confirms; None where no plan says.
    """

    arm: Arm
    task: str
    search: list[Trial] = field(default_factory=list)
    confirm: list[Trial] = field(default_factory=list)
    looks: Looks = field(default_factory=Looks)
    learning_rate: float | None = None
    batch_size: int | None = None
    seeds: int | None = None

    @property
    def key(self) -> str:
        return cell_key(self.arm.key, self.task)

    def confirmed(self) -> list[Trial]:
        """The confirm trials of what the search chose, finished or not.

        Where no plan says what that was, the runs do: most of them have it.
        """
        by_setting: dict[tuple[float, int], list[Trial]] = {}
        for trial in self.confirm:
            setting = trial.spec.learning_rate, trial.spec.training.batch_size
            by_setting.setdefault(setting, []).append(trial)
        if self.learning_rate is not None and self.batch_size is not None:
            return by_setting.get((self.learning_rate, self.batch_size), [])
        return max(by_setting.values(), key=len, default=[])


def ended(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that have a result, with a score or without one."""
    return [trial for trial in trials if trial.result is not None]


def read_cells(home: Home, sweep: str) -> dict[str, Cell]:
    """Every cell of a sweep that has at least one trial folder, by cell key."""
    trials = []
    for folder in home.trials():
        spec = folder.spec()
        # A folder without a specification is just being handed out.
        if spec is not None and spec.sweep == sweep:
            trials.append(Trial(folder, spec, folder.result()))
    return group_cells(trials)


def lost_specs(home: Home, *, known: Container[str] = ()) -> list[str]:
    """Name the trials of a home that have ended and no longer say what they were.

    Nobody can tell whose they are: a folder's name is a hash.

    Args:
        known: Hashes of trials that need no look.
    """
    found = []
    for folder in home.trials():
        if folder.hash in known or folder.spec() is not None:
            continue
        # A folder without a result is just being handed out, or was when its driver died.
        if folder.result() is not None:
            place = f"{folder.path.parent.name}/{folder.hash}/{SPEC}"
            found.append(f"{place} is missing or cut short, beside a result")
    return found


def group_cells(trials: Iterable[Trial]) -> dict[str, Cell]:
    """Group trials by cell, in the order of their numbers and seeds."""
    cells: dict[str, Cell] = {}
    for trial in trials:
        cell = cells.setdefault(trial.spec.cell, Cell(trial.spec.arm, trial.spec.task.name))
        if trial.spec.phase is Phase.SEARCH:
            cell.search.append(trial)
        # Pretrain runs lie in a folder of their own, so what is no search is a confirm run.
        else:
            cell.confirm.append(trial)
    # Folders come in the order of their hashes, which means nothing.
    for cell in cells.values():
        cell.search.sort(key=lambda t: t.spec.number)
        cell.confirm.sort(key=lambda t: t.spec.seed)
    return cells
