"""Mirrors studies into an Optuna storage, for optuna-dashboard.

The mirror is a view of the trial folders: the search never reads it. Every cell has one study,
named `<sweep>/<cell> @<home>`. It shows the trials that have ended. Each carries the hash of its
folder, so that it is written once. If the storage says something else than the folders do (a trial
was removed and run again), the study is written anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import create_engine, inspect, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from suite.errors import SuiteError, TrackingError
from suite.files import sqlite_uri
from suite.plan.cell_state import read_states
from suite.plan.definition import known_plan, sweeps
from suite.plan.optuna_trials import NAME, distribution_of, quiet
from suite.plan.plan import Plan, PlannedCell
from suite.plan.second_objective import cost
from suite.record.cells import Cell, Trial
from suite.record.folder import Home
from suite.record.result import Status, TrialResult
from suite.redact import redact
from suite.storage.databases import check_local, with_deadlines, with_driver
from suite.storage.identity import home_id
from suite.tracking.encode import result_digest
from suite.tracking.follower import Follower
from suite.tracking.store import sqlite_path, without_password, writing

HASH = "suite.trial"
"""User attribute of a trial: the hash of its folder."""
BATCH_SIZE = "batch_size"
"""Name of the second parameter, where batch sizes are searched."""
DIGEST = "suite.result"
"""User attribute of a trial: the digest of its result when it was written."""


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """How many trials were `written` or `already` there, in how many `studies`."""

    written: int = 0
    already: int = 0
    studies: int = 0

    def __add__(self, other: MirrorReport) -> MirrorReport:
        return MirrorReport(
            self.written + other.written, self.already + other.already, self.studies + other.studies
        )


def mirror_studies(home: Home, url: str, *, sweep: str | None = None) -> MirrorReport:
    """Show the studies of a home in an Optuna storage. A second call writes nothing.

    Args:
        home: The home with the trials; nothing in it is changed.
        url: `postgresql://...`, `sqlite:///PATH` or `journal:///PATH`; not MLflow's own database.
        sweep: Only this sweep; None = all.

    Raises:
        TrackingError: The storage cannot be reached or used.
    """
    report = MirrorReport()
    # A lock of its own, so that neither a slow MLflow nor this mirror holds up the other.
    with writing(home.path / "optuna.lock"), quiet(), explained(url):
        storage = open_storage(url)
        try:
            # A home may hold many sweeps; a sweep without a plan has no cells to show.
            for name in sweeps(home):
                # What is wrong with another sweep's definition is none of this one's.
                if sweep not in (None, name):
                    continue
                plan = known_plan(home, name)
                if plan is not None:
                    report += _mirror_sweep(storage, home, plan)
        finally:
            # Optuna keeps a session for each thread; an open one would hold a connection of the
            # database.
            storage.remove_session()
    return report


def open_storage(url: str) -> BaseStorage:
    """Open a storage, and make it where there is none.

    Raises:
        TrackingError: `database_url` refuses the URL.
    """
    path = journal_path(url)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))
    url = database_url(url)
    file = sqlite_path(url)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    # No pool: connections that wait for the next sync would count against the server's limit.
    return RDBStorage(url, engine_kwargs={"poolclass": NullPool})


def journal_path(url: str) -> Path | None:
    """The file of a journal; None = the URL names a database."""
    if not url.startswith("journal:///"):
        return None
    return Path(url.removeprefix("journal://"))


def check_url(url: str) -> None:
    """Refuse what can be no storage, before anything else is begun; asks no server.

    Raises:
        TrackingError: The URL is of another kind or cannot be read, nobody knows the driver of its
            database, or it names an sqlite file on a network file system.
    """
    if journal_path(url) is not None:
        return
    # Optuna would take any URL that SQLAlchemy can parse; the suite is tried with these three.
    if not re.match(r"(sqlite:///|postgres(ql)?[:+]|mysql[:+])", url):
        raise TrackingError(
            f"--optuna {redact(url)}: expected postgresql://USER:PASSWORD@HOST/DATABASE, "
            "sqlite:///PATH or journal:///PATH"
        )
    with explained(url):
        make_url(with_driver(url)).get_dialect()
    path = sqlite_path(url)
    if path is not None:
        check_local(path, option="--optuna")


def database_url(url: str) -> str:
    """A database's URL with driver and deadlines; the path of an sqlite file becomes absolute.

    Raises:
        TrackingError: `check_url` refuses the URL, or it names MLflow's own database.
    """
    check_url(url)
    url = with_deadlines(with_driver(url))
    path = sqlite_path(url)
    if path is not None:
        url = sqlite_uri(path)
        # The look for MLflow's tables below would make an empty file.
        if not path.exists():
            return url
    # Both libraries keep their schema's version in a table `alembic_version`, and one would
    # overwrite the other's.
    if inspect(create_engine(url, poolclass=NullPool)).has_table("experiments"):
        raise TrackingError(
            f"--optuna {without_password(url)}: holds MLflow's tables, "
            "which Optuna's would break; make it another database"
        )
    return url


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn what Optuna and its driver raise into one line with the storage and no password."""
    try:
        yield
    except (
        optuna.exceptions.OptunaError,
        SQLAlchemyError,
        ImportError,
        OSError,
        ValueError,
        KeyError,
    ) as error:
        lines = redact(str(error)).strip().splitlines() or [type(error).__name__]
        raise TrackingError(f"Optuna storage {without_password(url)}: {lines[0][:300]}") from error


