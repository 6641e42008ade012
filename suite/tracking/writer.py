"""MLflow brought up to date from the trial folders: once per trial hash, whenever it can be reached, rebuilt from nothing.

An experiment per sweep, a parent run per cell, a child run per ended trial. A run is found by its tags before it is
created; what an interrupted writer left behind lacks `suite.complete` and is completed. The new trials of a cell are written
together: into a database, in one transaction. A cell run carries a digest of the trials it sums up, so that a home that is
up to date costs one search per sweep and no reading of results.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import FileLock, Timeout

from suite.config.hashing import short_hash
from suite.errors import SuiteError, TrackingError, UnknownNameError
from suite.record.cells import Cell, Trial, group_cells
from suite.record.folder import Home, TrialFolder
from suite.record.lm_eval import FILE as LM_EVAL
from suite.record.lm_eval import as_metrics, over_seeds, read_record
from suite.record.spec import TrialSpec
from suite.storage.identity import home_id
from suite.tracking.encode import (
    identity_tags,
    result_digest,
    run_status,
    trial_metrics,
    trial_name,
    trial_params,
    trial_tags,
)
from suite.tracking.notes import NOTE, cell_note, trial_note
from suite.tracking.ranks import RankWriter
from suite.tracking.store import COMPLETE, Point, RunRecord, Store, StoredRun, open_store
from suite.tracking.summary import CellSummary, Definition, read_definition, summarise

FORMAT = 4
"""Raised when what is written changes: every cell is then written again at the next sync."""
LOCK_TIMEOUT_S = 60.0
READ_TAGS = (
    *(
        "suite.cell",
        "suite.trial",
        "suite.result",
        COMPLETE,
        "suite.lm_eval",
        "suite.artifacts",
        "mlflow.parentRunId",
    ),
)
"""Of a trial's run: what the writer looks at."""
ARTIFACTS = ("spec.json", "result.json", "predictions-*.parquet", LM_EVAL)
MAX_ARTIFACT_BYTES = 10 * 2**20


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did.

    Attributes:
        written: Trials that MLflow did not have, or had incompletely.
        already: Ended trials that it had.
        cells: Cell runs that were created or changed.
        unreachable: Why it stopped early, None if it did not.
    """

    written: int = 0
    already: int = 0
    cells: int = 0
    unreachable: str | None = None

    def __add__(self, other: SyncReport) -> SyncReport:
        return SyncReport(
            self.written + other.written,
            self.already + other.already,
            self.cells + other.cells,
            self.unreachable or other.unreachable,
        )


def sync(
    home: Home, *, tracking_uri: str, sweep: str | None = None, verify: bool = False
) -> SyncReport:
    """Bring MLflow up to date with the trial folders of a home.

    Args:
        home: Its folders are only read.
        tracking_uri: As `resolve_uri` gives it.
        sweep: Only this sweep; None = all in the home.
        verify: Look every trial up in MLflow, also where its cell says that nothing changed (after runs were deleted by hand).

    Raises:
        TrackingError: There is no such home, or no such sweep in it.
    """
    if not (home.path / "trials").is_dir():
        raise TrackingError(
            f"{home.path}: no trials here; is this the --home that suite run was given?"
        )
    if sweep is not None:
        known = {spec.sweep for folder in home.trials() if (spec := folder.spec()) is not None}
        if sweep not in known:
            raise TrackingError(str(UnknownNameError("sweep", sweep, known, where=str(home.path))))
    try:
        return Syncer(home, open_store(tracking_uri)).run(sweep, verify=verify)
    except TrackingError as error:
        return SyncReport(unreachable=str(error))


@dataclass(slots=True)
class _CellRun:
    """A cell's run in MLflow as last seen."""

    run: StoredRun

    @property
    def digest(self) -> str | None:
        return self.run.tags.get("suite.digest")


