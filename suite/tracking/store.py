"""The MLflow store: which one it is, and the few calls of MLflow's client by which it is used.

Each call can be repeated after an interruption without harm. MLflow is imported inside functions,
because `import mlflow` takes seconds, and starts its telemetry unless the environment says no.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from suite.config.names import why_not
from suite.errors import TrackingError
from suite.files import replacing, sqlite_uri
from suite.record.folder import Home
from suite.redact import redact
from suite.storage.databases import check_local, for_mlflow, with_deadlines, with_driver
from suite.tracking.notes import NOTE, sweep_note

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

PAGE_SIZE = 1000
LOCK_TIMEOUT_S = 60.0
START = "start with: suite run SWEEP.yaml, or suite sync for an existing home"
MAX_TAG_CHARS = 8000
MAX_NAME_CHARS = 250
MAX_PARAM_CHARS = 6000
ARTIFACTS = "mlartifacts"
"""The folder beside an sqlite file for the files of its runs."""
SWEEP = "suite.sweep"
"""The tag of an experiment with the name of its sweep, which stays when somebody renames it."""
RUN_ID = re.compile("[0-9a-f]{32}")
ENDED = frozenset({"FINISHED", "FAILED", "KILLED"})
"""States of a run that is over. RUNNING is one that is being written or whose trial runs; SCHEDULED
is one with work left."""
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "2",
    "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "4",
}
"""Environment variables that are set for this process unless the user has set them.

By MLflow's own values, a caller waits four minutes for a server that is away, and each process may
hold fifteen connections of a database.
"""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The part of an MLflow run that this package needs.

    Attributes:
        start_ms: When it started, in milliseconds since 1970; it orders duplicates.
        files: The URI of the folder of its artifacts.
    """

    id: str
    status: str
    start_ms: int
    tags: dict[str, str]
    files: str = ""

    @property
    def ended(self) -> bool:
        """Whether it was written to its end, which the last request says."""
        return self.status in ENDED

    def tag(self, key: str) -> str:
        """A tag that every run of ours has.

        Raises:
            TrackingError: Somebody removed it, or gave it another name.
        """
        value = self.tags.get(key)
        if value is None:
            raise TrackingError(
                f"run {self.id} of MLflow lacks the tag {key}, with which suite sync wrote it; "
                "delete the run there, then suite sync writes it anew"
            )
        return value


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric.

    Its time comes from the record, so that logging it again changes nothing.
    """

    key: str
    value: float
    time_s: float
    step: int = 0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run to write as a whole."""

    name: str
    start_s: float
    end_s: float
    status: str
    tags: dict[str, str]
    metrics: Sequence[Point] = ()
    params: Mapping[str, str] = field(default_factory=dict)


def resolve_uri(home: Home, tracking_uri: str | None = None, *, write: bool = False) -> str:
    """The URI that was asked for, else `MLFLOW_TRACKING_URI`, else sqlite in the home.

    Args:
        home: Where sqlite lies by default.
        tracking_uri: What was asked for. The path of an sqlite file is made absolute.
        write: Whether the caller is going to write: then an sqlite file on a network file system
            is refused.

    Raises:
        TrackingError: A folder, which MLflow 3 no longer writes, a folder in the place of an sqlite
            file, an in-memory database, one that cannot be written safely, or a kind of store that
            MLflow does not know.
    """
    chosen = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or home.tracking_uri
    try:
        scheme = urlsplit(chosen).scheme
    # A bracket of an IPv6 address that is not closed; the password may stand in what was given.
    except ValueError as error:
        raise TrackingError(
            f"tracking store {redact(chosen)!r}: {error}; expected sqlite:///PATH.db or "
            "http(s)://HOST:PORT, with an IPv6 address in brackets: http://[::1]:5000"
        ) from None
    if scheme in ("", "file"):
        raise TrackingError(
            f"tracking store {redact(chosen)!r}: expected sqlite:///PATH.db, "
            "postgresql://USER@HOST/DATABASE or http(s)://HOST:PORT; "
            "a folder is none, since MLflow no longer writes folders"
        )
    path = sqlite_path(chosen)
    if path is None:
        uri = with_driver(chosen)
        _check_kind(uri)
        return uri
    if path.is_dir():
        raise TrackingError(
            f"tracking store {chosen!r}: {path} is a folder, expected the file of a database: "
            f"{sqlite_uri(path / 'mlflow.db')}"
        )
    if write:
        check_local(path)
    return sqlite_uri(path)


