"""The MLflow store: found, created or migrated under a lock, and reached through a few calls that may be repeated.

The only module that touches MLflow. It is imported inside functions, because `import mlflow` starts its telemetry
unless the environment already says no.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

import psutil
from filelock import FileLock, Timeout

from suite.errors import TrackingError
from suite.train.folder import Home

if TYPE_CHECKING:
    from mlflow import MlflowClient

P = ParamSpec("P")
R = TypeVar("R")

LOCK_TIMEOUT_S = 120.0
PAGE_SIZE = 1000
METRICS_PER_BATCH = 500
MAX_TAG_CHARS = 8000
MAX_PARAM_CHARS = 6000
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse", "9p", "pvfs", "gluster")
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
"""Set for this process unless the user has: MLflow's own values keep a caller waiting for four minutes when its server is away."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """An MLflow run as far as it matters here; `start_ms` orders duplicates."""

    id: str
    status: str
    start_ms: int
    tags: dict[str, str]


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric, with a time that comes from the record, so that logging it again changes nothing."""

    key: str
    value: float
    time_s: float
    step: int = 0


def resolve_uri(home: Home, tracking_uri: str | None = None) -> str:
    """Where to track: what was asked for, else `MLFLOW_TRACKING_URI`, else sqlite in the home; sqlite paths are made absolute.

    Raises:
        TrackingError: A folder, which MLflow 3 no longer writes, or an in-memory database.
    """
    chosen = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or home.tracking_uri
    if urlsplit(chosen).scheme in ("", "file"):
        raise TrackingError(f"tracking store {chosen!r}: MLflow no longer writes folders; give sqlite:///PATH.db or http(s)://HOST:PORT")
    path = sqlite_path(chosen)
    return chosen if path is None else f"sqlite:///{path}"


def sqlite_path(uri: str) -> Path | None:
    """The absolute path of an sqlite store, None for any other store.

    Raises:
        TrackingError: The database has no file.
    """
    if not uri.startswith("sqlite:"):
        return None
    name = uri.removeprefix("sqlite:///")
    if name in ("", ":memory:") or name.startswith("sqlite:"):
        raise TrackingError(f"tracking store {uri!r}: expected sqlite:///PATH.db, a database with a file")
    return Path(name).resolve()


def open_store(tracking_uri: str, *, create: bool = True, page_size: int = PAGE_SIZE) -> Store:
    """Open a store that answers; an sqlite schema is created or migrated by one process at a time.

    Args:
        tracking_uri: As `resolve_uri` gives it.
        create: False for a reader: an absent database is an error, an old schema is not touched.
        page_size: Runs per search request.

    Raises:
        TrackingError: No such database, not a database, or a server that does not answer within seconds.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    for name in ("mlflow.store.db.utils", "alembic"):  # chatter about the schema, and a traceback for each locked database
        logging.getLogger(name).setLevel(logging.CRITICAL)
    path = sqlite_path(tracking_uri)
    if path is None:
        store = Store(_client(tracking_uri), tracking_uri, page_size)
        store.ping()
        return store
    if not path.exists() and not create:
        raise TrackingError(f"no results yet: {path} does not exist; start with: suite run SWEEP.yaml, or suite sync for an existing home")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S):
            return Store(_open_sqlite(path, migrate=create), tracking_uri, page_size)
    except Timeout:
        raise TrackingError(f"{path}.lock: held by another process for {LOCK_TIMEOUT_S:.0f} s; is a migration still running?") from None
    except OSError as error:
        raise TrackingError(f"{path}: cannot be opened: {error}") from error


def _open_sqlite(path: Path, *, migrate: bool) -> MlflowClient:
    if _schema(path) not in (None, _newest_schema()):
        if not migrate:
            raise TrackingError(f"{path}: has the schema of another MLflow; bring it up to date with: suite sync")
        _migrate(path)
    _forget_if_replaced(path)
    return _client(f"sqlite:///{path}")


_files: dict[Path, tuple[int, int]] = {}
"""Device and inode of every database this process has opened."""


