"""Reads files of rows as people keep them: CSV, TSV, JSON lines and parquet, plain or compressed.

Values of CSV stay the texts that they are: whoever asks for a number says what to do with text.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.errors import DataError
from suite.files import parse_json, sha256

if TYPE_CHECKING:
    import pyarrow as pa

FORMS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
}
PACKED = (".gz", ".bz2", ".xz", ".zip")
EXPECTED = f"{', '.join(FORMS)}, or one of them with {', '.join(PACKED)} behind"
DELIMITERS = (",", ";", "\t", "|")
SAMPLE_ROWS = 100
"""Rows from which the delimiter is told."""
MARKS = {
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
"""First bytes that tell an encoding; some spreadsheets call UTF-16 "Unicode text"."""
OF_PACKERS = (zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""What damaged files raise when they are unpacked, beside an OSError."""
CSV_BLOCK_BYTES = 1 << 20, 1 << 30
"""The least and the most that Arrow reads of a CSV file at once; its limit is 2 GiB."""
SHOWN_CHARACTERS = 60
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON writes half of a character beyond U+FFFF; two of them make one."""


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file.

    Attributes:
        path: The file.
        columns: Values by name of the column, each a pyarrow array.
        rows: How many rows there are.
        lines: Line of each row, from 1; None where the file has no lines (parquet, JSON arrays).
    """

    path: Path
    columns: Mapping[str, Any]
    rows: int
    lines: list[int] | None = field(repr=False, default=None)

    def place(self, row: int) -> str:
        """A row for an error: `reviews.csv:17`, or `reviews.parquet, row 15`."""
        if self.lines is None:
            return f"{self.path}, row {row}"
        return f"{self.path}:{self.lines[row]}"

    def as_arrow(self, names: list[str]) -> pa.Table:
        import pyarrow as pa

        return pa.table([self.columns[name] for name in names], names=names)