@dataclass(slots=True)
class _Found:
    """A trial folder: its immutable specification, and what marks its result file (None while there is none)."""

    folder: TrialFolder
    spec: TrialSpec
    stamp: int | None = field(default=None)

    @property
    def marks(self) -> list[str | int | None]:
        """What changes when there is something new to write of a trial that has ended."""
        return [
            self.folder.hash,
            self.stamp,
            *([] if (measured := _modified(self.folder.path / LM_EVAL)) is None else [measured]),
        ]


class Syncer:
    """Writes one home to one store, remembering between calls what cannot have changed.

    Not for two threads at a time. After an error it must be replaced by a new one, for it may remember too much.
    """

    def __init__(self, home: Home, store: Store) -> None:
        self.home, self.store = home, store
        self._specs: dict[str, tuple[TrialSpec, str]] = {}
        self._experiments: dict[str, str] = {}
        self._runs: dict[str, dict[str, _CellRun]] = {}
        self._trials: dict[str, dict[str, dict[str, StoredRun]]] = {}
        self._definitions: dict[str, Definition | None] = {}
        self._home_id = home_id(home)
        self._ranks = RankWriter(store, self._home_id)

    def run(self, sweep: str | None = None, *, verify: bool = False) -> SyncReport:
        """As `sync`; `unreachable` is set when the store fails half-way."""
        report = SyncReport()
        self._definitions.clear()  # a definition may grow between two calls
        try:
            with FileLock(self.home.path / "tracking.lock", timeout=LOCK_TIMEOUT_S):
                scanned = self._scan(sweep)
                for (name, cell), found in sorted(scanned.items()):
                    report += self._sync_cell(name, cell, found, verify=verify)
                for name in sorted({name for name, _ in scanned}):
                    self._sync_ranks(name, scanned)
        except Timeout:
            return replace(
                report,
                unreachable=f"{self.home.path}/tracking.lock: another process has been writing for {LOCK_TIMEOUT_S:.0f} s",
            )
        except SuiteError as error:  # the store's, or a file of the home that cannot be read
            return replace(report, unreachable=str(error))
        return report

    def _scan(self, sweep: str | None) -> dict[tuple[str, str], list[_Found]]:
        """Trial folders by sweep and cell; a specification is read once, a result not at all."""
        cells: dict[tuple[str, str], list[_Found]] = defaultdict(list)
        for folder in self.home.trials():
            if folder.hash not in self._specs:
                spec = folder.spec()
                if spec is None:
                    continue
                self._specs[folder.hash] = (spec, spec.cell)
            spec, cell = self._specs[folder.hash]
            if sweep in (None, spec.sweep):
                cells[spec.sweep, cell].append(_Found(folder, spec, _stamp(folder)))
        return cells

    def _sync_cell(self, sweep: str, cell: str, found: list[_Found], *, verify: bool) -> SyncReport:
        digest = _digest(found, self._definition(sweep), cell)
        known = self._cell_runs(sweep).get(cell)
        if known is not None and known.digest == digest and not verify:
            return SyncReport(already=sum(f.stamp is not None for f in found))
        return self.write_cell([Trial(f.folder, f.spec, f.folder.result()) for f in found], digest)

    def write_cell(self, trials: Sequence[Trial], digest: str) -> SyncReport:
        """Bring one cell and its trials up to date.

        Args:
            trials: All that were handed out.
            digest: Of what the cell's run will sum up; equal to the stored one, the next sync passes the cell over.
        """
        spec = trials[0].spec
        ended = [t for t in trials if t.result is not None]
        cell = self._cell_runs(spec.sweep).get(spec.cell) or self._create_cell(spec, ended)
        written = self._write_trials(cell, ended)
        self._write_summary(
            cell,
            summarise(group_cells(trials)[spec.cell], self._definition(spec.sweep)),
            ended,
            digest,
        )
        return SyncReport(written=written, already=len(ended) - written, cells=1)

    def _sync_ranks(self, sweep: str, scanned: dict[tuple[str, str], list[_Found]]) -> None:
        def read(cell: str) -> Cell:
            known, found = self._definition(sweep), scanned[sweep, cell]
            return group_cells(
                Trial(f.folder, f.spec, f.folder.result())
                for f in found
                if known is None or known.includes(f.spec)
            )[cell]

        tags = {
            cell: known.run.tags
            for cell, known in self._cell_runs(sweep).items()
            if (sweep, cell) in scanned
        }
        self._ranks.sync(self._experiments[sweep], sweep, tags, read)

    def _definition(self, sweep: str) -> Definition | None:
        if sweep not in self._definitions:
            self._definitions[sweep] = read_definition(self.home, sweep)
        return self._definitions[sweep]

    def _cell_runs(self, sweep: str) -> dict[str, _CellRun]:
        if sweep not in self._runs:
            self._experiments[sweep] = self.store.experiment(
                sweep, artifacts=self.home.path / "mlartifacts"
            )
            runs = self.store.runs(
                [self._experiments[sweep]], {"suite.kind": "cell", "suite.home": self._home_id}
            )
            self._runs[sweep] = {
                cell: _CellRun(run) for cell, run in self._one_each(runs, "suite.cell").items()
            }
        return self._runs[sweep]

    def _children(self, cell: _CellRun) -> dict[str, StoredRun]:
        """Runs of a cell's trials by trial hash; those whose cell run was deleted are handed to the new one."""
        sweep, key = cell.run.tags["sweep"], cell.run.tags["suite.cell"]
        if sweep not in self._trials:
            tags = {"suite.kind": "trial", "suite.home": self._home_id}
            found = self._one_each(
                self.store.runs([self._experiments[sweep]], tags, only=READ_TAGS), "suite.trial"
            )
            self._trials[sweep] = defaultdict(dict)
            for name, run in found.items():
                self._trials[sweep][run.tags["suite.cell"]][name] = run
        children = self._trials[sweep][key]
        for name, child in children.items():
            if child.tags.get("mlflow.parentRunId") != cell.run.id:
                self.store.log(child.id, tags={"mlflow.parentRunId": cell.run.id})
                children[name] = replace(
                    child, tags={**child.tags, "mlflow.parentRunId": cell.run.id}
                )
        return children

    def _one_each(self, runs: Iterable[StoredRun], key: str) -> dict[str, StoredRun]:
        """Runs by tag, oldest kept: a request that was repeated because its answer got lost leaves a second one."""
        kept: dict[str, StoredRun] = {}
        for run in runs:
            if kept.setdefault(run.tags[key], run) is not run:
                self.store.delete_run(run.id)
        return kept

    def _create_cell(self, spec: TrialSpec, ended: Sequence[Trial]) -> _CellRun:
        tags = {
            **identity_tags(spec),
            "suite.kind": "cell",
            "suite.home": self._home_id,
            NOTE: cell_note(spec),
        }
        start_s = min(
            (t.result.started_at for t in ended if t.result is not None), default=time.time()
        )
        created = _CellRun(
            self.store.create_run(
                self._experiments[spec.sweep], name=spec.cell, start_s=start_s, tags=tags
            )
        )
        self._runs[spec.sweep][spec.cell] = created
        return created

    def _write_trials(self, cell: _CellRun, ended: Sequence[Trial]) -> int:
        """Write the trials that MLflow has not whole; returns how many."""
        children, experiment = self._children(cell), self._experiments[cell.run.tags["sweep"]]
        new: list[RunRecord] = []
        completed = 0
        for trial in ended:
            record = self._record(trial, cell.run.id)
            run = children.get(trial.folder.hash)
            if (
                run is not None and run.tags.get("suite.result") != record.tags["suite.result"]
            ):  # run again: metrics cannot be replaced
                self.store.delete_run(run.id)
                run = None
            if run is None:
                new.append(record)
            elif run.tags.get(COMPLETE) != "true":
                children[trial.folder.hash] = self.store.write_run(experiment, record, run)
                completed += 1
        children |= {run.tags["suite.trial"]: run for run in self.store.write_runs(experiment, new)}
        for trial in ended:
            children[trial.folder.hash] = self._add_artifacts(
                self._add_lm_eval(children[trial.folder.hash], trial.folder), trial
            )
        return completed + len(new)

    def _record(self, trial: Trial, parent: str) -> RunRecord:
        spec, result = trial.spec, trial.result
        assert result is not None
        own = {
            "suite.kind": "trial",
            "suite.home": self._home_id,
            "suite.result": result_digest(result),
            "mlflow.parentRunId": parent,
        }
        own[NOTE] = trial_note(spec)
        return RunRecord(
            trial_name(spec),
            result.started_at,
            {**trial_tags(spec, result, trial.folder.path), **own, COMPLETE: "true"},
            run_status(result.status),
            result.finished_at,
            trial_metrics(result),
            trial_params(spec),
        )

    def _add_artifacts(self, run: StoredRun, trial: Trial) -> StoredRun:
        """The small files of a trial, where its sweep asks for that."""
        definition = self._definition(trial.spec.sweep)
        if definition is None or not definition.config.tracking.artifacts:
            return run
        files = small_files(trial.folder)
        digest = short_hash(
            [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
        )
        if run.tags.get("suite.artifacts") == digest:
            return run
        self.store.add_files(run.id, files)
        self.store.log(run.id, tags={"suite.artifacts": digest})
        return replace(run, tags={**run.tags, "suite.artifacts": digest})

    def _add_lm_eval(self, run: StoredRun, folder: TrialFolder) -> StoredRun:
        """What lm-eval measured since; a later time makes a metric the latest."""
        record = read_record(folder.path)
        digest = short_hash(record.model_dump(mode="json"))
        if not record.evaluations or run.tags.get("suite.lm_eval") == digest:
            return run
        end_s = max(evaluation.finished_at for evaluation in record.evaluations.values())
        points = [
            Point(key, value, end_s) for key, value in as_metrics(over_seeds([record])).items()
        ]
        self.store.log(run.id, metrics=points, tags={"suite.lm_eval": digest})
        return replace(run, tags={**run.tags, "suite.lm_eval": digest})

    def _write_summary(
        self, cell: _CellRun, summary: CellSummary, trials: Sequence[Trial], digest: str
    ) -> None:
        """The cell's numbers with a step higher than before, so that MLflow takes them for the latest; the digest last."""
        revision = int(cell.run.tags.get("suite.revision", 0)) + 1
        end_s = max(
            (t.result.finished_at for t in trials if t.result is not None), default=time.time()
        )
        points = [Point(key, value, end_s, revision) for key, value in summary.metrics().items()]
        tags = {
            **summary.tags(),
            **summary.row(self._home_id),
            "suite.revision": str(revision),
            "suite.written": repr(time.time()),
            "suite.digest": digest,
        }
        self.store.finish(
            cell.run.id,
            {"done": "FINISHED", "failed": "FAILED"}.get(summary.status, "SCHEDULED"),
            end_s,
        )
        self.store.log(cell.run.id, metrics=points, tags=tags)
        cell.run = replace(cell.run, tags={**cell.run.tags, **tags})


def _stamp(folder: TrialFolder) -> int | None:
    return _modified(folder.path / "result.json")


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _digest(found: Iterable[_Found], definition: Definition | None, cell: str) -> str:
    """Changes when a trial ends or the definition grows; handing trials out does not change it."""
    ended = sorted(f.marks for f in found if f.stamp is not None)
    asked = "" if definition is None else definition.asks(cell)
    files = ["artifacts"] if definition is not None and definition.config.tracking.artifacts else []
    return short_hash([FORMAT, asked, ended, *files])


def small_files(folder: TrialFolder) -> list[Path]:
    """What is worth a look beside a trial's numbers, and not too large for a tracking server; weights and logs are neither."""
    found = [path for pattern in ARTIFACTS for path in sorted(folder.path.glob(pattern))]
    return [
        path
        for path in found
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_ARTIFACT_BYTES
    ]