def _forget_if_replaced(path: Path) -> None:
    """MLflow keeps its connections for the life of the process: to a file that was deleted since, and made anew, they lead nowhere."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from mlflow.tracking._tracking_service.utils import _tracking_store_registry

    stat = path.stat()
    if _files.setdefault(path, (stat.st_dev, stat.st_ino)) != (stat.st_dev, stat.st_ino):
        _files[path] = (stat.st_dev, stat.st_ino)
        _tracking_store_registry._get_store_with_resolved_uri.cache_clear()
        engine = SqlAlchemyStore._engine_map.pop(f"sqlite:///{path}", None)
        if engine is not None:
            engine.dispose()


def _schema(path: Path) -> str | None:
    """The revision of a database's schema, None for a new one. Uses the write-ahead log from now on, where that is safe.

    Raises:
        TrackingError: The file is no database; MLflow would try ten times.
    """
    try:
        with closing(sqlite3.connect(path, timeout=20)) as connection:
            if _is_local(path):
                connection.execute("PRAGMA journal_mode=WAL")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone():
                return None
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            return None if row is None else str(row[0])
    except sqlite3.Error as error:
        raise TrackingError(f"{path}: not a usable sqlite database: {error}; move it away, then suite sync rebuilds it") from error


@functools.cache
def _newest_schema() -> str:
    from mlflow.store.db.utils import _get_latest_schema_revision

    return str(_get_latest_schema_revision())


def _is_local(path: Path) -> bool:
    """Whether sqlite's write-ahead log works there: it needs shared memory, which network file systems do not give."""
    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    kind = max(mounts, key=lambda m: len(m.mountpoint)).fstype.lower() if mounts else ""
    return not kind.startswith(NETWORK_FILE_SYSTEMS)


def _migrate(path: Path) -> None:
    """Bring the schema of an older MLflow up to date, keeping a copy of the database beside it."""
    from alembic.util import CommandError
    from mlflow.store.db.utils import _upgrade_db, create_sqlalchemy_engine_with_retry

    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(f"{path}.before-migration")) as copy:
        source.backup(copy)
    engine = create_sqlalchemy_engine_with_retry(f"sqlite:///{path}")
    try:
        _upgrade_db(engine)
    except CommandError as error:
        raise TrackingError(f"{path}: schema of another MLflow: {error}; move it away, then suite sync rebuilds it") from error
    finally:
        engine.dispose()


def load_mlflow() -> None:
    """Import MLflow in the calling thread: two threads that import it at once, one of them inside Ray, lock each other out."""
    import mlflow  # noqa: F401


