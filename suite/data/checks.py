"""Rows that a task cannot use, found before anything is tokenised; every error names the row and the value."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from suite.config.task import ClassificationTask, TaskConfig
from suite.errors import DataError


def check_rows(table: pa.Table, task: TaskConfig, *, where: str) -> None:
    """Texts are text, labels are labels, and there is at least one row.

    Args:
        table: All rows of a source split, with the task's columns.
        where: Data set and split.

    Raises:
        DataError: An empty split, a null, a column of the wrong type, a label that the task does not have.
    """
    if not table.num_rows:
        raise DataError(f"{where}: the split is empty")
    for column in task.columns:
        if table[column].null_count:
            raise DataError(f"{where}: column {column!r} is null in row {_first(pc.is_null(table[column]))}; every row must have it")
    for column in task.text_columns:
        kind = table[column].type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{where}: column {column!r} holds {kind}, expected text")
    if isinstance(task, ClassificationTask):
        _check_labels(table[task.label.column], task, where=f"{where}, column {task.label.column!r}")


def _check_labels(labels: pa.ChunkedArray, task: ClassificationTask, *, where: str) -> None:
    regression, kind = task.is_regression, labels.type
    if not (pa.types.is_integer(kind) or (regression and pa.types.is_floating(kind))):
        expected = "numbers" if regression else f"whole numbers, the positions in label.words {task.label.words}"
        raise DataError(f"{where}: got {kind} ({labels[0].as_py()!r} in row 0), expected {expected}")
    low, high = task.label.range or (0, task.num_labels - 1)
    # "not inside" rather than "outside", so that NaN is caught as well
    wrong = pc.invert(pc.and_(pc.greater_equal(labels, low), pc.less_equal(labels, high)))
    if pc.any(wrong).as_py():
        row = _first(wrong)
        hint = " (-1 usually marks an unlabelled split)" if labels[row].as_py() == -1 else ""
        expected = f"{low:g} to {high:g}" if regression else f"0 to {high:g} for {task.label.words}"
        raise DataError(f"{where}: label {labels[row].as_py()!r} in row {row}, expected {expected}{hint}")


def _first(mask: pa.ChunkedArray) -> int:
    return int(pc.index(mask, True).as_py())
