"""The MLflow store: found, created or migrated under a lock, and reached through a few calls that may be repeated.

MLflow is imported inside functions, because `import mlflow` starts its telemetry unless the environment already says no.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from suite.errors import TrackingError
from suite.record.folder import Home
from suite.redact import redact
from suite.storage.databases import check_local, with_deadlines, with_driver
from suite.tracking.notes import NOTE, sweep_note

if TYPE_CHECKING:
    from mlflow import MlflowClient

P = ParamSpec("P")
R = TypeVar("R")

PAGE_SIZE = 1000
METRICS_PER_BATCH = 500
COMPLETE = "suite.complete"
"""A tag that is there when everything else of a run is."""
MAX_TAG_CHARS = 8000
MAX_PARAM_CHARS = 6000
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "2",
    "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "4",
}
"""Set for this process unless the user has: MLflow's own values keep a caller waiting for four minutes when its server is away, and
each of its processes may hold fifteen connections of a database."""


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


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run to write as a whole; without an end it has just begun."""

    name: str
    start_s: float
    tags: dict[str, str]
    status: str = "RUNNING"
    end_s: float | None = None
    metrics: Sequence[Point] = ()
    params: Mapping[str, str] = field(default_factory=dict)


def resolve_uri(home: Home, tracking_uri: str | None = None, *, write: bool = False) -> str:
    """Where to track: what was asked for, else `MLFLOW_TRACKING_URI`, else sqlite in the home; sqlite paths are made absolute.

    Args:
        home: Where sqlite lies by default.
        tracking_uri: What was asked for.
        write: Whether the caller is going to write: then an sqlite file on a network file system is refused.

    Raises:
        TrackingError: A folder, which MLflow 3 no longer writes, an in-memory database, or one that cannot be written safely.
    """
    chosen = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or home.tracking_uri
    if urlsplit(chosen).scheme in ("", "file"):
        raise TrackingError(
            f"tracking store {chosen!r}: MLflow no longer writes folders; give sqlite:///PATH.db or http(s)://HOST:PORT"
        )
    path = sqlite_path(chosen)
    if path is not None and write:
        check_local(path)
    return with_driver(chosen) if path is None else f"sqlite:///{path}"


def sqlite_path(uri: str) -> Path | None:
    """The absolute path of an sqlite store, None for any other store.

    Raises:
        TrackingError: The database has no file.
    """
    if not uri.startswith("sqlite:"):
        return None
    name = uri.removeprefix("sqlite:///")
    if name in ("", ":memory:") or name.startswith("sqlite:"):
        raise TrackingError(
            f"tracking store {uri!r}: expected sqlite:///PATH.db, a database with a file"
        )
    return Path(name).resolve()


def open_store(tracking_uri: str, *, create: bool = True, page_size: int = PAGE_SIZE) -> Store:
    """Open a store that answers; the schema of a database is created by one process at a time, and of sqlite also migrated.

    Args:
        tracking_uri: As `resolve_uri` gives it.
        create: False for a reader: an absent database is an error, a schema is not touched, and MLflow is not imported for a database.
        page_size: Runs per search request.

    Raises:
        TrackingError: No such database, not a database, one that cannot be written safely, or a server that does not answer within seconds.
    """
    from suite.tracking.schema import sqlite_schema
    from suite.tracking.sql import SqlStore

    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    for name in (
        "mlflow.store.db.utils",
        "alembic",
    ):  # chatter about the schema, and a traceback for each locked database
        logging.getLogger(name).setLevel(logging.CRITICAL)
    uri, path = with_deadlines(tracking_uri), sqlite_path(tracking_uri)
    store = (
        SqlStore(uri, page_size)
        if path is not None or uri.startswith("postgresql")
        else Store(None, uri, page_size)
    )
    if path is not None and not create and not path.exists():
        raise TrackingError(
            f"no results yet: {path} does not exist; start with: suite run SWEEP.yaml, or suite sync for an existing home"
        )
    if create and path is not None:
        with sqlite_schema(path):
            store.connect()
    elif create and isinstance(store, SqlStore):
        with store.schema():
            store.connect()
    store.ping()
    return store


def load_mlflow() -> None:
    """Import MLflow in the calling thread: two threads that import it at once, one of them inside Ray, lock each other out."""
    import mlflow  # noqa: F401


