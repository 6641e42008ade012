"""Attaches the report of a sweep to its run `report` in MLflow.

There is one run for each home and sweep; its file is replaced when results change.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from suite.record.folder import Home
from suite.storage.identity import home_id
from suite.tracking import rows as files_of_rows
from suite.tracking.claim import Claim
from suite.tracking.notes import NOTE
from suite.tracking.store import Store, StoredRun, open_store, writing

KIND = "report"
OF_ROWS = "suite.report"
"""Tag with a digest of the rows that a report shows; only the runs of reports have it."""
Build = Callable[[Home, str, Path], Path]
"""Writes the report of a home's sweep into a folder; returns its page."""


def attach_reports(
    home: Home,
    tracking_uri: str,
    build: Build,
    *,
    sweep: str | None = None,
    unless: Collection[str] = (),
) -> list[str]:
    """Attach the report of every sweep of a home that has changed since its report was attached.

    The rows in MLflow do not tell whether a sweep has ended, because some of its cells may have no
    trial yet. The caller knows.

    Args:
        home: The home whose sweeps are meant; another home's sweep of the same name keeps its own
            report.
        tracking_uri: As `resolve_uri` gives it; the rows must be up to date there.
        build: Called only for sweeps that need it.
        sweep: Only this one; None = all.
        unless: None of these, because they go on.

    Returns:
        The sweeps whose report was attached.

    Raises:
        TrackingError: The store cannot be written, or another process has been writing for long.
        SuiteError: What `build` raises.
    """
    store = open_store(tracking_uri)
    known = store.experiments()
    attached = []
    # The same lock as in `writer`, so that the rows do not change while a report of them is made.
    with writing(home.tracking_lock):
        for name in sorted(known):
            is_meant = sweep in (None, name) and name not in unless
            if is_meant and _attach(store, known[name], home, name, build):
                attached.append(name)
    return attached


def _attach(store: Store, experiment: str, home: Home, sweep: str, build: Build) -> bool:
    of_home = {"suite.home": home_id(home)}
    # The experiment of a sweep may hold runs of several homes; only this home's are meant.
    with_rows = store.runs([experiment], of_home, having=files_of_rows.TAG)
    # Another home brought this sweep into the store; this one has published nothing of it.
    if not with_rows:
        return False
    # A report shows the rows of all homes that have the sweep in this store.
    files = [run.tags[files_of_rows.TAG] for run in files_of_rows.runs_with_rows(store, sweep)]
    of_rows = hashlib.sha256("\n".join(files).encode()).hexdigest()
    reports = store.runs([experiment], of_home, having=OF_ROWS)
    # The tags name the content of the rows, so equal tags mean an equal report.
    if reports and reports[0].tags[OF_ROWS] == of_rows:
        return False
    Claim(home, store).take(experiment)
    with tempfile.TemporaryDirectory() as folder:
        page = build(home, sweep, Path(folder))
        run = reports[0] if reports else _create(store, experiment, sweep, of_home)
        store.add_file(run, page)
    store.finish(run.id, "FINISHED", time.time())
    # The tag comes last: after an interruption before this line the report is simply made again.
    store.log(run.id, tags={OF_ROWS: of_rows})
    return True


def _create(store: Store, experiment: str, sweep: str, of_home: dict[str, str]) -> StoredRun:
    tags = {
        **of_home,
        "sweep": sweep,
        "suite.kind": KIND,
        # Empty until the file is there. The tag must exist, because the run is found by it.
        OF_ROWS: "",
        NOTE: f"The report of the sweep **{sweep}**, under Artifacts.",
    }
    return store.create_run(experiment, name=KIND, start_s=time.time(), tags=tags)
