"""Keep rows in one parquet file: a line per cell, a column per field of `Row`.

Mappings and lists are JSON text. The schema's metadata says which schema version the file has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from suite.config.hashing import short_hash
from suite.config.names import KINDS, why_not
from suite.errors import UnreadableRowsError
from suite.files import replacing
from suite.leaderboard.fields import BY_NAME, FIELDS, NAMES, Kind, Row, row_of

if TYPE_CHECKING:
    import pyarrow as pa

MEANING = 3
"""Raise this number when a field changes its meaning."""
# Made of the table itself, so that no field can come or go without a new version.
SCHEMA_VERSION = short_hash([MEANING, [[about.name, about.kind.value] for about in FIELDS]])
"""The version changes when a field comes or goes, or changes its meaning or its kind."""
VERSION_KEY = b"suite-rows"
REMEDY = "remove it and run: suite sync, then import again what came from other homes"


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace a file by these rows, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for about in FIELDS:
        values = []
        for row in rows:
            value = getattr(row, about.name)
            if about.kind is Kind.JSON:
                # NaN is no JSON, and other readers of the file would stop at it.
                value = json.dumps(value, allow_nan=False)
            values.append(value)
        columns[about.name] = pa.array(values, _type(about.kind))
    table = pa.table(columns).replace_schema_metadata({VERSION_KEY: SCHEMA_VERSION})
    # Whoever reads meanwhile sees the old file or the new one.
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_rows(path: Path, *, remedy: str | None = None) -> list[Row]:
    """The rows of a file, in its order.

    Args:
        path: The file.
        remedy: What helps where it is no whole file of this version; None = it is a store's.

    Raises:
        UnreadableRowsError: There is no such file; it was cut, is another kind of file, has another
            schema version, or a name in it could lead out of a folder.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    damaged = remedy or REMEDY
    outdated = remedy or "run: suite sync, or import the results of another home again"
    try:
        # `pq.read_table` imports pandas, which takes longer than all else that a reader does.
        with pq.ParquetFile(path) as file:
            table = file.read()
    except FileNotFoundError:
        raise UnreadableRowsError(f"{path}: no such file; run: suite sync") from None
    # A damaged schema ends in a UnicodeDecodeError, a kind of ValueError.
    except (OSError, ValueError, pa.ArrowException) as error:
        # pyarrow's messages may have many lines, of which the first says what is wrong.
        reason = str(error).partition("\n")[0]
        raise UnreadableRowsError(
            f"{path}: not a whole file of rows: {reason}; {damaged}"
        ) from None
    version = (table.schema.metadata or {}).get(VERSION_KEY)
    if version is None:
        raise UnreadableRowsError(f"{path}: parquet, but no file of rows; {damaged}")
    if version != SCHEMA_VERSION.encode():
        raise UnreadableRowsError(
            f"{path}: got rows of schema version {version.decode(errors='replace')}, expected "
            f"{SCHEMA_VERSION}: another version of the suite wrote it; {outdated}"
        )
    # The version says what should be there; a file that another program wrote may still lack it.
    absent = sorted(set(NAMES) - set(table.column_names))
    if absent:
        raise UnreadableRowsError(f"{path}: lacks the columns {', '.join(absent)}; {damaged}")
    try:
        columns = [_values(table, name) for name in NAMES]
    except (ValueError, KeyError, RecursionError) as error:
        raise UnreadableRowsError(
            f"{path}: not what this suite writes: {error}; {damaged}"
        ) from None
    for kind in KINDS:
        # Few names stand in many rows, so each is looked at once.
        for name in set(columns[NAMES.index(kind)]):
            wrong = why_not(kind, name or "")
            if wrong is not None:
                raise UnreadableRowsError(f"{path}: {wrong}; {damaged}")
    rows = []
    for values in zip(*columns, strict=True):
        rows.append(row_of(dict(zip(NAMES, values, strict=True))))
    return rows


def _values(table: pa.Table, name: str) -> list[Any]:
    about = BY_NAME[name]
    column = table.column(name)
    # A column of another type would become wrong values without an error.
    if column.type != _type(about.kind):
        raise ValueError(f"column {name} is {column.type}, expected {_type(about.kind)}")
    values: list[Any] = column.to_pylist()
    if about.kind is Kind.JSON:
        if column.null_count:
            raise ValueError(f"column {name} has empty fields, expected JSON")
        # One call for the whole column: 10,000 calls would take ten times as long.
        parsed: list[Any] = from_json("[" + ",".join(values) + "]")
        # A text such as "1,2" is no JSON by itself, yet gives two values in the joined list.
        if len(parsed) != len(values):
            raise ValueError(f"column {name} holds text that is not JSON")
        return parsed
    return values


def _type(kind: Kind) -> pa.DataType:
    import pyarrow as pa

    types = {
        Kind.TEXT: pa.string(),
        Kind.INTEGER: pa.int64(),
        Kind.NUMBER: pa.float64(),
        Kind.FLAG: pa.bool_(),
        Kind.JSON: pa.string(),
    }
    return types[kind]
