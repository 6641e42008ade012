"""The runs of one sweep of one home in MLflow.

There is one run for each cell, one for each trial that has ended or committed an epoch, and one
that has all rows. A run is found by its tags before one is created. What an interrupted writer left
behind is still in the state RUNNING, and is written to its end.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from suite.config.hashing import short_hash
from suite.errors import TrackingError
from suite.files import sha256
from suite.leaderboard.fields import Row, is_metric, metrics_of
from suite.record.cells import Trial
from suite.record.folder import RESULT as RESULT_FILE
from suite.record.folder import SPEC, TrialFolder
from suite.record.lm_eval import FILE as LM_EVAL
from suite.record.lm_eval import as_metrics, over_seeds, read_record
from suite.record.result import EpochRecord, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.tracking import rows as files_of_rows
from suite.tracking.encode import (
    CURVE,
    RESULT,
    BegunTrial,
    arm_names,
    cell_tags,
    curve_metrics,
    outcome_tags,
    run_digest,
    trial_record,
)
from suite.tracking.live import Curves, LiveTrial
from suite.tracking.notes import NOTE, cell_note
from suite.tracking.store import Point, RunRecord, Store, StoredRun, key_name

FORMAT = 7
"""A number to raise when what is written changes; the next sync then writes every cell again."""
DIGEST = "suite.digest"
"""The tag of a cell's run that says what was written into it and its trials' runs; set last."""
REVISION = "suite.revision"
MAX_REVISION_DIGITS = 15
"""MLflow's steps have 64 bits."""
ARTIFACTS = (SPEC, RESULT_FILE, "predictions-*.parquet", LM_EVAL)
CONFIRM_ARTIFACTS = (SPEC, RESULT_FILE, "rank0.log")
"""Files of every confirm run, on which the leaderboard rests. Search trials are too many."""
MAX_ARTIFACT_BYTES = 10 * 2**20
HAVING = {"cell": "suite.arm", "trial": "suite.trial", files_of_rows.KIND: files_of_rows.TAG}
"""A tag that only the runs of a kind have, by which they are found quickly."""
CELL_STATUS = {"done": "FINISHED", "not chosen": "FINISHED", "failed": "FAILED"}
"""A cell of any other status is SCHEDULED to MLflow: there is work left."""


