"""What a task's rows are like, before anything is trained on them: sizes, answers, repeated rows, rows in two splits.

It reads the answers of every split, test among them: it is no trial, and nothing it finds reaches one.
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
from suite.data.objective import Columns
from suite.data.prepare import number_groups, read_splits
from suite.data.source import CodeSource, open_source
from suite.data.splits import SPLIT_NAMES, Part, SplitName, plan_splits

MOST_COMMON = 5
LEAK_FAIL_FRAC = 0.05
"""Share of a split's rows that also stand in another from which the task is not fit to compare on (ours)."""
REPEATED_WARN_FRAC = 0.01
LIKE_CONSTANT_FRAC = 0.95
FEW_ROWS = 100
LONG_CHARACTERS = 100
"""Of running text only rows of so many characters are compared: short sentences repeat in any text (ours)."""

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What.
        text: What was found, for a reader.
        rows: How many rows it is about.
        examples: The first of them.
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
        split, source: Its name, and the data's split that its rows are from.
        rows: How many.
        answers: Share of each answer: all labels, the most common texts, or the quartiles of numbers (then their values).
        distinct_answers: How many there are.
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
        dropped: Per split of the data, how many rows the task's file left out.
    """

    task: TaskConfig
    tables: dict[str, pa.Table]
    parts: dict[SplitName, Part]
    dropped: dict[str, int]

    @classmethod
    def read(cls, task: TaskConfig, data_root: Path | None) -> TaskRows:
        """Every split of a task.

        Raises:
            DataError: Data that are absent, unreadable or not what the task says.
        """
        source = open_source(task, data_root)
        tables = read_splits(task, source)
        groups = {split: number_groups(table, task) for split, table in tables.items()}
        sizes = {split: table.num_rows for split, table in tables.items()}
        where = f"task {task.name}, {source.where}"
        parts = plan_splits(
            task.splits, sizes, LimitConfig(), where=where, in_order=task.in_order, groups=groups
        )
        return cls(
            task, tables, parts, dict(source.dropped) if isinstance(source, CodeSource) else {}
        )

    def columns(self, split: SplitName, *, at_most: int | None = None) -> Columns:
        """The first rows of a split, or all."""
        part = self.parts[split]
        columns: Columns = self.tables[part.source].take(pa.array(part.rows[:at_most])).to_pydict()
        return columns


@dataclass(frozen=True, slots=True)
class Row:
    """What a model reads, and what it must answer; two rows are the same where both are."""

    reads: tuple[Any, ...]
    answer: Hashable

    def shown(self, task: TaskConfig) -> str:
        text = " | ".join(map(str, self.reads))
        return text if self.answer is None else f"{text} -> {answer_text(task, self.answer)}"


def look(rows: TaskRows) -> tuple[list[SplitFacts], list[Finding]]:
    """Sizes and answers of every split, and what is to be said about them."""
    found = {split: list(_rows(rows.task, rows.columns(split))) for split in SPLIT_NAMES}
    facts = [
        _facts(rows.task, split, rows.parts[split].source, found[split]) for split in SPLIT_NAMES
    ]
    return facts, [
        _sizes(rows, facts),
        *_answers(rows.task, facts),
        _empty(rows.task, found),
        *_repeated(rows.task, found),
    ]


def answer_column(task: TaskConfig) -> str | None:
    """The column that holds the answer; None = the text itself is predicted."""
    if isinstance(task, LabelTask):
        return task.label.column
    if isinstance(task, GenerationTask | InstructionTask):
        return task.target
    return task.answers if isinstance(task, QuestionAnsweringTask) else None


def answer_text(task: TaskConfig, answer: Any) -> str:
    """An answer as a person reads it."""
    if isinstance(task, LabelTask) and task.label.words is not None:
        return task.label.words[int(answer)]
    if isinstance(answer, (list, tuple)):
        return answer[0] if answer else "(no answer)"
    return f"{answer:g}" if isinstance(answer, float) else str(answer)


def _rows(task: TaskConfig, columns: Columns) -> Iterator[Row]:
    answer = answer_column(task)
    reads = [name for name in task.text_columns if name != answer]
    texts = zip(*(columns[name] for name in reads), strict=True)
    answers: Sequence[Any] = (
        columns[answer] if answer is not None else [None] * len(columns[reads[0]])
    )
    for row, given in zip(texts, answers, strict=True):
        yield Row(row, tuple(given) if isinstance(given, list) else given)


def _facts(task: TaskConfig, split: SplitName, source: str, rows: Sequence[Row]) -> SplitFacts:
    answers = [row.answer for row in rows if row.answer is not None]
    if isinstance(task, LabelTask) and task.is_regression:
        points = np.quantile(np.asarray(answers, dtype=float), [0, 0.25, 0.5, 0.75, 1]).tolist()
        shares = dict(zip(("min", "25%", "median", "75%", "max"), points, strict=True))
    else:
        counts = Counter(answer_text(task, answer) for answer in answers)
        words = task.label.words if isinstance(task, LabelTask) else None
        shown = (
            list(words)
            if words is not None
            else [word for word, _ in counts.most_common(MOST_COMMON)]
        )
        shares = {word: counts[word] / len(answers) for word in shown}
    return SplitFacts(split, source, len(rows), shares, len(set(answers)))


def _sizes(rows: TaskRows, facts: Sequence[SplitFacts]) -> Finding:
    sizes = ", ".join(f"{fact.rows:,} {fact.split}" for fact in facts)
    left_out = ", ".join(f"{count:,} of {split}" for split, count in rows.dropped.items() if count)
    dropped = f"; rows() left out {left_out}" if left_out else ""
    small = [fact.split for fact in facts[1:] if fact.rows < FEW_ROWS]
    if small:
        advice = f"; fewer than {FEW_ROWS} rows of {' and '.join(small)} tell arms apart by a point at best"
        return Finding("warn", "splits", f"{sizes}{dropped}{advice}")
    return Finding("ok", "splits", sizes + dropped)


def _answers(task: TaskConfig, facts: Sequence[SplitFacts]) -> Iterator[Finding]:
    if not isinstance(task, LabelTask) or task.is_regression:
        return
    train = facts[0]
    if train.distinct_answers < 2:
        yield Finding(
            "fail",
            "labels",
            f"every row of train is {_most(train)[0]!r}: there is nothing to learn",
        )
        return
    said = [
        f"{fact.split} has no {word!r}"
        for fact in facts
        for word, share in fact.answers.items()
        if not share
    ]
    for fact in facts:
        word, share = _most(fact)
        said += (
            [f"{percent(share)} of {fact.split} is {word!r}"] if share >= LIKE_CONSTANT_FRAC else []
        )
    yield Finding(
        "warn" if said else "ok",
        "labels",
        "; ".join(said) or f"all {len(train.answers)} in every split",
    )


def _most(fact: SplitFacts) -> tuple[str, float]:
    return max(fact.answers.items(), key=lambda item: item[1])


def _empty(task: TaskConfig, found: Mapping[SplitName, Sequence[Row]]) -> Finding:
    """Rows without any text to read, or with an empty text to write."""
    rows = [
        row
        for part in found.values()
        for row in part
        if not any(str(text).strip() for text in row.reads) or row.answer == ""
    ]
    if rows:
        share = _share(len(rows), sum(map(len, found.values())))
        return Finding(
            "warn",
            "empty texts",
            f"nothing to read, or an empty answer: {share}",
            len(rows),
            _shown(task, rows),
        )
    return Finding("ok", "empty texts", "none")


def _repeated(task: TaskConfig, found: Mapping[SplitName, Sequence[Row]]) -> Iterator[Finding]:
    """Rows in two splits, rows twice in one, and the same text with another answer."""
    if task.in_order:
        found = {
            split: [row for row in rows if len(row.reads[0]) >= LONG_CHARACTERS]
            for split, rows in found.items()
        }
    for left, right in (("train", "validation"), ("train", "test"), ("validation", "test")):
        yield _leak(task, left, found[left], right, found[right])  # type: ignore[index]
    for split, rows in found.items():
        counts = Counter(rows)
        twice = [row for row, count in counts.items() if count > 1]
        extra = len(rows) - len(counts)
        level: Level = "warn" if extra > REPEATED_WARN_FRAC * len(rows) else "ok"
        yield Finding(
            level, f"repeated in {split}", _share(extra, len(rows)), extra, _shown(task, twice)
        )
    yield _contradictions(task, found)


def _leak(
    task: TaskConfig, left: str, first: Sequence[Row], right: str, second: Sequence[Row]
) -> Finding:
    seen = set(first)
    same = [row for row in second if row in seen]
    level: Level = (
        "ok"
        if not same
        else "fail"
        if len(same) > LEAK_FAIL_FRAC * len(second) and not task.in_order
        else "warn"
    )
    text = _share(len(same), len(second)) if same else "none"
    return Finding(level, f"{right} rows in {left}", text, len(same), _shown(task, same))


def _contradictions(task: TaskConfig, found: Mapping[SplitName, Sequence[Row]]) -> Finding:
    """Texts that have another answer elsewhere; where answers are texts that is no mistake."""
    answers: dict[tuple[Any, ...], set[Hashable]] = {}
    for rows in found.values():
        for row in rows:
            answers.setdefault(row.reads, set()).add(row.answer)
    torn = {reads for reads, given in answers.items() if len(given) > 1}
    rows = [row for part in found.values() for row in part if row.reads in torn]
    level: Level = "warn" if rows and isinstance(task, LabelTask) else "ok"
    total = sum(map(len, found.values()))
    examples = _shown(task, sorted(set(rows), key=lambda row: str(row.reads)))
    return Finding(
        level,
        "same text, other answer",
        _share(len(rows), total) if rows else "none",
        len(rows),
        examples,
    )


def _share(count: int, of: int) -> str:
    return f"{count:,} of {of:,} rows ({percent(count / of)})" if count else "none"


def percent(share: float) -> str:
    """Two significant digits, as far as they say something: `0.14%`, `7.5%`, `42%`."""
    return f"{100 * share:.2g}%" if share < 0.1 else f"{100 * share:.0f}%"


def _shown(task: TaskConfig, rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(row.shown(task) for row in rows[:3])
