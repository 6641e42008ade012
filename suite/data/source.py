"""Where rows come from: the hub, a local data root of the same layout, files, or a generator."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from suite.config.hashing import canonical_json
from suite.config.own_data import WHOLE, as_number, label_texts, read_file
from suite.config.task import (
    ClassificationTask,
    FileData,
    GeneratedData,
    HubData,
    LabelTask,
    PretrainTask,
    TaskConfig,
)
from suite.config.task_base import SPLIT_NAMES
from suite.config.task_files import TaskCode, code_of
from suite.data.generators import generators
from suite.errors import DataError, SuiteError
from suite.tables import Table, check_quotes, csv_block_bytes, ragged_row

HUB_TIMEOUT_S = 10.0
SHOWN_NAMES = 20
"""File names shown in an error, at most."""
CONVERTED = "refs/convert/parquet"
"""Revision of the hub's own conversion of data sets that came as a script."""


class Source(ABC):
    """The splits of one data set.

    Attributes:
        where: The data set's name, for errors.
        revision: The commit that was read; None where there is none.
        names: The task's name of a column -> the data's name, for columns whose names differ.
    """

    where: str
    revision: str | None = None
    names: Mapping[str, str] = {}

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The values that tell these data from others; they are part of a cache folder's name.

        This must be cheap: tokenised rows are looked up with it before any row is read.
        """

    @abstractmethod
    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        """The named columns of a split, all rows in order.

        Raises:
            DataError: The split is absent, unreadable, or lacks a column.
        """

    def _columns(self, split: str, found: Sequence[str], wanted: Sequence[str]) -> list[str]:
        """The columns of the data that hold the wanted ones, each once."""
        columns: list[str] = []
        missing: list[str] = []
        for name in wanted:
            column = self.names.get(name, name)
            # "answers.text" is the field `text` inside of column `answers`
            if column not in found:
                column = column.partition(".")[0]
            if column not in found:
                missing.append(repr(column))
            elif column not in columns:
                columns.append(column)
        if missing:
            raise DataError(
                f"{self.where}, split {split!r}: no column {', '.join(missing)}; "
                f"the data have {sorted(found)}"
            )
        return columns

    def _renamed(self, split: str, table: pa.Table, wanted: Sequence[str]) -> pa.Table:
        """The wanted columns by the task's names, also from inside structs."""
        arrays = []
        for column in wanted:
            name = self.names.get(column, column)
            inside: list[str] = []
            # a name with a dot may be that of a column, as in the heading of a CSV file
            if name not in table.column_names:
                name, *inside = name.split(".")
            # a chunked array, in which `struct_field` reaches through all levels at once
            array = table[name]
            try:
                arrays.append(_plain(pc.struct_field(array, inside) if inside else array))
            except (pa.ArrowException, TypeError) as error:
                raise DataError(
                    f"{self.where}, split {split!r}: column {name!r} ({array.type}) "
                    f"holds no {'.'.join(inside)}"
                ) from error
        return pa.table(arrays, names=list(wanted))