class SweepRuns:
    """Finds and writes the runs of a sweep, and remembers what it found.

    Args:
        store: The store that has the runs.
        home: The id of the home.
        sweep: The name of the sweep.
        files: A folder for files of runs, where the store has none of its own.
    """

    def __init__(self, store: Store, *, home: str, sweep: str, files: Path | None = None) -> None:
        self.store = store
        self.home = home
        self.sweep = sweep
        self.experiment = store.experiment(sweep, artifacts=files)
        if self.experiment in store.restored:
            self._doubt_all()
        self._cells = self._one_each("cell", "suite.cell")
        self._rows = self._one_each(files_of_rows.KIND, "sweep").get(sweep)
        # Whether the last look found the file of rows gone or damaged.
        self._rows_lost = False
        # None until a cell has to be written: a sync that has nothing to do never asks for them.
        self._trials: dict[str, dict[str, StoredRun]] | None = None
        self._names: dict[str, str] = {}
        self._curves = Curves(store)
        # Runs that show as running, by the trial's hash; None until they are asked for.
        self._running: dict[str, StoredRun] | None = None

    def _doubt_all(self) -> None:
        """Have every cell of the experiment looked at again, with its trials, by its home's sync.

        MLflow restores an experiment with all runs that were ever deleted in it: those that newer
        ones replaced stand beside them again.
        """
        cells = {"suite.kind": "cell"}
        for run in self.store.runs([self.experiment], cells, having=HAVING["cell"]):
            self.store.log(run.id, tags={DIGEST: ""})
        self.store.restored.discard(self.experiment)

    def _one_each(self, kind: str, key: str) -> dict[str, StoredRun]:
        """The runs of a kind by the value of a tag; of duplicates the newest that is whole is kept.

        A request that was repeated because its answer got lost leaves a second run, and a restored
        experiment has those that were replaced.
        """
        tags = {"suite.kind": kind, "suite.home": self.home}
        kept: dict[str, StoredRun] = {}
        for run in self.store.runs([self.experiment], tags, having=HAVING[kind]):
            name = run.tag(key)
            if name in kept:
                # Of two that are equally whole the newer one stays behind the older one.
                outdated, run = sorted([kept[name], run], key=_whole)
                self.store.delete_run(outdated.id)
            kept[name] = run
        return kept

    def rows(self) -> list[Row]:
        """The rows that were published last; errors are those of `published`."""
        if self._rows is None:
            return []
        try:
            return files_of_rows.published(self.store, self._rows)
        except TrackingError:
            self._rows_lost = True
            raise

    def publish(self, rows: Sequence[Row]) -> None:
        """Make these the rows of the sweep, for whoever reads the leaderboard.

        The runs of trials take the names of their arms from them.
        """
        self._names = arm_names(rows)
        run = self._rows
        if run is None:
            run = files_of_rows.create_run(
                self.store,
                self.experiment,
                home=self.home,
                sweep=self.sweep,
                now_s=time.time(),
            )
        else:
            # Another process, of another version perhaps, may have published in the meantime.
            now = self.store.run(run.id)
            self._rows_lost |= now.tags.get(files_of_rows.TAG) != run.tags.get(files_of_rows.TAG)
            run = now
        self._rows = files_of_rows.publish(self.store, run, rows, lost=self._rows_lost)
        self._rows_lost = False

    def is_current(self, row: Row, *, artifacts: bool | None = None) -> bool:
        """Whether the run of a cell, and those of its trials, say what the row does.

        Args:
            row: The row of the cell.
            artifacts: As in `write_cell`.
        """
        run = self._cells.get(row.cell_key)
        if run is None:
            return False
        # An import asks for nothing that a sync of the row's own home has not written.
        wanted = [artifacts] if artifacts is not None else [None, False, True]
        return run.tags.get(DIGEST) in [_digest(row, artifacts=each) for each in wanted]

    def write_cell(
        self, row: Row, trials: Sequence[Trial] = (), *, artifacts: bool | None = None
    ) -> int:
        """Bring a cell's run and the runs of its trials up to date, after `publish`.

        Args:
            row: The row of the cell.
            trials: The trials of the cell in this home; an imported cell has none.
            artifacts: Whether the small files of a trial are wanted too; None = the cell is
                imported, and its trials are elsewhere.

        Returns:
            Runs of trials that were written.
        """
        # `write_live` writes those that still run.
        ended = [trial for trial in trials if trial.result is not None]
        key = row.cell_key
        if key not in self._cells:
            self._cells[key] = self._create_cell(row, trials)
        cell = self._cells[key]
        written = 0
        if ended:
            children = self._children(cell)
            for trial in ended:
                name = trial.folder.hash
                written += self._write_trial(cell, children, trial)
                children[name] = self._add_lm_eval(children[name], trial.folder)
                if artifacts:
                    children[name] = self._add_artifacts(children[name], trial.folder)
        # Last, since its digest says that everything above is there.
        self._write_numbers(cell, row, artifacts=artifacts)
        return written

    def write_live(self, trial: LiveTrial, folder: TrialFolder) -> None:
        """Begin the run of a trial that still runs, or go on with it: the epochs that it lacks."""
        cell = self._cells.get(trial.spec.cell)
        epochs = folder.epochs()
        # A cell has a run when it has a row, and a trial has one when there is something to show.
        if cell is None or not epochs:
            return
        children = self._children(cell)
        known = children.get(folder.hash)
        if known is not None and (known.ended or RESULT in known.tags):
            # It ended just now, and `write_cell` writes it.
            if folder.result() is not None:
                return
            self._drop(known)
            known = None
        if known is not None and self._curves.missing(known, epochs) is None:
            self._drop(known)
            known = None
        begun = self._begun(cell, trial.spec, folder)
        run = self._running_run(begun, known, trial.began_s)
        children[folder.hash] = run
        if self._running is not None:
            self._running[folder.hash] = run
        missing = self._curves.missing(run, epochs) or set()
        points = curve_metrics(epochs, run.start_ms / 1000)
        for epoch in epochs:
            if epoch.epoch in missing:
                # One request an epoch, of which MLflow keeps all or nothing.
                own = [point for point in points if point.step == epoch.epoch]
                self.store.log(run.id, metrics=own, params=begun.params)
                self._curves.logged(run, epoch)

    def _running_run(self, begun: BegunTrial, known: StoredRun | None, began_s: float) -> StoredRun:
        """The run of a trial that runs, in the state RUNNING; made where there is none."""
        if known is None:
            run = self.store.create_run(
                self.experiment, name=begun.name, start_s=began_s, tags=begun.tags
            )
            self._curves.begun(run)
            return run
        if known.status == "RUNNING":
            return known
        self.store.mark(known.id, "RUNNING")
        return replace(known, status="RUNNING")

    def pause_others(self, live: Collection[str]) -> None:
        """Let no run show as running but those of the trials that run.

        The others stopped before their end, or their driver was killed. They are SCHEDULED: a later
        run of the sweep goes on with them.

        Args:
            live: Hashes of the trials that run.
        """
        if self._running is None:
            tags = {"suite.kind": "trial", "suite.home": self.home}
            self._running = {}
            for run in self.store.runs([self.experiment], tags, status="RUNNING"):
                self._running[run.tag("suite.trial")] = run
        for name in self._running.keys() - set(live):
            run = self._running.pop(name)
            self.store.mark(run.id, "SCHEDULED")
            if self._trials is not None:
                paused = replace(run, status="SCHEDULED")
                self._trials[run.tag("suite.cell")][name] = paused

    def _drop(self, run: StoredRun) -> None:
        """Delete the run of a trial that was run again: metrics of a run cannot be replaced."""
        self.store.delete_run(run.id)
        self._curves.forget(run)

    def _begun(self, cell: StoredRun, spec: TrialSpec, folder: TrialFolder) -> BegunTrial:
        return BegunTrial(
            spec, folder.path, home=self.home, parent=cell.id, arm=self._names[spec.arm.key]
        )

    def _create_cell(self, row: Row, trials: Sequence[Trial]) -> StoredRun:
        # The cell starts with its first trial, not with the sync that writes it.
        starts = [trial.result.started_at for trial in trials if trial.result is not None]
        description = trials[0].spec.task.description if trials else ""
        tags = cell_tags(row)
        tags |= {
            "suite.kind": "cell",
            "suite.home": self.home,
            NOTE: cell_note(row, description),
        }
        return self.store.create_run(
            self.experiment,
            name=row.cell_key,
            start_s=min(starts, default=row.ended_at or time.time()),
            tags=tags,
        )

    def _children(self, cell: StoredRun) -> dict[str, StoredRun]:
        """Runs of a cell's trials by the trial's hash.

        If the run of the cell was deleted by hand, they are handed over to the new one.
        """
        if self._trials is None:
            # One search for all cells; in a rebuild it finds nothing and takes no time.
            self._trials = defaultdict(dict)
            for name, run in self._one_each("trial", "suite.trial").items():
                self._trials[run.tag("suite.cell")][name] = run
        children = self._trials[cell.tag("suite.cell")]
        parent = {"mlflow.parentRunId": cell.id}
        for name, child in children.items():
            if child.tags.get("mlflow.parentRunId") != cell.id:
                self.store.log(child.id, tags=parent)
                children[name] = replace(child, tags={**child.tags, **parent})
        return children

    def _write_trial(self, cell: StoredRun, children: dict[str, StoredRun], trial: Trial) -> bool:
        """Write a trial's run unless it is there; returns whether there was something to write."""
        result = trial.result
        assert result is not None
        # A trial that failed has its curve in its folder alone.
        epochs = result.epochs or trial.folder.epochs()
        known = children.get(trial.folder.hash)
        if known is not None and not self._is_of(known, result, epochs):
            self._drop(known)
            known = None
        # A run that was begun and not ended goes on below, with the requests that are missing.
        if known is not None and known.ended:
            return False
        start_s = result.started_at
        # The run of a trial that was written while it ran started when the driver saw it begin.
        # Its points keep to that, so that logging one again changes nothing.
        if known is not None and known.start_ms != int(start_s * 1000):
            start_s = known.start_ms / 1000
        begun = self._begun(cell, trial.spec, trial.folder)
        record = trial_record(begun, result, epochs, start_s=start_s)
        if known is not None and RESULT not in known.tags:
            record = self._without_logged(known, record, epochs)
        files: list[Path] = []
        if trial.spec.phase is Phase.CONFIRM:
            files = small_files(trial.folder, CONFIRM_ARTIFACTS)
        run = self.store.write_run(self.experiment, record, known, files=files)
        children[trial.folder.hash] = run
        self._curves.forget(run)
        if self._running is not None:
            self._running.pop(trial.folder.hash, None)
        return True

    def _is_of(self, run: StoredRun, result: TrialResult, epochs: Sequence[EpochRecord]) -> bool:
        """Whether a run is of the attempt that gave a result, and not of an earlier one."""
        if RESULT in run.tags or run.ended:
            return run.tags.get(RESULT) == run_digest(result)
        return self._curves.missing(run, epochs) is not None

    def _without_logged(
        self, run: StoredRun, record: RunRecord, epochs: Sequence[EpochRecord]
    ) -> RunRecord:
        """The same record without the epochs that the run has since its trial ran."""
        missing = self._curves.missing(run, epochs) or set()
        points = []
        for point in record.metrics:
            if not point.key.startswith(CURVE) or point.step in missing:
                points.append(point)
        return replace(record, metrics=points)

    def _add_lm_eval(self, run: StoredRun, folder: TrialFolder) -> StoredRun:
        """Log what lm-eval measured since the trial ended."""
        record = read_record(folder.path)
        if not record.evaluations:
            return run
        tags = {"suite.lm_eval": short_hash(record.model_dump(mode="json"))}
        if tags.items() <= run.tags.items():
            return run
        # Of two values of a metric MLflow shows the one with the later time.
        end_s = max(evaluation.finished_at for evaluation in record.evaluations.values())
        points = []
        for key, value in as_metrics(over_seeds([record])).items():
            points.append(Point(key, value, end_s))
        self.store.log(run.id, metrics=points, tags=tags)
        return replace(run, tags={**run.tags, **tags})

    def _add_artifacts(self, run: StoredRun, folder: TrialFolder) -> StoredRun:
        files = small_files(folder, ARTIFACTS)
        tags = {"suite.artifacts": _files_digest(files)}
        if tags.items() <= run.tags.items():
            return run
        for path in files:
            self.store.add_file(run, path)
        self.store.log(run.id, tags=tags)
        return replace(run, tags={**run.tags, **tags})

    def _write_numbers(self, cell: StoredRun, row: Row, *, artifacts: bool | None) -> None:
        end_s = row.ended_at or time.time()
        # MLflow shows the value with the highest step as the latest.
        revision = _next_revision(cell.tags.get(REVISION, "0"))
        numbers = metrics_of(row)
        if REVISION in cell.tags:
            numbers |= self._unknown_now(cell, numbers)
        points = []
        for key, value in numbers.items():
            points.append(Point(key, value, end_s, revision))
        tags = {
            **outcome_tags(row, cell.tags),
            REVISION: str(revision),
            DIGEST: _digest(row, artifacts=artifacts),
        }
        # Before the digest is logged: an interruption in between makes the next sync write both
        # again.
        self.store.finish(cell.id, CELL_STATUS.get(row.status, "SCHEDULED"), end_s)
        self.store.log(cell.id, metrics=points, tags=tags)
        self._cells[row.cell_key] = replace(cell, tags={**cell.tags, **tags})

    def _unknown_now(self, cell: StoredRun, numbers: Mapping[str, float]) -> dict[str, float]:
        """NaN for every number that a cell's run shows and its row no longer has.

        MLflow removes no metric: the old value would stay the latest.
        """
        named = {key_name(key) for key in numbers}
        gone = {}
        for key, value in self.store.metrics(cell.id).items():
            # Metrics that somebody else logged stay as they are.
            if is_metric(key) and key not in named and not math.isnan(value):
                gone[key] = math.nan
        return gone