@functools.cache
def _store_errors() -> tuple[type[Exception], ...]:
    """What MLflow's client raises when its store is away, locked, full or refuses."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, RequestException, SQLAlchemyError, OSError)


def without_password(uri: str) -> str:
    """A store's URI as it may be shown and logged."""
    return redact(uri.partition("?")[0])


def _explained(method: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Store, P], R]:
    """Turn whatever MLflow raises into a TrackingError that names the store."""

    @functools.wraps(method)
    def call(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except _store_errors() as error:
            raise self.explain(error) from error

    return call


class Store:
    """A handful of MLflow calls; each can be repeated after an interruption without harm.

    Args:
        client: MLflow's own client.
        uri: Named in errors, without passwords.
        page_size: Runs per search request.
    """

    def __init__(self, client: MlflowClient | None, uri: str, page_size: int = PAGE_SIZE) -> None:
        self._client, self.uri, self.page_size = client, uri, page_size

    @property
    def client(self) -> MlflowClient:
        """MLflow's own; it is imported, and its connection opened, on first use."""
        if self._client is None:
            from mlflow import MlflowClient

            self._client = MlflowClient(self.uri)
        return self._client

    def explain(self, error: Exception) -> TrackingError:
        """What the store raised, in one line that names the store and holds no password."""
        shown = without_password(self.uri)
        lines = redact(str(error)).strip().splitlines() or [type(error).__name__]
        if urlsplit(self.uri).scheme in ("http", "https") and (
            "Max retries" in lines[0] or "timed out" in lines[0].lower()
        ):
            return TrackingError(
                f"tracking server {shown} does not answer; start it, or name another with --tracking-uri"
            )
        if "error code 401" in lines[0]:
            give = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            return TrackingError(
                f"tracking server {shown} does not know this user, or this password; give them by {give}"
            )
        for secret in filter(
            None,
            {self.uri, urlsplit(self.uri).password, unquote(urlsplit(self.uri).password or "")},
        ):
            lines[0] = lines[0].replace(secret, "***")
        return TrackingError(f"tracking store {shown}: {lines[0][:300]}")

    @_explained
    def connect(self) -> None:
        """Open MLflow's client now; on an empty database it makes the tables.

        Raises:
            TrackingError: The schema is another MLflow's.
        """
        self.client.search_experiments(max_results=1)

    @_explained
    def ping(self) -> None:
        """Raises TrackingError unless the store answers."""
        self.client.search_experiments(max_results=1)

    @_explained
    def experiments(self) -> dict[str, str]:
        """Experiment id by sweep name, for every sweep in the store."""
        found, token = {}, None
        while True:
            page = self.client.search_experiments(
                filter_string="tags.`suite.kind` = 'sweep'",
                max_results=self.page_size,
                page_token=token,
            )
            found.update({e.name: e.experiment_id for e in page})
            token = page.token
            if not token:
                return found

    @_explained
    def experiment(self, name: str, *, artifacts: Path | None = None) -> str:
        """The id of a sweep's experiment: found, taken out of the bin, or created.

        Args:
            name: The sweep's.
            artifacts: Where files of a new one go if neither a server nor the place of an sqlite file decides that.
        """
        known = self.client.get_experiment_by_name(name)
        if known is None:
            return self._create_experiment(name, artifacts)
        if known.lifecycle_stage == "deleted":
            self.client.restore_experiment(known.experiment_id)
        if known.tags.get("suite.kind") != "sweep":
            self.client.set_experiment_tag(known.experiment_id, "suite.kind", "sweep")
        return str(known.experiment_id)

    def _create_experiment(self, name: str, artifacts: Path | None) -> str:
        """Another driver may be quicker: then it is theirs."""
        from mlflow.exceptions import MlflowException

        tags = {"suite.kind": "sweep", NOTE: sweep_note(name)}
        try:
            return str(
                self.client.create_experiment(name, self._artifact_location(artifacts), tags)
            )
        except MlflowException:
            known = self.client.get_experiment_by_name(name)
            if known is None:
                raise
            return str(known.experiment_id)

    def _artifact_location(self, asked: Path | None) -> str | None:
        """None lets a server decide; without one, MLflow would take ./mlruns of whatever folder it was started in."""
        if urlsplit(self.uri).scheme in ("http", "https"):
            return None
        path = sqlite_path(self.uri)
        if path is not None:
            return (path.parent / "mlartifacts").as_uri()
        return os.environ.get("MLFLOW_DEFAULT_ARTIFACT_ROOT") or (
            None if asked is None else asked.resolve().as_uri()
        )

    @_explained
    def add_files(self, run_id: str, paths: Sequence[Path]) -> None:
        """Files as a run's artifacts, under their own names; what is there already is replaced."""
        for path in paths:
            self.client.log_artifact(run_id, str(path))

    @_explained
    def runs(
        self,
        experiments: Sequence[str],
        tags: Mapping[str, str],
        *,
        having: str | None = None,
        only: Sequence[str] = (),
    ) -> list[StoredRun]:
        """Every run with these tags, oldest first, over all pages.

        Args:
            experiments: Their ids.
            tags: Key and value.
            having: A key that the runs must have whatever its value, by which a database finds the few among many.
            only: The keys that the caller reads, `suite.curve.*` for all that begin so; others may be left out.
        """
        wanted = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
        query = " and ".join(wanted + ([] if having is None else [f"tags.`{having}` LIKE '%'"]))
        found: list[StoredRun] = []
        token = None
        while True:
            page = self.client.search_runs(
                list(experiments), query, max_results=self.page_size, page_token=token
            )
            found += [
                StoredRun(r.info.run_id, r.info.status, r.info.start_time, dict(r.data.tags))
                for r in page
            ]
            token = page.token
            if not token:
                return sorted(found, key=lambda run: (run.start_ms, run.id))

    @_explained
    def create_run(
        self, experiment: str, *, name: str, start_s: float, tags: Mapping[str, str]
    ) -> StoredRun:
        run = self.client.create_run(
            experiment,
            start_time=int(start_s * 1000),
            tags=clip(tags, MAX_TAG_CHARS),
            run_name=name,
        )
        return StoredRun(run.info.run_id, run.info.status, run.info.start_time, dict(run.data.tags))

    def write_runs(self, experiment: str, records: Sequence[RunRecord]) -> list[StoredRun]:
        """Write runs that the store does not have. Their tag `suite.complete`, if they have it, comes last.

        A database writes all or none of them; a server may be cut off between two.
        """
        return [self.write_run(experiment, record) for record in records]

    def write_run(
        self, experiment: str, record: RunRecord, known: StoredRun | None = None
    ) -> StoredRun:
        """Write a run, or what an interrupted writer left out of a `known` one."""
        begun = {key: value for key, value in record.tags.items() if key != COMPLETE}
        run = known or self.create_run(
            experiment, name=record.name, start_s=record.start_s, tags=begun
        )
        self.log(run.id, metrics=record.metrics, params=record.params)
        if record.end_s is not None:
            self.finish(run.id, record.status, record.end_s)
        if COMPLETE in record.tags:
            self.log(run.id, tags={COMPLETE: record.tags[COMPLETE]})
        return replace(run, tags={**run.tags, **record.tags})

    @_explained
    def log(
        self,
        run_id: str,
        *,
        metrics: Sequence[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Metrics and parameters first, tags last: a tag that says "complete" is never there before what it speaks of."""
        from mlflow.entities import Metric, Param, RunTag

        values = [Metric(key_name(p.key), p.value, int(p.time_s * 1000), p.step) for p in metrics]
        texts = [Param(key_name(k), v) for k, v in clip(params or {}, MAX_PARAM_CHARS).items()]
        for start in range(0, max(len(values), 1), METRICS_PER_BATCH):
            self.client.log_batch(
                run_id, values[start : start + METRICS_PER_BATCH], texts if start == 0 else ()
            )
        if tags:
            self.client.log_batch(
                run_id, tags=[RunTag(k, v) for k, v in clip(tags, MAX_TAG_CHARS).items()]
            )

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
    """Values cut to what MLflow stores, visibly; MLflow itself cuts them without a word. What no database holds is replaced."""
    whole = {
        key: text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
        for key, text in texts.items()
    }
    return {
        key: text if len(text) <= limit else text[: limit - 3] + "..."
        for key, text in whole.items()
    }
