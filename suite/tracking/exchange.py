"""Results as one file, to bring the sweeps of several clusters together in one MLflow store.

A file holds what the leaderboard showed, for whoever reads it, and the tags of the cell runs and ranks behind it, from which
an import makes them anew elsewhere: under the name of the home they come from, so that equal sweeps of two homes stay two.
The cells of another home are never touched by a sync of this one.

JSON: one object, `ResultsFile`. Parquet: the leaderboard as a table; the rest of that object as JSON text in the schema's
metadata under `suite-results`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from suite.errors import TrackingError, UnknownNameError
from suite.files import replacing
from suite.tracking.query import leaderboard, to_rows
from suite.tracking.ranks import KIND as RANKS
from suite.tracking.store import Point, Store, StoredRun, open_store, without_password
from suite.tracking.summary import FIELDS, NAMES, ROW, CellSummary, from_tags

SCHEMA_VERSION = 1
"""Of the file; raised when its meaning changes."""
FORMAT = "suite-results"
SUFFIXES = (".json", ".parquet")
MAX_BYTES = 512 * 2**20
"""Of a file to read; the results of 10,000 cells have some 100 MiB."""
CELL = "cell"
LAST = ("suite.digest", "suite.written")
"""Tags that say a run is whole: written when everything else is."""


class ExchangedRun(BaseModel):
    """A run of MLflow: a cell, or the ranks of a sweep's arms on a task."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tags: dict[str, str]
    started_at: float = Field(description="seconds since 1970")

    @property
    def place(self) -> tuple[str, ...]:
        """What it is about; the same in every store."""
        keys = ("backbone", "task") if self.tags["suite.kind"] == RANKS else ("suite.cell",)
        return (self.tags["suite.kind"], self.tags["suite.home"], *(self.tags[key] for key in keys))

    @property
    def written(self) -> float:
        """When its home wrote it, seconds since 1970."""
        return float(self.tags.get("suite.written", 0.0))


class ResultsFile(BaseModel):
    """What a file holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["suite-results"] = "suite-results"
    schema_version: int = SCHEMA_VERSION
    suite_version: str
    homes: list[str] = Field(description="where the sweeps were run")
    runs: list[ExchangedRun]
    leaderboard: list[dict[str, Any]] = Field(
        default=[],
        description="as `suite leaderboard --format json` prints it; not read by an import",
    )


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did with the cells of a file: `older` ones were left out, as the store has newer ones."""

    new: int = 0
    replaced: int = 0
    already: int = 0
    older: int = 0

    @property
    def total(self) -> int:
        return self.new + self.replaced + self.already + self.older


