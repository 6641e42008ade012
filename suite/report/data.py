"""Everything that a report shows of one sweep, read once.

This is rows of the leaderboard, learning-rate curves, every trial and what is missing.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.config.reference import MEAN
from suite.errors import ConfigError, TrackingError, UnknownNameError
from suite.leaderboard.choice import Sort, sort_of
from suite.leaderboard.fields import Row as Cell
from suite.leaderboard.fields import with_values
from suite.leaderboard.measures import join, of_preparation
from suite.leaderboard.table import choose, plain
from suite.meters.record import ESTIMATE
from suite.plan.cell_state import CellStatus
from suite.plan.definition import known_plan
from suite.plan.plan import Plan
from suite.record.cells import Trial
from suite.record.folder import Home
from suite.record.result import Status
from suite.redact import redact
from suite.report import values
from suite.report.names import Arm, arms_of, key_in_home, own_key
from suite.report.table import rows_where, rows_with, rows_without, values_of
from suite.storage.identity import identity_path
from suite.tracking.rows import readable_and_others, runs_with_rows

if TYPE_CHECKING:
    from suite.tracking.store import Store

Row = dict[str, Any]
# The most trial folders that are read, which takes some 20 s. Of a larger home MLflow has the whole
# leaderboard, but not the single trials.
MOST_TRIALS = 20_000
# Planned cells without a trial that are named.
MOST_NAMED = 5
PARTLY_ESTIMATED = ", partly estimated"
# What is missing from a cell, by its state.
UNFINISHED = {
    "searching": "are still searched",
    "partial": "lack confirm runs, or some of their seeds",
    "failed": "failed: nothing is left to run, and a confirm run has no score",
}


@dataclass(frozen=True)
class Report:
    """One sweep as far as it has come.

    Attributes:
        sweep: Its name.
        rows: The leaderboard, with rejected rows and architectures that were not chosen. Where
            several homes have results of the sweep, an arm's key begins with its home.
        cells: Cells with their learning-rate curves, by arm key and task.
        trials: Every trial that was handed out, as `trial_row` gives it.
        plan: The plan of the sweep's last run; None where this home does not hold it.
        unread_trials: How many folders lie beyond `MOST_TRIALS`.
        unread_rows: By home why its file of rows cannot be used.
        provenance: Hardware, versions and the like of every result, as recorded.
        failures: Attempts that their machine ended, and trials without a score. Trials that the
            search ended early are no failures.
        command: The command that writes its page, as a shell takes it; it holds no password.
        own_home: The name of this home in the store, whose trials and plan these are; None where it
            has none.
        sources: Energy sources of trials that are not among `trials`.
    """

    sweep: str
    rows: list[Row]
    cells: dict[tuple[str, str], Cell]
    trials: list[Row] = field(default_factory=list)
    plan: Plan | None = None
    unread_trials: int = 0
    unread_rows: dict[str, str] = field(default_factory=dict)
    provenance: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)
    command: str = ""
    own_home: str | None = None
    sources: frozenset[str] = frozenset()

    @cached_property
    def homes(self) -> list[str]:
        """The homes whose rows these are, by name; ranks compare the rows of one home alone."""
        return sorted(set(values_of(self.rows, "home")))

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """The arms by key; the best come first, so that they get the plainest colours."""
        return arms_of(self.rows)

    @cached_property
    def shown(self) -> list[Row]:
        """The rows without architectures that lost their contest."""
        return rows_without(self.rows, "status", CellStatus.NOT_CHOSEN)

    @cached_property
    def tasks(self) -> list[str]:
        return sorted(set(values_of(self.rows, "task")) - {MEAN})

    @cached_property
    def places(self) -> list[str]:
        """The mean over tasks where there is one with a score, then every task."""
        if self.scored(MEAN):
            return [MEAN, *self.tasks]
        return self.tasks

    def scored(self, task: str) -> list[Row]:
        """Rows of a task, or of the mean, that have a test score.

        Architectures that another one has beaten since are left out.
        """
        return rows_with(rows_where(self.shown, "task", task), "score_mean")

    def admitted(self, task: str) -> list[Row]:
        """Rows of a task with a test score that is neither rejected nor of a failed row."""
        return [row for row in self.scored(task) if not values.flaw(row)]

    def failed(self, task: str) -> list[Row]:
        """Rows of a task with a test score of only those seeds that survived."""
        return [row for row in self.scored(task) if values.flaw(row) == CellStatus.FAILED]

    def label(self, row: Mapping[str, Any]) -> str:
        """The short name of a row's arm."""
        return self.arms[row["arm"]].label

    def labelled(self, rows: Iterable[Row]) -> list[Row]:
        """The rows with the short names of their arms."""
        return [row | {"label": self.label(row)} for row in rows]

    @cached_property
    def confirm_runs(self) -> list[Row]:
        """Confirm trials at the learning rates and batch sizes that are chosen now.

        An earlier choice may have left others.
        """
        found = []
        for trial in self.trials:
            # An arm that the sweep no longer has is in no row.
            if trial["phase"] != "confirm" or trial["arm"] not in self.arms:
                continue
            cell = self.cells.get((trial["arm"], trial["task"]))
            if cell is None:
                found.append(trial)
                continue
            same_rate = cell.learning_rate in (None, trial["learning_rate"])
            # Sweeps with one batch size do not search it, and their cells need not name it.
            if same_rate and cell.batch_size in (None, trial["batch_size"]):
                found.append(trial)
        return found

    def higher_is_better(self, task: str) -> bool:
        """Whether more is better, as far as the rows know."""
        return False not in values_of(rows_where(self.rows, "task", task), "higher_is_better")

    def by_scale(self, task: str) -> dict[str, list[Row]]:
        """The scored rows of a task that can be set beside each other; by backbone, or all by "".

        A perplexity is per token of its backbone's tokenizer, and says nothing of another's.
        """
        rows = self.scored(task)
        if self.on_one_scale(task, rows):
            return {"": rows}
        backbones = sorted(set(values_of(rows, "backbone")))
        return {backbone: rows_where(rows, "backbone", backbone) for backbone in backbones}

    def on_one_scale(self, task: str, rows: Sequence[Row]) -> bool:
        """Whether the scores of some rows of a task can be set beside each other."""
        return self.higher_is_better(task) or len(set(values_of(rows, "backbone"))) < 2

    @cached_property
    def training_sources(self) -> set[str]:
        """The energy sources of training, in all trials, or in the rows where no trial was read."""
        rows = self.trials or self.rows
        # The trials of a folder say nothing about rows of other homes.
        if len(self.homes) > 1 or self.unread_rows:
            rows = [*self.trials, *self.rows]
        return _sources(values_of(rows, "energy_source"))

    @cached_property
    def energy_sources(self) -> set[str]:
        """The energy sources of all phases; of training alone where no trial was read."""
        found = self.training_sources | self.sources
        for trial in self.trials:
            found |= _sources([*trial["sources"].values(), trial["prepare_source"]])
        return found

    @property
    def estimated(self) -> bool:
        """Whether all energy here was estimated, and none measured."""
        return self.energy_sources == {ESTIMATE}

    @property
    def energy_note(self) -> str:
        """What stands behind the energy of training: `, estimate` where nothing was measured."""
        return _note(self.training_sources)

    @property
    def spent_note(self) -> str:
        """The same behind an energy of all phases: a phase may lack the meter that others had."""
        return _note(self.energy_sources)

    @cached_property
    def pruned(self) -> str:
        """How many trials the search ended early, in a sentence; empty for none."""
        count = values_of(self.trials, "status").count(Status.PRUNED.value)
        if count == 0:
            return ""
        if count == 1:
            return "The search ended 1 trial early (pruned)."
        return f"The search ended {count} trials early (pruned)."

    def absent(self, task: str) -> list[str]:
        """Keys of the planned cells of a task, or of all, that have no ended trial yet."""
        if self.plan is None:
            return []
        # Without its rows nobody knows which of the home's cells have ended.
        if self.own_home in self.unread_rows:
            return []
        ended = set()
        for (arm, own_task), cell in self.cells.items():
            # The plan is this home's: another one may have what this one still lacks.
            if self.own_home in (None, cell.home):
                ended.add(f"{own_key(arm)}/{own_task}")
        found = []
        for planned in self.plan.cells:
            if planned.key not in ended and task in (MEAN, planned.task.name):
                found.append(planned.key)
        return sorted(found)

    @cached_property
    def missing(self) -> list[str]:
        """What a finished sweep would have and this one does not have, in sentences."""
        found = []
        if self.plan is not None:
            planned = {cell.key for cell in self.plan.cells}
            absent = self.absent(MEAN)
            if absent:
                named = ", ".join(absent[:MOST_NAMED])
                if len(absent) > MOST_NAMED:
                    named += f" and {len(absent) - MOST_NAMED} more"
                found.append(
                    f"{len(absent)} of {len(planned)} planned cells have no ended trial yet:"
                    f" {named}."
                )
        # A mean row is no cell: its tasks would be counted twice.
        states = Counter(values_of(rows_without(self.rows, "task", MEAN), "status"))
        for state, meaning in UNFINISHED.items():
            if states[state]:
                found.append(f"{states[state]} of {states.total()} cells {meaning}.")
        running = values_of(self.trials, "status").count("unfinished")
        if running:
            found.append(f"{running} trials were handed out and have not ended.")
        if self.unread_trials:
            found.append(
                f"{self.unread_trials} trial folders were not read (a report reads"
                f" {MOST_TRIALS:,}); the leaderboard is whole."
            )
        return found


