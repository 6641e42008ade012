"""What backbones of each family read of a task, token by token, and must answer; and how long that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.bpe import draft_bpe
from suite.backbones.loading import ResolvedBackbone, load_tokenizer
from suite.config.task import (
    GenerationTask,
    LabelTask,
    LanguageModelTask,
    QuestionAnsweringTask,
    TaskConfig,
)
from suite.config.task_files import own_score
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED
from suite.data.inspection import Finding, TaskRows, answer_text, percent
from suite.data.make_objective import make_objective
from suite.data.objective import Columns, Features, Objective
from suite.data.splits import SPLIT_NAMES
from suite.errors import HubUnreachableError, IncompatibleError, SuiteError
from suite.metrics.text import exact_matches

Counts = np.ndarray[Any, np.dtype[np.int64]]
SAMPLE_ROWS = 2000
"""Rows per split of which lengths are counted."""
WHOLE = 1_000_000
"""Tokens that nothing is longer than."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A backbone's tokenizer.

    Attributes:
        draft: One of bytes stands in for it, as its own is out of reach: nothing can be said about lengths.
    """

    backbone: str
    kind: Kind
    tokenizer: PreTrainedTokenizerBase
    draft: bool

    @classmethod
    def of(cls, resolved: ResolvedBackbone) -> Reader:
        try:
            return cls(
                resolved.choice.name, resolved.family.kind, load_tokenizer(resolved), draft=False
            )
        except HubUnreachableError:
            return cls(resolved.choice.name, resolved.family.kind, draft_bpe(), draft=True)


@dataclass(frozen=True, slots=True)
class Example:
    """One row as tokens say it, special ones among them."""

    row: str
    reads: list[str]
    answers: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of inputs, or of answers.

    Attributes:
        what: "inputs" or "answers".
        at_most: Tokens that training keeps; None = nothing is cut.
        cut_frac: Share of rows that loses some; None = unknown, or cut into windows or blocks that lose nothing.
    """

    what: str
    p50: float
    p90: float
    p99: float
    longest: int
    at_most: int | None
    cut_frac: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    """How one backbone reads a task; `refused` says why it cannot."""

    backbone: str
    kind: Kind
    draft: bool
    examples: list[Example]
    lengths: list[Lengths]
    refused: str | None = None


def read_as(
    reader: Reader, rows: TaskRows, sample: TaskRows, *, training: TrainingConfig, examples: int
) -> Reading:
    """A task as one backbone reads it.

    Args:
        rows: All of them; examples are the first of train.
        sample: Those to count tokens of.
        training: What cuts; of a draft tokenizer nothing is cut.
        examples: How many to show.
    """
    task = rows.task
    whole = training.model_copy(update={"max_length": WHOLE, "target_max_length": WHOLE})
    try:
        full = _objective(task, reader, whole)
        cut = full if reader.draft else _objective(task, reader, training)
        shown = _examples(cut, reader, rows, examples)
        lengths = _lengths(full, None if reader.draft else cut, reader, sample)
    except IncompatibleError as error:
        return Reading(reader.backbone, reader.kind, reader.draft, [], [], str(error))
    return Reading(reader.backbone, reader.kind, reader.draft, shown, lengths)


def sampled(task: TaskConfig, data: TaskRows) -> TaskRows:
    """At most `SAMPLE_ROWS` of every split."""
    draw = np.random.default_rng(0)
    kept = {}
    for name, part in data.parts.items():
        few = (
            part.rows
            if len(part.rows) <= SAMPLE_ROWS
            else np.sort(draw.choice(part.rows, SAMPLE_ROWS, replace=False))
        )
        kept[name] = type(part)(part.source, few)
    return TaskRows(task, data.tables, kept, data.dropped)