def _client(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    try:
        return MlflowClient(uri)
    except _store_errors() as error:
        raise _explain(uri, error) from error


@functools.cache
def _store_errors() -> tuple[type[Exception], ...]:
    """What MLflow's client raises when its store is away, locked, full or refuses."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, RequestException, SQLAlchemyError, OSError)


def _explain(uri: str, error: Exception) -> TrackingError:
    shown = without_password(uri)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if urlsplit(uri).scheme in ("http", "https") and ("Max retries" in lines[0] or "timed out" in lines[0].lower()):
        return TrackingError(f"tracking server {shown} does not answer; start it, or name another with --tracking-uri")
    return TrackingError(f"tracking store {shown}: {lines[0][:300]}")


def without_password(uri: str) -> str:
    """A store's URI as it may be shown and logged."""
    return re.sub(r"//[^/@]*@", "//***@", uri)


def _explained(method: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Store, P], R]:
    """Turn whatever MLflow raises into a TrackingError that names the store."""

    @functools.wraps(method)
    def call(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except _store_errors() as error:
            raise _explain(self.uri, error) from error

    return call


class Store:
    """A handful of MLflow calls; each can be repeated after an interruption without harm.

    Args:
        client: MLflow's own client.
        uri: Named in errors, without passwords.
        page_size: Runs per search request.
    """

    def __init__(self, client: MlflowClient, uri: str, page_size: int = PAGE_SIZE) -> None:
        self.client, self.uri, self.page_size = client, uri, page_size

    @_explained
    def ping(self) -> None:
        """Raises TrackingError unless the store answers."""
        self.client.search_experiments(max_results=1)

    @_explained
    def experiments(self) -> dict[str, str]:
        """Experiment id by sweep name, for every sweep in the store."""
        found, token = {}, None
        while True:
            page = self.client.search_experiments(filter_string="tags.`suite.kind` = 'sweep'", max_results=self.page_size, page_token=token)
            found.update({e.name: e.experiment_id for e in page})
            token = page.token
            if not token:
                return found

    @_explained
    def experiment(self, name: str) -> str:
        """The id of a sweep's experiment: found, taken out of the bin, or created."""
        known = self.client.get_experiment_by_name(name)
        if known is None:
            return str(self.client.create_experiment(name, self._artifact_location(), {"suite.kind": "sweep"}))
        if known.lifecycle_stage == "deleted":
            self.client.restore_experiment(known.experiment_id)
        if known.tags.get("suite.kind") != "sweep":
            self.client.set_experiment_tag(known.experiment_id, "suite.kind", "sweep")
        return str(known.experiment_id)

    def _artifact_location(self) -> str | None:
        path = sqlite_path(self.uri)  # else MLflow would take ./mlruns of whatever folder it was started in
        return None if path is None else (path.parent / "mlartifacts").as_uri()

    @_explained
    def runs(self, experiments: Sequence[str], tags: Mapping[str, str]) -> list[StoredRun]:
        """Every run with these tags, oldest first, over all pages."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found: list[StoredRun] = []
        token = None
        while True:
            page = self.client.search_runs(list(experiments), query, max_results=self.page_size, page_token=token)
            found += [StoredRun(r.info.run_id, r.info.status, r.info.start_time, dict(r.data.tags)) for r in page]
            token = page.token
            if not token:
                return sorted(found, key=lambda run: (run.start_ms, run.id))

    @_explained
    def create_run(self, experiment: str, *, name: str, start_s: float, tags: Mapping[str, str]) -> StoredRun:
        run = self.client.create_run(experiment, start_time=int(start_s * 1000), tags=clip(tags, MAX_TAG_CHARS), run_name=name)
        return StoredRun(run.info.run_id, run.info.status, run.info.start_time, dict(run.data.tags))

    @_explained
    def log(
        self, run_id: str, *, metrics: Sequence[Point] = (), params: Mapping[str, str] | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        """Metrics and parameters first, tags last: a tag that says "complete" is never there before what it speaks of."""
        from mlflow.entities import Metric, Param, RunTag

        values = [Metric(key_name(p.key), p.value, int(p.time_s * 1000), p.step) for p in metrics]
        texts = [Param(key_name(k), v) for k, v in clip(params or {}, MAX_PARAM_CHARS).items()]
        for start in range(0, max(len(values), 1), METRICS_PER_BATCH):
            self.client.log_batch(run_id, values[start : start + METRICS_PER_BATCH], texts if start == 0 else ())
        if tags:
            self.client.log_batch(run_id, tags=[RunTag(k, v) for k, v in clip(tags, MAX_TAG_CHARS).items()])

    @_explained
    def finish(self, run_id: str, status: str, end_s: float) -> None:
        """Set FINISHED, FAILED or, for a cell with work left, SCHEDULED: nothing shows as running after a kill."""
        if status == "SCHEDULED":
            self.client.update_run(run_id, status)
        else:
            self.client.set_terminated(run_id, status, int(end_s * 1000))

    @_explained
    def delete_run(self, run_id: str) -> None:
        self.client.delete_run(run_id)


def key_name(text: str) -> str:
    """`text` with every character that MLflow refuses in a metric or parameter name replaced by an underscore."""
    return re.sub(r"[^A-Za-z0-9_\-./: ]", "_", text)[:250]


def clip(texts: Mapping[str, Any], limit: int) -> dict[str, str]:
    """Values cut to what MLflow stores, visibly; MLflow itself cuts them without a word."""
    return {key: text if len(text) <= limit else text[: limit - 3] + "..." for key, text in texts.items()}
