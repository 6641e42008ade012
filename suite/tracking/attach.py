"""The report of a sweep as a file of its run `report` in MLflow: one for each home and sweep, replaced when results change."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from filelock import FileLock, Timeout

from suite.config.hashing import short_hash
from suite.errors import TrackingError
from suite.record.folder import Home
from suite.storage.identity import home_id
from suite.tracking.notes import NOTE
from suite.tracking.store import Store, StoredRun, open_store
from suite.tracking.writer import LOCK_TIMEOUT_S

KIND = "report"
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

    Whether a sweep has ended, its cells in MLflow do not tell (some may have no trial yet): the caller knows.

    Args:
        home: Whose sweeps are meant; other homes' sweeps of the same name keep reports of their own.
        tracking_uri: As `resolve_uri` gives it; the cells must be up to date there.
        build: Called only for sweeps that need it.
        sweep: Only this one; None = all.
        unless: None of these: they go on.

    Returns:
        The sweeps whose report was attached.

    Raises:
        TrackingError: The store cannot be written, or another process has been writing for long.
        SuiteError: What `build` raises.
    """
    store = open_store(tracking_uri)
    known = store.experiments()
    names = [name for name in sorted(known) if sweep in (None, name) and name not in unless]
    try:
        with FileLock(home.path / "tracking.lock", timeout=LOCK_TIMEOUT_S):
            return [name for name in names if _attach(store, known[name], home, name, build)]
    except Timeout as error:
        raise TrackingError(
            f"{home.path}/tracking.lock: another process has been writing for {LOCK_TIMEOUT_S:.0f} s"
        ) from error


def _attach(store: Store, experiment: str, home: Home, sweep: str, build: Build) -> bool:
    of_home = {"suite.home": home_id(home)}
    cells = store.runs([experiment], {"suite.kind": "cell", **of_home})
    if not cells:
        return False
    digest = short_hash(sorted(cell.tags.get("suite.digest", "") for cell in cells))
    run = next(iter(store.runs([experiment], {"suite.kind": KIND, **of_home})), None)
    if run is not None and run.tags.get("suite.digest") == digest:
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = build(home, sweep, Path(folder))
        run = run or _create(store, experiment, sweep, of_home)
        store.add_files(run.id, [path])
    store.finish(run.id, "FINISHED", time.time())
    store.log(run.id, tags={"suite.digest": digest})
    return True


def _create(store: Store, experiment: str, sweep: str, of_home: dict[str, str]) -> StoredRun:
    tags = {
        "sweep": sweep,
        "suite.kind": KIND,
        **of_home,
        NOTE: f"The report of the sweep **{sweep}**, under Artifacts.",
    }
    return store.create_run(experiment, name=KIND, start_s=time.time(), tags=tags)
