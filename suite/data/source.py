"""Where rows come from: the hub, a local data root of the same layout, or a generator."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from suite.config.hashing import canonical_json
from suite.config.task import GeneratedData, HubData, TaskConfig
from suite.config.task_files import TaskCode, code_of
from suite.data.generators import generators
from suite.data.generators.base import SPLITS
from suite.data.splits import source_splits
from suite.errors import DataError, SuiteError

HUB_TIMEOUT_S = 10.0
SHOWN_NAMES = 20
UTF16 = (b"\xff\xfe", b"\xfe\xff")
"""How a file begins that some spreadsheets call "Unicode text"."""
CONVERTED = "refs/convert/parquet"


class Source(ABC):
    """The splits of one data set.

    Attributes:
        where: Name for errors.
        revision: The commit that was read; None where there is none.
        names: The task's name of a column: the data's, where they differ.
    """

    where: str
    revision: str | None = None
    names: Mapping[str, str] = {}

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What tells this data from other data, cheaply: it names the folder of the tokenised rows."""

    @abstractmethod
    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        """The named columns of a split, all rows in order.

        Raises:
            DataError: Absent, unreadable, or without these columns.
        """

    def _columns(self, split: str, found: Sequence[str], wanted: Sequence[str]) -> list[str]:
        """The columns of the data that hold the wanted ones, each once."""
        columns = [self.names.get(column, column).partition(".")[0] for column in wanted]
        missing = [column for column in columns if column not in found]
        if missing:
            raise DataError(
                f"{self.where}, split {split!r}: no column {', '.join(map(repr, missing))}; the data have {sorted(found)}"
            )
        return list(dict.fromkeys(columns))

    def _renamed(self, split: str, table: pa.Table, wanted: Sequence[str]) -> pa.Table:
        """The wanted columns by the task's names, also from inside structs."""
        arrays = []
        for column in wanted:
            name, *inside = self.names.get(column, column).split(".")
            try:
                arrays.append(pc.struct_field(table[name], inside) if inside else table[name])
            except (pa.ArrowException, TypeError) as error:
                raise DataError(
                    f"{self.where}, split {split!r}: column {name!r} ({table[name].type}) holds no {'.'.join(inside)}"
                ) from error
        return pa.table(arrays, names=list(wanted))


def open_source(task: TaskConfig, data_root: Path | None) -> Source:
    """The source of a task's rows, as its own file makes them where it does; a data root stands in for the hub.

    Raises:
        DataError: The data root does not hold the data set; a generator's split is named that does not exist.
        ConfigError: Bad generator options; the task's Python file is gone or another one.
    """
    code = code_of(task) if task.code is not None and task.code.rows else None
    source = _raw_source(task, data_root)
    return source if code is None else CodeSource(source, code)


def _raw_source(task: TaskConfig, data_root: Path | None) -> Source:
    if isinstance(task.data, GeneratedData):
        return GeneratedSource(task.data, task)
    return HubSource(task.data) if data_root is None else LocalSource(task.data, task, data_root)


class CodeSource(Source):
    """The rows of another source after a task file's `rows`; numbered as they come out of it.

    Attributes:
        dropped: Split -> rows left out, of those read so far.
    """

    def __init__(self, raw: Source, code: TaskCode) -> None:
        self.dropped: dict[str, int] = {}
        self.raw, self.code, self.where = raw, code, f"{raw.where}, rows() of {code.path.name}"

    @property
    def revision(self) -> str | None:  # type: ignore[override]
        return self.raw.revision

    def identity(self) -> dict[str, Any]:
        return {**self.raw.identity(), "code_sha256": self.code.sha256}

    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        raw = self.raw.read(split, self.code.reads).to_pylist()
        made = [
            self.code.convert(row, columns, where=f"split {split!r}, row {number}")
            for number, row in enumerate(raw)
        ]
        kept = [row for row in made if row is not None]
        self.dropped[split] = len(made) - len(kept)
        try:
            return pa.table({column: [row[column] for row in kept] for column in columns})
        except pa.ArrowException as error:
            raise DataError(
                f"{self.where}, split {split!r}: the values of a column are not of one type: {error}"
            ) from error


class GeneratedSource(Source):
    """Rows of a generator; identified by the rows themselves, so a changed generator is other data."""

    def __init__(self, data: GeneratedData, task: TaskConfig) -> None:
        self.where = f"task {task.name}: generator {data.generator}"
        generator = generators.get(data.generator, where=f"task {task.name}").configure(
            data.options, where=f"task {task.name}: data.options"
        )
        unknown = [split for split in source_splits(task.splits) if split not in SPLITS]
        if unknown:
            raise DataError(
                f"{self.where}: no split {unknown[0]!r}; a generator makes {', '.join(SPLITS)}"
            )
        self.rows = {split: generator.rows(split) for split in source_splits(task.splits)}

    def identity(self) -> dict[str, Any]:
        return {"generated": hashlib.sha256(canonical_json(self.rows).encode()).hexdigest()}

    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        table = pa.Table.from_pylist(self.rows[split])
        return table.select(self._columns(split, table.column_names, columns))