def export_results(path: Path, *, tracking_uri: str, sweep: str | None = None) -> int:
    """Write the results of a store, those imported into it among them, to a file.

    Args:
        path: Ends in .json or .parquet; an existing file is replaced.
        tracking_uri: As `resolve_uri` gives it.
        sweep: Only this sweep; None = all.

    Returns:
        Cells in the file.

    Raises:
        TrackingError: Another suffix; the store cannot be read, or holds no such results.
    """
    from suite import __version__

    _check_suffix(path)
    frame = leaderboard(tracking_uri, sweep=sweep, rejected=True)
    store = open_store(tracking_uri, create=False)
    experiments = [id_ for name, id_ in store.experiments().items() if sweep in (None, name)]
    found = [
        run
        for kind in (CELL, RANKS)
        for run in store.runs(experiments, {"suite.kind": kind})
        if "suite.digest" in run.tags
    ]
    runs = [ExchangedRun(tags=_own_tags(run.tags), started_at=run.start_ms / 1000) for run in found]
    homes = sorted({run.tags["suite.home"] for run in runs})
    content = ResultsFile(suite_version=__version__, homes=homes, runs=runs)
    with replacing(path) as temporary:
        if path.suffix == ".json":
            whole = content.model_copy(update={"leaderboard": to_rows(frame)})
            temporary.write_text(
                json.dumps(whole.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
            )
        else:
            _write_parquet(temporary, frame, content)
    return sum(run.tags["suite.kind"] == CELL for run in runs)


def _own_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Without those that MLflow sets itself, and the row, which is made of the others."""
    return {
        key: value
        for key, value in sorted(tags.items())
        if not key.startswith("mlflow.") and key != ROW
    }


def _write_parquet(path: Path, frame: Any, content: ResultsFile) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    rest = content.model_dump_json(exclude={"leaderboard"})
    pq.write_table(
        table.replace_schema_metadata({**(table.schema.metadata or {}), FORMAT: rest}), path
    )


def read_results(path: Path) -> ResultsFile:
    """A file of results, checked as a whole.

    Raises:
        TrackingError: Absent, cut, of another kind or of another schema version, or a run in it does not make sense.
    """
    _check_suffix(path)
    _check_size(path)
    data = _read_json(path) if path.suffix == ".json" else _read_parquet(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TrackingError(f"{path}: not a file of suite export-results")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        made = f"schema version {version}, written by suite {data.get('suite_version', '?')}"
        raise TrackingError(
            f"{path}: got {made}, expected {SCHEMA_VERSION}; export it again with the version of the suite that is here"
        )
    try:
        content = ResultsFile.model_validate(data)
    except ValidationError as error:
        raise TrackingError(
            f"{path}: not what suite export-results writes: {_first(error)}"
        ) from None
    for number, run in enumerate(content.runs):
        _check_run(run, where=f"{path}: runs[{number}]")
    return content


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise TrackingError(
            f"{path}: got a name that ends in {path.suffix or 'nothing'!r}, expected {' or '.join(SUFFIXES)}"
        )


def _check_size(path: Path) -> None:
    """A file comes from elsewhere: what it takes to read it is known before."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise TrackingError(f"{path}: no such file") from None
    except OSError as error:
        raise TrackingError(f"{path}: cannot be read: {error}") from None
    if size > MAX_BYTES:
        raise TrackingError(
            f"{path}: got {size:,} bytes, expected at most {MAX_BYTES:,}; export the sweeps one by one (--sweep)"
        )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TrackingError(f"{path}: not whole JSON: {error}; was it cut in a transfer?") from None


def _read_parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
        return json.loads(metadata.get(FORMAT.encode(), b"null"))
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        raise TrackingError(
            f"{path}: not whole parquet: {str(error).splitlines()[0]}; was it cut in a transfer?"
        ) from None


def _check_run(run: ExchangedRun, *, where: str) -> None:
    kind = run.tags.get("suite.kind")
    if kind not in (CELL, RANKS):
        raise TrackingError(f"{where}: got a run of kind {kind!r}, expected {CELL} or {RANKS}")
    if ROW in run.tags:
        raise TrackingError(f"{where}: got the tag {ROW}, which no file has")
    needed = {
        "suite.home",
        "suite.digest",
        *(("sweep", "backbone", "task") if kind == RANKS else ("suite.cell", *NAMES)),
    }
    if lacking := sorted(needed - run.tags.keys()):
        raise TrackingError(f"{where}: lacks the tags {', '.join(lacking)}")
    if kind == CELL:
        try:
            TypeAdapter(CellSummary).validate_python(_fields(from_tags(run.tags)))
        except ValidationError as error:
            raise TrackingError(
                f"{where}: cell {run.tags['suite.cell']}: {_first(error)}"
            ) from None
        except TrackingError as error:
            raise TrackingError(f"{where}: {error}") from None


def _fields(summary: CellSummary) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in FIELDS}


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def import_results(path: Path, *, tracking_uri: str, sweep: str | None = None) -> ImportReport:
    """Bring the results of a file into a store; done twice, the second time changes nothing.

    A cell that the store has already, of the same home, is replaced if its home wrote the file's later. Nothing is written
    unless the whole file is good.

    Args:
        path: What `export_results` wrote, here or elsewhere.
        tracking_uri: As `resolve_uri` gives it; an sqlite store is created.
        sweep: Only this sweep; None = all.

    Raises:
        TrackingError: As `read_results`; the file has no such sweep; the store cannot be written.
    """
    content = read_results(path)
    known = {run.tags["sweep"] for run in content.runs}
    if sweep is not None and sweep not in known:
        raise TrackingError(str(UnknownNameError("sweep", sweep, known, where=str(path))))
    chosen = sorted(
        (r for r in content.runs if sweep in (None, r.tags["sweep"])), key=lambda r: r.tags["sweep"]
    )
    store, report = open_store(tracking_uri), ImportReport()
    for name, runs in groupby(chosen, key=lambda run: run.tags["sweep"]):
        report = _import_sweep(store, name, list(runs), report)
    return report


