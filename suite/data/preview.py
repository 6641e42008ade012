"""Previews a task token by token: what each family of backbones reads, must answer, and loses.

Lengths are counted with each family's own tokenizer.
"""

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
from suite.config.task_base import SPLIT_NAMES
from suite.config.task_files import own_score
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED
from suite.data.inspection import Finding, Level, TaskRows, answer_text, percent
from suite.data.make_objective import make_objective
from suite.data.objective import Columns, Features, Objective, lengths
from suite.data.splits import Part
from suite.errors import HubUnreachableError, IncompatibleError, SuiteError
from suite.metrics.text import exact_matches

Counts = np.ndarray[Any, np.dtype[np.int64]]
SAMPLE_ROWS = 2000
"""Rows of each split whose tokens are counted."""
WHOLE = 1_000_000
"""A limit in tokens that cuts nothing."""
CUT_WARN_FRAC = 0.01
"""The command warns if more than this share of the rows is cut (ours)."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A backbone's tokenizer.

    Attributes:
        backbone: Name of the backbone.
        kind: The kind of the backbone.
        tokenizer: The backbone's tokenizer, or one of bytes that stands in for it.
        draft: Whether a tokenizer of bytes stands in, because the hub cannot be reached. Lengths
            are then unknown.
    """

    backbone: str
    kind: Kind
    tokenizer: PreTrainedTokenizerBase
    draft: bool

    @classmethod
    def load(cls, resolved: ResolvedBackbone) -> Reader:
        """The reader of a backbone."""
        name = resolved.choice.name
        kind = resolved.family.kind
        try:
            return cls(name, kind, load_tokenizer(resolved), draft=False)
        except HubUnreachableError:
            return cls(name, kind, draft_bpe(), draft=True)


@dataclass(frozen=True, slots=True)
class Example:
    """One row as its tokens spell it, special tokens included.

    Attributes:
        row: Name of the row.
        reads: What the model reads; one text per choice where there are choices.
        answers: What it must answer.
    """

    row: str
    reads: list[str]
    answers: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens of all inputs, or of all answers.

    Attributes:
        what: "inputs" or "answers".
        p50, p90, p99: Percentiles.
        longest: The largest number of tokens.
        at_most: Tokens that training keeps; None = nothing is cut.
        cut_frac: Share of rows that lose tokens. None = unknown, or the rows are cut into windows
            or blocks, which lose nothing.
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
    """How one backbone reads a task; `refused` says why it cannot, where it cannot."""

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
        reader: The backbone.
        rows: All rows; the examples are the first of train.
        sample: The rows whose tokens are counted.
        training: Says what is cut. For a draft tokenizer nothing is cut.
        examples: How many examples to show.
    """
    try:
        # lengths are those of whole rows; what training keeps is compared with them
        whole = _objective(rows.task, reader, _uncut(training))
        cut = None if reader.draft else _objective(rows.task, reader, training)
        shown = _examples(cut or whole, reader, rows, examples)
        counted = _lengths(whole, cut, reader, sample)
    except IncompatibleError as error:
        return Reading(reader.backbone, reader.kind, reader.draft, [], [], str(error))
    return Reading(reader.backbone, reader.kind, reader.draft, shown, counted)


def sample_rows(task: TaskConfig, data: TaskRows) -> TaskRows:
    """At most `SAMPLE_ROWS` of every split."""
    # a fixed seed, so that two runs of the command print the same
    draw = np.random.default_rng(0)
    parts = {}
    for name, part in data.parts.items():
        rows = part.rows
        if len(rows) > SAMPLE_ROWS:
            rows = np.sort(draw.choice(rows, SAMPLE_ROWS, replace=False))
        parts[name] = Part(part.source, rows)
    return TaskRows(task, data.tables, parts, data.dropped)


def first_objective(
    readers: Sequence[Reader], task: TaskConfig, training: TrainingConfig
) -> Objective | None:
    """The objective of the first backbone that can answer the task; it cuts nothing."""
    for reader in readers:
        try:
            return _objective(task, reader, _uncut(training))
        except IncompatibleError:
            continue
    return None


def check_metrics(rows: TaskRows, sample: TaskRows, objective: Objective) -> list[Finding]:
    """Whether the metrics can be computed, and whether a perfect answer beats a constant one.

    Both are scored on test rows.
    """
    task = rows.task
    if task.item_score:
        # a perplexity needs a model
        return []
    golds, groups = _golds(objective, sample.columns("test"))
    perfect = golds
    if isinstance(task, QuestionAnsweringTask):
        # any accepted text is right
        perfect = [texts[0] for texts in golds]
    constant = _most_common_class(task, golds)
    try:
        scores = objective.scores(perfect, golds, groups)
        best = task.score_of(scores)
        text = f"right answers score {best:.4g}"
        # the suite's own metrics give right answers 100; a file's `score` gives what it likes, and
        # where exact_match finds no answer, `_check_references` says so
        blind = [name for name, score in scores.items() if score <= 0 and name != "exact_match"]
        if blind and own_score(task) is None:
            return [Finding("fail", "metrics", f"{text}: {_why_blind(task, blind)}")]
        if constant is not None:
            always = [constant] * len(golds)
            same = task.score_of(objective.scores(always, golds, groups))
            text += f", always {answer_text(task, constant)!r} scores {same:.4g}"
            if same >= best and len(set(golds)) == 1:
                text = f"every test answer is {answer_text(task, constant)!r}"
                return [Finding("fail", "metrics", f"{text}: no metric can tell models apart")]
            # such a metric would rank a model that learnt nothing first
            if same >= best:
                return [Finding("fail", "metrics", f"{text}: more must be better")]
        if best <= 1 and own_score(task) is not None:
            text += (
                ": right answers should score 100, because the search and the verdicts take a "
                "difference of 1 for a small one; multiply the score by 100"
            )
            return [Finding("warn", "metrics", text), *_check_references(task, rows)]
    except SuiteError as error:
        return [Finding("fail", "metrics", str(error))]
    except ValueError as error:
        names = ", ".join(task.metrics)
        return [Finding("fail", "metrics", f"{names} cannot be computed of right answers: {error}")]
    return [Finding("ok", "metrics", text), *_check_references(task, rows)]


def _why_blind(task: TaskConfig, blind: Sequence[str]) -> str:
    """Why the suite's own metrics give right answers nothing."""
    said = f"{' and '.join(blind)} cannot be more than 0"
    if isinstance(task, LabelTask):
        return f"{said} on a test split with these answers"
    return (
        f"{said} for these texts: rouge reads Latin letters and digits alone, and bleu needs texts "
        "of four words with blanks between them; exact_match compares any text"
    )