def _mirror_sweep(storage: BaseStorage, home: Home, plan: Plan) -> MirrorReport:
    states = read_states(plan, home)
    # One request for all cells instead of one for each.
    shown = set(optuna.get_all_study_names(storage))
    report = MirrorReport()
    for planned in plan.cells:
        cell = states[planned.key].as_cell()
        # A cell without search trials has nothing that a dashboard could plot.
        if not cell.search:
            continue
        name = f"{plan.config.name}/{planned.key} @{home_id(home)}"
        search = plan.config.search
        sizes = tuple(search.batch_sizes)
        mirror = _StudyMirror(storage, name, planned, search.second, sizes)
        report += mirror.bring_up_to_date(cell, exists=name in shown)
    return report


@dataclass(frozen=True, slots=True)
class _StudyMirror:
    """The study that shows one cell.

    Attributes:
        second: The second objective of its search; None = the score alone.
        batch_sizes: Those that its search chooses from; empty where there is one.
    """

    storage: BaseStorage
    name: str
    planned: PlannedCell
    second: str | None
    batch_sizes: tuple[int, ...]

    def bring_up_to_date(self, cell: Cell, *, exists: bool) -> MirrorReport:
        ended = {}
        for trial in cell.search:
            if trial.result is not None:
                ended[trial.folder.hash] = trial
        study = self._open(exists=exists)
        shown = _own_trials(study)
        # Optuna cannot change or remove a single trial, so the whole study goes.
        if not self._agree(shown, ended):
            optuna.delete_study(study_name=self.name, storage=self.storage)
            study = self._open(exists=False)
            shown = []
        # After an interruption some are there already; only the others are added.
        there = {trial.user_attrs[HASH] for trial in shown}
        written = 0
        for trial_hash, trial in ended.items():
            if trial_hash not in there:
                study.add_trial(self._frozen(trial, cell))
                written += 1
        self._describe(study, cell)
        return MirrorReport(written, len(there), 1)

    def _agree(self, shown: Sequence[FrozenTrial], ended: Mapping[str, Trial]) -> bool:
        """Whether every trial of the study is one of the folders', as it ended, and there once."""
        hashes = {trial.user_attrs[HASH] for trial in shown}
        # A driver that was superseded may have written a trial a second time.
        if len(hashes) < len(shown):
            return False
        for frozen in shown:
            trial = ended.get(frozen.user_attrs[HASH])
            if trial is None or trial.result is None:
                return False
            if frozen.user_attrs.get(DIGEST) != result_digest(trial.result):
                return False
            # An earlier version showed the learning rate alone.
            if frozen.params != self._params(trial):
                return False
        return True

    def _open(self, *, exists: bool) -> Study:
        if exists:
            return optuna.load_study(study_name=self.name, storage=self.storage)
        directions = [StudyDirection.MINIMIZE]
        if self.planned.task.higher_is_better:
            directions = [StudyDirection.MAXIMIZE]
        # The second objective is a cost.
        if self.second is not None:
            directions.append(StudyDirection.MINIMIZE)
        return optuna.create_study(
            study_name=self.name,
            storage=self.storage,
            directions=directions,
            # Another driver may have made it since the names were read.
            load_if_exists=True,
        )

    def _frozen(self, trial: Trial, cell: Cell) -> FrozenTrial:
        """An ended trial in Optuna's form."""
        result = trial.result
        assert result is not None
        values = self._values(result)
        # A trial without a score is FAIL to Optuna, whose plots leave it out.
        state = TrialState.FAIL
        if result.status is Status.PRUNED:
            state = TrialState.PRUNED
        elif values is not None:
            state = TrialState.COMPLETE
        # The edge guard may have widened the range, so it must include every rate that was tried.
        tried = [other.spec.learning_rate for other in cell.search]
        searched: dict[str, BaseDistribution] = {
            NAME: distribution_of(self.planned.learning_rate, tried)
        }
        if self.batch_sizes:
            searched[BATCH_SIZE] = CategoricalDistribution(self.batch_sizes)
        frozen = create_trial(
            state=state,
            # Optuna refuses values of a failed trial, and a pruned one has no final ones.
            values=values if state is TrialState.COMPLETE else None,
            params=self._params(trial),
            distributions=searched,
            user_attrs=_attributes(trial, result),
            # A trial that failed has its curve in its folder alone.
            intermediate_values={
                epoch.epoch: epoch.validation_score
                for epoch in result.epochs or trial.folder.epochs()
            },
        )
        # `create_trial` takes no times and would set both to now. Optuna wants local time without a
        # zone.
        frozen.datetime_start = datetime.fromtimestamp(result.started_at)
        frozen.datetime_complete = datetime.fromtimestamp(result.finished_at)
        return frozen

    def _params(self, trial: Trial) -> dict[str, float | int]:
        """What the search chose for a trial."""
        found: dict[str, float | int] = {NAME: trial.spec.learning_rate}
        if self.batch_sizes:
            found[BATCH_SIZE] = trial.spec.training.batch_size
        return found

    def _values(self, result: TrialResult) -> list[float] | None:
        """The score, and the second objective where there is one; None unless all are known."""
        if result.score is None:
            return None
        if self.second is None:
            return [result.score]
        second = cost(result, self.second)
        if second is None:
            return None
        return [result.score, second]

    def _describe(self, study: Study, cell: Cell) -> None:
        """Note the names of the cell, and what its confirm runs gave."""
        arm = self.planned.arm
        test_scores = {}
        for trial in cell.confirmed():
            if trial.result is not None:
                test_scores[str(trial.spec.seed)] = trial.result.score
        wanted = {
            "backbone": arm.backbone.name,
            "attention": arm.attention.name,
            "method": arm.method,
            "architecture": arm.architecture,
            "task": self.planned.task.name,
            "test scores by seed": test_scores,
        }
        known = study.user_attrs
        for key, value in wanted.items():
            # Each attribute that is set costs a transaction, so only changes are sent.
            if known.get(key) != value:
                study.set_user_attr(key, value)


