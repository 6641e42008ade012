"""Completes a task whose rows lie in files of one's own: where they are, labels, splits.

What is found is written into the task, so that it is part of every trial: a file with another
content makes another task.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from suite.config.loader import Lines, Strict, place_of, validate
from suite.config.task_base import FILE_KEYS, FileData, SplitConfig
from suite.errors import ConfigError, DataError, UnknownNameError
from suite.tables import Table, form_of, read_table, sha256_of, shortened

MOST_WORDS = 1000
"""Different labels that are taken for classes, ours; ImageNet has as many."""
MOST_GRADES = 20
"""Different whole numbers that are taken for classes, such as stars; more are numbers (ours)."""
HELD_OUT_PART = 5
"""A fifth of the rows for validation, and as many for testing, is ours."""
MOST_HELD_OUT = 1000
SHOWN_NAMES = 20
WHOLE = re.compile(r"-?\d{1,15}(\.0+)?")
"""A whole number as CSV holds it: 2, or 2.0 where the column once had a gap."""


class _OwnData(Strict):
    """The part of a task's file that is read before the rest, under its own key for errors."""

    data: FileData


def with_own_files(data: dict[str, Any], lines: Lines, *, path: Path) -> dict[str, Any]:
    """The keys of a task with what its files say: their hashes, label words and splits.

    Args:
        data: The keys of a task's file, not yet validated; without files of one's own they come
            back as they are.
        lines: The line of each key.
        path: The task's file. Paths of data start from its folder, the one above, or the working
            folder, whichever has the file.

    Raises:
        ConfigError: `data` of the task is not valid.
        DataError: A file is absent or cannot be read.
    """
    given = data.get("data")
    if isinstance(given, str):
        # told alone: the label might need no words, which depends on the data
        raise ConfigError(
            f"{place_of(('data',), str(path), lines)}: data: got {given!r}, expected keys and "
            "values: {files: FILE} for a file of your own, {hub: ID} for a data set of the hub"
        )
    if not isinstance(given, Mapping) or not any(key in given for key in FILE_KEYS):
        return data
    for key in ("folder", "sha256"):
        if key in given:
            known = [*FILE_KEYS, "columns", "delimiter", "encoding"]
            place = place_of(("data", key), str(path), lines)
            raise UnknownNameError("key", key, known, where=f"{place}: data")
    files = validate(_OwnData, {"data": given}, where=str(path), lines=lines).data
    folder = folder_of(files, path)
    hashes = {}
    for split, name in files.paths.items():
        hashes[split] = sha256_of(folder / name)
    files = files.model_copy(update={"folder": str(folder), "sha256": hashes})
    completed = {**data, "data": files}
    code = data.get("code")
    # where code makes the rows, the label is what the code says it is
    if code is None or not code.rows:
        completed |= _label(data, files, where=str(path))
    return completed | _splits(data, files, where=place_of(("splits",), str(path), lines))


def read_file(data: FileData, split: str) -> Table:
    """The rows of the file of a split.

    Raises:
        DataError: It is absent, cannot be read, or is not the file that the task was made from.
    """
    path = Path(data.folder or ".") / data.paths[split]
    if not path.is_file():
        raise DataError(f"{path}: no such file on this machine; every machine needs the same files")
    sha256 = sha256_of(path)
    if data.sha256 is not None and sha256 != data.sha256[split]:
        raise DataError(
            f"{path}: has changed since the task was read (sha256 {sha256[:12]}, was "
            f"{data.sha256[split][:12]}); changed data are another task: put the file back, or "
            "start a sweep of another name"
        )
    return _table(path, data.delimiter, data.encoding, sha256)


