"""Brings MLflow up to date from the trial folders, or rebuilds it from nothing.

The rows of every sweep come first, in one file, so that the leaderboard does not wait for the runs
of thousands of trials. Then come the runs, cell by cell. A cell's run carries a digest of the row
that it was written for, so a home that is up to date costs three searches and a claim
(`suite.tracking.claim`) per sweep, and an interrupted sync goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from suite.config.sweep import SweepConfig
from suite.errors import SuiteError, TrackingError, UnknownNameError
from suite.leaderboard.collect import folders_by_cell, sweep_rows
from suite.leaderboard.fields import IMPORTED, Row
from suite.plan.definition import sweeps
from suite.record.cells import Trial
from suite.record.folder import RESULT, Home, TrialFolder
from suite.storage.identity import home_id
from suite.tracking.claim import Claim
from suite.tracking.live import LiveTrial
from suite.tracking.store import ARTIFACTS, Store, open_store, writing
from suite.tracking.sweep_runs import SweepRuns

REFRESH_S = 30.0
"""While the runs of many trials are written, the rows are made anew this often."""
Step = Callable[[int, int, int], None]
"""A function that is told: cells done, cells in all, runs of trials written."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did.

    Attributes:
        written: Trials that MLflow did not have, or had incompletely.
        already: The other trials that have ended. Only `verify` looks each of them up.
        cells: Cell runs that were created or changed.
        unreachable: Why it stopped early, None if it did not.
    """

    written: int = 0
    already: int = 0
    cells: int = 0
    unreachable: str | None = None


def sync(
    home: Home,
    *,
    tracking_uri: str,
    sweep: str | None = None,
    verify: bool = False,
    step: Step | None = None,
    take_over: bool = False,
) -> SyncReport:
    """Bring MLflow up to date with the trial folders of a home.

    Args:
        home: The home with the trials; nothing in it is changed.
        tracking_uri: As `resolve_uri` gives it.
        sweep: Only this sweep; None = all in the home.
        verify: Look every trial up in MLflow, also where its cell says that nothing changed (after
            runs were deleted by hand).
        step: Is told of the progress after each cell.
        take_over: Write although another copy of the home has written (`suite.tracking.claim`).

    Raises:
        TrackingError: There is no such home, or no such sweep in it.
    """
    # A mistyped --home would otherwise look like a home in which all is up to date.
    if not (home.path / "trials").is_dir():
        raise TrackingError(
            f"{home.path}: no trials here; is this the --home that suite run was given?"
        )
    known = sweeps(home)
    # Rows are made from a sweep's plan: without one, nothing would be written and nothing said.
    if not known and any(True for _ in home.trials()):
        raise TrackingError(
            f"{home.path}: holds trials but defines no sweep (sweeps/*.json); got trials that were "
            "run by hand or copied alone, expected those of suite run; copy the folder sweeps too"
        )
    if sweep is not None and sweep not in known:
        raise TrackingError(str(UnknownNameError("sweep", sweep, known, where=str(home.path))))
    try:
        store = open_store(tracking_uri)
    except TrackingError as error:
        # No error, since the folders keep everything: the caller says that MLflow is behind.
        return SyncReport(unreachable=str(error))
    return Syncer(home, store, take_over=take_over).run(sweep, verify=verify, step=step)


@dataclass(frozen=True, slots=True)
class _Due:
    """A cell whose runs are not up to date."""

    runs: SweepRuns
    row: Row
    folders: Sequence[TrialFolder]
    artifacts: bool


class Syncer:
    """Writes one home to one store, remembering between calls what cannot have changed.

    Not for two threads at a time. After an error it must be replaced by a new one, for it may
    remember too much.
    """

    def __init__(self, home: Home, store: Store, *, take_over: bool = False) -> None:
        self.home = home
        self.store = store
        self._claim = Claim(home, store, take_over=take_over)
        self._home_id = home_id(home)
        # By sweep; both are filled at the first look at a sweep.
        self._runs: dict[str, SweepRuns] = {}
        self._rows: dict[str, list[Row]] = {}
        self._refreshed_s = 0.0

    def run(
        self,
        sweep: str | None = None,
        *,
        verify: bool = False,
        step: Step | None = None,
        live: Mapping[str, LiveTrial] | None = None,
    ) -> SyncReport:
        """Do what `sync` does; `unreachable` of the report says why it stopped half-way.

        Args:
            live: The trials that run, by their hash: their curves are written too, and no other
                trial's run shows as running. Only a driver knows; None leaves such runs as they
                are.
        """
        report = SyncReport()
        try:
            with writing(self.home.tracking_lock):
                due = self._refresh(sweep, verify=verify)
                written: set[str] = set()
                while due:
                    cell = due.pop()
                    trials = self._write(cell)
                    written.add(cell.row.digest)
                    report = replace(
                        report, written=report.written + trials, cells=report.cells + 1
                    )
                    if step is not None:
                        step(report.cells, report.cells + len(due), report.written)
                    # A rebuild takes minutes, in which a running sweep ends more trials.
                    if due and time.monotonic() - self._refreshed_s > REFRESH_S:
                        due = self._refresh(sweep, verify=verify)
                        due = [cell for cell in due if cell.row.digest not in written]
                if live is not None:
                    self._write_live(sweep, live)
                return replace(report, already=self._ended(sweep) - report.written)
        except SuiteError as error:  # the store's, or a file of the home that cannot be read
            return replace(report, unreachable=str(error))

    def _refresh(self, sweep: str | None, *, verify: bool) -> list[_Due]:
        """Publish the rows of all sweeps; returns the cells whose runs are not up to date."""
        due: list[_Due] = []
        for name in sweeps(self.home) if sweep is None else [sweep]:
            if name not in self._runs:
                if not folders_by_cell(self.home, name):  # none of its trials was handed out yet
                    continue
                self._begin(name, verify=verify)
            runs = self._runs[name]
            self._claim.take(runs.experiment)
            # Rows that are known and still hold are taken over, which saves reading their trials.
            rows = sweep_rows(self.home, name, known=self._rows[name])
            self._rows[name] = rows
            # After the rows: a trial that begins in between is in no row and would be written once
            # more, while one that a row counts and this list lacks would never be written.
            folders = folders_by_cell(self.home, name)
            runs.publish(rows)
            definition = self.home.sweep_definition(name).read_bytes()
            artifacts = SweepConfig.model_validate_json(definition).tracking.artifacts
            for row in rows:
                if verify or not runs.is_current(row, artifacts=artifacts):
                    due.append(_Due(runs, row, folders[row.cell_key], artifacts))
        self._refreshed_s = time.monotonic()
        # Reversed, because `run` takes cells from the end of the list.
        return due[::-1]

    def _begin(self, sweep: str, *, verify: bool) -> None:
        """Look at what the store has of a sweep."""
        runs = SweepRuns(
            self.store, home=self._home_id, sweep=sweep, files=self.home.path / ARTIFACTS
        )
        known: list[Row] = []
        try:
            # Read with `verify` too: a file of rows that is lost must be found, and sent again.
            for row in runs.rows():
                # This home's own export was imported here: the answers are in its folders.
                if not (row.unverified or "").startswith(IMPORTED):
                    known.append(row)
        except TrackingError:
            known = []  # lost, or of another version: they are made again from the folders
        if verify:
            known = []
        self._runs[sweep] = runs
        self._rows[sweep] = known

    def _write_live(self, sweep: str | None, live: Mapping[str, LiveTrial]) -> None:
        for trial in live.values():
            runs = self._runs.get(trial.spec.sweep)
            # Otherwise its folder is not there yet.
            if runs is not None:
                runs.write_live(trial, self.home.trial(trial.spec))
        for name, runs in self._runs.items():
            if sweep in (None, name):
                runs.pause_others(live)

    def _write(self, cell: _Due) -> int:
        trials = []
        for folder in cell.folders:
            spec = folder.spec()
            # A folder without a spec was just made, or is not whole; a later sync sees it.
            if spec is not None:
                trials.append(Trial(folder, spec, folder.result()))
        return cell.runs.write_cell(cell.row, trials, artifacts=cell.artifacts)

    def _ended(self, sweep: str | None) -> int:
        """How many trials have a result."""
        count = 0
        for name in self._runs:
            if sweep in (None, name):
                for folders in folders_by_cell(self.home, name).values():
                    count += sum((folder.path / RESULT).exists() for folder in folders)
        return count
