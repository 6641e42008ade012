"""Backbones whose tokenizer is trained on a task's text (`bpe:SIZE:TASK`).

A tokenizer is trained once into the cache and found there from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import tokenizers

from suite.backbones.bpe import Bpe, parse_bpe, train_bpe
from suite.backbones.loading import ResolvedBackbone, resolve
from suite.config.hashing import short_hash
from suite.config.sweep import BackboneChoice, LimitConfig
from suite.config.task import TaskConfig, load_task
from suite.data.prepare import read_splits, split_rows
from suite.data.source import Source, open_source
from suite.files import make_once

FORMAT = 1
"""Raise this number when the same text would give another tokenizer."""
CHUNK_ROWS = 1000
"""Rows held as Python strings at a time."""


def open_backbone(
    choice: BackboneChoice, *, data_root: Path | None, cache: Path, where: str = ""
) -> ResolvedBackbone:
    """Resolve a backbone as `resolve` does, and first train its tokenizer where it has to be.

    Args:
        choice: The backbone.
        data_root: Folder of local data, read instead of the hub.
        cache: Folder for trained tokenizers, shared by all workers of a machine.
        where: For errors.

    Raises:
        DataError: The text to train a tokenizer on cannot be had; else as `resolve`.
    """
    bpe = parse_bpe(choice.tokenizer, where=where)
    folder = None
    if bpe is not None:
        folder = bpe_folder(bpe, data_root=data_root, cache=cache, where=where)
    return resolve(choice, where=where, tokenizer=folder)


def bpe_folder(bpe: Bpe, *, data_root: Path | None, cache: Path, where: str = "") -> Path:
    """The folder of a trained tokenizer; the first process that asks trains it.

    It sees the task's whole training split, whatever the sweep's limit, so that sweeps of any size
    share it.
    """
    task = load_task(bpe.task, where=where)
    source = open_source(task, data_root)
    # what the text depends on; other keys of the task may change without a new tokenizer
    keys = {"inputs", "target", "choices", "splits", "group", "data", "version"}
    parts = {
        "format": FORMAT,
        "task": task.model_dump(mode="json", include=keys),
        "source": source.identity(),
        "size": bpe.size,
        # another version of the library may merge in another order
        "tokenizers": tokenizers.__version__,
    }
    folder = cache / "tokenizers" / f"bpe-{bpe.size}-{task.name}-{short_hash(parts)}"
    make_once(folder, lambda temporary: _train(bpe, task, source, temporary))
    return folder


def _train(bpe: Bpe, task: TaskConfig, source: Source, folder: Path) -> None:
    tables = read_splits(task, source)
    where = f"task {task.name}, {source.where}"
    # no row of validation or test may shape the vocabulary
    train = split_rows(task, tables, LimitConfig(), where=where)["train"]
    rows = tables[train.source].take(pa.array(train.rows))
    train_bpe(_texts(rows, task), bpe.size).save_pretrained(folder)


def _texts(table: pa.Table, task: TaskConfig) -> Iterator[str]:
    for batch in table.to_batches(max_chunksize=CHUNK_ROWS):
        for column in task.text_columns:
            yield from batch.column(column).to_pylist()