def check_families(readings: Sequence[Reading]) -> Finding:
    """Which families can answer the task at all."""
    able = []
    unable = []
    reasons = []
    for reading in readings:
        if reading.refused is None:
            able.append(reading.kind)
        else:
            unable.append(reading.kind)
            reasons.append(reading.refused)
    if not able:
        return Finding("fail", "families", f"none can answer it: {'; '.join(reasons)}")
    text = f"{', '.join(able)} can answer it"
    if unable:
        text += f"; {', '.join(unable)} cannot (why: above)"
    return Finding("ok", "families", text)


def check_lengths(readings: Sequence[Reading]) -> list[Finding]:
    """Say what does not fit, and which limit would fit."""
    findings = []
    keys = {"inputs": "training.max_length", "answers": "training.target_max_length"}
    for reading in readings:
        for found in reading.lengths:
            # unknown, or nothing is cut
            if not found.cut_frac:
                continue
            share = percent(found.cut_frac)
            # a multiple of 8, which matrix units like
            enough = -(-int(found.p99) // 8) * 8
            text = (
                f"{share} of {found.what} are cut by {keys[found.what]} {found.at_most}; "
                f"{enough} would keep 99% whole"
            )
            level: Level = "warn" if found.cut_frac > CUT_WARN_FRAC else "ok"
            findings.append(Finding(level, f"length for {reading.backbone}", text))
    return findings


def _uncut(training: TrainingConfig) -> TrainingConfig:
    return training.model_copy(update={"max_length": WHOLE, "target_max_length": WHOLE})


def _objective(task: TaskConfig, reader: Reader, training: TrainingConfig) -> Objective:
    return make_objective(
        task,
        kind=reader.kind,
        tokenizer=reader.tokenizer,
        training=training,
        # a head, because label words cannot ask for a number
        decoder_objective="head",
    )


def _examples(objective: Objective, reader: Reader, rows: TaskRows, count: int) -> list[Example]:
    """The first rows of train as the backbone reads them."""
    part = rows.parts["train"]
    features = _first_windows(objective.encode(rows.columns("train", at_most=count)))
    examples = []
    for place, number in enumerate(part.rows[:count].tolist()):
        row = {name: values[place] for name, values in features.items()}
        reads, answers = _spell(objective.task, reader, row)
        examples.append(Example(f"{part.source}/{number}", reads, answers))
    return examples


def _first_windows(features: Features) -> Features:
    """One entry per row: the first window of rows that have several."""
    if "index" not in features:
        return features
    first: Features = {name: [] for name in features}
    before = None
    for place, index in enumerate(features["index"]):
        if place == 0 or index != before:
            for name, values in features.items():
                first[name].append(values[place])
        before = index
    return first


def _spell(task: TaskConfig, reader: Reader, row: Mapping[str, Any]) -> tuple[list[str], str]:
    """What an encoded row reads, one text per choice where there are choices, and its answer."""
    ids = row["input_ids"]
    if row.get("labels") is not None:
        return _spell_text(reader, ids, row["labels"])
    if isinstance(task, LanguageModelTask):
        return [_text(reader, ids)], "every token, from those before it"
    if "start_positions" in row:
        start = row["start_positions"]
        end = row["end_positions"]
        # both are 0 where the window holds no answer
        answer = _text(reader, ids[start : end + 1]) if end else "(no answer here)"
        return [_text(reader, ids)], answer
    answer = answer_text(task, row["gold"])
    if isinstance(task, LabelTask) and task.label.words is not None:
        answer += f" (class {row['gold']})"
    # a head over choices reads a list of sequences
    choices = ids if ids and isinstance(ids[0], list) else [ids]
    return [_text(reader, choice) for choice in choices], answer


def _spell_text(reader: Reader, ids: Sequence[int], labels: Sequence[int]) -> tuple[list[str], str]:
    """What is read and written, where the answer is a text."""
    written = [label for label in labels if label != IGNORED]
    prompt = list(ids)
    if reader.kind != "encoder-decoder":
        # a decoder has its answer in the same sequence
        prompt = [token for token, label in zip(ids, labels, strict=True) if label == IGNORED]
    return [_text(reader, prompt)], _text(reader, written)


def _text(reader: Reader, ids: Sequence[int]) -> str:
    # cleaned up, the text would hide which spaces the model sees
    return str(reader.tokenizer.decode([*ids], clean_up_tokenization_spaces=False))


def _golds(objective: Objective, columns: Columns) -> tuple[list[Any], list[str] | None]:
    """Gold and group of every row; groups are None where the task has none."""
    count = len(next(iter(columns.values())))
    names = [str(number) for number in range(count)]
    parts = objective.features([(names, columns)], "test")
    # a gold belongs to a question and not to each of its windows
    features = _first_windows(next(iter(parts)))
    return features["gold"], features.get("group")


def _most_common_class(task: TaskConfig, golds: Sequence[Any]) -> Any:
    """The most common class; None where a constant answer says nothing."""
    if not isinstance(task, LabelTask) or task.is_regression:
        return None
    values, counts = np.unique(np.asarray(golds), return_counts=True)
    return values[counts.argmax()].item()


def _check_references(task: TaskConfig, rows: TaskRows) -> list[Finding]:
    """References in which the pattern `answer` finds nothing: no model can be right there."""
    if not isinstance(task, GenerationTask) or task.answer is None or own_score(task) is not None:
        return []
    texts: list[str] = []
    for split in SPLIT_NAMES:
        texts += rows.columns(split)[task.target]
    # a reference matches itself unless nothing is found in it
    matches = exact_matches(texts, texts, answer=task.answer)
    without = [text for text, found in zip(texts, matches, strict=True) if not found]
    if not without:
        return [Finding("ok", "answers", f"found in all {len(texts):,} references")]
    level: Level = "fail" if len(without) == len(texts) else "warn"
    text = (
        f"the pattern finds nothing in {len(without):,} of {len(texts):,} references, "
        "which no model can match"
    )
    return [Finding(level, "answers", text, len(without), tuple(without[:3]))]


def _lengths(
    whole: Objective, cut: Objective | None, reader: Reader, sample: TaskRows
) -> list[Lengths]:
    """Lengths of inputs, and of answers that are text.

    Args:
        whole: Cuts nothing.
        cut: Cuts as training does; None = that is unknown.
    """
    if cut is not None and _in_parts(cut):
        cut = None
    all_tokens = _count_splits(whole, reader, sample)
    kept_tokens = {}
    limits = {}
    if cut is not None:
        kept_tokens = _count_splits(cut, reader, sample)
        limits["inputs"] = cut.training.max_length
        limits["answers"] = cut.training.target_max_length
    found = []
    for what, tokens in all_tokens.items():
        lost = None
        if cut is not None:
            # a row that is cut has fewer tokens than without a limit
            lost = float((tokens != kept_tokens[what]).mean())
        p50, p90, p99 = np.percentile(tokens, [50, 90, 99]).tolist()
        found.append(Lengths(what, p50, p90, p99, int(tokens.max()), limits.get(what), lost))
    return found


def _in_parts(objective: Objective) -> bool:
    """Whether long rows become several sequences instead of losing their end."""
    return isinstance(objective.task, LanguageModelTask) or hasattr(objective, "windows")


def _count_splits(objective: Objective, reader: Reader, sample: TaskRows) -> dict[str, Counts]:
    """The counts that `_count` gives, over the rows of all splits."""
    parts: dict[str, list[Counts]] = {}
    for split in SPLIT_NAMES:
        for what, tokens in _count(objective, reader, sample.columns(split)).items():
            parts.setdefault(what, []).append(tokens)
    return {what: np.concatenate(counts) for what, counts in parts.items()}


def _count(objective: Objective, reader: Reader, columns: Columns) -> dict[str, Counts]:
    """Count the tokens of every row's `inputs`, and of its `answers` where they are written."""
    features = _first_windows(objective.encode(columns))
    # decoders have the answer in the same sequence, so it is taken off their inputs below
    if "labels" in features:
        written = []
        for row in features["labels"]:
            written.append(len(row) - list(row).count(IGNORED))
        answers = np.array(written)
        inputs = np.array(lengths(features["input_ids"]))
        if reader.kind != "encoder-decoder":
            inputs = inputs - answers
        return {"inputs": inputs, "answers": answers}
    if "length" in features:
        return {"inputs": np.array(features["length"])}
    return {"inputs": np.array(lengths(features["input_ids"]))}