def _sources(texts: Iterable[str | None]) -> set[str]:
    """Single energy sources: a run on several kinds of devices has several, joined by "+"."""
    found: set[str] = set()
    for text in texts:
        if text is not None:
            found.update(text.split("+"))
    return found


def _note(sources: set[str]) -> str:
    """What stands behind "energy" in a title where some of it, or all, was estimated."""
    if ESTIMATE not in sources:
        return ""
    if sources == {ESTIMATE}:
        return ", estimate"
    return PARTLY_ESTIMATED


def read(
    home: Path | str,
    sweep: str | None = None,
    *,
    tracking_uri: str | None = None,
    sort: str = Sort.SCORE,
) -> Report:
    """Read one sweep for its report.

    Args:
        home: The home of `suite run --home`.
        sweep: Name of the sweep; not needed where the home has one.
        tracking_uri: MLflow store; None = `MLFLOW_TRACKING_URI`, or else the home's own.
        sort: Order of the leaderboard's rows.

    Raises:
        TrackingError: There are no results, or none of this sweep, or a newer version wrote them.
        ConfigError: The home holds several sweeps and none was named, `sort` is no sort key, or a
            record is of another version.

    Example:
        >>> report = suite.report.read("runs")  # doctest: +SKIP
    """
    # MLflow takes seconds to import.
    from suite.tracking.store import open_store, resolve_uri

    # Before the store is opened, so that a typing mistake is known at once.
    sort_of(sort)
    place = Home(Path(home))
    uri = resolve_uri(place, tracking_uri)
    store = open_store(uri, create=False)
    if sweep is None:
        sweep = _only(_sweeps_of(store, place))
    # Rejected rows, too: the report says what was taken out, and why.
    runs = runs_with_rows(store, sweep)
    stored, others = readable_and_others(store, runs)
    unread_rows = {run.tag("suite.home"): str(others[run.id]) for run in runs if run.id in others}
    rows = plain(choose(stored, rejected=True, sort=sort).rows)
    own = _own_id(place)
    # A home whose rows cannot be read still has trials, and they are not those of another one.
    several_homes = len({*values_of(rows, "home"), *unread_rows}) > 1
    # The same arm of two homes is two arms: their runs were never compared.
    if several_homes:
        rows = [row | {"arm": key_in_home(row["home"], row["arm"])} for row in rows]
        stored = [with_values(cell, arm=key_in_home(cell.home, cell.arm)) for cell in stored]
    cells = {(cell.arm, cell.task): cell for cell in stored}
    plan = known_plan(place, sweep)
    trials, unread = read_trials(place, sweep, plan)
    trial_rows = []
    failures = []
    provenance = []
    for trial in trials:
        trial_rows.append(trial_row(trial))
        failures += failure_rows(trial)
        if trial.result is not None:
            provenance.append(trial.result.provenance)
    if several_homes and own is not None:
        for row in (*trial_rows, *failures):
            row["arm"] = key_in_home(own, row["arm"])
    return Report(
        sweep=sweep,
        rows=rows,
        cells=cells,
        trials=trial_rows,
        plan=plan,
        unread_trials=unread,
        unread_rows=unread_rows,
        provenance=provenance,
        failures=failures,
        command=_command(home, sweep, tracking_uri, sort),
        own_home=own,
    )


