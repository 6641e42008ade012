"""The text of a task on files of one's own, which `suite init --data` writes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.cli.sweep_text import line, plain
from suite.config.loader import validate
from suite.config.own_data import Labels, column_of, find_labels, read_file
from suite.config.task_base import SPLIT_NAMES, FileData
from suite.errors import ConfigError, DataError

NUMBER_STEPS = 100
"""Steps of the range of numbers that a text-to-text model may write, about (ours)."""
MOST_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Files:
    """Files of rows, and which of their columns make a task.

    Attributes:
        data: The files, in the working folder.
        texts: Columns that a model reads.
        label: Column of the answer.
    """

    data: FileData
    texts: Sequence[str]
    label: str


def files_of(given: Sequence[str], delimiter: str | None, encoding: str | None) -> FileData:
    """The files of `--data FILE`, or of `--data train=FILE --data test=FILE`.

    Raises:
        ConfigError: They are not given in one of these ways.
        DataError: A file is absent.
    """
    keys: dict[str, str] = {}
    for item in given:
        split, equals, path = item.partition("=")
        if not equals or split not in SPLIT_NAMES:
            if equals and not Path(item).is_file():
                raise DataError(
                    f"--data {item}: no such file (looked from {Path.cwd()}); "
                    f"before = stands one of {', '.join(SPLIT_NAMES)}"
                )
            split = "files"
            path = item
        if split in keys:
            raise ConfigError(
                f"--data: got {keys[split]} and {path}; expected one file with all rows, or "
                "train=FILE and, each where there is one, validation=FILE and test=FILE"
            )
        keys[split] = path
    more = {"delimiter": delimiter, "encoding": encoding, "folder": str(Path.cwd())}
    data = validate(FileData, {**keys, **more}, where="--data")
    for path in data.paths.values():
        if not (Path.cwd() / path).is_file():
            raise DataError(f"--data {path}: no such file (looked from {Path.cwd()})")
    return data


def check_columns(data: FileData, names: Sequence[str], *, option: str) -> None:
    """Check that the files have these columns.

    Raises:
        ConfigError: They do not, or none is named; the message lists the columns.
    """
    table = read_file(data, "train")
    if not names:
        raise ConfigError(
            f"{option}: expected one of the columns of {table.path.name}: "
            f"{', '.join(table.columns)}"
        )
    for name in names:
        column_of(table, name)


def task_text(files: Files) -> tuple[str, str]:
    """The commented file of a task, and one line that says what was found.

    Raises:
        DataError: A label is missing, or is a text among numbers.
        ConfigError: There is nothing to choose between.
    """
    data = files.data
    found = find_labels(data, files.label)
    # as numbers, 1 and 1.00 are one value, and so are two ids of 20 digits
    same = found.are_numbers and found.low == found.high
    if len(found.counts) < 2 or same:
        raise ConfigError(
            f"--label {files.label}: every row has {next(iter(found.counts), 'none')!r}, "
            "so there is nothing to learn"
        )
    columns = _task_names([*files.texts, files.label])
    inputs = [columns[name] for name in files.texts]
    named = ", ".join(data.paths.values())
    label: dict[str, Any] = {"column": columns[files.label]}
    if found.are_numbers:
        label |= _number_range(found)
        metrics = ["pearson", "spearman"]
        about = "least and greatest, and the step to which a text-to-text model rounds"
    else:
        label["words"] = [*found.counts]
        metrics = ["accuracy", "macro_f1"]
        about = "the classes in sorted order"
    prompt = "; ".join(f"{name}: {{{name}}}" for name in inputs)
    lines = [
        "# Made by `suite init --data`. What a model reads, and what is odd about the rows: "
        "suite task check NAME",
        line(f"description: {plain(f'{files.label} of {named}')}", "for lists and reports"),
        line(f"source: {plain(named)}", "where the rows are from"),
        line(
            f"data: {plain(_data_keys(data, columns))}",
            "from this folder, the one above or the working folder",
        ),
        line(f"inputs: {plain(inputs)}", "the columns that a model reads"),
        line(
            f"text_to_text: {plain(f'{columns[files.label]} of {prompt}')}",
            "what a text-to-text model reads",
        ),
        line(f"label: {plain(label)}", about),
        line(f"metrics: {plain(metrics)}", "all are reported"),
    ]
    if not found.are_numbers:
        lines.append(line("headline: accuracy", "the metric that is the score"))
    return "\n".join(lines) + "\n", _found_line(found)


def _data_keys(data: FileData, columns: Mapping[str, str]) -> dict[str, Any]:
    keys: dict[str, Any] = data.model_dump(
        exclude={"folder", "sha256", "columns"}, exclude_none=True
    )
    renamed = {ours: theirs for theirs, ours in columns.items() if ours != theirs}
    if renamed:
        keys["columns"] = renamed
    return keys


def _task_names(columns: Sequence[str]) -> dict[str, str]:
    """The data's name of each column -> the task's, which stands in braces in prompts."""
    names: dict[str, str] = {}
    for column in columns:
        name = re.sub(r"\W+", "_", column).strip("_") or "column"
        while name in names.values():
            name += "_"
        names[column] = name
    return names


def _number_range(found: Labels) -> dict[str, Any]:
    assert found.low is not None and found.high is not None
    # a round step: 1, 2 or 5 times a power of ten
    # each divided, since their difference may be more than a float holds
    step = found.high / NUMBER_STEPS - found.low / NUMBER_STEPS
    power = 10.0 ** math.floor(math.log10(step))
    for factor in (1.0, 2.0, 5.0, 10.0):
        if factor * power >= step:
            step = float(f"{factor * power:.1e}")
            break
    return {"range": [found.low, found.high], "step": step}


def _found_line(found: Labels) -> str:
    rows = sum(found.counts.values())
    if found.are_numbers:
        return f"{rows:,} rows, numbers from {found.low:g} to {found.high:g}"
    shown = []
    for word, count in list(found.counts.items())[:MOST_SHOWN]:
        shown.append(f"{count:,} {word}")
    more = len(found.counts) - MOST_SHOWN
    if more > 0:
        shown.append(f"{more} more labels")
    return f"{rows:,} rows: {', '.join(shown)}"
