"""Results as one file, to bring the sweeps of several clusters together in one MLflow store.

The file holds the leaderboard's cells, of one or many sweeps and homes, with what compares them:
as parquet, or as JSON with the same names. Rows keep the id of the home they come from, so equal
sweeps of two homes stay two, and a sync of this home does not touch the rows of another.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from suite.config.names import KINDS, why_not
from suite.config.reference import MEAN
from suite.errors import TrackingError, UnknownNameError
from suite.files import read_json, replacing
from suite.leaderboard.fields import IMPORTED, Row, with_values
from suite.leaderboard.file import SCHEMA_VERSION, read_rows, write_rows
from suite.leaderboard.measures import mean, spread
from suite.leaderboard.table import compare
from suite.plan.cell_state import CellStatus
from suite.tracking.rows import read_rows as rows_of_store
from suite.tracking.store import open_store, without_password
from suite.tracking.sweep_runs import SweepRuns

FORMAT = "suite-rows"
SUFFIXES = (".json", ".parquet")
MAX_BYTES = 512 * 2**20
"""The largest file that is read; the results of 10,000 cells have some 50 MiB as JSON."""
TOLERANCE = 1e-9
"""Relative; sums in another order differ by less."""
LARGEST = 1e100
"""No measured number is larger, and sums of numbers near the end of the range overflow."""
MADE_AGAIN = "export it again from the home that ran the sweep: this file was changed since"
REMEDY = "get it again, or export it again with the version of the suite that is here"
NEEDED = ("home", "sweep", "backbone", "method", "task", "arm", "digest")
"""Fields that may not be empty."""


class ResultsFile(BaseModel):
    """A JSON file of results."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["suite-rows"] = "suite-rows"
    schema_version: str
    suite_version: str
    rows: list[dict[str, Any]]


@dataclass(slots=True)
class ImportReport:
    """What an import did with the cells of a file.

    Attributes:
        new: Cells that the store did not have.
        replaced: Cells of which the store had older results.
        already: Cells that the store had as they are.
        older: Cells that were left out, because the store has newer results of their sweep.
    """

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
    stored = rows_of_store(open_store(tracking_uri, create=False), sweep)
    # What takes more than one row to know is not stored; whoever reads the file has no suite.
    rows = [row for row in compare(stored) if row.task != MEAN]
    if path.suffix == ".parquet":
        write_rows(path, rows)
        return len(rows)
    content = ResultsFile(
        schema_version=SCHEMA_VERSION, suite_version=__version__, rows=[vars(row) for row in rows]
    )
    # A file that is cut off by a full disk never takes the place of a whole one.
    with replacing(path) as temporary:
        # NaN is not JSON, and other readers would refuse the file.
        text = json.dumps(content.model_dump(), indent=1, allow_nan=False)
        temporary.write_text(text + "\n")
    return len(rows)


def read_results(path: Path) -> list[Row]:
    """The rows of a file, checked as a whole.

    Raises:
        TrackingError: Absent, too large, without rows, cut, of another kind or of another schema
            version, or a row in it does not make sense, or stands there twice.
    """
    _check_suffix(path)
    _check_size(path)
    if path.suffix == ".json":
        found = _read_json(path)
    else:
        found = [vars(row) for row in read_rows(path, remedy=REMEDY)]
    # Nothing exports such a file, and a script that merges files would not notice.
    if not found:
        raise TrackingError(f"{path}: holds no rows; {REMEDY}")
    # Built once, because building the validator of a class with many fields takes long.
    check = TypeAdapter(Row)
    rows: list[Row] = []
    places: dict[tuple[str, str, str], int] = {}
    # All rows are checked before the first is used, so that a bad file changes nothing.
    for number, values in enumerate(found):
        where = f"{path}: rows[{number}]"
        try:
            row = check.validate_python(values)
        except ValidationError as error:
            raise TrackingError(f"{where}: {_first(error)}") from None
        _check_row(row, where=where)
        # Files that somebody put together: the leaderboard would show such a cell twice.
        first = places.setdefault((row.home, row.sweep, row.cell_key), number)
        if first != number:
            raise TrackingError(
                f"{where}: got {row.sweep}/{row.cell_key} of home {row.home} a second time, after "
                f"rows[{first}]; expected each cell once: import the files one after the other"
            )
        rows.append(row)
    return rows


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise TrackingError(
            f"{path}: got a name that ends in {path.suffix or 'nothing'!r}, "
            f"expected {' or '.join(SUFFIXES)}"
        )