def _command(home: Path | str, sweep: str, tracking_uri: str | None, sort: str) -> str:
    """The command that writes the page of what these arguments of `read` give."""
    from suite.tracking.store import without_password

    words = ["suite", "report", "--home", str(home), "--sweep", sweep]
    if tracking_uri is not None:
        words += ["--tracking-uri", without_password(tracking_uri)]
    if sort != Sort.SCORE:
        words += ["--sort", sort]
    return shlex.join(words)


def sweeps(home: Path | str, tracking_uri: str | None = None) -> list[str]:
    """Every sweep in the home's store, by name.

    Raises:
        TrackingError: The store cannot be read or has none.
    """
    from suite.tracking.store import open_store, resolve_uri

    place = Home(Path(home))
    return _sweeps_of(open_store(resolve_uri(place, tracking_uri), create=False), place)


def _sweeps_of(store: Store, home: Home) -> list[str]:
    from suite.tracking.store import START

    found = sorted(store.experiments())
    if not found:
        raise TrackingError(f"{home.path}: no results yet; {START}")
    return found


def only_sweep(home: Path | str, sweep: str | None, tracking_uri: str | None = None) -> str:
    """The sweep with this name; None = the only one of the home.

    Raises:
        TrackingError: The store cannot be read or has none.
        ConfigError: It has several and none is named, or not this one.
    """
    found = sweeps(home, tracking_uri)
    if sweep is None:
        return _only(found)
    if sweep not in found:
        raise UnknownNameError("sweep", sweep, found, where=str(home))
    return sweep


