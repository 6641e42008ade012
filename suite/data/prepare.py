"""Tokenises a task once per (data, template, tokenizer, length).

The rows are kept as Arrow files, which all workers of a machine map into memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from suite.config.hashing import canonical_json, short_hash
from suite.config.sweep import LimitConfig
from suite.config.task import ClassificationTask, LabelTask, PretrainTask, TaskConfig
from suite.config.task_base import SplitName
from suite.data.objective import TEMPLATE, Columns, Features, Objective, rows_of
from suite.data.row_checks import check_ids, check_rows, is_text
from suite.data.source import Source, open_source
from suite.data.splits import Part, Rows, plan_splits
from suite.errors import DataError
from suite.files import make_once, read_json

FORMAT = 4
"""Raise this number when the files change."""
CHUNK_ROWS = 1000
"""Rows tokenised at a time."""
MANIFEST = "prepared.json"


@dataclass(frozen=True)
class Prepared:
    """Tokenised splits of a task.

    Attributes:
        path: Folder with one Arrow file per split.
        sizes: Rows per split.
        data_hash: SHA-256 over the content of the rows that are used, in order.
        revision: Commit of the hub's data set; None for local and generated data.
    """

    path: Path
    sizes: dict[str, int]
    data_hash: str
    revision: str | None

    def split(self, name: SplitName, *, confirm: bool) -> Dataset:
        """The encoded rows of a split, mapped from disk.

        The column `index` names the source split and row of each.

        Args:
            name: Which split.
            confirm: Whether this is the confirm phase.

        Raises:
            RuntimeError: Test data are asked for outside the confirm phase, which is a bug of ours.
        """
        # the search must not see test data, whoever calls this
        if name == "test" and not confirm:
            raise RuntimeError("test data may be read in the confirm phase only")
        return Dataset.from_file(str(self.path / f"{name}.arrow"))


def prepare(
    task: TaskConfig,
    objective: Objective,
    *,
    limit: LimitConfig,
    data_root: Path | None,
    cache: Path,
) -> Prepared:
    """The task's rows as the objective encodes them.

    The first process that asks makes them, and all others find them.

    Args:
        task: The task.
        objective: How its rows are encoded.
        limit: At most so many rows per split.
        data_root: Folder of local data, read instead of the hub.
        cache: Folder for tokenised data, shared by all workers of a machine.

    Raises:
        DataError: The data are absent, unreadable or not what the task says.
    """
    source = open_source(task, data_root)
    # the folder's name holds everything that its files depend on
    keys = TEMPLATE | {"name", "kind", "splits", "version", "data", "id"}
    parts = {
        "format": FORMAT,
        "task": task.model_dump(mode="json", include=keys),
        "source": source.identity(),
        "limit": limit.model_dump(),
        "objective": objective.fingerprint(),
    }
    folder = cache / "data" / f"{task.name}-{short_hash(parts)}"
    # several workers of a machine may ask at the same time
    make_once(folder, lambda temporary: _build(task, objective, source, limit, temporary))
    try:
        manifest = read_json(folder / MANIFEST)
        return Prepared(folder, manifest["sizes"], manifest["data_hash"], manifest["revision"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder / MANIFEST}: cannot be read: {error!r}; remove the folder {folder.name}, and "
            "the data are prepared anew"
        ) from error


def _build(
    task: TaskConfig, objective: Objective, source: Source, limit: LimitConfig, folder: Path
) -> None:
    """Write the files of a task into an empty folder."""
    where = f"task {task.name}, {source.where}"
    tables = read_splits(task, source)
    parts = split_rows(task, tables, limit, where=where)
    digest = hashlib.sha256()
    sizes: dict[str, int] = {}
    for name, part in parts.items():
        if name not in objective.splits:
            continue
        # the name, so that rows which move to another split change the hash
        digest.update(f"{name}\n".encode())
        chunks = _chunks(tables[part.source], part, task, digest)
        sizes[name] = _write(
            folder / f"{name}.arrow",
            objective.features(chunks, name),
            where=f"{where}, split {name!r}",
        )
    manifest = {"sizes": sizes, "data_hash": digest.hexdigest(), "revision": source.revision}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def token_lengths(rows: Dataset, stacks: int) -> np.ndarray[Any, Any]:
    """Tokens of each row that each stack of a backbone reads in training, (rows, stacks).

    The first stack reads the input, a second one (a decoder with an encoder) the labels.
    """
    lengths = np.empty((len(rows), stacks), dtype=np.int64)
    for stack, column in enumerate(("input_ids", "labels")[:stacks]):
        lengths[:, stack] = pc.list_value_length(rows.data.column(column)).to_numpy()
    return lengths


def read_splits(task: TaskConfig, source: Source) -> dict[str, pa.Table]:
    """Every source split that the task uses, checked, with its labels as numbers.

    Raises:
        DataError: `number_labels`, `check_rows`, `check_ids` or `Source.read` raised it.
    """
    tables: dict[str, pa.Table] = {}
    for split in task.splits.sources:
        where = f"{source.where}, split {split!r}"
        # first the numbers, since `check_rows` looks at their range
        table = number_labels(source.read(split, task.read_columns), task, where=where)
        check_rows(table, task, where=where)
        tables[split] = table
    check_ids(tables, task, where=source.where)
    return tables


def split_rows(
    task: TaskConfig, tables: Mapping[str, pa.Table], limit: LimitConfig, *, where: str
) -> dict[SplitName, Part]:
    """The rows of train, validation and test; groups stay together.

    Raises:
        DataError: A split would be empty.
    """
    sizes = {}
    groups = {}
    for split, table in tables.items():
        sizes[split] = table.num_rows
        groups[split] = number_groups(table, task)
    return plan_splits(
        task.splits, sizes, limit, where=where, in_order=task.in_order, groups=groups
    )


def number_labels(table: pa.Table, task: TaskConfig, *, where: str) -> pa.Table:
    """The table with labels as numbers, their positions in `label.words`.

    Labels may be written out as these words, or be false (0) and true (1); the other way round
    where the words are true and false.

    Raises:
        DataError: A label is none of the words.
    """
    if not isinstance(task, LabelTask) or task.label.words is None:
        return table
    column = task.label.column
    words = task.label.words
    labels = table[column]
    if pa.types.is_boolean(labels.type):
        if task.label.true_first:
            labels = pc.invert(labels)
        numbers = labels.cast(pa.int64())
    elif is_text(labels.type):
        numbers = pc.index_in(labels, value_set=pa.array(words, labels.type))
        # a null stays a null here, and `check_rows` names it
        unknown = pc.and_(pc.is_null(numbers), pc.is_valid(labels))
        if pc.any(unknown).as_py():
            row = pc.index(unknown, True).as_py()
            raise DataError(
                f"{where}, column {column!r}: label {labels[row].as_py()!r} in row {row}, "
                f"expected one of label.words {words}, or whole numbers, their positions from 0"
            )
    else:
        return table
    return table.set_column(table.schema.get_field_index(column), column, numbers)


def number_groups(table: pa.Table, task: TaskConfig) -> Rows:
    """The number of each row's group; in a task without groups each row is its own group."""
    if not isinstance(task, ClassificationTask | PretrainTask) or not task.group:
        return np.arange(table.num_rows)
    numbers: dict[Any, int] = {}
    columns = table.select(task.group).to_pydict()
    # numbered in the order of their first rows, so that every machine numbers alike
    keys = rows_of(columns, task.group)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _chunks(
    table: pa.Table, part: Part, task: TaskConfig, digest: Any
) -> Iterator[tuple[list[str], Columns]]:
    """Names and columns of the rows of `part`, some at a time; `digest` takes in their content."""
    for start in range(0, len(part.rows), CHUNK_ROWS):
        # in parts, since a column of Python objects takes many times the memory of Arrow's
        rows = part.rows[start : start + CHUNK_ROWS]
        columns = table.take(pa.array(rows)).to_pydict()
        for row in rows_of(columns, task.columns):
            # before encoding, so that all arms of a comparison have the same hash
            digest.update(canonical_json(row).encode() + b"\n")
        # where the data name their rows, a row keeps its name when others are added before it
        names = rows if task.id is None else columns[task.id]
        yield [f"{part.source}/{name}" for name in names], columns


def _write(path: Path, features: Iterable[Features], *, where: str) -> int:
    """Write the items of a split, and return how many there are.

    Raises:
        DataError: There are none.
    """
    writer: pa.RecordBatchStreamWriter | None = None
    schema: pa.Schema | None = None
    items = 0
    with pa.OSFile(str(path), "wb") as file:
        for part in features:
            chunk = pa.table(part)
            if writer is None:
                schema = chunk.schema
                writer = pa.ipc.new_stream(file, schema)
            # a part whose lists are all empty would otherwise have another type
            writer.write_table(chunk.cast(schema))
            items += chunk.num_rows
        if writer is None:
            raise DataError(
                f"{where}: the text is too short for a single example; "
                "lower max_length or raise limit (of training, or of the pretrain stage)"
            )
        writer.close()
    return items
