"""Everything a report shows of one sweep, read once: rows of the leaderboard, learning-rate curves, every trial and what is missing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from suite.config.reference import MEAN
from suite.errors import ConfigError, TrackingError, UnknownNameError
from suite.leaderboard.fields import Row as Cell
from suite.leaderboard.table import SORTS, to_rows
from suite.plan.definition import known_plan
from suite.plan.plan import Plan
from suite.record.cells import Trial
from suite.record.folder import Home
from suite.record.result import Status
from suite.redact import redact
from suite.report.names import Arm, arms_of
from suite.report.values import ESTIMATE
from suite.tracking.query import leaderboard
from suite.tracking.rows import read_rows

Row = dict[str, Any]
MOST_TRIALS = 20_000
"""Trial folders that are read: some 20 s. Of a larger home the leaderboard, which MLflow gives, is whole; single trials are not."""


@dataclass(frozen=True)
class Report:
    """One sweep as far as it has come.

    Attributes:
        sweep: Its name.
        rows: The leaderboard, rejected rows and architectures that were not chosen included: `suite.tracking.to_rows`.
        cells: With their learning-rate curves, by arm key and task.
        trials: Every trial that was handed out, as `trial_row` gives it.
        plan: The sweep as last run; None where this home does not hold it.
        unread_trials: Folders beyond `MOST_TRIALS`.
        provenance: Of the results: hardware, versions and the like, as recorded.
        failures: Attempts that their machine ended, and trials without a score; those that the search ended early are no failures.
    """

    sweep: str
    rows: list[Row]
    cells: dict[tuple[str, str], Cell]
    trials: list[Row] = field(default_factory=list)
    plan: Plan | None = None
    unread_trials: int = 0
    provenance: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """By key: those with test scores first, the best first, so that they get the plainest colours."""
        return arms_of(self.rows)

    @cached_property
    def tasks(self) -> list[str]:
        return sorted({row["task"] for row in self.rows} - {MEAN})

    @cached_property
    def places(self) -> list[str]:
        """The mean over tasks where there is one with a score, then every task."""
        return [*([MEAN] if self.scored(MEAN) else []), *self.tasks]

    def scored(self, task: str) -> list[Row]:
        """Rows of a task, or of the mean, that have a test score; without architectures that another one has beaten since."""
        return [
            r
            for r in self.rows
            if r["task"] == task and r["score_mean"] is not None and r["status"] != "not chosen"
        ]

    @cached_property
    def confirm_runs(self) -> list[Row]:
        """Confirm trials at the learning rates that are chosen now; an earlier choice may have left others."""
        rates = {key: cell.learning_rate for key, cell in self.cells.items()}
        confirm = [
            trial
            for trial in self.trials
            if trial["phase"] == "confirm" and trial["arm"] in self.arms
        ]
        return [
            trial
            for trial in confirm
            if rates.get((trial["arm"], trial["task"])) in (None, trial["learning_rate"])
        ]

    def higher_is_better(self, task: str) -> bool:
        return all(row["higher_is_better"] is not False for row in self.rows if row["task"] == task)

    @cached_property
    def energy_sources(self) -> set[str]:
        """Of all trials, or of the rows where no trial was read."""
        found = {row["energy_source"] for row in (self.trials or self.rows)} - {None}
        return {name for source in found for name in source.split("+")}

    @property
    def estimated(self) -> bool:
        """Whether all energy here was estimated, and none measured."""
        return self.energy_sources == {ESTIMATE}

    @property
    def energy_note(self) -> str:
        """What an axis or a head says behind "energy": `, estimate` where nothing was measured."""
        if ESTIMATE not in self.energy_sources:
            return ""
        return ", estimate" if self.estimated else ", partly estimated"

    @cached_property
    def pruned(self) -> str:
        """How many trials the search ended early, in a sentence; empty for none."""
        count = sum(row["status"] == Status.PRUNED.value for row in self.trials)
        if not count:
            return ""
        return (
            "The search ended 1 trial early (pruned)."
            if count == 1
            else f"The search ended {count} trials early (pruned)."
        )

    @cached_property
    def missing(self) -> list[str]:
        """What a finished sweep would have and this one has not, in sentences."""
        cells = [row for row in self.rows if row["task"] != MEAN]
        states = Counter(row["status"] for row in cells)
        found = []
        planned = set()
        if self.plan is not None:
            planned = {cell.key for cell in self.plan.cells}
        absent = sorted(planned - {f"{arm}/{task}" for arm, task in self.cells})
        if absent:
            shown = ", ".join(absent[:5]) + (
                f" and {len(absent) - 5} more" if len(absent) > 5 else ""
            )
            found.append(
                f"{len(absent)} of {len(planned)} planned cells have no ended trial yet: {shown}."
            )
        meanings = {
            "searching": "are still searched",
            "partial": "lack confirm runs, or some of their seeds",
            "failed": "failed: no seed can get a score",
        }
        found += [
            f"{states[state]} of {len(cells)} cells {meaning}."
            for state, meaning in meanings.items()
            if states[state]
        ]
        if running := sum(row["status"] == "unfinished" for row in self.trials):
            found.append(f"{running} trials were handed out and have not ended.")
        if self.unread_trials:
            found.append(
                f"{self.unread_trials} trial folders were not read (a report reads {MOST_TRIALS:,}); the leaderboard is whole."
            )
        return found


def read(
    home: Path | str,
    sweep: str | None = None,
    *,
    tracking_uri: str | None = None,
    sort: str = "score",
) -> Report:
    """Read one sweep for its report.

    Args:
        home: As `suite run --home`.
        sweep: Its name; may be left out where the home has one.
        tracking_uri: MLflow store; None = `MLFLOW_TRACKING_URI`, else the home's own.
        sort: Order of the leaderboard's rows, `suite.leaderboard.table.SORTS`.

    Raises:
        TrackingError: No results, or none of this sweep, or written by a newer version.
        ConfigError: The home holds several sweeps and none was named, or a record is not of this version.

    Example:
        >>> report = suite.report.read("runs")  # doctest: +SKIP
    """
    from suite.tracking.store import open_store, resolve_uri

    if sort not in SORTS:
        raise UnknownNameError("column", sort, SORTS, where="--sort")
    place = Home(Path(home))
    uri = resolve_uri(place, tracking_uri)
    name = sweep if sweep is not None else _only([*open_store(uri, create=False).experiments()])
    rows = to_rows(leaderboard(uri, sweep=name, rejected=True, sort=sort))
    own = _own_id(place)
    own = (
        own if any(row["home"] == own for row in rows) else None
    )  # a store without rows of this home: then all of them are meant
    rows = [row for row in rows if own in (None, row["home"])]
    cells = {
        (cell.arm, cell.task): cell
        for cell in read_rows(open_store(uri, create=False), name)
        if own in (None, cell.home)
    }
    plan = known_plan(place, name)
    trials, unread = read_trials(place, name, plan)
    return Report(
        name,
        rows,
        cells,
        [trial_row(trial) for trial in trials],
        plan,
        unread,
        [t.result.provenance for t in trials if t.result is not None],
        [row for trial in trials for row in failure_rows(trial)],
    )


def sweeps(home: Path | str, tracking_uri: str | None = None) -> list[str]:
    """Every sweep in the home's store, by name.

    Raises:
        TrackingError: The store cannot be read or has none.
    """
    from suite.tracking.store import open_store, resolve_uri

    found = sorted(
        open_store(resolve_uri(Home(Path(home)), tracking_uri), create=False).experiments()
    )
    if not found:
        raise TrackingError(
            f"{home}: no results yet; start with: suite run SWEEP.yaml, or suite sync for trials that MLflow does not have"
        )
    return found


def _only(names: Sequence[str]) -> str:
    if len(names) != 1:
        what = (
            f"holds {len(names)} sweeps: {', '.join(sorted(names))}; name one"
            if names
            else "holds no results yet; start with: suite run"
        )
        raise ConfigError(f"sweep: the store {what}")
    return names[0]


def _own_id(home: Home) -> str | None:
    """The home's name in a store that several write to; None where it was never given one."""
    try:
        return (home.path / "tracking-id").read_text().strip() or None
    except FileNotFoundError:
        return None