def _check_size(path: Path) -> None:
    """Check that the file is not too large: it comes from elsewhere and is read as a whole."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise TrackingError(f"{path}: no such file") from None
    except OSError as error:
        raise TrackingError(f"{path}: cannot be read: {error}") from None
    # Asked before the file is opened: a huge file must not fill the memory first.
    if size > MAX_BYTES:
        raise TrackingError(
            f"{path}: got {size:,} bytes, expected at most {MAX_BYTES:,}; "
            "export the sweeps one by one (--sweep)"
        )


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise TrackingError(f"{path}: not whole JSON: {error}; was it cut in a transfer?") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TrackingError(f"{path}: not a file of suite export-results")
    # Before the model is validated, so that an old file gets this message and not one about a
    # field.
    if data.get("schema_version") != SCHEMA_VERSION:
        raise TrackingError(
            f"{path}: got rows of schema version {data.get('schema_version')}, written by suite "
            f"{data.get('suite_version', '?')}, expected {SCHEMA_VERSION}; "
            f"{REMEDY}"
        )
    try:
        return ResultsFile.model_validate(data).rows
    except ValidationError as error:
        raise TrackingError(
            f"{path}: not what suite export-results writes: {_first(error)}"
        ) from None


def _check_row(row: Row, *, where: str) -> None:
    empty = [name for name in NEEDED if not getattr(row, name)]
    if empty:
        raise TrackingError(f"{where}: got nothing for {', '.join(empty)}, expected a name")
    # They become parts of paths, and MLflow is searched by them, in a language of quotes.
    for kind in KINDS:
        wrong = why_not(kind, getattr(row, kind))
        if wrong is not None:
            raise TrackingError(f"{where}: {wrong}")
    known = [status.value for status in CellStatus]
    if row.status not in known:
        raise TrackingError(f"{where}: got status {row.status!r}, expected {', '.join(known)}")
    _check_text(row, where=where)
    _check_numbers(row, where=where)
    _check_scores(row, where=f"{where}: {row.sweep}/{row.cell_key}")


def _check_text(row: Row, *, where: str) -> None:
    for name, value in vars(row).items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        # JSON can write half of a pair of surrogates, which is no character.
        except UnicodeEncodeError as error:
            raise TrackingError(
                f"{where}: got {name} that is no text ({error.reason}); {MADE_AGAIN}"
            ) from None


def _check_numbers(row: Row, *, where: str) -> None:
    for name, value in vars(row).items():
        numbers = value.values() if isinstance(value, dict) else [value]
        for number in numbers:
            # Whatever is compared with NaN, the answer is no.
            if isinstance(number, (int, float)) and not abs(number) <= LARGEST:
                raise TrackingError(
                    f"{where}: got {name} {number!s:.12}, expected a number up to {LARGEST:g}"
                )


def _check_scores(row: Row, *, where: str) -> None:
    """Compute again what follows from a row's own seed scores."""
    scores = row.seed_scores.values()
    told = {"seeds": row.seeds, "score_mean": row.score_mean, "score_std": row.score_std}
    expected = {"seeds": len(scores), "score_mean": mean(scores), "score_std": spread(scores)}
    for name, value in expected.items():
        if not _same(told[name], value):
            raise TrackingError(
                f"{where}: got {name} {told[name]}, expected {value}, as its seed_scores "
                f"{dict(row.seed_scores)} give; {MADE_AGAIN}"
            )
    if row.ci_low is not None and row.ci_high is not None and row.score_mean is not None:
        # Rounding may push the end of an interval without a width past its middle.
        slack = TOLERANCE * max(1.0, abs(row.score_mean))
        if not row.ci_low - slack <= row.score_mean <= row.ci_high + slack:
            raise TrackingError(
                f"{where}: got the interval {row.ci_low} to {row.ci_high}, expected one that holds "
                f"score_mean, {row.score_mean}; {MADE_AGAIN}"
            )
    if row.rejected and row.admitted is not False:
        raise TrackingError(
            f"{where}: got admitted {row.admitted} beside reasons to reject it "
            f"({'; '.join(row.rejected)}), expected false; {MADE_AGAIN}"
        )


