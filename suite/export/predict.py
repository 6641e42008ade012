"""What an exported model answers to texts: the answers that its trial's evaluation would give.

The task's own objective fills its template, cuts and pads, and reads the answer back, as in
training. Predictions of a trial are class ids; here a class is its label word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.config.task import (
    ClassificationTask,
    GenerationTask,
    InstructionTask,
    LabelTask,
    LanguageModelTask,
    MultipleChoiceTask,
    PretrainTask,
    QuestionAnsweringTask,
    TaskConfig,
)
from suite.data.generation import make_generation
from suite.data.label_words import NO_LABEL
from suite.data.make_objective import make_objective
from suite.data.objective import Columns, Features, Objective
from suite.errors import DataError
from suite.export.description import Reading

log = logging.getLogger(__name__)

Text: TypeAlias = str | Sequence[str] | Mapping[str, str]
"""A row's text; several in the order of the task's columns, or by column."""
Answer: TypeAlias = str | float | None
PLACEHOLDER = "."
"""Stands where training has the text to write. It is not empty, so that a prompt has an end."""


@torch.no_grad()
def predict(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    reading: Reading,
    texts: Iterable[Text],
    *,
    kind: Kind,
    batch_size: int,
) -> list[Answer]:
    """Answer every text; `Loaded.predict` says what each answer is.

    Raises:
        DataError: A text is not what the task reads, or the task asks no question.
    """
    task = reading.task
    if isinstance(task, PretrainTask):
        raise DataError(f"{task.name}: pre-training asks nothing that a model could answer")
    if _is_one_row(texts):
        raise DataError(f"predict: got {type(texts).__name__}, expected a list of texts")
    texts = list(texts)
    if not texts:
        return []
    columns = _columns(task, texts)
    objective = make_objective(
        task,
        kind=kind,
        tokenizer=tokenizer,
        training=reading.training,
        decoder_objective=reading.decoder_objective,
    )
    if isinstance(task, LanguageModelTask):
        return _perplexities(model, objective, columns, batch_size=batch_size)
    answering = objective
    if isinstance(task, InstructionTask):
        # the trial scores given responses; whoever asks wants one written
        answering = make_generation(_as_generation(task), tokenizer, reading.training, kind=kind)
    data = _encoded(objective, columns)
    answers = _answers(model, objective, data, answering=answering, batch_size=batch_size)
    predictions = objective.merge(data, answers).predictions
    if isinstance(task, LabelTask) and task.label.range is not None:
        _warn_outside(predictions, task)
    return [_readable(task, answer) for answer in predictions]


def _warn_outside(numbers: Sequence[float], task: LabelTask) -> None:
    """Say how many numbers are none that a label could be; they stay as the model gives them."""
    assert task.label.range is not None
    low, high = task.label.range
    # "not inside" rather than "outside", so that NaN is counted as well
    outside = sum(not low <= number <= high for number in numbers)
    if outside:
        log.warning(
            "%s: %d of %d answers lie outside of %g to %g, the range of the task's labels",
            task.name,
            outside,
            len(numbers),
            low,
            high,
        )


def text_columns(task: TaskConfig) -> list[str]:
    """The columns of text that the model reads, in the order of `predict`'s texts."""
    if isinstance(task, MultipleChoiceTask):
        return [*task.inputs, *task.choices]
    return list(task.inputs)


def _is_one_row(texts: Any) -> bool:
    """Whether this is no list of rows: one text, or a mapping or table, which iterate by key."""
    by_key = isinstance(texts, str | Mapping) or hasattr(texts, "columns")
    return by_key or not isinstance(texts, Iterable)


def _columns(task: TaskConfig, texts: Sequence[Text]) -> dict[str, list[Any]]:
    """Rows as the task's data have them.

    Evaluation reads no answer off a row (`Objective.predict`), so any answer will do.
    """
    names = text_columns(task)
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for number, text in enumerate(texts):
        for name, value in zip(names, _row(text, names, number=number), strict=True):
            columns[name].append(value)
    placeholder: dict[str, Any] = {}
    if isinstance(task, ClassificationTask):
        placeholder |= dict.fromkeys(task.group, PLACEHOLDER)
    if isinstance(task, LabelTask):
        low = task.label.range or [0]
        placeholder[task.label.column] = low[0]
    elif isinstance(task, QuestionAnsweringTask):
        placeholder |= {task.answers: [], task.starts: []}
    elif isinstance(task, (GenerationTask, InstructionTask)):
        placeholder[task.target] = PLACEHOLDER
    for name, value in placeholder.items():
        # an input may name the group as well
        columns.setdefault(name, [value] * len(texts))
    return columns


def _row(text: Any, names: Sequence[str], *, number: int) -> list[str]:
    """The values of one row, in the order of `names`."""
    if isinstance(text, str):
        values: list[Any] = [text]
    elif isinstance(text, Mapping):
        values = [text[name] for name in names if name in text]
    elif isinstance(text, Iterable):
        values = list(text)
    else:
        values = []
    if len(values) != len(names) or not all(isinstance(value, str) for value in values):
        raise DataError(
            f"predict: text {number} is {text!r:.80}, expected {len(names)}: {', '.join(names)};"
            " give several as a tuple in this order, or as a dictionary"
        )
    return values


def _encoded(objective: Objective, columns: Columns) -> Dataset:
    """The rows as the objective encodes a split that is evaluated."""
    count = len(next(iter(columns.values())))
    names = [str(number) for number in range(count)]
    merged: Features = {}
    for part in objective.features([(names, columns)], "test"):
        for name, values in part.items():
            merged.setdefault(name, []).extend(values)
    return Dataset.from_dict(merged)


def _answers(
    model: nn.Module, objective: Objective, data: Dataset, *, answering: Objective, batch_size: int
) -> list[Any]:
    """One answer per encoded row."""
    device = next(model.parameters()).device
    answers: list[Any] = []
    for start in range(0, len(data), batch_size):
        rows = [data[number] for number in range(start, min(start + batch_size, len(data)))]
        batch = {}
        for name, tensor in objective.collate_eval(rows).items():
            batch[name] = tensor.to(device)
        answers += answering.predict(model, batch, synced=False)
    return answers


def _perplexities(
    model: nn.Module, objective: Objective, columns: Columns, *, batch_size: int
) -> list[Answer]:
    """The perplexity of each text by itself; a trial takes all rows of a split for one text."""
    found: list[Answer] = []
    for name, texts in columns.items():
        for text in texts:
            data = _encoded(objective, {name: [text]})
            if not len(data):
                # a single token has none before it that could predict it
                found.append(None)
                continue
            nll = _answers(model, objective, data, answering=objective, batch_size=batch_size)
            found.append(objective.score(nll, data["gold"][:])["perplexity"])
    return found


def _as_generation(task: InstructionTask) -> GenerationTask:
    """The same task with its response as a text to write."""
    return GenerationTask(
        kind="generation",
        name=task.name,
        description=task.description,
        source=task.source,
        data=task.data,
        inputs=task.inputs,
        target=task.target,
        text_to_text=task.text_to_text,
        metrics=["exact_match"],
    )


def _readable(task: TaskConfig, answer: Any) -> Answer:
    if not isinstance(task, LabelTask) or task.label.words is None:
        readable: Answer = answer
        return readable
    if answer == NO_LABEL:
        return None
    return task.label.words[int(answer)]