def _whole(run: StoredRun) -> tuple[bool, bool]:
    """How much of a run is there; the more, the greater."""
    return run.ended, bool(run.tags.get(files_of_rows.TAG))


def _next_revision(known: str) -> int:
    """The step after a known one."""
    if known.isdecimal() and len(known) < MAX_REVISION_DIGITS:
        return int(known) + 1
    # Somebody edited the tag. Seconds are above any number of revisions, so the newest still wins.
    return int(time.time())


def _digest(row: Row, *, artifacts: bool | None) -> str:
    # With `artifacts`, so that switching them on later sends the files of cells that are done, and
    # a home that syncs after an import of its rows sends the trials.
    return short_hash([FORMAT, row.digest, artifacts])


def small_files(folder: TrialFolder, patterns: Sequence[str]) -> list[Path]:
    """The files of a trial by these names that are not too large for a tracking server."""
    found = []
    for pattern in patterns:
        for path in sorted(folder.path.glob(pattern)):
            # A link could point at any file of this machine, which must not be sent to a server.
            if path.is_symlink() or not path.is_file():
                continue
            if path.stat().st_size <= MAX_ARTIFACT_BYTES:
                found.append(path)
    return found


def _files_digest(paths: Iterable[Path]) -> str:
    marks = []
    for path in paths:
        marks.append([path.name, sha256(path)])
    return short_hash(marks)