@dataclass(frozen=True, slots=True)
class Labels:
    """What the column of labels holds.

    Attributes:
        counts: How many rows have each label, the labels in sorted order: numbers by size.
        low, high: The smallest and the largest number; None where a label is no number.
    """

    counts: dict[str, int]
    low: float | None = None
    high: float | None = None

    @property
    def are_numbers(self) -> bool:
        """Whether they are to be learnt as numbers: with fractions, or too many for classes."""
        if self.low is None:
            return False
        whole = all(WHOLE.fullmatch(name) for name in self.counts)
        # 1 and 1.0 side by side are one value, and would be two classes
        mixed = len({"." in name for name in self.counts}) > 1
        return not whole or mixed or len(self.counts) > MOST_GRADES


def find_labels(data: FileData, column: str) -> Labels:
    """The labels of all files of a task, as texts.

    Raises:
        UnknownNameError: There is no such column.
        DataError: The column holds lists, has no value in some row, or has a text among numbers.
    """
    counts: Counter[str] = Counter()
    places: dict[str, str] = {}
    for split in data.paths:
        table = read_file(data, split)
        for row, text in enumerate(label_texts(table, column)):
            counts[text] += 1
            if text not in places:
                places[text] = table.place(row)
    if not counts:
        raise DataError(f"{', '.join(map(str, data.paths.values()))}: no rows")
    numbers = []
    words = []
    for text in counts:
        number = as_number(text)
        if number is None:
            words.append(text)
        else:
            numbers.append(number)
    if not words:
        in_order = {name: counts[name] for name in sorted(counts, key=float)}
        return Labels(in_order, min(numbers), max(numbers))
    # a text among grades may be a grade; among so many numbers it is a gap in the data
    if len(numbers) > MOST_GRADES and len(numbers) > len(words):
        raise DataError(
            f"{places[words[0]]}: column {column!r} holds {words[0]!r}, a text that is not a "
            "number, and the others are numbers; correct it, or take the row out"
        )
    return Labels({name: counts[name] for name in sorted(counts)})


def label_texts(table: Table, column: str) -> list[str]:
    """A column of labels as texts: 1 is "1", true is "true".

    Raises:
        UnknownNameError: There is no such column.
        DataError: It holds lists or objects, or has no value in some row.
    """
    values = column_of(table, column).to_pylist()
    texts = []
    for row, value in enumerate(values):
        if isinstance(value, list | dict):
            raise DataError(
                f"{table.place(row)}: column {column!r} holds {shortened(repr(value))}, expected "
                "one label a row; for several, make a column of yes and no for each, and a task "
                "for each column"
            )
        # a gap in a column of numbers comes as NaN, and one of spaces looks empty
        if value is None or value != value or not str(value).strip():
            raise DataError(
                f"{table.place(row)}: no label in column {column!r}; "
                "give the row one, or take it out"
            )
        if isinstance(value, bool):
            value = str(value).lower()
        # a column of whole numbers with a gap comes as 1.0, 2.0
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        texts.append(str(value).strip())
    return texts


def column_of(table: Table, name: str) -> Any:
    """A column of a file, or with `answer.label` what column `answer` holds by the name `label`.

    Raises:
        UnknownNameError: It has no such column.
        DataError: The column holds nothing of that name.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    # a name with a dot may be that of a column, as in the heading of a CSV file
    if name in table.columns:
        return table.columns[name]
    outer, *inside = name.split(".")
    if outer not in table.columns:
        raise UnknownNameError("column", name, table.columns, where=str(table.path))
    if not inside:
        return table.columns[outer]
    try:
        return pc.struct_field(table.columns[outer], inside)
    except (pa.ArrowException, TypeError) as error:
        raise DataError(
            f"{table.path}: column {outer!r} ({table.columns[outer].type}) holds no "
            f"{'.'.join(inside)}"
        ) from error


def as_number(text: str) -> float | None:
    """The number that a text is; None where it is none, such as `n/a` or `nan`."""
    # Python reads 1_2 as 12, where a file means a name.
    if "_" in text:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    # infinity and NaN are numbers to Python, and compare with nothing
    if number - number != 0:
        return None
    return number


def folders_searched(path: Path) -> list[Path]:
    """The folders in which the files of a task are looked for, in this order."""
    here = path.resolve().parent
    return list(dict.fromkeys([here, here.parent, Path.cwd()]))


@lru_cache(maxsize=4)
def _table(path: Path, delimiter: str | None, encoding: str | None, sha256: str) -> Table:
    """A file's rows, kept for the next who asks; the hash says that it is the same file."""
    return read_table(path, delimiter=delimiter, encoding=encoding)


