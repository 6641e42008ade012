"""The rows of a sweep, as a file of its run `leaderboard` in MLflow.

There is one run for each home and sweep. Two file names are used in turn. A tag of the run says
which of them counts, and the digest of its content: a reader sees the last file that was written
whole, whatever the store of the files is.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from suite.errors import TrackingError, UnknownNameError, UnreadableRowsError
from suite.files import sha256
from suite.leaderboard.fields import Row
from suite.leaderboard.file import read_rows as read_file
from suite.leaderboard.file import write_rows as write_file
from suite.tracking.notes import NOTE, rows_note
from suite.tracking.store import START, Store, StoredRun, without_password

log = logging.getLogger(__name__)

KIND = "leaderboard"
NAMES = ("leaderboard-0.parquet", "leaderboard-1.parquet")
TAG = "suite.file"
"""The tag with the name of the file that counts, a space, and its SHA-256; empty = none yet."""
ATTEMPTS = 3
AGAIN = "suite sync writes the rows of its own home again, suite import-results those of others"
DOWNLOADS = 8
"""How many files are fetched from a server at the same time."""


def create_run(store: Store, experiment: str, *, home: str, sweep: str, now_s: float) -> StoredRun:
    """The run of a home's sweep that will have the file."""
    tags = {
        "suite.kind": KIND,
        "suite.home": home,
        "sweep": sweep,
        TAG: "",
        NOTE: rows_note(sweep),
    }
    run = store.create_run(experiment, name=KIND, start_s=now_s, tags=tags)
    # Ended at once: the run holds a file, and nothing of it ever runs.
    store.finish(run.id, "FINISHED", now_s)
    return replace(run, status="FINISHED")


def publish(store: Store, run: StoredRun, rows: Sequence[Row], *, lost: bool = False) -> StoredRun:
    """Put rows in the place of those that a run has; nothing is sent where they are the same.

    Args:
        store: The store of the run.
        run: The run that holds the file.
        rows: The new rows.
        lost: Whether the file that counts cannot be read; then it is sent again.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write_file(path, rows)
        digest = sha256(path)
        current = run.tags.get(TAG, "")
        # Equal rows give an equal file, so the digest alone decides whether they changed.
        if not lost and current.endswith(f" {digest}"):
            return run
        # Never the file that counts now: a reader may be in the middle of it.
        name = NAMES[0]
        if current.startswith(name):
            name = NAMES[1]
        store.add_file(run, path, name=name)
    # Only now does the new file count. If this process dies before, the old one is still whole.
    tags = {TAG: f"{name} {digest}"}
    store.log(run.id, tags=tags)
    return replace(run, tags={**run.tags, **tags})


def published(store: Store, run: StoredRun) -> list[Row]:
    """The rows that a run has; empty where none were published yet.

    Raises:
        UnreadableRowsError: The file is not there, not whole, or of another schema version; or the
            tag names no file of ours.
        TrackingError: The store does not give it.
    """
    for _ in range(ATTEMPTS):
        name, _, digest = run.tags.get(TAG, "").partition(" ")
        if not digest:
            return []
        # It becomes a part of a path, and anybody may have written the database.
        if name not in NAMES:
            raise UnreadableRowsError(
                f"{without_password(store.uri)}: run {run.id}: the tag {TAG} names the file "
                f"{name!r}, expected one of {', '.join(NAMES)}; {AGAIN}"
            )
        try:
            with store.file(run, name) as path:
                # A store may serve half a file, or one from a cache; the digest of the tag decides.
                if path.is_file() and sha256(path) == digest:
                    return read_file(path)
        # It is there, and its own reason says more than that it was lost.
        except UnreadableRowsError:
            raise
        except TrackingError:
            # A store that answers and lists no such file has lost it, and others are still there.
            if store.has_file(run, name):
                raise
        # Perhaps it was replaced twice since the run was read: then the tag is another by now.
        run = store.run(run.id)
    raise UnreadableRowsError(
        f"{without_password(store.uri)}: {run.files}/{name}: not there, or not as it was written; "
        f"docs/stores.md says who must reach the files of a store; {AGAIN}"
    )


def runs_with_rows(store: Store, sweep: str | None = None) -> list[StoredRun]:
    """The newest run with rows of each home and sweep.

    Raises:
        TrackingError: The store has no such sweep.
    """
    experiments = store.experiments()
    # An empty store is no unknown sweep; the caller says so in its own words.
    if sweep is not None and experiments:
        if sweep not in experiments:
            where = without_password(store.uri)
            raise TrackingError(str(UnknownNameError("sweep", sweep, experiments, where=where)))
        experiments = {sweep: experiments[sweep]}
    newest: dict[tuple[str, str], StoredRun] = {}
    # Oldest first, so that the newest of several stays.
    for run in store.runs(list(experiments.values()), {"suite.kind": KIND}, having=TAG):
        # A request that was repeated because its answer got lost leaves a second run, without rows.
        if run.tags[TAG]:
            newest[run.tag("sweep"), run.tag("suite.home")] = run
    return [newest[key] for key in sorted(newest)]


def read_rows(store: Store, sweep: str | None = None) -> list[Row]:
    """Every cell of one or all sweeps in a store, of all homes.

    Raises:
        TrackingError: There is none, or a file of rows cannot be read.
    """
    rows, unread = _read_all(store, runs_with_rows(store, sweep))
    for error in unread.values():
        raise error
    return rows


def readable_rows(store: Store, runs: Sequence[StoredRun]) -> list[Row]:
    """Every cell in those files of some runs that can be used; a warning names each of the others.

    One sweep that another version of the suite wrote must not hide all others of a shared store.

    Raises:
        TrackingError: There is none, no file can be used, or the store does not give one.
    """
    rows, _ = readable_and_others(store, runs)
    return rows


def readable_and_others(
    store: Store, runs: Sequence[StoredRun]
) -> tuple[list[Row], dict[str, UnreadableRowsError]]:
    """The same, and by the ids of the other runs why their files cannot be used."""
    rows, unread = _read_all(store, runs)
    for error in unread.values():
        log.warning("left out: %s", error)
    return rows, unread


def _read_all(
    store: Store, runs: Sequence[StoredRun]
) -> tuple[list[Row], dict[str, UnreadableRowsError]]:
    """The rows of all files that can be used, and by its run's id why each other one cannot."""

    def read(run: StoredRun) -> list[Row] | UnreadableRowsError:
        # The path alone may be that of a download, and the sweep another home's.
        whose = f"sweep {run.tag('sweep')} of home {run.tag('suite.home')}"
        try:
            return published(store, run)
        except UnreadableRowsError as error:
            return UnreadableRowsError(f"{whose}: {error}")
        except TrackingError as error:
            raise TrackingError(f"{whose}: {error}") from error

    # A database without a server reads its files from this disk, where threads save nothing.
    if store.is_remote:
        with ThreadPoolExecutor(DOWNLOADS) as pool:
            found = list(pool.map(read, runs))
    else:
        found = [read(run) for run in runs]
    rows: list[Row] = []
    unread = {}
    for run, one in zip(runs, found, strict=True):
        if isinstance(one, UnreadableRowsError):
            unread[run.id] = one
        else:
            rows += one
    if rows:
        return rows, unread
    for error in unread.values():
        raise error
    raise TrackingError(f"no results yet in {without_password(store.uri)}; {START}")