def _check_kind(uri: str) -> None:
    """Refuse a URI for which neither MLflow nor a plug-in of it has a store; asks no server.

    Raises:
        TrackingError: Nobody knows its scheme, or the driver of its database.
    """
    set_environment()
    from mlflow import MlflowClient
    from mlflow.store.db.db_types import DATABASE_ENGINES
    from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException
    from sqlalchemy import make_url
    from sqlalchemy.exc import NoSuchModuleError

    try:
        # A client of a database connects at once, and a server that is away is no mistake.
        if uri.startswith(tuple(DATABASE_ENGINES)):
            make_url(uri).get_dialect()
        else:
            MlflowClient(uri)
    except (NoSuchModuleError, UnsupportedModelRegistryStoreURIException):
        raise TrackingError(
            f"tracking store {without_password(uri)}: MLflow knows no store of this kind; "
            "expected sqlite:///PATH.db or http(s)://HOST:PORT"
        ) from None
    # What else is wrong is told when the store is opened.
    except (ValueError, ImportError):
        return
    except _store_errors():
        return


def sqlite_path(uri: str) -> Path | None:
    """The absolute path of an sqlite store, None for any other store.

    Raises:
        TrackingError: The database has no file, or one whose name none can have.
    """
    if not uri.startswith("sqlite:"):
        return None
    name = uri.removeprefix("sqlite:///")
    if name in ("", ":memory:") or name.startswith("sqlite:"):
        raise TrackingError(
            f"tracking store {uri!r}: expected sqlite:///PATH.db, a database with a file"
        )
    # What follows a `?` are options of the connection, not of the path.
    path = Path(unquote(name.partition("?")[0]))
    try:
        return path.resolve()
    # A NUL, or half a surrogate pair, also written as %00.
    except ValueError as error:
        raise TrackingError(
            f"tracking store {uri!r}: no file can have this name: {error}; "
            "expected sqlite:///PATH.db"
        ) from None


def without_password(uri: str) -> str:
    """A store's URI as it may be shown and logged."""
    return redact(uri.partition("?")[0])


@contextmanager
def writing(lock: Path) -> Iterator[None]:
    """Hold a lock, so that two processes that write a home at once do not create runs twice.

    Raises:
        TrackingError: Another process holds it for long.
    """
    try:
        with FileLock(lock, timeout=LOCK_TIMEOUT_S):
            yield
    except Timeout as error:
        raise TrackingError(
            f"{lock}: another process has been writing for {LOCK_TIMEOUT_S:.0f} s; run this "
            "again when it has ended"
        ) from error


def set_environment() -> None:
    """Set MLflow's variables for this process, unless the user has.

    MLflow reads some of them, among them whether it sends telemetry, when it is imported.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)


def load_mlflow() -> None:
    """Import MLflow in the calling thread.

    Two threads that import it at once, one of them inside Ray, lock each other out.
    """
    set_environment()
    # Imported for its effect alone: later imports then find the module complete.
    import mlflow  # noqa: F401


def open_store(tracking_uri: str, *, create: bool = True, page_size: int = PAGE_SIZE) -> Store:
    """A store that answers.

    Args:
        tracking_uri: As `resolve_uri` gives it.
        create: Whether MLflow's tables are made in a database that has none. For a reader, who
            says False, such a database is an error.
        page_size: Runs per search request.

    Raises:
        TrackingError: No such database, not a database, the tables of another MLflow, or a server
            that does not answer within seconds.
    """
    # Before MLflow is imported, since it reads some of these while it is imported.
    set_environment()
    # These chat about the tables that they make, and print a traceback for each locked database.
    for name in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    store = Store(with_deadlines(tracking_uri), page_size)
    store.open(create=create)
    return store


@functools.cache
def _store_errors() -> tuple[type[Exception], ...]:
    """What MLflow's client raises when its store is away, locked, full or refuses."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    # UnicodeError: the name of a host that no DNS can hold.
    return (MlflowException, RequestException, SQLAlchemyError, OSError, UnicodeError)


