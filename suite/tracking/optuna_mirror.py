"""Studies mirrored into an Optuna storage, for optuna-dashboard. A view of the trial folders: the search never reads it.

A study per cell, named `<sweep>/<cell> @<home>`; its trials carry the hash of theirs, by which each is written once. Where
the storage says something else than the folders do (a trial was removed and run again), the study is written anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import create_engine, inspect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from suite.errors import SuiteError, TrackingError
from suite.plan.definition import known_plan, sweeps
from suite.plan.optuna_trials import NAME, distribution_of, quiet
from suite.plan.plan import Plan, PlannedCell
from suite.plan.second_objective import cost
from suite.record.cells import Cell, Trial, read_cells
from suite.record.folder import Home
from suite.record.result import Status
from suite.redact import redact
from suite.storage.databases import check_local, with_deadlines, with_driver
from suite.storage.identity import home_id
from suite.tracking.encode import result_digest
from suite.tracking.follower import Follower

LOCK_TIMEOUT_S = 60.0
HASH, DIGEST = "suite.trial", "suite.result"
"""User attributes of a trial: the hash of its folder, and what its result was when it was written."""


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """What a mirroring did: trials that were `written` (or have ended since) or `already` there, over so many `studies`."""

    written: int = 0
    already: int = 0
    studies: int = 0

    def __add__(self, other: MirrorReport) -> MirrorReport:
        return MirrorReport(
            self.written + other.written, self.already + other.already, self.studies + other.studies
        )


def mirror_studies(home: Home, url: str, *, sweep: str | None = None) -> MirrorReport:
    """Bring an Optuna storage up to date with the studies of a home; done twice, the second time writes nothing.

    Args:
        home: Its folders are only read.
        url: `postgresql://...`, `sqlite:///PATH` or `journal:///PATH`; a database of its own, not MLflow's.
        sweep: Only this one; None = all.

    Raises:
        TrackingError: The storage cannot be reached or used.
    """
    report = MirrorReport()
    try:
        with FileLock(home.path / "optuna.lock", timeout=LOCK_TIMEOUT_S), quiet(), explained(url):
            storage = open_storage(url)
            try:
                for name in sweeps(home):
                    if sweep in (None, name) and (plan := known_plan(home, name)) is not None:
                        report += _mirror_sweep(storage, home, plan)
            finally:
                storage.remove_session()
    except Timeout:
        raise TrackingError(
            f"{home.path}/optuna.lock: another process has been writing for {LOCK_TIMEOUT_S:.0f} s"
        ) from None
    return report


def open_storage(url: str) -> BaseStorage:
    """Open a storage, and make it where there is none.

    Raises:
        TrackingError: As `database_url`.
    """
    path = journal_path(url)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))
    url = database_url(url)
    if url.startswith("sqlite:"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return RDBStorage(url, engine_kwargs={"poolclass": NullPool})


def journal_path(url: str) -> Path | None:
    """The file of a journal, None for a database."""
    return Path(url.removeprefix("journal://")) if url.startswith("journal:///") else None


def database_url(url: str) -> str:
    """A database's URL with driver, deadlines and, of sqlite, an absolute path.

    Raises:
        TrackingError: A URL of another kind, MLflow's own database, or sqlite on a network file system.
    """
    if not re.match(r"(sqlite:///|postgres(ql)?[:+]|mysql[:+])", url):
        raise TrackingError(
            f"--optuna {redact(url)}: expected postgresql://USER:PASSWORD@HOST/DATABASE, sqlite:///PATH or journal:///PATH"
        )
    url = with_deadlines(with_driver(url))
    if url.startswith("sqlite:"):
        path = Path(url.removeprefix("sqlite:///")).resolve()
        check_local(path, option="--optuna")
        url = f"sqlite:///{path}"
        if not path.exists():
            return url
    if inspect(create_engine(url, poolclass=NullPool)).has_table("experiments"):
        raise TrackingError(
            f"--optuna {redact(url.partition('?')[0])}: holds MLflow's tables, which Optuna's would break; make it another database"
        )
    return url


@contextmanager
def explained(url: str) -> Iterator[None]:
    """What Optuna and its driver raise, as one line that names the storage and holds no password."""
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
        raise TrackingError(
            f"Optuna storage {redact(url.partition('?')[0])}: {lines[0][:300]}"
        ) from error


def _mirror_sweep(storage: BaseStorage, home: Home, plan: Plan) -> MirrorReport:
    cells = read_cells(home, plan.config.name)
    known = {study.study_name: study._study_id for study in storage.get_all_studies()}
    report = MirrorReport()
    for planned in plan.cells:
        cell = cells.get(planned.key)
        if cell is not None and cell.search:
            name = f"{plan.config.name}/{planned.key} @{home_id(home)}"
            report += _Study(
                storage, name, known.get(name), planned, plan.config.search.second
            ).mirror(cell)
    return report


@dataclass(slots=True)
class _Study:
    """One cell's study in a storage; `id` is None while it is not there."""

    storage: BaseStorage
    name: str
    id: int | None
    planned: PlannedCell
    second: str | None

    def mirror(self, cell: Cell) -> MirrorReport:
        found = [] if self.id is None else self.storage.get_all_trials(self.id, deepcopy=False)
        ours = [
            trial for trial in found if HASH in trial.user_attrs
        ]  # of one that somebody added by hand nothing is known, and it stays
        there, wanted = (
            {trial.user_attrs[HASH]: trial for trial in ours},
            {t.folder.hash: t for t in cell.search},
        )
        twice = len(there) < len(ours)  # by two drivers, of which one was superseded
        if twice or any(_differs(trial, wanted.get(name)) for name, trial in there.items()):
            assert self.id is not None
            self.storage.delete_study(self.id)
            self.id, there = None, {}
        study = self._make() if self.id is None else self.id
        changed = [
            self._write(study, trial, there.get(name), cell) for name, trial in wanted.items()
        ]
        self._describe(study, cell)
        return MirrorReport(sum(changed), len(changed) - sum(changed), 1)

    def _make(self) -> int:
        score = (
            StudyDirection.MAXIMIZE
            if self.planned.task.higher_is_better
            else StudyDirection.MINIMIZE
        )
        return self.storage.create_new_study(
            [score] if self.second is None else [score, StudyDirection.MINIMIZE], self.name
        )

    def _write(self, study: int, trial: Trial, known: FrozenTrial | None, cell: Cell) -> bool:
        """Whether anything was written."""
        frozen = self._frozen(trial, cell)
        if known is None:
            self.storage.create_new_trial(study, template_trial=frozen)
            return True
        if known.state.is_finished() or not frozen.state.is_finished():
            return False
        for key, value in frozen.user_attrs.items():
            self.storage.set_trial_user_attr(known._trial_id, key, value)
        for step, score in frozen.intermediate_values.items():
            self.storage.set_trial_intermediate_value(known._trial_id, step, score)
        self.storage.set_trial_state_values(known._trial_id, frozen.state, frozen.values)
        return True

    def _frozen(self, trial: Trial, cell: Cell) -> FrozenTrial:
        result, values = trial.result, self._values(trial)
        state = (
            TrialState.RUNNING
            if result is None
            else _state(result.status, scored=values is not None)
        )
        tried = distribution_of(
            self.planned.learning_rate, [t.spec.learning_rate for t in cell.search]
        )
        distributions: dict[str, BaseDistribution] = {NAME: tried}
        return FrozenTrial(
            number=-1,
            trial_id=-1,
            state=state,
            value=None,
            values=values if state is TrialState.COMPLETE else None,
            datetime_start=datetime.now()
            if result is None
            else datetime.fromtimestamp(result.started_at),
            datetime_complete=None
            if result is None
            else datetime.fromtimestamp(result.finished_at),
            params={NAME: trial.spec.learning_rate},
            distributions=distributions,
            user_attrs=_attributes(trial),
            system_attrs={},
            intermediate_values={}
            if result is None
            else {e.epoch: e.validation_score for e in result.epochs},
        )

    def _values(self, trial: Trial) -> list[float] | None:
        """Score, and the second objective where there is one; None unless all are known."""
        result = trial.result
        if result is None or result.score is None:
            return None
        if self.second is None:
            return [result.score]
        dear = cost(result, self.second)
        return None if dear is None else [result.score, dear]

    def _describe(self, study: int, cell: Cell) -> None:
        """The names of the cell, and what its confirm runs gave."""
        arm = self.planned.arm
        names = {
            "backbone": arm.backbone.name,
            "attention": arm.attention.name,
            "method": arm.method,
            "task": self.planned.task.name,
        }
        confirmed = {
            str(t.spec.seed): t.result.score for t in cell.confirmed() if t.result is not None
        }
        wanted: dict[str, Any] = {
            **names,
            "architecture": arm.architecture,
            "test scores by seed": confirmed,
        }
        known = self.storage.get_study_user_attrs(study)
        for key, value in wanted.items():
            if known.get(key) != value:
                self.storage.set_study_user_attr(study, key, value)