def _only(names: Sequence[str]) -> str:
    if len(names) > 1:
        raise ConfigError(
            f"sweep: the store holds {len(names)} sweeps: {', '.join(names)}; name one"
        )
    return names[0]


def _own_id(home: Home) -> str | None:
    """Read the home's name in a store that several write to; None where it has none."""
    try:
        return identity_path(home).read_text(errors="replace").strip() or None
    except FileNotFoundError:
        return None


def read_trials(home: Home, sweep: str, plan: Plan | None) -> tuple[list[Trial], int]:
    """Read the trials of the sweep as it now stands, and count the folders left unread.

    Raises:
        ConfigError: A record is of another version.
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
    # Folders are named by hashes, in whose order nobody reads.
    trials.sort(key=_place_of_trial)
    # The iterator goes on where `islice` stopped: this counts the rest.
    return trials, sum(1 for _ in folders)


def _place_of_trial(trial: Trial) -> tuple[str, str, str, int, int]:
    spec = trial.spec
    return spec.arm.key, spec.task.name, spec.phase, spec.number, spec.seed


def _trial_names(trial: Trial) -> Row:
    """The columns that say which trial this is."""
    spec = trial.spec
    return {
        "trial": trial.folder.hash,
        "arm": spec.arm.key,
        "task": spec.task.name,
        "phase": spec.phase.value,
        "number": spec.number,
        "seed": spec.seed,
        "learning_rate": spec.learning_rate,
        "batch_size": spec.training.batch_size,
    }


def trial_row(trial: Trial) -> Row:
    """A trial in one row; what it could not measure is None."""
    row = _trial_names(trial) | {
        "status": "unfinished",
        "validation_score": None,
        "test_score": None,
        "best_epoch": None,
        "train_s": None,
        "energy_kwh": None,
        "energy_source": None,
        "peak_memory_bytes": None,
        "prepare_s": None,
        "prepare_energy_kwh": None,
        "prepare_source": None,
        "samples_per_s": None,
        "started_at": None,
        "finished_at": None,
        "phases": {},
        "sources": {},
        "epochs": [],
    }
    result = trial.result
    if result is None:
        return row
    row["status"] = result.status.value
    row["validation_score"] = result.validation_score
    row["test_score"] = result.test_score
    row["best_epoch"] = result.best_epoch
    row["started_at"] = result.started_at
    row["finished_at"] = result.finished_at
    if result.timing is not None:
        row["samples_per_s"] = result.timing.samples_per_s
    for name, phase in result.phases.items():
        row["phases"][name] = (phase.seconds, phase.energy_kwh)
        row["sources"][name] = phase.energy_source
    for epoch in result.epochs:
        row["epochs"].append((epoch.epoch, epoch.train_loss, epoch.validation_score))
    if result.made_before:
        row["prepare_s"] = of_preparation("seconds")(result)
        row["prepare_energy_kwh"] = of_preparation("energy_kwh")(result)
        costs = [made.cost for made in result.made_before if made.cost is not None]
        row["prepare_source"] = join(cost.energy_source for cost in costs)
    train = result.phases.get("train")
    if train is not None:
        row["train_s"] = train.seconds
        row["energy_kwh"] = train.energy_kwh
        row["energy_source"] = train.energy_source
        row["peak_memory_bytes"] = train.memory.allocated_max_bytes
    return row


def failure_rows(trial: Trial) -> list[Row]:
    """List what went wrong with a trial.

    There is a row per attempt that ended without a result, and one where the trial itself ended
    without a score.
    """
    names = _trial_names(trial)
    rows = []
    for attempt in trial.folder.failures():
        row = _failure(attempt.type, attempt.message, attempt.log_path)
        rows.append(names | {"status": "attempt"} | row)
    result = trial.result
    # A pruned trial did what the search asked of it.
    if result is None or not result.status.is_failure:
        return rows
    if result.failure is not None:
        row = _failure(result.failure.type, result.failure.message, result.failure.log_path)
    else:
        row = _failure(result.status.value, result.missing.get("score", ""), "")
    rows.append(names | {"status": result.status.value} | row)
    return rows


def _failure(kind: str, message: str, log_path: str) -> Row:
    # The log's name alone: a report goes to people to whom this machine's folders are of no use.
    return {"type": kind, "message": redact(message), "log": os.path.basename(log_path)}