def _plain(array: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text as text, however a file packs it: pandas keeps categories as a dictionary."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return array.cast(kind.value_type)
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    return array


def open_source(task: TaskConfig, data_root: Path | None) -> Source:
    """The source of a task's rows; a data root stands in for the hub.

    A task's own Python file may make its rows out of those of the source.

    Raises:
        DataError: The data root does not hold the data set, or the task names a split that its
            generator does not make.
        ConfigError: The generator's options are wrong, or the task's Python file is gone or has
            changed.
    """
    source: Source
    if isinstance(task.data, GeneratedData):
        source = GeneratedSource(task.data, task)
    elif isinstance(task.data, FileData):
        source = FileSource(task.data, task)
    elif data_root is None:
        _refuse_folder(task.data, task)
        source = HubSource(task.data)
    else:
        source = LocalSource(task.data, task, data_root)
    if task.code is None or not task.code.rows:
        return source
    code = code_of(task)
    assert code is not None
    return CodeSource(source, code)


def _refuse_folder(data: HubData, task: TaskConfig) -> None:
    """Refuse an id that is also a folder here, since a look-up on the hub was hardly meant.

    Raises:
        DataError: There is such a folder.
    """
    folder = Path.cwd() / data.hub
    if folder.is_dir():
        raise DataError(
            f"task {task.name}: data.hub {data.hub!r} is a folder here ({folder}), and without "
            "--data-root the hub would be asked; give --data-root . to read the folder, or start "
            "elsewhere to ask the hub"
        )


class CodeSource(Source):
    """The rows that a task file's `rows` makes of another source's; numbered as it makes them.

    Attributes:
        dropped: Split -> rows left out, for splits that were read.
    """

    def __init__(self, raw: Source, code: TaskCode) -> None:
        self.dropped: dict[str, int] = {}
        self.raw = raw
        self.code = code
        self.where = f"{raw.where}, rows() of {code.path.name}"

    @property
    def revision(self) -> str | None:  # type: ignore[override]
        return self.raw.revision

    def identity(self) -> dict[str, Any]:
        return {**self.raw.identity(), "code_sha256": self.code.sha256}

    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        # plain Python values, since users write `rows` for dictionaries
        raw = self.raw.read(split, self.code.reads).to_pylist()
        values: dict[str, list[Any]] = {column: [] for column in columns}
        self.dropped[split] = 0
        for number, row in enumerate(raw):
            made = self.code.convert(row, columns, where=f"split {split!r}, row {number}")
            if made is None:
                self.dropped[split] += 1
                continue
            for column in columns:
                values[column].append(made[column])
        try:
            return pa.table(values)
        except pa.ArrowException as error:
            raise DataError(
                f"{self.where}, split {split!r}: the values of a column are not of one type: "
                f"{error}"
            ) from error


class GeneratedSource(Source):
    """Rows of a generator.

    The rows themselves identify it, so a generator that has changed gives other data.
    """

    def __init__(self, data: GeneratedData, task: TaskConfig) -> None:
        self.where = f"task {task.name}: generator {data.generator}"
        generator = generators.get(data.generator, where=f"task {task.name}").configure(
            data.options, where=f"task {task.name}: data.options"
        )
        self.rows: dict[str, list[dict[str, Any]]] = {}
        # made at once, because `identity` needs the rows, and generators are quick
        for split in task.splits.sources:
            if split not in SPLIT_NAMES:
                raise DataError(
                    f"{self.where}: no split {split!r}; a generator makes {', '.join(SPLIT_NAMES)}"
                )
            self.rows[split] = generator.rows(split)

    def identity(self) -> dict[str, Any]:
        return {"generated": hashlib.sha256(canonical_json(self.rows).encode()).hexdigest()}

    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        table = pa.Table.from_pylist(self.rows[split])
        return table.select(self._columns(split, table.column_names, columns))


class FileSource(Source):
    """Files of one's own, one for each split of the data."""

    def __init__(self, data: FileData, task: TaskConfig) -> None:
        folder = Path(data.folder or ".")
        # joined, as `read_file` does: a whole path does not lie in the folder
        self.where = ", ".join(str(folder / name) for name in data.paths.values())
        self.data = data
        self.names = data.columns
        self.task: LabelTask | None = None
        # where code makes the rows, it also makes the labels
        if isinstance(task, LabelTask) and (task.code is None or not task.code.rows):
            self.task = task
        for split in task.splits.sources:
            if split not in data.paths:
                raise DataError(
                    f"task {task.name}: splits names {split!r}, but data has files for "
                    f"{', '.join(data.paths)} alone"
                )

    def identity(self) -> dict[str, Any]:
        return {"sha256": self.data.sha256}

    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        file = read_file(self.data, split)
        names = self._columns(split, list(file.columns), columns)
        table = self._renamed(split, file.as_arrow(names), columns)
        if self.task is None or self.task.label.column not in columns:
            return table
        column = self.task.label.column
        labels = _labels(file, self.names.get(column, column), self.task, no_word=self._no_word)
        return table.set_column(table.schema.get_field_index(column), column, labels)

    @cached_property
    def _no_word(self) -> str | None:
        """The first label of all files that is none of the task's words, and where it stands.

        Asked of one file alone, 1 to 3 might be words there and positions in another.
        """
        assert self.task is not None
        column = self.names.get(self.task.label.column, self.task.label.column)
        word_of = _words(self.task)
        for split in self.task.splits.sources:
            table = read_file(self.data, split)
            for row, text in enumerate(label_texts(table, column)):
                if word_of(text) is None:
                    return f"{table.place(row)}: column {column!r} holds {text!r}"
        return None


def _words(task: LabelTask) -> Callable[[str], str | None]:
    """A function that gives the word that a label is, or None where it is none."""
    words = {word: word for word in task.label.words or ()}
    # A table writes the word "1" as 1.0 once its column had a gap.
    by_value = {int(float(word)): word for word in words if WHOLE.fullmatch(word)}

    def word_of(text: str) -> str | None:
        if text not in words and WHOLE.fullmatch(text):
            return by_value.get(int(float(text)))
        return words.get(text)

    return word_of


def _labels(file: Table, column: str, task: LabelTask, *, no_word: str | None) -> pa.Array:
    """The labels of a file: numbers, words, or positions of words.

    Args:
        file: A file of the task.
        column: Its column of labels.
        task: The task.
        no_word: Where a label is none of the task's words; None = in none of its files.

    Raises:
        DataError: A number is asked for and a text is there, or labels are words in some rows and
            positions in others.
    """
    texts = label_texts(file, column)
    if task.is_regression:
        numbers = []
        for row, text in enumerate(texts):
            number = as_number(text)
            if number is None:
                raise DataError(
                    f"{file.place(row)}: column {column!r} holds the text {text!r}, expected a "
                    "number; correct it, or take the row out"
                )
            numbers.append(number)
        return pa.array(numbers, pa.float64())
    # words first: a star rating of 1 is the word "1", and not the second of the words
    if no_word is None:
        word_of = _words(task)
        return pa.array([word_of(text) or text for text in texts])
    truths = {"false": "0", "true": "1"}
    if task.label.true_first:
        truths = {"true": "0", "false": "1"}
    # pandas writes True, a spreadsheet TRUE
    positions = [truths.get(text.lower(), text) for text in texts]
    if not all(WHOLE.fullmatch(text) for text in positions):
        return pa.array(texts)
    wholes = [int(float(text)) for text in positions]
    words = task.label.words or ()
    # numbers may be words, and then the one that is none of them is at fault
    if all(0 <= number < len(words) for number in wholes) or not {*words}.intersection(texts):
        return pa.array(wholes, pa.int64())
    raise DataError(
        f"{no_word}, expected one of the words {list(words)}, as in other rows; correct it, or "
        f"write positions, 0 to {len(words) - 1}, in every row"
    )


class LocalSource(Source):
    """`<root>/<hub id>/<config>/<split>.parquet` or `.csv`, with the hub's column names."""

    def __init__(self, data: HubData, task: TaskConfig, root: Path) -> None:
        self.where = f"{data.hub} ({data.config})"
        self.names = data.columns
        self.splits = task.splits.sources
        for part in (data.hub, data.config, *self.splits):
            # a task's file may come from somebody else
            if Path(part).is_absolute() or ".." in Path(part).parts:
                raise DataError(
                    f"task {task.name}: {part!r} must name something inside the data root, "
                    "not a path out of it"
                )
        self.root = root
        self.folder = root / data.hub / data.config
        self.task: TaskConfig | None = None
        self.texts: list[str] = []
        # where code makes the rows, the task's columns are not those of the file
        if task.code is None or not task.code.rows:
            self.task = task
            columns = [*task.text_columns, *_names_in_csv(task)]
            self.texts = [self.names.get(column, column) for column in columns]
        # looked for at once: an absent file is known before anything is computed
        for split in self.splits:
            self._path(split)

    def identity(self) -> dict[str, Any]:
        # size and time of change, because reading all of a large file would take too long
        files = {}
        for split in self.splits:
            stat = self._path(split).stat()
            files[split] = [stat.st_size, stat.st_mtime_ns]
        found: dict[str, Any] = {"folder": str(self.folder.resolve())}
        found["bytes_and_mtime_ns"] = files
        if any(self._path(split).suffix == ".csv" for split in self.splits):
            # raise this number when the same CSV file is read in another way
            found["csv"] = 3
        return found

    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        table = self._read(split, columns)
        task = self.task
        if task is None or self._path(split).suffix != ".csv":
            return table
        # what CSV holds as text gets the type that parquet would have
        for column in _names_in_csv(task):
            if column not in columns or column in task.text_columns:
                continue
            values = table[column]
            if isinstance(task, LabelTask) and column == task.label.column:
                if not self._labels_are_words:
                    values = _positions(values)
            elif column == task.id:
                # the same name is the same text in every split
                values = _whole(values).cast(pa.string())
            else:
                values = _whole(values)
            table = table.set_column(table.schema.get_field_index(column), column, values)
        return table

    @cached_property
    def _labels_are_words(self) -> bool:
        """Whether every label of every split is one of the task's words.

        Asked of one split alone, 1 to 3 might be words there and positions in another.
        """
        assert isinstance(self.task, LabelTask)
        column = self.task.label.column
        words = {*(self.task.label.words or ())}
        return all(
            words.issuperset(self._read(split, [column])[column].unique().to_pylist())
            for split in self.splits
        )

    def _read(self, split: str, columns: Sequence[str]) -> pa.Table:
        path = self._path(split)
        try:
            table = _read_file(path, lambda found: self._columns(split, found, columns), self.texts)
            return self._renamed(split, table, columns)
        except (pa.ArrowException, OSError) as error:
            kind = path.suffix.removeprefix(".")
            raise DataError(
                f"{path}: not a readable {kind} file ({path.stat().st_size:,} bytes): {error}; "
                "copy it again"
            ) from error

    def _path(self, split: str) -> Path:
        """The file of a split.

        Raises:
            DataError: There is none, or there are two.
        """
        parquet = self.folder / f"{split}.parquet"
        csv = self.folder / f"{split}.csv"
        if parquet.is_file() and csv.is_file():
            raise DataError(
                f"{self.where}, split {split!r}: {parquet} and {csv.name} are both there; "
                "keep one of them"
            )
        if parquet.is_file():
            return parquet
        if csv.is_file():
            return csv
        raise DataError(
            f"{self.where}, split {split!r}: looked for {parquet} (or .csv), which does not exist; "
            f"in {_listing(self.folder)}"
        )


def _names_in_csv(task: TaskConfig) -> list[str]:
    """Columns of labels in words, groups and ids: what is read as text of a CSV file.

    Arrow would make one group of 007 and 7, dates of some words, and positions of the words 1 and
    2.
    """
    names: list[str] = []
    if isinstance(task, LabelTask) and task.label.words is not None:
        names.append(task.label.column)
    if isinstance(task, ClassificationTask | PretrainTask):
        names += task.group
    if task.id is not None:
        names.append(task.id)
    return list(dict.fromkeys(names))


def _whole(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whole numbers where every text is how one is written, as 7 is and 007 is not; else texts.

    Nothing at all among numbers is null.
    """
    filled = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
    try:
        numbers = filled.cast(pa.int64())
    except pa.ArrowInvalid:
        return texts
    if numbers.cast(pa.string()).equals(filled):
        return numbers
    return texts


def _positions(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Labels that are not all words: whole numbers, false and true, or texts as they are."""
    trimmed = pc.utf8_trim_whitespace(texts)
    filled = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
    try:
        return filled.cast(pa.int64())
    except pa.ArrowInvalid:
        pass
    lower = pc.utf8_lower(filled)
    if pc.all(pc.is_in(lower, pa.array(["false", "true"]), skip_nulls=False)).as_py():
        return lower.cast(pa.bool_())
    return texts


def _listing(folder: Path) -> str:
    """What lies in a folder, or in the nearest one above it that exists, for an error."""
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        shown += f" and {len(names) - SHOWN_NAMES} more"
    return f"{folder} there is: {shown or 'nothing'}"


def _text_of(path: Path) -> str:
    """The text of a CSV file of a data root.

    Raises:
        DataError: It is not UTF-8.
        OSError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not all of it is UTF-8 text; save it as UTF-8 (a spreadsheet: CSV UTF-8)"
        ) from error


def _read_file(
    path: Path, choose: Callable[[Sequence[str]], list[str]], texts: Sequence[str]
) -> pa.Table:
    """Some columns of a parquet file, or of a CSV file with a heading.

    Args:
        path: The file. Texts in the quotes of a CSV file may hold commas and line ends.
        choose: Chooses among the columns of the file.
        texts: Columns that are text, even where a CSV file holds only numbers in them, or `NA`.
    """
    if path.suffix != ".csv":
        with pq.ParquetFile(path) as file:
            return file.read(columns=choose(file.schema_arrow.names))
    text = _text_of(path)
    check_quotes(path, text, ",")
    try:
        table = pacsv.read_csv(
            path,
            read_options=pacsv.ReadOptions(block_size=csv_block_bytes(path.stat().st_size)),
            parse_options=pacsv.ParseOptions(newlines_in_values=True),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(texts, pa.string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowException as error:
        ragged = ragged_row(path, text, ",")
        if ragged is None:
            raise
        raise DataError(ragged) from error
    chosen = choose(table.column_names)
    for name in chosen:
        # a CSV file may name two columns alike, and nothing says which one is meant
        times = table.column_names.count(name)
        if times > 1:
            raise DataError(
                f"{path}: column {name!r} is there {times} times; rename or remove all but one"
            )
    return table.select(chosen)


class HubSource(Source):
    """A data set of the Hugging Face hub, downloaded once into the Hugging Face cache."""

    def __init__(self, data: HubData) -> None:
        self.data = data
        self.where = f"{data.hub} ({data.config}) on the hub"
        self.names = data.columns

    def identity(self) -> dict[str, Any]:
        return self.data.model_dump()

    def read(self, split: str, columns: Sequence[str]) -> pa.Table:
        # imported here, because local and generated data need no hub
        from datasets import load_dataset

        # once for all splits, so that none comes from a newer commit
        self.revision = self.revision or self._resolve()
        name: str | None = self.data.config
        folder = None
        if self.data.revision == CONVERTED:
            # the hub's conversion keeps each configuration in a folder
            name = None
            folder = self.data.config
        try:
            loaded = load_dataset(self.data.hub, name, data_dir=folder, revision=self.revision)
        except Exception as error:  # the library raises many kinds, from network to builder errors
            raise DataError(self._advice("cannot be loaded", error)) from error
        if split not in loaded:
            raise DataError(
                f"{self.where}: no split {split!r}; it has {', '.join(map(str, loaded))}"
            )
        rows = loaded[split]
        chosen = rows.select_columns(self._columns(split, rows.column_names, columns))
        return self._renamed(split, chosen.with_format("arrow")[:], columns)

    def _resolve(self) -> str:
        """The commit behind the revision.

        It takes one short request, so that a hub out of reach is known at once.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        revision = self.data.revision
        try:
            info = HfApi().dataset_info(self.data.hub, revision=revision, timeout=HUB_TIMEOUT_S)
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise DataError(
                f"{self.where}: the hub has no such data set or no revision {revision!r}: {error}"
            ) from error
        # offline mode, name resolution, proxies, time-outs, a hub that is busy: it cannot be had
        except Exception as error:
            raise DataError(self._advice("the hub cannot be reached or refuses", error)) from error
        return info.sha or revision

    def _advice(self, what: str, error: Exception) -> str:
        if isinstance(error, SuiteError):
            return str(error)
        layout = f"DIR/{self.data.hub}/{self.data.config}/<split>.parquet"
        return (
            f"{self.where}: {what} ({type(error).__name__}: {error}); "
            f"connect if this machine is offline, or give the rows as {layout} with --data-root DIR"
        )