def _differs(there: FrozenTrial, trial: Trial | None) -> bool:
    """Whether what the storage holds for ended is not what the folder holds."""
    if trial is None or not there.state.is_finished():
        return trial is None
    return trial.result is None or there.user_attrs.get(DIGEST) != result_digest(trial.result)


def _state(status: Status, *, scored: bool) -> TrialState:
    if status is Status.PRUNED:
        return TrialState.PRUNED
    return TrialState.COMPLETE if scored else TrialState.FAIL


def _attributes(trial: Trial) -> dict[str, Any]:
    result = trial.result
    known: dict[str, Any] = {HASH: trial.folder.hash, "number": trial.spec.number}
    if result is None:
        return known
    known |= {DIGEST: result_digest(result), "status": result.status.value}
    train = result.phases.get("train")
    if train is not None:
        known |= {
            "train_s": train.seconds,
            "energy_kwh": train.energy_kwh,
            "peak_memory_bytes": train.memory.allocated_max_bytes,
        }
    return known if result.failure is None else {**known, "failure": result.failure.message[:500]}


class OptunaFollower(Follower):
    """Mirrors a running sweep.

    Args:
        home: The sweep's home.
        url: As `mirror_studies`.
        sweep: Its name.
        say: As in `Follower`.
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
        self.home, self.url, self.sweep = home, url, sweep

    def bring_up_to_date(self) -> str | None:
        try:
            mirror_studies(self.home, self.url, sweep=self.sweep)
        except SuiteError as error:
            return str(error)
        return None