def scoring(rows: TaskRows, sample: TaskRows, objective: Objective) -> list[Finding]:
    """Whether the metrics can be computed, and what a perfect answer and the most common one score on test."""
    task = rows.task
    if task.item_score:
        return []
    columns = sample.columns("test")
    golds, groups = _golds(objective, columns)
    perfect = [gold[0] for gold in golds] if isinstance(task, QuestionAnsweringTask) else golds
    try:
        best = task.score_of(objective.scores(perfect, golds, groups))
        constant = _constant(task, golds)
        same = (
            None
            if constant is None
            else task.score_of(objective.scores([constant] * len(golds), golds, groups))
        )
    except SuiteError as error:
        return [Finding("fail", "metrics", str(error))]
    except ValueError as error:
        return [
            Finding(
                "fail",
                "metrics",
                f"{', '.join(task.metrics)} cannot be computed of right answers: {error}",
            )
        ]
    text = f"right answers score {best:.4g}"
    if same is not None and constant is not None:
        text += f", always {answer_text(task, constant)!r} scores {same:.4g}"
        if same >= best:
            return [Finding("fail", "metrics", f"{text}: more must be better")]
    return [Finding("ok", "metrics", text), *_unanswered(task, rows)]


def make_any(
    readers: Sequence[Reader], task: TaskConfig, training: TrainingConfig
) -> Objective | None:
    """The objective of the first family that can answer the task."""
    for reader in readers:
        try:
            return _objective(
                task,
                reader,
                training.model_copy(update={"max_length": WHOLE, "target_max_length": WHOLE}),
            )
        except IncompatibleError:
            continue
    return None


def families(readings: Sequence[Reading]) -> Finding:
    """Who can answer the task at all."""
    able = [reading.kind for reading in readings if reading.refused is None]
    refused = [reading for reading in readings if reading.refused is not None]
    if not able:
        return Finding(
            "fail",
            "families",
            "none can answer it: " + "; ".join(str(reading.refused) for reading in refused),
        )
    cannot = (
        f"; {', '.join(reading.kind for reading in refused)} cannot (why: above)" if refused else ""
    )
    return Finding("ok", "families", f"{', '.join(able)} can answer it{cannot}")


def truncation(readings: Sequence[Reading]) -> list[Finding]:
    """What does not fit, and what would."""
    found = []
    keys = {"inputs": "training.max_length", "answers": "training.target_max_length"}
    for reading in readings:
        for lengths in reading.lengths:
            if lengths.cut_frac:
                share = f"{percent(lengths.cut_frac)} of {lengths.what} are cut by {keys[lengths.what]} {lengths.at_most}"
                enough = f"{-(-int(lengths.p99) // 8) * 8} would keep 99% whole"
                level: Any = "warn" if lengths.cut_frac > 0.01 else "ok"
                found.append(
                    Finding(
                        level, f"length for {reading.backbone}", f"{share}; {enough}", examples=()
                    )
                )
    return found


def _objective(task: TaskConfig, reader: Reader, training: TrainingConfig) -> Objective:
    return make_objective(
        task,
        kind=reader.kind,
        tokenizer=reader.tokenizer,
        training=training,
        decoder_objective="head",
    )


def _examples(objective: Objective, reader: Reader, rows: TaskRows, count: int) -> list[Example]:
    part = rows.parts["train"]
    features = _first_windows(objective.encode(rows.columns("train", at_most=count)))
    encoded = (
        dict(zip(features, values, strict=True)) for values in zip(*features.values(), strict=True)
    )
    return [
        Example(f"{part.source}/{number}", *_spelt(objective.task, reader, row))
        for number, row in zip(part.rows[:count].tolist(), encoded, strict=True)
    ]


def _first_windows(features: Features) -> Features:
    """One entry per row, where long ones have several."""
    if "index" not in features:
        return features
    first = [
        n
        for n, index in enumerate(features["index"])
        if n == 0 or index != features["index"][n - 1]
    ]
    return {name: [values[n] for n in first] for name, values in features.items()}


