"""What a task's rows are like: sizes, answers, repeated rows, rows in two splits.

This is looked at before anything is trained. It reads the answers of every split, test included;
that is no leak, because it is no trial, and nothing that it finds reaches one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from suite.config.sweep import LimitConfig
from suite.config.task import (
    GenerationTask,
    InstructionTask,
    LabelTask,
    QuestionAnsweringTask,
    TaskConfig,
)
from suite.config.task_base import SPLIT_NAMES, SplitName
from suite.data.objective import Columns, rows_of
from suite.data.prepare import read_splits, split_rows
from suite.data.source import CodeSource, open_source
from suite.data.splits import Part

MOST_COMMON = 5
"""How many answers are shown of a task whose answers are texts."""
LEAK_FAIL_FRAC = 0.05
"""With a larger share of a split's rows in another split, a task cannot compare arms (ours)."""
REPEATED_WARN_FRAC = 0.01
LIKE_CONSTANT_FRAC = 0.95
"""From this share of one label on, a constant answer scores almost as much as any (ours)."""
FEW_ROWS = 100
LONG_CHARACTERS = 100
"""Shorter rows of running text are not compared: short sentences repeat in any text (ours)."""

Level = Literal["ok", "warn", "fail"]
RowsBySplit = Mapping[SplitName, "Sequence[Row]"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        level: How bad it is.
        check: Name of the check.
        text: What was found, for a reader.
        rows: How many rows it is about.
        examples: The first of these rows.
    """

    level: Level
    check: str
    text: str
    rows: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """One split as the task uses it.

    Attributes:
        split: The name of the split.
        source: The data's split that its rows are from.
        rows: How many rows it has.
        answers: Share of each answer: of all labels, or of the most common texts. For numbers the
            quartiles.
        distinct_answers: How many different answers it has.
    """

    split: SplitName
    source: str
    rows: int
    answers: dict[str, float]
    distinct_answers: int


@dataclass(frozen=True, slots=True)
class TaskRows:
    """A task's rows by split.

    Attributes:
        task: The task.
        tables: All rows of each split of the data.
        parts: Which of these rows are in each split of the task.
        dropped: Rows that the task's file left out of each split of the data.
    """

    task: TaskConfig
    tables: dict[str, pa.Table]
    parts: dict[SplitName, Part]
    dropped: dict[str, int]

    @classmethod
    def read(cls, task: TaskConfig, data_root: Path | None) -> TaskRows:
        """Read every split of a task.

        Raises:
            DataError: The data are absent, unreadable or not what the task says.
        """
        source = open_source(task, data_root)
        tables = read_splits(task, source)
        where = f"task {task.name}, {source.where}"
        # without a limit: a sweep's limit is not known here
        parts = split_rows(task, tables, LimitConfig(), where=where)
        dropped = dict(source.dropped) if isinstance(source, CodeSource) else {}
        return cls(task, tables, parts, dropped)

    def columns(self, split: SplitName, *, at_most: int | None = None) -> Columns:
        """The first rows of a split; None = all of them."""
        part = self.parts[split]
        rows = pa.array(part.rows[:at_most])
        columns: Columns = self.tables[part.source].take(rows).to_pydict()
        return columns


@dataclass(frozen=True, slots=True)
class Row:
    """What a model reads, and what it must answer. Two rows are the same where both are."""

    reads: tuple[Any, ...]
    answer: Hashable

    def shown(self, task: TaskConfig) -> str:
        text = " | ".join(map(str, self.reads))
        if self.answer is None:
            return text
        return f"{text} -> {answer_text(task, self.answer)}"


def inspect_rows(rows: TaskRows) -> tuple[list[SplitFacts], list[Finding]]:
    """Sizes and answers of every split, and what was found in the rows."""
    task = rows.task
    found: dict[SplitName, list[Row]] = {}
    facts: list[SplitFacts] = []
    # always in the order train, validation, test, on which the checks below rely
    for split in SPLIT_NAMES:
        found[split] = list(_rows(task, rows.columns(split)))
        facts.append(_facts(task, split, rows.parts[split].source, found[split]))
    findings = [
        _check_sizes(rows, facts),
        *_check_labels(task, facts),
        _check_empty(task, found),
        *_check_repeated(task, found),
    ]
    return facts, findings


def answer_column(task: TaskConfig) -> str | None:
    """The column that holds the answer; None = the text itself is predicted."""
    if isinstance(task, LabelTask):
        return task.label.column
    if isinstance(task, GenerationTask | InstructionTask):
        return task.target
    if isinstance(task, QuestionAnsweringTask):
        return task.answers
    return None


def answer_text(task: TaskConfig, answer: Any) -> str:
    """An answer as a person reads it."""
    if isinstance(task, LabelTask) and task.label.words is not None:
        return task.label.words[int(answer)]
    if isinstance(answer, (list, tuple)):
        # the first of the accepted texts
        return answer[0] if answer else "(no answer)"
    if isinstance(answer, float):
        return f"{answer:g}"
    return str(answer)


def percent(share: float) -> str:
    """A share in percent, with two significant digits below 10%: `0.14%`, `7.5%`, `42%`."""
    if share < 0.1:
        return f"{100 * share:.2g}%"
    return f"{100 * share:.0f}%"


def _rows(task: TaskConfig, columns: Columns) -> Iterator[Row]:
    answer = answer_column(task)
    # a target is text as well, but the model does not read it
    reads = [name for name in task.text_columns if name != answer]
    for number, texts in enumerate(rows_of(columns, reads)):
        given = None if answer is None else columns[answer][number]
        if isinstance(given, list):
            given = tuple(given)  # rows are compared by hash
        yield Row(texts, given)


def _facts(task: TaskConfig, split: SplitName, source: str, rows: Sequence[Row]) -> SplitFacts:
    answers = [row.answer for row in rows if row.answer is not None]
    shares: dict[str, float] = {}
    if isinstance(task, LabelTask) and task.is_regression:
        values = np.asarray(answers, dtype=float)
        points = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
        shares = dict(zip(("min", "25%", "median", "75%", "max"), points, strict=True))
    else:
        counts = Counter(answer_text(task, answer) for answer in answers)
        # answers that are texts may be as many as rows
        shown = [word for word, _ in counts.most_common(MOST_COMMON)]
        if isinstance(task, LabelTask) and task.label.words is not None:
            # all labels, also those that do not occur
            shown = task.label.words
        for word in shown:
            shares[word] = counts[word] / len(answers)
    return SplitFacts(split, source, len(rows), shares, len(set(answers)))


def _check_sizes(rows: TaskRows, facts: Sequence[SplitFacts]) -> Finding:
    text = ", ".join(f"{fact.rows:,} {fact.split}" for fact in facts)
    left_out = [f"{count:,} of {split}" for split, count in rows.dropped.items() if count]
    if left_out:
        text += f"; rows() left out {', '.join(left_out)}"
    # the first is train; its size is no matter of precision
    small = [fact.split for fact in facts[1:] if fact.rows < FEW_ROWS]
    if not small:
        return Finding("ok", "splits", text)
    advice = (
        f"fewer than {FEW_ROWS} rows of {' and '.join(small)}: one answer changes the score by "
        "more than a point"
    )
    return Finding("warn", "splits", f"{text}; {advice}")


def _check_labels(task: TaskConfig, facts: Sequence[SplitFacts]) -> Iterator[Finding]:
    """Labels that do not occur, and labels that nearly always do."""
    if not isinstance(task, LabelTask) or task.is_regression:
        return
    train = facts[0]
    # nothing else needs to be said then
    if train.distinct_answers < 2:
        label, _ = _most_common(train)
        yield Finding(
            "fail", "labels", f"every row of train is {label!r}: there is nothing to learn"
        )
        return
    # first what is missing, then what prevails, each over all splits
    said = []
    level: Level = "warn"
    for fact in facts:
        for label, share in fact.answers.items():
            if not share:
                said.append(f"{fact.split} has no {label!r}")
            elif not train.answers[label]:
                # Often the same label in another spelling.
                said.append(
                    f"{percent(share)} of {fact.split} is {label!r}, which nothing can learn"
                )
                level = "fail"
    for fact in facts:
        label, share = _most_common(fact)
        if share >= LIKE_CONSTANT_FRAC:
            said.append(f"{percent(share)} of {fact.split} is {label!r}")
    if said:
        yield Finding(level, "labels", "; ".join(said))
    else:
        yield Finding("ok", "labels", f"all {len(train.answers)} in every split")


def _most_common(fact: SplitFacts) -> tuple[str, float]:
    return max(fact.answers.items(), key=lambda item: item[1])


def _check_empty(task: TaskConfig, found: RowsBySplit) -> Finding:
    """Rows without any text to read, or with an empty text to write."""
    empty = []
    total = 0
    for rows in found.values():
        total += len(rows)
        for row in rows:
            if not "".join(map(str, row.reads)).strip() or row.answer == "":
                empty.append(row)
    if not empty:
        return Finding("ok", "empty texts", "none")
    text = f"nothing to read, or an empty answer: {_share(len(empty), total)}"
    return Finding("warn", "empty texts", text, len(empty), _shown(task, empty))


def _check_repeated(task: TaskConfig, found: RowsBySplit) -> Iterator[Finding]:
    """Rows in two splits, rows twice in one split, and the same text with another answer."""
    if task.in_order:
        long: dict[SplitName, list[Row]] = {}
        for split, rows in found.items():
            long[split] = [row for row in rows if len(row.reads[0]) >= LONG_CHARACTERS]
        found = long
    # rows that were trained on come first: they make scores too high
    yield _check_leak(task, found, "train", "validation")
    yield _check_leak(task, found, "train", "test")
    yield _check_leak(task, found, "validation", "test")
    for split, rows in found.items():
        counts = Counter(rows)
        twice = [row for row, count in counts.items() if count > 1]
        # a row that stands there three times counts twice
        extra = len(rows) - len(counts)
        level: Level = "warn" if extra > REPEATED_WARN_FRAC * len(rows) else "ok"
        share = _share(extra, len(rows))
        yield Finding(level, f"repeated in {split}", share, extra, _shown(task, twice))
    yield _check_contradictions(task, found)


def _check_leak(
    task: TaskConfig, found: RowsBySplit, first: SplitName, second: SplitName
) -> Finding:
    """Rows of the second split that also stand in the first."""
    # rows are hashable, so that large splits are compared in one pass
    seen = set(found[first])
    rows = found[second]
    same = [row for row in rows if row in seen]
    level: Level = "ok"
    if same:
        level = "warn"
        # running text may quote itself
        if len(same) > LEAK_FAIL_FRAC * len(rows) and not task.in_order:
            level = "fail"
    share = _share(len(same), len(rows))
    return Finding(level, f"{second} rows in {first}", share, len(same), _shown(task, same))


def _check_contradictions(task: TaskConfig, found: RowsBySplit) -> Finding:
    """Texts that have another answer elsewhere; where answers are texts that is no mistake."""
    answers: dict[tuple[Any, ...], set[Hashable]] = {}
    total = 0
    for rows in found.values():
        total += len(rows)
        for row in rows:
            answers.setdefault(row.reads, set()).add(row.answer)
    count = 0
    torn: set[Row] = set()
    for rows in found.values():
        for row in rows:
            if len(answers[row.reads]) > 1:
                count += 1
                torn.add(row)
    level: Level = "warn" if torn and isinstance(task, LabelTask) else "ok"
    # sorted, so that the answers to a text stand side by side
    torn_rows = sorted(torn, key=lambda row: (str(row.reads), str(row.answer)))
    examples = _shown(task, torn_rows)
    return Finding(level, "same text, other answer", _share(count, total), count, examples)


def _share(count: int, total: int) -> str:
    if not count:
        return "none"
    return f"{count:,} of {total:,} rows ({percent(count / total)})"


def _shown(task: TaskConfig, rows: Sequence[Row]) -> tuple[str, ...]:
    # three are enough to see what is wrong
    return tuple(row.shown(task) for row in rows[:3])