def folder_of(files: FileData, path: Path) -> Path:
    """The first folder that has all files of a task.

    Args:
        files: The files.
        path: The task's file, which need not be there yet.

    Raises:
        DataError: No folder has them all.
    """
    searched = folders_searched(path)
    for folder in searched:
        # resolved, so that ../data also leads out of a folder that is not there yet
        if all((folder / name).resolve().is_file() for name in files.paths.values()):
            return folder
    for name in files.paths.values():
        looked = searched
        # a whole path leads out of every folder
        if Path(name).is_absolute():
            looked = [Path(name).parent]
        if not any((folder / name).resolve().is_file() for folder in looked):
            there = []
            for folder in looked:
                # nothing is listed of a folder that is not there
                there += [str(file) for file in sorted(folder.glob("*")) if form_of(file)]
            raise DataError(
                f"{path}: data: no file {name}; looked in {', '.join(map(str, looked))}; "
                f"files of rows there: {', '.join(there[:SHOWN_NAMES]) or 'none'}"
            )
    raise DataError(
        f"{path}: data: {', '.join(files.paths.values())} are not in one folder; looked in "
        f"{', '.join(map(str, searched))}; write their paths from one of these"
    )


def _label(data: Mapping[str, Any], files: FileData, *, where: str) -> dict[str, Any]:
    """The key `label` with its words, where the task leaves them to the data."""
    label = data.get("label")
    if data.get("kind", "classification") != "classification" or not isinstance(label, Mapping):
        return {}
    column = label.get("column", "label")
    if label.get("words") or label.get("range") or not isinstance(column, str):
        return {}
    name = files.columns.get(column, column)
    found = find_labels(files, name)
    if found.are_numbers or not 2 <= len(found.counts) <= MOST_WORDS:
        shown = ", ".join(repr(text) for text in list(found.counts)[:3])
        raise ConfigError(
            f"{where}: label: column {name!r} holds {len(found.counts):,} different values "
            f"({shown}...), expected 2 to {MOST_WORDS:,} words or whole numbers that are classes; "
            "to learn a number write range: [low, high], the least and the greatest there may be"
        )
    return {"label": {**label, "words": [*found.counts]}}


def _splits(data: Mapping[str, Any], files: FileData, *, where: str) -> dict[str, Any]:
    """The key `splits`: files as they are, and rows of train for those that are missing.

    Raises:
        ConfigError: The rule that was given reads no rows of a file.
    """
    splits = data.get("splits", {})
    # what is no mapping is told when the task is validated
    if not isinstance(splits, Mapping):
        return {}
    splits = dict(splits)
    if "rule" not in splits:
        if "validation" not in files.paths:
            splits["rule"] = "held-out"
        elif "test" in files.paths:
            splits["rule"] = "named"
        else:
            # READ's: the validation file is halved, or becomes the test set
            splits["rule"] = "read"
    if splits["rule"] != "read" and "test" in files.paths:
        splits.setdefault("test", "test")
    if splits["rule"] == "held-out" and "held_out" not in splits:
        rows = read_file(files, "train").rows
        splits["held_out"] = max(1, min(MOST_HELD_OUT, rows // HELD_OUT_PART))
    # what is no splits is told when the task is validated
    with contextlib.suppress(ValidationError):
        read = SplitConfig.model_validate(splits).sources
        for split, name in files.paths.items():
            # the score would be of rows of another file
            if split not in read:
                # `test: null` says that the rows come from train
                given = f"splits.{split}" if split in splits else "the rule"
                raise ConfigError(
                    f"{where}: splits: rule {splits['rule']} reads {' and '.join(read)}, and no "
                    f"row of data.{split} ({name}); leave {given} out, or the file"
                )
    return {"splits": splits}
