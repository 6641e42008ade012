"""MLflow's tables in sqlite and PostgreSQL, read and written directly: the same runs as through its client, a hundred times faster.

MLflow's client reads every metric of every run that it returns and makes several transactions for each run that it writes:
some 1,000 runs/s and 60 runs/s. Here a search reads the tags that are asked for, and all the runs of a cell are one
transaction. The schema, experiments, artifacts and deletions stay MLflow's own (the client is opened when one of these is
needed, and by whoever writes, so that MLflow has made or checked the schema).

Source: tables as in mlflow.store.tracking.dbmodels.models of MLflow 3.17.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from suite.errors import TrackingError
from suite.tracking.store import (
    MAX_PARAM_CHARS,
    MAX_TAG_CHARS,
    PAGE_SIZE,
    Point,
    RunRecord,
    Store,
    StoredRun,
    clip,
    key_name,
)

BUSY_S = 20
SCHEMA_LOCK = 5_217_340_991_245
"""PostgreSQL's advisory lock under which the schema is made; any number that others do not use."""
COLUMNS = {
    "runs": (
        *(
            "run_uuid",
            "name",
            "source_type",
            "source_name",
            "entry_point_name",
            "user_id",
            "status",
            "start_time",
            "end_time",
        ),
        *("source_version", "lifecycle_stage", "artifact_uri", "experiment_id"),
    ),
    "tags": ("key", "value", "run_uuid"),
    "params": ("key", "value", "run_uuid"),
    "metrics": ("key", "value", "timestamp", "step", "is_nan", "run_uuid"),
    "latest_metrics": ("key", "value", "timestamp", "step", "is_nan", "run_uuid"),
}
Rows = dict[str, list[tuple[Any, ...]]]
"""Rows to insert, by table."""