def read_trials(home: Home, sweep: str, plan: Plan | None) -> tuple[list[Trial], int]:
    """Trials of the sweep as it now stands, and how many folders were left unread.

    Raises:
        ConfigError: A record is not of this version.
    """
    folders = home.trials()
    cells = {}
    if plan is not None:
        cells = {cell.key: cell for cell in plan.cells}
    trials = []
    for folder in islice(folders, MOST_TRIALS):
        spec = folder.spec()
        if spec is None or spec.sweep != sweep:
            continue
        trial = Trial(folder, spec, folder.result())
        # A changed definition may have left trials behind.
        if plan is None or (spec.cell in cells and plan.includes(cells[spec.cell], trial)):
            trials.append(trial)
    trials.sort(
        key=lambda t: (t.spec.arm.key, t.spec.task.name, t.spec.phase, t.spec.number, t.spec.seed)
    )
    return trials, sum(1 for _ in folders)


def trial_row(trial: Trial) -> Row:
    """A trial in one row; what it could not measure is None."""
    spec, result = trial.spec, trial.result
    train = None if result is None else result.phases.get("train")
    return {
        "trial": trial.folder.hash,
        "arm": spec.arm.key,
        "task": spec.task.name,
        "phase": spec.phase.value,
        "number": spec.number,
        "seed": spec.seed,
        "learning_rate": spec.learning_rate,
        "status": "unfinished" if result is None else result.status.value,
        "validation_score": None if result is None else result.validation_score,
        "test_score": None if result is None else result.test_score,
        "best_epoch": None if result is None else result.best_epoch,
        "train_s": None if train is None else train.seconds,
        "energy_kwh": None if train is None else train.energy_kwh,
        "energy_source": None if train is None else train.energy_source,
        "peak_memory_bytes": None if train is None else train.memory.allocated_max_bytes,
        "samples_per_s": None
        if result is None or result.timing is None
        else result.timing.samples_per_s,
        "started_at": None if result is None else result.started_at,
        "finished_at": None if result is None else result.finished_at,
        "phases": {}
        if result is None
        else {name: (p.seconds, p.energy_kwh) for name, p in result.phases.items()},
        "epochs": []
        if result is None
        else [(e.epoch, e.train_loss, e.validation_score) for e in result.epochs],
    }


def failure_rows(trial: Trial) -> list[Row]:
    """A row per attempt that ended without a result, and one where the trial itself ended without a score."""
    spec = trial.spec
    names: Row = {
        "trial": trial.folder.hash,
        "arm": spec.arm.key,
        "task": spec.task.name,
        "phase": spec.phase.value,
    }
    names |= {"number": spec.number, "seed": spec.seed, "learning_rate": spec.learning_rate}
    rows = [
        {
            **names,
            "status": "attempt",
            "type": f.type,
            "message": redact(f.message),
            "log": _log(f.log_path),
        }
        for f in trial.folder.failures()
    ]
    result = trial.result
    if result is not None and result.status not in (Status.COMPLETED, Status.PRUNED):
        failure = result.failure
        why = failure.message if failure is not None else result.missing.get("score", "")
        kind, log = (
            (failure.type, _log(failure.log_path))
            if failure is not None
            else (result.status.value, "")
        )
        rows.append(
            {
                **names,
                "status": result.status.value,
                "type": kind,
                "message": redact(why),
                "log": log,
            }
        )
    return rows


def _log(path: str) -> str:
    """The name alone: a report is sent to people to whom this machine's folders are of no use."""
    return os.path.basename(path)