class LocalSource(Source):
    """`<root>/<hub id>/<config>/<split>.parquet` or `.csv`, with the hub's column names."""

    def __init__(self, data: HubData, task: TaskConfig, root: Path) -> None:
        self.where, self.names = f"{data.hub} ({data.config})", data.columns
        for part in (data.hub, data.config, *source_splits(task.splits)):
            if Path(part).is_absolute() or ".." in Path(part).parts:
                raise DataError(
                    f"task {task.name}: {part!r} must name something inside the data root, not a path out of it"
                )
        self.root, self.folder = root, root / data.hub / data.config
        self.splits = source_splits(task.splits)
        made = (
            task.code is not None and task.code.rows
        )  # then the task's names are not those of the file
        self.texts = (
            () if made else tuple(self.names.get(column, column) for column in task.text_columns)
        )
        for split in self.splits:
            self._path(split)

    def identity(self) -> dict[str, Any]:
        stats = {split: self._path(split).stat() for split in self.splits}
        files = {split: [stat.st_size, stat.st_mtime_ns] for split, stat in stats.items()}
        return {"folder": str(self.folder.resolve()), "bytes_and_mtime_ns": files}

    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        path = self._path(split)
        try:
            return self._renamed(
                split,
                _read_file(path, lambda found: self._columns(split, found, columns), self.texts),
                columns,
            )
        except (pa.ArrowException, OSError) as error:
            if path.suffix == ".csv" and ("UTF8" in str(error) or path.read_bytes()[:2] in UTF16):
                raise DataError(
                    f"{path}: not all of it is UTF-8 text; save it as UTF-8 (a spreadsheet: CSV UTF-8)"
                ) from error
            kind = path.suffix.removeprefix(".")
            raise DataError(
                f"{path}: not a readable {kind} file ({path.stat().st_size:,} bytes): {error}; copy it again"
            ) from error

    def _path(self, split: str) -> Path:
        path, text = (self.folder / f"{split}{suffix}" for suffix in (".parquet", ".csv"))
        if path.is_file() and text.is_file():
            raise DataError(
                f"{self.where}, split {split!r}: {path} and {text.name} are both there; keep one of them"
            )
        if path.is_file() or text.is_file():
            return path if path.is_file() else text
        beside = next(folder for folder in (self.folder, *self.folder.parents) if folder.is_dir())
        names = sorted(entry.name for entry in beside.iterdir())
        there = (
            ", ".join(names[:SHOWN_NAMES])
            + (f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else "")
            or "nothing"
        )
        raise DataError(
            f"{self.where}, split {split!r}: looked for {path} (or .csv), which does not exist; in {beside} there is: {there}"
        )


def _read_file(
    path: Path, choose: Callable[[Sequence[str]], list[str]], texts: Sequence[str]
) -> pa.Table:
    """Some columns of a parquet file, or of a CSV file with a heading; texts in quotes may hold commas and line ends.

    Args:
        path: Of the file.
        choose: Of the columns there are.
        texts: Columns that are text also where a CSV file holds but numbers in them, or `NA`.
    """
    if path.suffix == ".csv":
        types = pacsv.ConvertOptions(
            column_types=dict.fromkeys(texts, pa.string()), strings_can_be_null=False
        )
        table = pacsv.read_csv(
            path, parse_options=pacsv.ParseOptions(newlines_in_values=True), convert_options=types
        )
        chosen = choose(table.column_names)
        if twice := [name for name in chosen if table.column_names.count(name) > 1]:
            raise DataError(
                f"{path}: column {twice[0]!r} is there {table.column_names.count(twice[0])} times; rename or remove all but one"
            )
        return table.select(chosen)
    with pq.ParquetFile(path) as file:
        return file.read(columns=choose(file.schema_arrow.names))


class HubSource(Source):
    """A data set of the Hugging Face hub, downloaded once into the Hugging Face cache."""

    def __init__(self, data: HubData) -> None:
        self.data, self.where, self.names = (
            data,
            f"{data.hub} ({data.config}) on the hub",
            data.columns,
        )

    def identity(self) -> dict[str, Any]:
        return self.data.model_dump()

    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        from datasets import load_dataset

        self.revision = self.revision or self._resolve()
        try:
            # the hub's own conversion of old data sets that came as a script keeps each configuration in a folder
            name, folder = (
                (None, self.data.config)
                if self.data.revision == CONVERTED
                else (self.data.config, None)
            )
            loaded = load_dataset(self.data.hub, name, data_dir=folder, revision=self.revision)
        except Exception as error:  # the library raises many kinds, from network to builder errors
            raise DataError(f"{self._advice('cannot be loaded', error)}") from error
        if split not in loaded:
            raise DataError(
                f"{self.where}: no split {split!r}; it has {', '.join(map(str, loaded))}"
            )
        chosen = loaded[split].select_columns(
            self._columns(split, loaded[split].column_names, columns)
        )
        return self._renamed(split, chosen.with_format("arrow")[:], columns)

    def _resolve(self) -> str:
        """The commit behind the revision: one short request, so that a hub out of reach is known at once."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            sha = (
                HfApi()
                .dataset_info(self.data.hub, revision=self.data.revision, timeout=HUB_TIMEOUT_S)
                .sha
            )
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise DataError(
                f"{self.where}: the hub has no such data set or no revision {self.data.revision!r}: {error}"
            ) from error
        except Exception as error:  # offline mode, name resolution, proxies, time-outs: all mean that it cannot be had
            raise DataError(self._advice("the hub cannot be reached", error)) from error
        return sha or self.data.revision

    def _advice(self, what: str, error: Exception) -> str:
        if isinstance(error, SuiteError):
            return str(error)
        layout = f"DIR/{self.data.hub}/{self.data.config}/<split>.parquet"
        return f"{self.where}: {what} ({type(error).__name__}: {error}); connect, or give the rows as {layout} with --data-root DIR"