class SqlStore(Store):
    """A store whose database this process reaches by itself.

    Args:
        uri: `sqlite:///PATH` or `postgresql+psycopg://...`.
        page_size: Of the calls that are left to MLflow's client.

    Raises:
        TrackingError: The URI cannot be read, or its driver is not installed.
    """

    def __init__(self, uri: str, page_size: int = PAGE_SIZE) -> None:
        super().__init__(None, uri, page_size)
        self.engine = _engine(uri)

    def ping(self) -> None:
        self._read("SELECT count(*) FROM experiments")

    @contextmanager
    def schema(self) -> Iterator[None]:
        """Hold a PostgreSQL database while MLflow opens it and, where it is empty, makes its tables: drivers on two hosts would collide.

        Raises:
            TrackingError: The server does not answer, or refuses.
        """
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(self.engine.connect())
                connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": SCHEMA_LOCK})
            except SQLAlchemyError as error:
                raise self.explain(error) from error
            stack.callback(
                connection.invalidate
            )  # the lock ends with the connection, which a pool would keep
            yield

    def experiments(self) -> dict[str, str]:
        rows = self._read(
            "SELECT e.name, e.experiment_id FROM experiments e JOIN experiment_tags t ON t.experiment_id = e.experiment_id "
            "WHERE e.lifecycle_stage = 'active' AND t.key = 'suite.kind' AND t.value = 'sweep' ORDER BY e.name"
        )
        return {name: str(id_) for name, id_ in rows}

    def runs(
        self,
        experiments: Sequence[str],
        tags: Mapping[str, str],
        *,
        having: str | None = None,
        only: Sequence[str] = (),
    ) -> list[StoredRun]:
        statement, values = _search(experiments, tags, having, only)
        found: dict[str, StoredRun] = {}
        for id_, status, start_ms, key, value in self._read(statement, values):
            run = found.get(id_)
            if run is None:
                run = found[id_] = StoredRun(id_, status, start_ms, {})
            run.tags[key] = value
        return sorted(found.values(), key=lambda run: (run.start_ms, run.id))

    def create_run(
        self, experiment: str, *, name: str, start_s: float, tags: Mapping[str, str]
    ) -> StoredRun:
        return self.write_runs(experiment, [RunRecord(name, start_s, dict(tags))])[0]

    def write_runs(self, experiment: str, records: Sequence[RunRecord]) -> list[StoredRun]:
        ((location,),) = self._read(
            "SELECT artifact_location FROM experiments WHERE experiment_id = :id",
            {"id": int(experiment)},
        )
        rows: Rows = {table: [] for table in COLUMNS}
        made = [
            _add(rows, record, experiment=int(experiment), location=location) for record in records
        ]

        def insert(connection: Connection) -> None:
            for table, found in rows.items():
                _insert(connection, table, found)

        self._write(insert)
        return made

    def log(
        self,
        run_id: str,
        *,
        metrics: Sequence[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        rows = _details(run_id, metrics, params or {}, tags or {})

        def upsert(connection: Connection) -> None:
            for table in ("params", "metrics", "latest_metrics", "tags"):
                if rows[table]:
                    connection.execute(
                        text(_upsert(table)),
                        [dict(zip(COLUMNS[table], row, strict=True)) for row in rows[table]],
                    )

        self._write(upsert)

    def finish(self, run_id: str, status: str, end_s: float) -> None:
        values = {
            "id": run_id,
            "status": status,
            "end": None if status == "SCHEDULED" else int(end_s * 1000),
        }
        statement = text(
            "UPDATE runs SET status = :status, end_time = coalesce(:end, end_time) WHERE run_uuid = :id"
        )
        self._write(lambda connection: connection.execute(statement, values))

    def _read(self, statement: str, values: Mapping[str, Any] | None = None) -> list[Any]:
        rows: list[Any] = self._transact(
            lambda connection: list(connection.execute(text(statement), dict(values or {})))
        )
        return rows

    def _write(self, change: Callable[[Connection], object]) -> None:
        self._transact(change, write=True)

    def _transact(self, work: Callable[[Connection], Any], *, write: bool = False) -> Any:
        """In one transaction, so that a kill or a lost connection leaves all or nothing.

        Raises:
            TrackingError: The database is away, locked or full, or is none of MLflow's.
        """
        try:
            with self.engine.begin() as connection:
                if (
                    write and self.engine.dialect.name == "sqlite"
                ):  # wait for the other writer here, not half-way
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                return work(connection)
        except (
            SQLAlchemyError,
            self.engine.dialect.loaded_dbapi.Error,
        ) as error:  # the latter from COPY
            raise self.explain(error) from error


def _engine(uri: str) -> Engine:
    try:
        if not uri.startswith("sqlite:"):
            return create_engine(uri, pool_size=2, pool_pre_ping=True)
        engine = create_engine(uri, poolclass=NullPool, connect_args={"timeout": BUSY_S})
    except (SQLAlchemyError, NoSuchModuleError, ImportError) as error:
        scheme = make_url(uri).drivername if "://" in uri else uri
        raise TrackingError(
            f"tracking store {scheme}://...: {error}; for PostgreSQL: pip install 'petl-suite[postgres]'"
        ) from error
    event.listen(engine, "connect", _leave_transactions_to_us)
    return engine


def _leave_transactions_to_us(connection: Any, _: Any) -> None:
    """Python's sqlite3 would begin a transaction by itself, and not an immediate one."""
    connection.isolation_level = None


def _search(
    experiments: Sequence[str], tags: Mapping[str, str], having: str | None, only: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """A statement, made of fixed texts and numbered names, and the values bound to them."""
    values: dict[str, Any] = {f"e{n}": int(id_) for n, id_ in enumerate(experiments)}
    wheres = [
        "r.lifecycle_stage = 'active'",
        f"r.experiment_id IN ({_names('e', len(experiments)) or 'NULL'})",
    ]
    if having is not None:  # an index leads to the few runs that have it
        wheres.append("r.run_uuid IN (SELECT run_uuid FROM tags WHERE key = :having)")
        values["having"] = having
    for n, (key, value) in enumerate(tags.items()):
        wheres.append(
            f"EXISTS (SELECT 1 FROM tags m WHERE m.run_uuid = r.run_uuid AND m.key = :k{n} AND m.value = :v{n})"  # noqa: S608
        )
        values |= {f"k{n}": key, f"v{n}": value}
    whole, parts = (
        [key for key in only if not key.endswith("*")],
        [key[:-1] + "%" for key in only if key.endswith("*")],
    )
    if only:
        wanted = [
            f"t.key IN ({_names('o', len(whole)) or 'NULL'})",
            *(f"t.key LIKE :p{n}" for n in range(len(parts))),
        ]
        wheres.append(f"({' OR '.join(wanted)})")
        values |= {f"o{n}": key for n, key in enumerate(whole)} | {
            f"p{n}": key for n, key in enumerate(parts)
        }
    select = "SELECT r.run_uuid, r.status, r.start_time, t.key, t.value FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid WHERE "
    return select + " AND ".join(wheres), values


def _names(letter: str, count: int) -> str:
    return ", ".join(f":{letter}{n}" for n in range(count))


def _add(rows: Rows, record: RunRecord, *, experiment: int, location: str | None) -> StoredRun:
    """The rows of a new run, as MLflow's own `create_run` and `log_batch` would make them."""
    id_, start_ms = uuid.uuid4().hex, int(record.start_s * 1000)
    end_ms = None if record.end_s is None else int(record.end_s * 1000)
    tags = clip({**record.tags, "mlflow.runName": record.name}, MAX_TAG_CHARS)
    folder = f"{(location or '').rstrip('/')}/{id_}/artifacts"
    run = (
        id_,
        record.name[:250],
        "UNKNOWN",
        "",
        "",
        "unknown",
        record.status,
        start_ms,
        end_ms,
        "",
        "active",
        folder,
        experiment,
    )
    rows["runs"].append(run)
    for table, found in _details(id_, record.metrics, record.params, tags).items():
        rows[table] += found
    return StoredRun(id_, record.status, start_ms, dict(tags))


def _details(
    id_: str, metrics: Sequence[Point], params: Mapping[str, str], tags: Mapping[str, str]
) -> Rows:
    points = {(key_name(p.key), p.value, int(p.time_s * 1000), p.step) for p in metrics}
    latest = {
        key: (key, value, time_ms, step)
        for key, value, time_ms, step in sorted(points, key=lambda p: (p[3], p[2], p[1]))
    }
    return {
        "tags": [(key, value, id_) for key, value in clip(tags, MAX_TAG_CHARS).items()],
        "params": [
            (key, value, id_)
            for key, value in {
                key_name(k): v for k, v in clip(params, MAX_PARAM_CHARS).items()
            }.items()
        ],
        "metrics": [(*point, False, id_) for point in points],
        "latest_metrics": [(*point, False, id_) for point in latest.values()],
    }


def _insert(connection: Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    columns = COLUMNS[table]
    if not rows:
        return
    raw = connection.connection.driver_connection
    if connection.dialect.name == "postgresql" and raw is not None:
        with (
            raw.cursor() as cursor,
            cursor.copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN") as copy,
        ):
            for row in rows:
                copy.write_row(row)
    else:
        connection.exec_driver_sql(
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",  # noqa: S608 - names of ours
            list(rows),
        )


def _upsert(table: str) -> str:
    """A tag is replaced, a metric becomes the latest if it is, what is there already stays."""
    columns = COLUMNS[table]
    insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(f':{c}' for c in columns)}) ON CONFLICT "  # noqa: S608 - names of ours
    if table == "tags":
        return insert + "(key, run_uuid) DO UPDATE SET value = excluded.value"
    if table == "latest_metrics":
        values = ", ".join(f"{c} = excluded.{c}" for c in columns[1:-1])
        order = ("step", "timestamp", "value")
        older, newer = (", ".join(f"{of}.{c}" for c in order) for of in (table, "excluded"))
        return insert + f"(key, run_uuid) DO UPDATE SET {values} WHERE ({older}) < ({newer})"
    return insert + "DO NOTHING"
