"""Rows that a task cannot use, found before anything is tokenised; every error names the row and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from suite.config.task import LabelTask, QuestionAnsweringTask, TaskConfig
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
    for column in task.read_columns:
        if table[column].null_count:
            raise DataError(
                f"{where}: column {column!r} is null in row {_first(pc.is_null(table[column]))}; every row must have it"
            )
    for column in task.text_columns:
        kind = table[column].type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{where}: column {column!r} holds {kind}, expected text")
    if isinstance(task, QuestionAnsweringTask):
        _check_answers(table, task, where=where)
    if isinstance(task, LabelTask):
        _check_labels(
            table[task.label.column], task, where=f"{where}, column {task.label.column!r}"
        )


def check_ids(tables: Mapping[str, pa.Table], task: TaskConfig, *, where: str) -> None:
    """No row stands twice, neither in one split nor in two, as far as the data name their rows (`id` of the task).

    Raises:
        DataError: An id that is there twice.
    """
    if task.id is None:
        return
    seen: dict[Any, str] = {}
    for split, table in tables.items():
        for row, name in enumerate(table[task.id].to_pylist()):
            place = f"row {row} of split {split!r}"
            if name in seen:
                both = f"{seen[name]} and {place}"
                raise DataError(
                    f"{where}, column {task.id!r}: {name!r} names {both}; a row may be in the splits once only"
                )
            seen[name] = place


def _check_answers(table: pa.Table, task: QuestionAnsweringTask, *, where: str) -> None:
    for column, holds, what in (
        (task.answers, pa.types.is_string, "texts"),
        (task.starts, pa.types.is_integer, "whole numbers"),
    ):
        kind = table[column].type
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not lists or not (holds(kind.value_type) or pa.types.is_null(kind.value_type)):
            raise DataError(f"{where}: column {column!r} holds {kind}, expected lists of {what}")
    texts, starts = (
        pc.list_value_length(table[task.answers]),
        pc.list_value_length(table[task.starts]),
    )
    if pc.any(wrong := pc.not_equal(texts, starts)).as_py():
        row = _first(wrong)
        got = f"{texts[row]} {task.answers} and {starts[row]} {task.starts}"
        raise DataError(f"{where}: row {row} has {got}, expected as many of both")
    if not task.unanswerable and pc.any(empty := pc.equal(texts, 0)).as_py():
        row = _first(empty)
        raise DataError(
            f"{where}: row {row} has no answer in column {task.answers!r}; where that may be, the task says unanswerable: true"
        )


def _check_labels(labels: pa.ChunkedArray, task: LabelTask, *, where: str) -> None:
    regression, kind = task.is_regression, labels.type
    if not (pa.types.is_integer(kind) or (regression and pa.types.is_floating(kind))):
        expected = (
            "numbers"
            if regression
            else f"whole numbers, the positions in label.words {task.label.words}"
        )
        raise DataError(
            f"{where}: got {kind} ({labels[0].as_py()!r} in row 0), expected {expected}"
        )
    low, high = task.label.range or (0, task.num_labels - 1)
    # "not inside" rather than "outside", so that NaN is caught as well
    wrong = pc.invert(pc.and_(pc.greater_equal(labels, low), pc.less_equal(labels, high)))
    if pc.any(wrong).as_py():
        row = _first(wrong)
        hint = " (-1 usually marks an unlabelled split)" if labels[row].as_py() == -1 else ""
        expected = f"{low:g} to {high:g}" if regression else f"0 to {high:g} for {task.label.words}"
        raise DataError(
            f"{where}: label {labels[row].as_py()!r} in row {row}, expected {expected}{hint}"
        )


def _first(mask: pa.ChunkedArray) -> int:
    return int(pc.index(mask, True).as_py())
