"""Finds rows that a task cannot use, before anything is tokenised; every error names the row."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from suite.config.task import (
    ClassificationTask,
    LabelTask,
    PretrainTask,
    QuestionAnsweringTask,
    TaskConfig,
)
from suite.errors import DataError


def check_rows(table: pa.Table, task: TaskConfig, *, where: str) -> None:
    """Check that texts are text, that labels are labels, and that there is at least one row.

    Args:
        table: All rows of a source split, with the task's columns.
        task: The task.
        where: Data set and split.

    Raises:
        DataError: The split is empty, a value is null, a column has the wrong type, or the task
            does not have a label that the data have.
    """
    if not table.num_rows:
        raise DataError(f"{where}: the split is empty")
    # nulls first, because a comparison with null is null and would hide a wrong label below
    for column in task.read_columns:
        if table[column].null_count:
            row = _first(pc.is_null(table[column]))
            raise DataError(
                f"{where}: column {column!r} is null in row {row}; every row must have it"
            )
    for column in task.text_columns:
        kind = table[column].type
        if not is_text(kind):
            raise DataError(f"{where}: column {column!r} holds {kind}, expected text")
    if isinstance(task, ClassificationTask | PretrainTask):
        for column in task.group:
            kind = table[column].type
            if not (is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
                raise DataError(
                    f"{where}: column {column!r} holds {kind}, and group expects text or whole "
                    "numbers"
                )
            if is_text(kind):
                _check_names(table[column], where=f"{where}: column {column!r}")
    if isinstance(task, QuestionAnsweringTask):
        _check_answers(table, task, where=where)
    if isinstance(task, LabelTask):
        column = task.label.column
        _check_labels(table[column], task, where=f"{where}, column {column!r}")


def _check_names(names: pa.ChunkedArray, *, where: str) -> None:
    blank = pc.equal(pc.utf8_trim_whitespace(names), "")
    if pc.any(blank).as_py():
        raise DataError(
            f"{where} names no group in row {_first(blank)}; rows without a name would be one group"
        )


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def check_ids(tables: Mapping[str, pa.Table], task: TaskConfig, *, where: str) -> None:
    """Check that no row stands twice, neither in one split nor in two.

    Only rows that the data name (`id` of the task) can be told apart.

    Raises:
        DataError: An id is there twice.
    """
    if task.id is None:
        return
    seen: dict[str, str] = {}
    for split, table in tables.items():
        for row, name in enumerate(table[task.id].to_pylist()):
            place = f"row {row} of split {split!r}"
            # JSON holds 7 where CSV holds the text
            name = str(name)
            if name in seen:
                raise DataError(
                    f"{where}, column {task.id!r}: {name!r} names {seen[name]} and {place}; "
                    "a row may be in the splits once only"
                )
            seen[name] = place


def _check_answers(table: pa.Table, task: QuestionAnsweringTask, *, where: str) -> None:
    checks = (
        (task.answers, is_text, "texts"),
        (task.starts, pa.types.is_integer, "whole numbers"),
    )
    for column, holds, what in checks:
        kind = table[column].type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        # lists that are all empty have the type null
        if not is_list or not (holds(kind.value_type) or pa.types.is_null(kind.value_type)):
            raise DataError(f"{where}: column {column!r} holds {kind}, expected lists of {what}")
        if pc.list_flatten(table[column]).null_count:
            lists = table[column].to_pylist()
            row = next(number for number, entries in enumerate(lists) if None in entries)
            raise DataError(
                f"{where}: row {row} has a null in the list of column {column!r}; take it out"
            )
    texts = pc.list_value_length(table[task.answers])
    starts = pc.list_value_length(table[task.starts])
    differs = pc.not_equal(texts, starts)
    if pc.any(differs).as_py():
        row = _first(differs)
        raise DataError(
            f"{where}: row {row} has {texts[row]} {task.answers} and {starts[row]} {task.starts}, "
            "expected as many of both"
        )
    empty = pc.equal(texts, 0)
    if not task.unanswerable and pc.any(empty).as_py():
        raise DataError(
            f"{where}: row {_first(empty)} has no answer in column {task.answers!r}; "
            "where that may be, the task says unanswerable: true"
        )


def _check_labels(labels: pa.ChunkedArray, task: LabelTask, *, where: str) -> None:
    kind = labels.type
    words = task.label.words
    if task.is_regression:
        expected = "numbers"
        fits = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    else:
        expected = f"whole numbers, the positions in label.words {words}"
        fits = pa.types.is_integer(kind)
    if not fits:
        raise DataError(
            f"{where}: got {kind} ({labels[0].as_py()!r} in row 0), expected {expected}"
        )
    low, high = task.label.range or (0, task.num_labels - 1)
    # "not inside" rather than "outside", so that NaN is caught as well
    inside = pc.and_(pc.greater_equal(labels, low), pc.less_equal(labels, high))
    wrong = pc.invert(inside)
    if not pc.any(wrong).as_py():
        return
    row = _first(wrong)
    label = labels[row].as_py()
    expected = f"{low:g} to {high:g}"
    if not task.is_regression:
        expected += f" for {words}"
    if label == -1:
        expected += " (-1 usually marks an unlabelled split)"
    raise DataError(f"{where}: label {label!r} in row {row}, expected {expected}")


def _first(mask: pa.ChunkedArray) -> int:
    """The first row for which a mask is true."""
    return int(pc.index(mask, True).as_py())