def _import_sweep(
    store: Store, sweep: str, runs: Sequence[ExchangedRun], report: ImportReport
) -> ImportReport:
    """Cells first; the ranks of a home come with its cells, as they are of no use beside others."""
    experiment = store.experiment(sweep)
    here = _by_place(
        run for kind in (CELL, RANKS) for run in store.runs([experiment], {"suite.kind": kind})
    )
    changed: set[str] = set()
    for run in (r for r in runs if r.tags["suite.kind"] == CELL):
        verdict = _verdict(run, here.get(run.place))
        report = replace(report, **{verdict: getattr(report, verdict) + 1})
        if verdict in ("new", "replaced"):
            changed.add(run.tags["suite.home"])
            _write(store, experiment, run, here.get(run.place))
    for run in (r for r in runs if r.tags["suite.kind"] == RANKS):
        if run.tags["suite.home"] in changed or run.place not in here:
            _write(store, experiment, run, here.get(run.place))
    return report


def _by_place(runs: Iterable[StoredRun]) -> dict[tuple[str, ...], StoredRun]:
    """Oldest first, so that of a run that was made twice the same one is found as by a sync."""
    found: dict[tuple[str, ...], StoredRun] = {}
    for run in runs:
        found.setdefault(ExchangedRun(tags=run.tags, started_at=0.0).place, run)
    return found


def _verdict(
    run: ExchangedRun, known: StoredRun | None
) -> Literal["new", "replaced", "already", "older"]:
    if known is None:
        return "new"
    if known.tags.get("suite.digest") == run.tags["suite.digest"]:
        return "already"
    return "replaced" if run.written >= float(known.tags.get("suite.written", 0.0)) else "older"


def _write(store: Store, experiment: str, run: ExchangedRun, known: StoredRun | None) -> None:
    """What an interrupted import leaves behind lacks its digest, and is written again by the next."""
    tags = run.tags
    if known is None:
        begun = {key: value for key, value in tags.items() if key not in LAST}
        known = store.create_run(
            experiment,
            name=tags.get("suite.cell", f"ranks {tags['task']}"),
            start_s=run.started_at,
            tags=begun,
        )
    points: list[Point] = []
    if tags["suite.kind"] == CELL:
        summary = from_tags(tags)
        revision = (
            max(int(known.tags.get("suite.revision", 0)), int(tags.get("suite.revision", 0))) + 1
        )
        tags = {**tags, "suite.revision": str(revision), **summary.row(tags["suite.home"])}
        points = [
            Point(key, value, summary.ended_at or run.started_at, revision)
            for key, value in summary.metrics().items()
        ]
        status = {"done": "FINISHED", "failed": "FAILED"}.get(summary.status, "SCHEDULED")
        store.finish(known.id, status, summary.ended_at or run.started_at)
    store.log(known.id, metrics=points, tags=tags)


def describe(report: ImportReport, path: Path, tracking_uri: str) -> str:
    """One line for a person."""
    parts = f"{report.new} new, {report.replaced} newer than here, {report.already} here already, {report.older} older than here"
    return f"{report.total} cells in {path}: {parts}; in {without_password(tracking_uri)}"