def _spelt(task: TaskConfig, reader: Reader, row: Mapping[str, Any]) -> tuple[list[str], str]:
    """What is read, one text per choice where there are choices, and what is to be answered."""
    ids, labels = row["input_ids"], row.get("labels")
    choices = ids if ids and isinstance(ids[0], list) else [ids]
    if labels is not None:
        wanted = [label for label in labels if label != IGNORED]
        prompt = (
            ids
            if reader.kind == "encoder-decoder"
            else [i for i, label in zip(ids, labels, strict=True) if label == IGNORED]
        )
        return [_text(reader, prompt)], _text(reader, wanted)
    if isinstance(task, LanguageModelTask):
        return [_text(reader, ids)], "every token, from those before it"
    if "start_positions" in row:
        start, end = row["start_positions"], row["end_positions"]
        return [_text(reader, ids)], _text(
            reader, ids[start : end + 1]
        ) if end else "(no answer here)"
    answer = answer_text(task, row["gold"])
    words = task.label.words if isinstance(task, LabelTask) else None
    return [
        _text(reader, one) for one in choices
    ], answer if words is None else f"{answer} (class {row['gold']})"


def _text(reader: Reader, ids: Sequence[int]) -> str:
    return str(reader.tokenizer.decode([*ids], clean_up_tokenization_spaces=False))


def _golds(objective: Objective, columns: Columns) -> tuple[list[Any], list[str] | None]:
    names = [str(number) for number in range(len(next(iter(columns.values()))))]
    features = _first_windows(next(iter(objective.features([(names, columns)], "test"))))
    return features["gold"], features.get("group")


def _constant(task: TaskConfig, golds: Sequence[Any]) -> Any:
    """The most common class; None where a constant answer says nothing."""
    if not isinstance(task, LabelTask) or task.is_regression:
        return None
    values, counts = np.unique(np.asarray(golds), return_counts=True)
    return values[counts.argmax()].item()


def _unanswered(task: TaskConfig, rows: TaskRows) -> list[Finding]:
    """References in which `answer` finds nothing: no model can be right there."""
    if not isinstance(task, GenerationTask) or task.answer is None or own_score(task) is not None:
        return []
    texts = [text for split in SPLIT_NAMES for text in rows.columns(split)[task.target]]
    without = [
        text
        for text, right in zip(texts, exact_matches(texts, texts, answer=task.answer), strict=True)
        if not right
    ]
    if not without:
        return [Finding("ok", "answers", f"found in all {len(texts):,} references")]
    level: Any = "fail" if len(without) == len(texts) else "warn"
    text = f"the pattern finds nothing in {len(without):,} of {len(texts):,} references, which no model can match"
    return [Finding(level, "answers", text, len(without), tuple(without[:3]))]


def _lengths(
    full: Objective, cut: Objective | None, reader: Reader, sample: TaskRows
) -> list[Lengths]:
    """Of inputs, and of answers that are text."""
    cut = None if cut is None or _in_parts(cut) else cut
    columns = [sample.columns(split) for split in SPLIT_NAMES]
    whole = [_counted(full, reader, part) for part in columns]
    kept = [] if cut is None else [_counted(cut, reader, part) for part in columns]
    limits = (
        {}
        if cut is None
        else {"inputs": cut.training.max_length, "answers": cut.training.target_max_length}
    )
    found = []
    for what in whole[0]:
        tokens = np.concatenate([part[what] for part in whole])
        lost = (
            float((tokens != np.concatenate([part[what] for part in kept])).mean())
            if kept
            else None
        )
        p50, p90, p99 = np.percentile(tokens, [50, 90, 99]).tolist()
        found.append(Lengths(what, p50, p90, p99, int(tokens.max()), limits.get(what), lost))
    return found


def _in_parts(objective: Objective) -> bool:
    """Whether long rows become several sequences instead of losing their end."""
    return isinstance(objective.task, LanguageModelTask) or hasattr(objective, "windows")


def _counted(objective: Objective, reader: Reader, columns: Columns) -> dict[str, Counts]:
    """Tokens of every row's `inputs`, and of its `answers` where they are written."""
    features = _first_windows(objective.encode(columns))
    if "labels" not in features:
        return {
            "inputs": np.array(
                features["length"]
                if "length" in features
                else [len(ids) for ids in features["input_ids"]]
            )
        }
    written = np.array([sum(label != IGNORED for label in row) for row in features["labels"]])
    read = np.array([len(ids) for ids in features["input_ids"]])
    return {
        "inputs": read if reader.kind == "encoder-decoder" else read - written,
        "answers": written,
    }