def _explained(method: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Store, P], R]:
    """Turn whatever MLflow raises into a TrackingError that names the store."""

    @functools.wraps(method)
    def call(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        # The tuple is asked for only when something was raised, so that no call imports MLflow for
        # it.
        except _store_errors() as error:
            raise self.explain(error) from error

    return call


class Store:
    """A handful of calls of MLflow's client.

    Args:
        uri: The URI of the store; errors name it without its password.
        page_size: Runs per search request.

    Attributes:
        restored: Ids of the experiments that were taken out of MLflow's bin, until somebody has
            looked at what came back with them.
    """

    def __init__(self, uri: str, page_size: int = PAGE_SIZE) -> None:
        self.uri = uri
        self.page_size = page_size
        self.restored: set[str] = set()

    @functools.cached_property
    def client(self) -> MlflowClient:
        """MLflow's own client; it is imported, and its connection opened, on first use."""
        from mlflow import MlflowClient

        from suite.tracking import schema

        # Before the first connection, which this must hear of.
        schema.watch_sqlite_files()
        try:
            return MlflowClient(for_mlflow(self.uri))
        # A port that is no number, a database whose driver is not installed.
        except (ValueError, ImportError) as error:
            raise self.explain(error) from error

    @property
    def is_remote(self) -> bool:
        """Whether an MLflow server stands between this process and the store."""
        return urlsplit(self.uri).scheme in ("http", "https")

    @_explained
    def open(self, *, create: bool) -> None:
        """Make the tables where asked to, and see that the store answers.

        Raises:
            TrackingError: As `open_store`.
        """
        from suite.tracking import schema

        path = sqlite_path(self.uri)
        is_postgres = self.uri.startswith("postgresql")
        # SQLAlchemy would make an empty file of a path that was mistyped.
        if path is not None and not create and not path.exists():
            raise TrackingError(f"no results yet: {path} does not exist; {START}")
        if path is not None and create:
            schema.prepare_sqlite(path)
        elif is_postgres and create:
            schema.prepare_postgres(self.uri)
        if path is not None or is_postgres:
            # Asked here, before the first request, so that another schema gets a message with a
            # remedy.
            found = schema.revision(self.uri)
            expected = schema.newest_revision()
            if found != expected:
                raise self._other_tables(path, found, expected)
        # The cheapest request that goes all the way to the tables.
        self.client.search_experiments(max_results=1)

    def _other_tables(self, path: Path | None, found: str | None, expected: str) -> TrackingError:
        """Say which tables a database has in place of those of this MLflow."""
        from suite.tracking import schema

        shown = without_password(self.uri)
        if path is not None and schema.is_half_made(path):
            return TrackingError(
                f"no results yet: {path}: MLflow was killed while it made the tables; "
                "write it anew from the trial folders with: suite sync"
            )
        if found is None:
            return TrackingError(f"no results yet: {shown} has no tables of MLflow; {START}")
        return TrackingError(
            f"tracking store {shown}: has the tables of another MLflow version, "
            f"schema {found}, expected {expected}; use the MLflow that wrote it, "
            "or move it away, then suite sync makes it anew"
        )

    def explain(self, error: Exception) -> TrackingError:
        """What the store raised, in one line that names the store and holds no password."""
        shown = without_password(self.uri)
        lines = redact(str(error)).strip().splitlines()
        line = lines[0] if lines else type(error).__name__
        # MLflow wraps what `requests` raises, so only the text tells a server that is away.
        is_silent = "Max retries" in line or "timed out" in line.lower()
        if self.is_remote and is_silent:
            return TrackingError(
                f"tracking server {shown} does not answer; "
                "start it, or name another with --tracking-uri"
            )
        if "error code 401" in line:
            return TrackingError(
                f"tracking server {shown} does not know this user, or this password; "
                "give them by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        password = urlsplit(self.uri).password or ""
        # Drivers print the password as it stands in the URL, or decoded.
        for secret in (self.uri, password, unquote(password)):
            if secret:
                line = line.replace(secret, "***")
        return TrackingError(f"tracking store {shown}: {line[:300]}")

    @_explained
    def experiments(self) -> dict[str, str]:
        """Experiment id by sweep name, for every sweep in the store.

        One that somebody renamed still has its sweep's name in a tag. Those whose sweep has no
        possible name are left out with a warning: whoever reaches the store can make experiments,
        and reports take these names.
        """
        found: dict[str, str] = {}
        for experiment in self._search_experiments("tags.`suite.kind` = 'sweep'"):
            sweep = experiment.tags.get(SWEEP, experiment.name)
            wrong = why_not("sweep", sweep)
            if wrong is not None:
                log.warning(
                    "tracking store %s: %s; this experiment is left out, rename it or delete it",
                    without_password(self.uri),
                    wrong,
                )
            # A copy with the tags of another experiment does not take its place.
            elif sweep not in found or experiment.name == sweep:
                found[sweep] = experiment.experiment_id
        return found

    def _search_experiments(self, query: str, *, deleted: bool = False) -> list[Experiment]:
        from mlflow.entities import ViewType

        view = ViewType.ACTIVE_ONLY
        if deleted:
            view = ViewType.ALL
        found: list[Experiment] = []
        token = None
        while True:
            page = self.client.search_experiments(
                view, filter_string=query, max_results=self.page_size, page_token=token
            )
            found += page
            token = page.token
            if not token:
                return found

    @_explained
    def experiment(self, name: str, *, artifacts: Path | None = None) -> str:
        """The id of a sweep's experiment: found, taken out of the bin, or created.

        Args:
            name: The sweep's; the experiment may have got another one from somebody.
            artifacts: Where files of a new one go if neither a server nor the place of an sqlite
                file decides that.

        Raises:
            TrackingError: The experiment of another sweep got this name.
        """
        known = self._experiment_of(name)
        if known is None:
            return self._create_experiment(name, artifacts)
        # MLflow keeps the name of a deleted experiment, so no new one can be made under it.
        if known.lifecycle_stage == "deleted":
            self.client.restore_experiment(known.experiment_id)
            self.restored.add(str(known.experiment_id))
        # An earlier version made it, or somebody by hand; it is found by these tags.
        for key, value in _sweep_tags(name).items():
            if known.tags.get(key) != value:
                self.client.set_experiment_tag(known.experiment_id, key, value)
        return str(known.experiment_id)

    def _experiment_of(self, sweep: str) -> Experiment | None:
        """The experiment with a sweep's tag, else one of its name; rather one that is not deleted.

        Raises:
            TrackingError: The experiment of another sweep got this name.
        """
        found = self._search_experiments(f"tags.`{SWEEP}` = '{sweep}'", deleted=True)
        found.sort(key=lambda each: (each.lifecycle_stage == "deleted", each.name != sweep))
        if found:
            return found[0]
        named = self.client.get_experiment_by_name(sweep)
        if named is not None and named.tags.get(SWEEP, sweep) != sweep:
            raise TrackingError(
                f"tracking store {without_password(self.uri)}: the experiment of the sweep "
                f"{named.tags[SWEEP]!r} has the name of the sweep {sweep!r}; rename it in MLflow"
            )
        return named

    @_explained
    def experiment_tag(self, experiment: str, key: str) -> str:
        """A tag of an experiment; empty where it has none."""
        tags: dict[str, str] = self.client.get_experiment(experiment).tags
        return tags.get(key, "")

    @_explained
    def set_experiment_tag(self, experiment: str, key: str, value: str) -> None:
        """Set a tag of an experiment."""
        self.client.set_experiment_tag(experiment, key, value)

    def _create_experiment(self, name: str, artifacts: Path | None) -> str:
        from mlflow.exceptions import MlflowException

        tags = {**_sweep_tags(name), NOTE: sweep_note(name)}
        try:
            return str(
                self.client.create_experiment(name, self._artifact_location(artifacts), tags)
            )
        except MlflowException:
            # Another driver may have been quicker: then there is one by now.
            known = self.client.get_experiment_by_name(name)
            if known is None:
                raise
            return str(known.experiment_id)

    def _artifact_location(self, asked: Path | None) -> str | None:
        """Where the files of a new experiment go; None lets the server decide."""
        if self.is_remote:
            return None
        path = sqlite_path(self.uri)
        if path is not None:
            return (path.parent / ARTIFACTS).as_uri()
        root = os.environ.get("MLFLOW_DEFAULT_ARTIFACT_ROOT")
        if root or asked is None:
            return root
        # MLflow by itself would take ./mlruns of whatever folder this process was started in.
        return asked.resolve().as_uri()

    @_explained
    def runs(
        self,
        experiments: Sequence[str],
        tags: Mapping[str, str],
        *,
        having: str | None = None,
        status: str | None = None,
    ) -> list[StoredRun]:
        """Every run with these tags, oldest first, over all pages.

        Args:
            experiments: The ids of the experiments.
            tags: Key and value.
            having: A key that only these runs have. Then the database looks at no others: among
                300,000 runs with a tag it takes a second to find those with one value of it.
            status: Only runs in this state, which few runs are in; it takes the place of `having`.
        """
        if not experiments:
            return []
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        if having is not None:
            # MLflow joins the table of tags once for each condition; here the values are compared
            # below.
            query = f"tags.`{having}` LIKE '%'"
        if status is not None:
            query = f"attributes.status = '{status}'"
        found: list[StoredRun] = []
        token = None
        while True:
            page = self.client.search_runs(
                list(experiments), query, max_results=self.page_size, page_token=token
            )
            for run in page:
                if tags.items() <= run.data.tags.items():
                    found.append(_stored(run))
            token = page.token
            if not token:
                # The id makes the order the same on every call, also for runs of one millisecond.
                return sorted(found, key=lambda run: (run.start_ms, run.id))

    @_explained
    def run(self, run_id: str) -> StoredRun:
        """A run as it is now."""
        return _stored(self.client.get_run(run_id))

    @_explained
    def create_run(
        self, experiment: str, *, name: str, start_s: float, tags: Mapping[str, str]
    ) -> StoredRun:
        """A run in the state RUNNING."""
        run = self.client.create_run(
            experiment,
            # MLflow counts in milliseconds since 1970.
            start_time=int(start_s * 1000),
            tags=clip(tags, MAX_TAG_CHARS),
            run_name=clip({"name": name}, MAX_NAME_CHARS)["name"],
        )
        return _stored(run)

    def write_run(
        self,
        experiment: str,
        record: RunRecord,
        begun: StoredRun | None = None,
        *,
        files: Sequence[Path] = (),
    ) -> StoredRun:
        """Write a run in three requests, and one for each of its files.

        Of a `begun` run, which an interrupted writer left or which was begun while its trial ran,
        all but the first are sent.
        """
        run = begun or self.create_run(
            experiment, name=record.name, start_s=record.start_s, tags=record.tags
        )
        # A run whose trial was running lacks those that the result decides. The others stay as
        # they are: somebody may have changed the description.
        tags = {key: value for key, value in record.tags.items() if key not in run.tags}
        for path in files:
            self.add_file(run, path)
        self.log(run.id, metrics=record.metrics, params=record.params, tags=tags)
        # Last: a run that has ended has its files and its numbers.
        self.finish(run.id, record.status, record.end_s)
        return replace(run, status=record.status, tags={**run.tags, **record.tags})

    @_explained
    def log(
        self,
        run_id: str,
        *,
        metrics: Sequence[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Send one request, or several where MLflow takes no more at once (1,000 metrics)."""
        from mlflow.entities import Metric, Param, RunTag

        self.client.log_batch(
            run_id,
            [Metric(key_name(p.key), p.value, int(p.time_s * 1000), p.step) for p in metrics],
            [Param(key_name(k), v) for k, v in clip(params or {}, MAX_PARAM_CHARS).items()],
            [RunTag(k, v) for k, v in clip(tags or {}, MAX_TAG_CHARS).items()],
        )

    @_explained
    def finish(self, run_id: str, status: str, end_s: float) -> None:
        """Set FINISHED, FAILED or KILLED, or, for a cell with work left, SCHEDULED.

        Nothing shows as running after a kill.
        """
        # `set_terminated` would give it an end, but a cell with work left has none.
        if status not in ENDED:
            self.client.update_run(run_id, status)
        else:
            self.client.set_terminated(run_id, status, int(end_s * 1000))

    @_explained
    def mark(self, run_id: str, status: str) -> None:
        """Set RUNNING or SCHEDULED, for a trial that goes on or stopped before its end."""
        self.client.update_run(run_id, status)

    @_explained
    def history(self, run_id: str, key: str) -> dict[int, float]:
        """The values of a run's metric, by step; empty where it has none."""
        points = self.client.get_metric_history(run_id, key_name(key))
        return {point.step: point.value for point in points}

    @_explained
    def metrics(self, run_id: str) -> dict[str, float]:
        """The latest value of each metric of a run."""
        found: dict[str, float] = self.client.get_run(run_id).data.metrics
        return found

    @_explained
    def delete_run(self, run_id: str) -> None:
        """Put a run into MLflow's bin."""
        self.client.delete_run(run_id)

    @_explained
    def add_file(self, run: StoredRun, path: Path, *, name: str | None = None) -> None:
        """Make a file an artifact of a run; it replaces one of the same name, never by half.

        Args:
            run: The run whose artifact it becomes.
            path: The path of the file.
            name: The name of the artifact; None = the file's own name.
        """
        name = name or path.name
        folder = self._folder(run)
        if folder is not None:
            with replacing(folder / name) as temporary:
                temporary.write_bytes(path.read_bytes())
        elif name == path.name:
            self.client.log_artifact(run.id, str(path))
        else:
            with tempfile.TemporaryDirectory() as scratch:
                renamed = Path(scratch) / name
                renamed.write_bytes(path.read_bytes())
                self.client.log_artifact(run.id, str(renamed))

    @contextmanager
    def file(self, run: StoredRun, name: str) -> Iterator[Path]:
        """A run's artifact as a file of this machine, to be read within the block.

        Raises:
            TrackingError: MLflow cannot fetch it. Beside an sqlite database the path is given
                whether there is such a file or not.
        """
        folder = self._folder(run)
        if folder is not None:
            yield folder / name
            return
        with tempfile.TemporaryDirectory() as scratch:
            yield self._download(f"{run.files}/{name}", scratch)

    @_explained
    def has_file(self, run: StoredRun, name: str) -> bool:
        """Whether a run has an artifact of this name at its top, as far as MLflow sees it."""
        return any(file.path == name for file in self.client.list_artifacts(run.id))

    @_explained
    def _download(self, uri: str, folder: str) -> Path:
        import mlflow.artifacts

        return Path(
            mlflow.artifacts.download_artifacts(
                artifact_uri=uri, dst_path=folder, tracking_uri=for_mlflow(self.uri)
            )
        )

    def _folder(self, run: StoredRun) -> Path | None:
        """The folder of a run's files beside an sqlite database; None = MLflow has to reach them.

        A home may be moved or copied. The database goes on naming the place where it once was, to
        which MLflow's client would write.
        """
        path = sqlite_path(self.uri)
        # The id is a part of the path, and anybody may have written the database.
        if path is None or not RUN_ID.fullmatch(run.id):
            return None
        if not run.files.endswith(f"/{ARTIFACTS}/{run.id}/artifacts"):
            return None
        return path.parent / ARTIFACTS / run.id / "artifacts"


def _sweep_tags(sweep: str) -> dict[str, str]:
    """The tags by which the experiment of a sweep is found."""
    return {"suite.kind": "sweep", SWEEP: sweep}


def _stored(run: Any) -> StoredRun:
    """The part of a `mlflow.entities.Run` that is needed here."""
    info = run.info
    return StoredRun(
        info.run_id, info.status, info.start_time, dict(run.data.tags), info.artifact_uri or ""
    )


def key_name(text: str) -> str:
    """Replace every character of a name that MLflow refuses by an underscore."""
    # 250 characters is MLflow's limit for a key.
    return re.sub(r"[^A-Za-z0-9_\-./: ]", "_", text)[:250]


def clip(texts: Mapping[str, Any], limit: int) -> dict[str, str]:
    """Cut values visibly to the length that MLflow stores; MLflow itself cuts them without a word.

    What no database holds is replaced.
    """
    clipped: dict[str, str] = {}
    for key, text in texts.items():
        # PostgreSQL refuses the null character, and lone surrogates cannot be encoded at all.
        whole = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
        if len(whole) > limit:
            whole = whole[: limit - 3] + "..."
        clipped[key] = whole
    return clipped
