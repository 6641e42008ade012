"""Rows of every shipped task's schema, made up, under a temporary data root: what the hub would give, only fewer and duller."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from suite.config.task import (
    ClassificationTask,
    GenerationTask,
    HubData,
    LabelTask,
    QuestionAnsweringTask,
    TaskConfig,
)

GROUP_ROWS = 3
SIZES = {"train": 48, "validation": 21, "test": 15}
"""Rows of splits; those of other names have as many as `validation`."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_rows(task: TaskConfig, root: Path, sizes: Mapping[str, int] = SIZES) -> Path:
    """The splits that a task of the hub reads, as parquet files with the hub's column names; `root` again."""
    assert isinstance(task.data, HubData)
    start = 0
    for split in task.splits.sources:
        count = sizes.get(split, sizes["validation"])
        path = root / task.data.hub / task.data.config / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([hub_row(task, start + n) for n in range(count)]), path)
        start += count
    return root


def hub_row(task: TaskConfig, number: int) -> dict[str, Any]:
    """A row by the hub's names, nested where the task's names reach inside."""
    if task.code is not None:
        return CODED[task.name](number)
    assert isinstance(task.data, HubData)
    row: dict[str, Any] = {}
    for column, value in task_row(task, number).items():
        *outside, last = task.data.columns.get(column, column).split(".")
        place = row
        for name in outside:
            place = place.setdefault(name, {})
        place[last] = value
    return row


def task_row(task: TaskConfig, number: int) -> dict[str, Any]:
    """A row by the task's names."""
    words = " ".join(NUMBERS[int(digit)] for digit in str(number))
    row: dict[str, Any] = {column: f"{column} {words}." for column in task.text_columns}
    if task.id is not None:
        row[task.id] = f"{number:08x}"
    if isinstance(task, LabelTask):
        label = task.label
        row[label.column] = (
            number % task.num_labels
            if label.range is None
            else label.range[0] + number % 6 * label.step
        )
    if isinstance(task, ClassificationTask):
        row |= dict.fromkeys(task.group, number // GROUP_ROWS)
    if isinstance(task, GenerationTask) and "exact_match" in task.metrics:
        row[task.target] = f"{words} #### {number}"
    if isinstance(task, QuestionAnsweringTask):
        row |= _answers(task, number)
    return row


def _answers(task: QuestionAnsweringTask, number: int) -> dict[str, Any]:
    """Every third question has no answer where that may be; the others have two accepted texts."""
    context = " ".join(NUMBERS[(number + n) % 10] for n in range(10)) + " é and more."
    texts = [NUMBERS[(number + 3) % 10], " ".join(NUMBERS[(number + n) % 10] for n in (3, 4))]
    if task.unanswerable and number % 3 == 2:
        texts = []
    return {
        task.inputs[0]: f"What comes {number} after?",
        task.inputs[1]: context,
        task.answers: texts,
        task.starts: [context.index(text) for text in texts],
    }


def _wsc(number: int) -> dict[str, Any]:
    noun = NUMBERS[number % 10]
    text = f"The {noun} saw it, and it was number {number}."
    return {
        "text": text,
        "span1_text": noun,
        "span1_index": 1,
        "span2_text": "it",
        "span2_index": 5,
        "idx": number,
        "label": number % 2,
    }


CODED = {"wsc": _wsc}
"""Raw rows of the tasks whose own file makes theirs."""
