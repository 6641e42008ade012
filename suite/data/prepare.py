"""Tokenise a task once per (data, template, tokenizer, length) and keep it as Arrow files that all workers map into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from suite.config.hashing import canonical_json, short_hash
from suite.config.sweep import LimitConfig
from suite.config.task import ClassificationTask, LabelTask, TaskConfig
from suite.data.objective import TEMPLATE, Columns, Features, Objective
from suite.data.row_checks import check_ids, check_rows
from suite.data.source import Source, open_source
from suite.data.splits import Part, Rows, SplitName, plan_splits, source_splits
from suite.errors import DataError
from suite.files import make_once

FORMAT = 2
"""Raise when the files change."""
CHUNK_ROWS = 1000
MANIFEST = "prepared.json"


@dataclass(frozen=True)
class Prepared:
    """Tokenised splits of a task.

    Attributes:
        path: Folder with one Arrow file per split.
        sizes: Rows per split.
        data_hash: SHA-256 over the content of the used rows, in order.
        revision: Commit of the hub data set; None for local and generated data.
    """

    path: Path
    sizes: dict[str, int]
    data_hash: str
    revision: str | None

    def split(self, name: SplitName, *, confirm: bool) -> Dataset:
        """The encoded rows of a split, mapped from disk; `index` names the source split and row of each.

        Args:
            confirm: Whether this is the confirm phase.

        Raises:
            RuntimeError: Test data are asked for outside the confirm phase, which would be a bug of ours.
        """
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
    """The task's rows as the objective encodes them; made by the first process that asks, found by all others.

    Args:
        limit: At most so many rows per split.
        data_root: Local data instead of the hub.
        cache: Folder for tokenised data, shared by all workers of a machine.

    Raises:
        DataError: Data that are absent, unreadable or not what the task says.
    """
    source = open_source(task, data_root)
    keep = task.model_dump(
        mode="json", include=TEMPLATE | {"name", "kind", "splits", "version", "data", "id"}
    )
    parts = {
        "format": FORMAT,
        "task": keep,
        "source": source.identity(),
        "limit": limit.model_dump(),
        "objective": objective.fingerprint(),
    }
    folder = cache / "data" / f"{task.name}-{short_hash(parts)}"
    make_once(folder, lambda temporary: _build(task, objective, source, limit, temporary))
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return Prepared(folder, manifest["sizes"], manifest["data_hash"], manifest["revision"])


def _build(
    task: TaskConfig, objective: Objective, source: Source, limit: LimitConfig, folder: Path
) -> None:
    tables = read_splits(task, source)
    where, rows = (
        f"task {task.name}, {source.where}",
        {split: table.num_rows for split, table in tables.items()},
    )
    groups = {split: number_groups(table, task) for split, table in tables.items()}
    plan = plan_splits(task.splits, rows, limit, where=where, in_order=task.in_order, groups=groups)
    digest = hashlib.sha256()
    sizes: dict[str, int] = {}
    for name, part in plan.items():
        if name not in objective.splits:
            continue
        digest.update(f"{name}\n".encode())
        chunks = _chunks(tables[part.source], part, task, digest)
        sizes[name] = _write(
            folder / f"{name}.arrow",
            objective.features(chunks, name),
            where=f"{where}, split {name!r}",
        )
    manifest = {"sizes": sizes, "data_hash": digest.hexdigest(), "revision": source.revision}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def check_batch_fits(
    rows: int, batch_size: int, *, where: str, key: str = "training.batch_size"
) -> None:
    """Raise DataError unless an epoch holds at least one whole batch (an incomplete last one is dropped)."""
    if rows < batch_size:
        raise DataError(
            f"{where}: {key} is {batch_size}, but there are only {rows} training rows; use a smaller batch_size"
        )


def read_splits(task: TaskConfig, source: Source) -> dict[str, pa.Table]:
    """Every source split that the task uses, checked; labels that are written out are numbers.

    Raises:
        DataError: As `number_labels`, `check_rows`, `check_ids` and `Source.read`.
    """
    tables: dict[str, pa.Table] = {}
    for split in source_splits(task.splits):
        where = f"{source.where}, split {split!r}"
        tables[split] = number_labels(source.read(split, task.read_columns), task, where=where)
        check_rows(tables[split], task, where=where)
    check_ids(tables, task, where=source.where)
    return tables


def number_labels(table: pa.Table, task: TaskConfig, *, where: str) -> pa.Table:
    """The table with positions in `label.words` in place of labels that are written out as these words, and of false (0) and true (1).

    Raises:
        DataError: A label that is none of the words.
    """
    if not isinstance(task, LabelTask) or task.label.words is None:
        return table
    column, words = task.label.column, task.label.words
    labels, place = table[column], table.schema.get_field_index(column)
    if pa.types.is_boolean(labels.type):
        return table.set_column(place, column, labels.cast(pa.int64()))
    if not (pa.types.is_string(labels.type) or pa.types.is_large_string(labels.type)):
        return table
    numbers = pc.index_in(labels, value_set=pa.array(words, labels.type))
    if pc.any(unknown := pc.and_(pc.is_null(numbers), pc.is_valid(labels))).as_py():
        row = pc.index(unknown, True).as_py()
        got = f"label {labels[row].as_py()!r} in row {row}"
        raise DataError(
            f"{where}, column {column!r}: {got}, expected one of label.words {words}, or whole numbers, their positions from 0"
        )
    return table.set_column(place, column, numbers)


def number_groups(table: pa.Table, task: TaskConfig) -> Rows:
    """The number of each row's group; rows of a task without groups have one each."""
    if not isinstance(task, ClassificationTask) or not task.group:
        return np.arange(table.num_rows)
    known: dict[Any, int] = {}
    keys = zip(*(table[column].to_pylist() for column in task.group), strict=True)
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


def _chunks(
    table: pa.Table, part: Part, task: TaskConfig, digest: Any
) -> Iterator[tuple[list[str], Columns]]:
    """The rows of `part` with their names, some at a time; `digest` takes in their content."""
    for start in range(0, len(part.rows), CHUNK_ROWS):
        rows = part.rows[start : start + CHUNK_ROWS]
        columns = table.take(pa.array(rows)).to_pydict()
        for row in zip(*(columns[column] for column in task.columns), strict=True):
            digest.update(canonical_json(row).encode() + b"\n")
        yield (
            [f"{part.source}/{name}" for name in (rows if task.id is None else columns[task.id])],
            columns,
        )


def _write(path: Path, features: Iterable[Features], *, where: str) -> int:
    """Write the items of a split; returns how many there are."""
    writer: pa.RecordBatchStreamWriter | None = None
    schema: pa.Schema | None = None
    items = 0
    with pa.OSFile(str(path), "wb") as file:
        for part in features:
            chunk = pa.table(part)
            schema = schema or chunk.schema
            writer = writer or pa.ipc.new_stream(file, schema)
            writer.write_table(chunk.cast(schema))
            items += chunk.num_rows
        if writer is None:
            raise DataError(
                f"{where}: the text is too short for a single example; lower training.max_length or raise limit"
            )
        writer.close()
    return items
