"""Tokenise a task once per (data, template, tokenizer, length) and keep it as Arrow files that all workers map into memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset
from filelock import FileLock, Timeout

from suite.config.hashing import canonical_json, short_hash
from suite.config.sweep import LimitConfig
from suite.config.task import TaskConfig
from suite.data.checks import check_rows
from suite.data.objective import Objective
from suite.data.source import Source, open_source
from suite.data.splits import Part, SplitName, plan_splits, source_splits
from suite.errors import DataError

FORMAT = 1
"""Raise when the files change."""
CHUNK_ROWS = 1000
LOCK_TIMEOUT_S = 3600.0
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


def prepare(task: TaskConfig, objective: Objective, *, limit: LimitConfig, data_root: Path | None, cache: Path) -> Prepared:
    """The task's rows as the objective encodes them; made by the first process that asks, found by all others.

    Args:
        limit: At most so many rows per split.
        data_root: Local data instead of the hub.
        cache: Folder for tokenised data, shared by all workers of a machine.

    Raises:
        DataError: Data that are absent, unreadable or not what the task says.
    """
    source = open_source(task, data_root)
    keep = task.model_dump(mode="json", include={"name", "inputs", "label", "splits", "version"})
    parts = {"format": FORMAT, "task": keep, "source": source.identity(), "limit": limit.model_dump(), "objective": objective.fingerprint()}
    folder = cache / "data" / f"{task.name}-{short_hash(parts)}"
    if (found := _open(folder)) is not None:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(folder.name + ".lock")
    try:
        with FileLock(lock, timeout=LOCK_TIMEOUT_S):
            return _open(folder) or _build(task, objective, source, limit, folder)
    except Timeout:
        raise DataError(f"{lock}: another process has prepared {task.name} for over {LOCK_TIMEOUT_S:.0f} s; is it alive?") from None


def _open(folder: Path) -> Prepared | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Prepared(folder, manifest["sizes"], manifest["data_hash"], manifest["revision"])


def _build(task: TaskConfig, objective: Objective, source: Source, limit: LimitConfig, folder: Path) -> Prepared:
    """Write into a folder beside the final one, then rename: a crash leaves no half-made data. The caller holds the lock."""
    for stale in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(stale)
    tables = read_splits(task, source)
    plan = plan_splits(
        task.splits, {split: table.num_rows for split, table in tables.items()}, limit, where=f"task {task.name}, {source.where}"
    )
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    digest = hashlib.sha256()
    for name, part in plan.items():
        digest.update(f"{name}\n".encode())
        _write(temporary / f"{name}.arrow", tables[part.source], part, task, objective, digest)
    sizes: dict[str, int] = {name: len(part.rows) for name, part in plan.items()}
    manifest = {"sizes": sizes, "data_hash": digest.hexdigest(), "revision": source.revision}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    temporary.rename(folder)
    return Prepared(folder, sizes, digest.hexdigest(), source.revision)


def check_batch_fits(rows: int, batch_size: int, *, where: str) -> None:
    """Raise DataError unless an epoch holds at least one whole batch (an incomplete last one is dropped)."""
    if rows < batch_size:
        raise DataError(f"{where}: training.batch_size is {batch_size}, but there are only {rows} training rows; use a smaller batch_size")


def read_splits(task: TaskConfig, source: Source) -> dict[str, pa.Table]:
    """Every source split that the task uses, checked.

    Raises:
        DataError: As `check_rows` and `Source.read`.
    """
    tables = {split: source.read(split, task.columns) for split in source_splits(task.splits)}
    for split, table in tables.items():
        check_rows(table, task, where=f"{source.where}, split {split!r}")
    return tables


def _write(path: Path, table: pa.Table, part: Part, task: TaskConfig, objective: Objective, digest: Any) -> None:
    """Encode the rows of `part` in chunks; `digest` takes in their content."""
    writer: pa.RecordBatchStreamWriter | None = None
    schema: pa.Schema | None = None
    with pa.OSFile(str(path), "wb") as file:
        for start in range(0, len(part.rows), CHUNK_ROWS):
            rows = part.rows[start : start + CHUNK_ROWS]
            columns = table.take(pa.array(rows)).to_pydict()
            for row in zip(*(columns[column] for column in task.columns), strict=True):
                digest.update(canonical_json(row).encode() + b"\n")
            chunk = _encoded(objective, columns, [f"{part.source}/{row}" for row in rows])
            schema = schema or chunk.schema
            writer = writer or pa.ipc.new_stream(file, schema)
            writer.write_table(chunk.cast(schema))
        assert writer is not None  # plan_splits refuses empty splits
        writer.close()


def _encoded(objective: Objective, columns: Mapping[str, list[Any]], index: list[str]) -> pa.Table:
    return pa.table({"index": index, **objective.encode(columns)})