def form_of(path: Path) -> str | None:
    """csv, json or parquet, by the file's suffix; None where it is none of them."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    if not suffixes:
        return None
    return FORMS.get(suffixes[-1])


def check_form(path: Path) -> str:
    """The form of a file that is to be read.

    Raises:
        DataError: It is none that can be read; the message says which can.
    """
    form = form_of(path)
    if form is not None:
        return form
    advice = ""
    if path.suffix.lower() in (".xlsx", ".xls", ".ods"):
        advice = " (a spreadsheet saves as CSV UTF-8)"
    raise DataError(f"{path}: expected a file that ends in {EXPECTED}{advice}")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file as it lies there, kept until its size or time changes."""
    about = path.stat()
    return _sha256(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256(path: Path, size_bytes: int, mtime_ns: int) -> str:
    return sha256(path)


def read_table(path: Path, *, delimiter: str | None = None, encoding: str | None = None) -> Table:
    """All rows of a file.

    Args:
        path: The file. Its suffix says what it is.
        delimiter: One character between the values of a CSV file; None = it is found.
        encoding: Encoding of a text file; None = by its first bytes, else UTF-8.

    Raises:
        DataError: The file cannot be read; the message names the line where it has lines.
    """
    form = check_form(path)
    content = _unpacked(path)
    if form == "parquet":
        return _parquet(path, content)
    text = _decoded(path, content, encoding)
    if form == "json":
        return _json(path, text)
    if delimiter is None:
        delimiter = _found_delimiter(path, text)
    return _csv(path, text, delimiter)


def ragged_row(path: Path, text: str, delimiter: str) -> str | None:
    """Where a CSV text has a row with more or fewer values than its heading; None = nowhere."""
    columns = 0
    try:
        for line, values in _records(text, delimiter):
            columns = columns or len(values)
            if len(values) != columns:
                shown = shortened(delimiter.join(values))
                return (
                    f"{path}:{line}: {len(values)} values, expected {columns} as in the first "
                    f"line: {shown!r}; a value that holds {delimiter!r} or a line end needs "
                    'quotes around it ("...")'
                )
    except csv.Error as error:
        return f"{path}: not readable as CSV: {error}"
    return None


def csv_block_bytes(size_bytes: int) -> int:
    """How much of a CSV file Arrow reads at once: all of it, since a row must fit in.

    Arrow refuses a row that reaches beyond the next block, as a long document would.
    """
    least, most = CSV_BLOCK_BYTES
    return max(least, min(most, size_bytes))


def _unpacked(path: Path) -> bytes:
    """The content of a file, decompressed where its suffix says that it is compressed."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        if suffix == ".bz2":
            return bz2.decompress(path.read_bytes())
        if suffix == ".xz":
            return lzma.decompress(path.read_bytes())
        if suffix == ".zip":
            return _unzipped(path)
        return path.read_bytes()
    # A RuntimeError of an archive with a password, or packed in a way that Python does not know.
    except (OSError, EOFError, ValueError, RuntimeError, *OF_PACKERS) as error:
        raise DataError(f"{path}: cannot be read: {error}; copy it again") from error


def _unzipped(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        # which of several files is meant, nothing says
        if len(names) != 1:
            raise DataError(f"{path}: holds {len(names)} files, expected one; unpack it")
        return archive.read(names[0])


def _decoded(path: Path, content: bytes, encoding: str | None) -> str:
    if encoding is None:
        encoding = "utf-8"
        for mark, found in MARKS.items():
            if content.startswith(mark):
                encoding = found
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raw = content.split(b"\n")[line - 1].removesuffix(b"\r")
        # what it would be as the most common other encoding lets a person decide
        guess = shortened(raw.decode("cp1252", errors="replace"))
        raise DataError(
            f"{path}:{line}: not {encoding} text; save the file as UTF-8 (a spreadsheet: CSV "
            f"UTF-8), or give its encoding: as cp1252 (Windows, western Europe) the line is "
            f"{guess!r}"
        ) from None
    # UTF-16 without its mark is valid UTF-8 with a NUL in every second place
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(
            f"{path}:{line}: holds a NUL character, so it is no {encoding} text; "
            "give its encoding, such as utf-16-le"
        )
    # the mark stays in the text where its encoding was given as utf-8 or utf-16-le
    return text.removeprefix("\ufeff")


def _found_delimiter(path: Path, text: str) -> str:
    """The delimiter that gives the most columns, and equally many in the first rows."""
    if ".tsv" in [suffix.lower() for suffix in path.suffixes]:
        return "\t"
    best = ","
    most = (False, 1)
    for delimiter in DELIMITERS:
        widths = []
        try:
            for _, values in _records(text, delimiter):
                widths.append(len(values))
                if len(widths) > SAMPLE_ROWS:
                    break
        # quotes that make no sense with this delimiter
        except csv.Error:
            continue
        if not widths or widths[0] == 1:
            continue
        # an even table beats a wide heading, which a comma in a text may feign
        found = (len(set(widths)) == 1, widths[0])
        if found > most:
            best = delimiter
            most = found
    return best


def check_quotes(path: Path, text: str, delimiter: str) -> None:
    """Check that every quote which opens a value of a CSV text also closes it.

    A quote without its partner takes all rows up to the next quote into one value.

    Raises:
        DataError: One does not; the message names the line at which its row begins.
    """
    reader = _reader(text, delimiter, strict=True)
    begins = 1
    try:
        for _ in reader:
            begins = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}:{begins}: the row that begins here opens a value with a quote and does not "
            f"close the value with the next one ({error}); put quotes around the whole value, and "
            'double those inside it ("he said ""no""")'
        ) from None


def _reader(text: str, delimiter: str, *, strict: bool = False) -> Any:
    # the module's limit of 128 KiB is less than a long document
    csv.field_size_limit(sys.maxsize)
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=strict)