def _same(told: float | None, computed: float | None) -> bool:
    if told is None or computed is None:
        return told is computed
    return math.isclose(told, computed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _first(error: ValidationError) -> str:
    # One fault is enough to find the place; a broken file may have thousands.
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def import_results(
    path: Path, *, tracking_uri: str, sweep: str | None = None, files: Path | None = None
) -> ImportReport:
    """Bring the results of a file into a store; done twice, the second time changes nothing.

    A home's sweep that the store has already is replaced. It stays where its last trial ended later
    than the file's, or where its test scores were looked at more often. Nothing is written unless
    the whole file is good, and no cell is lost: a home's sweep only grows, so its later state has
    all cells of its earlier one.

    Args:
        path: What `export_results` wrote, here or elsewhere.
        tracking_uri: As `resolve_uri` gives it; an sqlite store is created.
        sweep: Only this sweep; None = all.
        files: A folder for files of runs, where the store has none of its own.

    Raises:
        TrackingError: `read_results` refuses the file; the file has no such sweep; the later state
            of a sweep lacks cells of the earlier one; the store cannot be written.
    """
    # By home too: two clusters may have run a sweep of the same name.
    of_sweeps: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in read_results(path):
        of_sweeps[row.sweep, row.home].append(row)
    known = {name for name, _ in of_sweeps}
    if sweep is not None and sweep not in known:
        raise TrackingError(str(UnknownNameError("sweep", sweep, known, where=str(path))))
    store = open_store(tracking_uri)
    wanted = []
    for (name, home), rows in sorted(of_sweeps.items()):
        if sweep not in (None, name):
            continue
        runs = SweepRuns(store, home=home, sweep=name, files=files)
        here = _rows_here(runs)
        _check_none_is_lost(here, rows, where=f"{path}: {name} of home {home}")
        wanted.append((runs, here, rows))
    report = ImportReport()
    for runs, here, rows in wanted:
        _import_sweep(runs, here, rows, report)
    return report


def _rows_here(runs: SweepRuns) -> dict[str, Row]:
    try:
        return {row.cell_key: row for row in runs.rows()}
    except TrackingError:
        # Lost, or of another version of the suite: the imported rows take their place.
        return {}


def _check_none_is_lost(here: Mapping[str, Row], rows: Sequence[Row], *, where: str) -> None:
    given = {row.cell_key for row in rows}
    later = "the file"
    lost = sorted(here.keys() - given)
    if _is_later(here, rows):
        later = "the store"
        lost = sorted(given - here.keys())
    if lost:
        raise TrackingError(
            f"{where}: {later} has the later state, and lacks {len(lost)} of the other's cells "
            f"({lost[0]}, ...): rows were taken out, or two copies of the home went on by "
            "themselves; export all of it from one home, or run `suite sync --new-id` in one of "
            "the copies and export that again, or import into another --home"
        )


def _is_later(here: Mapping[str, Row], rows: Sequence[Row]) -> bool:
    """Whether the store has the newer state of a sweep: that with the later trial."""
    return _lateness(here.values()) > _lateness(rows)


def _import_sweep(
    runs: SweepRuns, here: Mapping[str, Row], rows: Sequence[Row], report: ImportReport
) -> None:
    """Write the rows, which the leaderboard reads, and then a run for each cell, for people."""
    if _is_later(here, rows):
        report.older += len(rows)
        return
    counted = []
    for row in rows:
        _count(row, here, report)
        known = here.get(row.cell_key)
        if known is None or known.digest != row.digest:
            counted.append(_imported(row))
        # This one was computed from its answers here.
        elif known.score_mean is not None and known.unverified is None:
            counted.append(known)
        # A digest is of one cell's trials, and ranks hang on those of all.
        else:
            counted.append(with_values(row, unverified=known.unverified))
    rows = counted
    # From here on the leaderboard shows the imported rows; the runs below only serve people.
    runs.publish(rows)
    # An import that was interrupted has published its rows, and lacks the runs of some cells.
    for row in rows:
        if not runs.is_current(row):
            runs.write_cell(row)


def _imported(row: Row) -> Row:
    """The row as this store has it: nobody can compute its score again from answers."""
    if row.score_mean is None:
        return row
    return with_values(row, unverified=f"{IMPORTED}, which home {row.home} has")


def _count(row: Row, here: Mapping[str, Row], report: ImportReport) -> None:
    before = here.get(row.cell_key)
    if before is None:
        report.new += 1
    elif before.digest == row.digest:
        report.already += 1
    else:
        report.replaced += 1


def _lateness(rows: Iterable[Row]) -> tuple[float, int]:
    """The later a state of a sweep is, the greater: when its last trial ended, and its looks.

    A sweep whose seeds change has another look at its test scores, and may train nothing for it.
    """
    last_end_s, looks = 0.0, 0
    for row in rows:
        # A cell without an ended trial is older than any other.
        last_end_s = max(last_end_s, row.ended_at or 0.0)
        looks += row.test_looks
    return last_end_s, looks


def describe(report: ImportReport, path: Path, tracking_uri: str) -> str:
    """Say in one line what an import did."""
    return (
        f"{report.total} cells in {path}: {report.new} new, {report.replaced} newer than here, "
        f"{report.already} here already, {report.older} older than here; "
        f"in {without_password(tracking_uri)}"
    )