def _own_trials(study: Study) -> list[FrozenTrial]:
    """The trials that came from folders. Those that somebody added by hand stay as they are."""
    trials = study.get_trials(deepcopy=False)
    return [trial for trial in trials if HASH in trial.user_attrs]


def _attributes(trial: Trial, result: TrialResult) -> dict[str, Any]:
    known: dict[str, Any] = {
        HASH: trial.folder.hash,
        DIGEST: result_digest(result),
        "number": trial.spec.number,
        "status": result.status.value,
    }
    train = result.phases.get("train")
    if train is not None:
        known["train_s"] = train.seconds
        known["energy_kwh"] = train.energy_kwh
        known["peak_memory_bytes"] = train.memory.allocated_max_bytes
    if result.failure is not None:
        known["failure"] = result.failure.message[:500]
    return known


class OptunaFollower(Follower):
    """Mirrors a running sweep.

    Args:
        home: The sweep's home.
        url: The storage, as `mirror_studies` takes it.
        sweep: The name of the sweep.
        say: Receives the lines meant for the user, as in `Follower`.
    """

    def __init__(
        self,
        home: Home,
        url: str,
        *,
        sweep: str,
        say: Callable[[str], None] | None = None,
        patience_s: float = 20.0,
    ) -> None:
        super().__init__("Optuna", say=say, patience_s=patience_s)
        self.home = home
        self.url = url
        self.sweep = sweep

    def bring_up_to_date(self) -> str | None:
        try:
            mirror_studies(self.home, self.url, sweep=self.sweep)
        except SuiteError as error:
            return str(error)
        return None