def _records(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Every row of a CSV text that is not empty, with the line at which it begins, from 1."""
    reader = _reader(text, delimiter)
    begins = 1
    for values in reader:
        if values:
            yield begins, values
        begins = reader.line_num + 1


def _csv(path: Path, text: str, delimiter: str) -> Table:
    import pyarrow as pa
    import pyarrow.csv as pacsv

    # the library leaves out lines that are empty, and so does `_records`
    try:
        heading = next(_records(text, delimiter), None)
    except csv.Error as error:
        raise DataError(f"{path}: not readable as CSV: {error}") from error
    if heading is None:
        raise DataError(f"{path}: is empty; expected a first line with the names of the columns")
    names = heading[1]
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"{path}:{heading[0]}: {_several(names, name)} (the first line must name the"
                " columns)"
            )
    # before the rows are counted: a quote that takes the rest of the file leaves a row too short
    check_quotes(path, text, delimiter)
    # as text: the library would make numbers of 007, and nothing of `n/a`
    types = dict.fromkeys(names, pa.string())
    content = text.encode()
    try:
        table = pacsv.read_csv(
            io.BytesIO(content),
            read_options=pacsv.ReadOptions(block_size=csv_block_bytes(len(content))),
            parse_options=pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pacsv.ConvertOptions(column_types=types, strings_can_be_null=False),
        )
    except pa.ArrowException as error:
        raise DataError(
            ragged_row(path, text, delimiter) or f"{path}: not readable as CSV: {error}"
        ) from error
    lines = [line for line, _ in _records(text, delimiter)][1:]
    # the two readers agree on what a row is, or a line named in an error would be wrong
    if len(lines) != table.num_rows:
        raise DataError(
            f"{path}: {len(lines):,} rows or {table.num_rows:,}, depending on how its quotes are "
            "read; save it anew with quotes around texts that hold quotes"
        )
    columns = dict(zip(table.column_names, table.columns, strict=True))
    return Table(path, columns, table.num_rows, lines)


def _json(path: Path, text: str) -> Table:
    """Objects one a line, or an array of objects."""
    rows: list[dict[str, Any]] = []
    lines: list[int] | None = None
    if text.lstrip().startswith("["):
        for number, row in enumerate(_loads(text, where=str(path))):
            rows.append(_object(row, where=f"{path}, row {number}"))
    else:
        lines = []
        # not `splitlines`, which also ends lines at characters that JSON allows inside of texts
        for line, written in enumerate(text.split("\n"), start=1):
            if written.strip():
                where = f"{path}:{line}"
                rows.append(_object(_loads(written, where=where), where=where))
                lines.append(line)
    # how pandas writes a table unless it is told otherwise
    if len(rows) == 1 and rows[0] and all(isinstance(held, dict) for held in rows[0].values()):
        raise DataError(
            f"{path}: holds one object of columns, expected one object a row; "
            'from pandas write to_json(path, orient="records", lines=True)'
        )
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    columns = {}
    for name in names:
        columns[name] = _array([row.get(name) for row in rows], where=f"{path}, column {name!r}")
    return Table(path, columns, len(rows), lines)


def _loads(text: str, *, where: str) -> Any:
    try:
        found = parse_json(text, distinct=True)
    except ValueError as error:
        why = str(error)
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg} at character {error.pos + 1}"
        raise DataError(
            f"{where}: not JSON: {why} in {shortened(text)!r}; "
            "expected one object a line, or one array of objects"
        ) from None
    # Python holds half a pair of surrogates, which no encoding does, and neither does pyarrow.
    if SURROGATE.search(text):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: holds half a character, {error.object[error.start]!a}, as no text may; "
                "write the file again from its source, with errors replaced"
            ) from None
    return found


def _object(row: Any, *, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: got {shortened(json.dumps(row))}, expected an object {{...}}")
    return row


def _array(values: list[Any], *, where: str) -> Any:
    """A column; texts and numbers mixed become texts, so that an error can quote them."""
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        pass
    texts = []
    for value in values:
        if isinstance(value, list | dict):
            raise DataError(
                f"{where}: some rows hold {shortened(json.dumps(value))}, others do not"
            )
        if value is None or isinstance(value, str):
            texts.append(value)
        # how pandas keeps a gap among texts, and Python writes it as JSON
        elif value != value:
            texts.append(None)
        else:
            texts.append(json.dumps(value))
    return pa.array(texts)


def _parquet(path: Path, content: bytes) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(pa.BufferReader(content)).names
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"{path}: {_several(names, name)}")
        table = pq.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a readable parquet file ({len(content):,} bytes): {error}; copy it again"
        ) from error
    columns = dict(zip(table.column_names, table.columns, strict=True))
    return Table(path, columns, table.num_rows)


def _several(names: list[str], name: str) -> str:
    # nothing says which of them is meant
    return f"column {name!r} is there {names.count(name)} times; rename or remove all but one"


def shortened(text: str) -> str:
    """A value for an error: its first 60 characters."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}..."
