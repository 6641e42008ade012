"""A task: where its rows come from, what the model sees, what it must answer, how it is scored.

The key `kind` of its file says which kind it is; without the key it is `classification`, which is
also the kind of tasks that ask for a number. `KINDS` holds all kinds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from suite.config.loader import validate
from suite.config.numbers import Count
from suite.config.own_data import with_own_files
from suite.config.task_base import BaseTask, Prompt
from suite.config.task_base import FileData as FileData
from suite.config.task_base import GeneratedData as GeneratedData
from suite.config.task_base import HubData as HubData
from suite.config.task_base import LabelConfig as LabelConfig
from suite.config.task_base import SplitConfig as SplitConfig
from suite.config.task_files import read_task_file, task_name, task_paths
from suite.errors import ConfigError, UnknownNameError
from suite.registry import shipped_folder, user_folders
from suite.tables import form_of

LabelMetric = Literal["accuracy", "f1", "macro_f1", "group_em", "matthews", "pearson", "spearman"]
SpanMetric = Literal["em", "token_f1"]
TextMetric = Literal["bleu", "rouge1", "rouge2", "rougeL", "exact_match"]
ObjectiveName = Literal["mlm", "causal-lm", "span-corruption"]


class LabelTask(BaseTask):
    """A class or a number per row: what the kinds of such tasks have in common."""

    inputs: Annotated[list[str], Field(min_length=1)] = Field(
        description="columns of text that the model reads"
    )
    label: LabelConfig
    text_to_text: Prompt = Field(description="T5-style prompt with {column} in braces")
    metrics: Annotated[list[LabelMetric], Field(min_length=1)] = Field(
        description="the headline score is their mean"
    )

    @model_validator(mode="after")
    def _prompt_uses_columns(self) -> LabelTask:
        self._check_prompt(self.text_to_text, self.text_columns)
        return self

    @property
    def columns(self) -> list[str]:
        return [*self.text_columns, self.label.column]

    @property
    def is_regression(self) -> bool:
        return self.label.range is not None

    @property
    def num_labels(self) -> int:
        """Classes, or 1 for regression: the width of a task head."""
        if self.label.words is None:
            return 1
        return len(self.label.words)


class ClassificationTask(LabelTask):
    """A class or a number per row.

    Rows of one `group` (such as the answers to one question) are never torn apart, and they may be
    scored together.
    """

    kind: Literal["classification"] = "classification"
    pair: Annotated[list[Prompt], Field(min_length=1, max_length=2)] | None = Field(
        None,
        exclude_if=lambda pair: pair is None,
        description="the one or two texts that an encoder reads, as prompts; null = the inputs",
    )
    group: list[str] = Field(
        default_factory=list,
        exclude_if=lambda group: not group,
        description="columns that together name the group that a row is part of",
    )

    @model_validator(mode="after")
    def _pair_uses_inputs(self) -> ClassificationTask:
        if self.pair is not None:
            # together the texts must name every input, but either may leave some out
            self._check_prompt(" ".join(self.pair), self.inputs, key="pair")
        elif len(self.inputs) > 2:
            raise ValueError(
                f"an encoder reads two texts at most, but inputs are {self.inputs}; "
                "say in pair how they make one or two"
            )
        return self

    @model_validator(mode="after")
    def _metrics_fit(self) -> ClassificationTask:
        if self.code is not None and self.code.score:
            # the file's own score() defines its metrics
            return self
        for metric in self.metrics:
            # correlations are of numbers; all other metrics count classes
            is_correlation = metric in ("pearson", "spearman")
            if self.is_regression and not is_correlation:
                raise ValueError(
                    f"metric {metric} does not fit numbers (label.range); use pearson, spearman"
                )
            if is_correlation and not self.is_regression:
                raise ValueError(
                    f"metric {metric} does not fit classes; use accuracy, f1, macro_f1, matthews"
                )
            if metric == "f1" and self.num_labels != 2:
                raise ValueError(
                    f"metric f1 is that of class 1 of two, but there are {self.num_labels} "
                    "label.words; use macro_f1"
                )
            if metric == "group_em" and not self.group:
                raise ValueError(
                    "metric group_em needs group: "
                    "the columns that name what is right only as a whole"
                )
        return self

    @property
    def columns(self) -> list[str]:
        # an input may name the group as well, and each column is read once
        return list(dict.fromkeys([*super().columns, *self.group]))


class MultipleChoiceTask(LabelTask):
    """Asks which of a row's own texts fits; a text-to-text model calls them by `label.words`."""

    kind: Literal["multiple-choice"]
    choices: Annotated[list[str], Field(min_length=2)] = Field(
        description="columns of the texts to choose from, in the order of the label"
    )
    stem: Prompt = Field(
        description="prompt of the inputs; encoders pair it with each choice, "
        "decoders complete it with each choice"
    )
    metrics: Annotated[list[Literal["accuracy"]], Field(min_length=1, max_length=1)] = ["accuracy"]  # type: ignore[assignment]

    @model_validator(mode="after")
    def _choices_fit(self) -> MultipleChoiceTask:
        self._check_prompt(self.stem, self.inputs, key="stem")
        # a text-to-text model answers with the word that stands at the place of its choice
        if len(self.label.words or ()) != len(self.choices):
            raise ValueError(
                f"label.words are {self.label.words}, "
                f"expected one for each of choices {self.choices}"
            )
        return self

    @property
    def text_columns(self) -> list[str]:
        return [*self.inputs, *self.choices]


class QuestionAnsweringTask(BaseTask):
    """Asks for the stretch of a context that answers a question, if there is one.

    An item is a question, in however many windows a model reads it.
    """

    kind: Literal["question-answering"]
    inputs: Annotated[list[str], Field(min_length=2, max_length=2)] = Field(
        description="columns of the question and of the context"
    )
    answers: str = Field(
        description="column of lists: the accepted texts of each row; "
        "empty = the context has no answer"
    )
    starts: str = Field(
        description="column of lists: the character of the context at which each text begins"
    )
    unanswerable: bool = Field(
        False, description="whether there are questions without an answer (SQuAD 2.0)"
    )
    stride: Count = Field(
        128,
        description="tokens of context from one window to the next, half a window at most "
        "(BERT: 128)",
    )
    text_to_text: Prompt = Field(description="T5-style prompt with {column} in braces")
    beams: Count = Field(
        1,
        description="beams where a model writes the answer; 1 = greedy; "
        "training.beams overrides it",
    )
    metrics: Annotated[list[SpanMetric], Field(min_length=1)] = ["em", "token_f1"]
    headline: str | None = "token_f1"

    @model_validator(mode="after")
    def _prompt_uses_columns(self) -> QuestionAnsweringTask:
        self._check_prompt(self.text_to_text, self.inputs)
        return self

    @property
    def columns(self) -> list[str]:
        return [*self.inputs, self.answers, self.starts]


class LanguageModelTask(BaseTask):
    """Running text, in which every token is predicted from those before it.

    It is scored by perplexity, of which less is better.
    """

    higher_is_better: ClassVar[bool] = False
    in_order: ClassVar[bool] = True
    item_score: ClassVar[bool] = True

    kind: Literal["language-model"]
    inputs: Annotated[list[str], Field(min_length=1, max_length=1)] = Field(
        description="the column of text"
    )
    stride: Count = Field(
        256,
        description="tokens from one scored window to the next (MHE: 256); "
        "training.stride overrides it",
    )
    metrics: Annotated[list[Literal["perplexity"]], Field(min_length=1, max_length=1)] = [
        "perplexity"
    ]

    def utility(self, score: float) -> float:
        """Minus the mean loss per token.

        Perplexities of a study span orders of magnitude; their logarithms do not.
        """
        return -math.log(score)


class WritingTask(BaseTask):
    """A text per row to write: what the kinds of such tasks have in common."""

    target: str = Field(description="the column of text to write")
    text_to_text: Prompt = Field(
        description="prompt with {column} in braces, T5's where there is one"
    )

    @model_validator(mode="after")
    def _columns_are_used(self) -> WritingTask:
        self._check_prompt(self.text_to_text, self.inputs)
        if self.target in self.inputs:
            raise ValueError(f"target {self.target!r} is one of the inputs")
        return self

    @property
    def text_columns(self) -> list[str]:
        return [*self.inputs, self.target]


class GenerationTask(WritingTask):
    """The model writes a text per row, and all texts of a split are scored at once."""

    kind: Literal["generation"]
    beams: Count = Field(
        1, description="beams of the search; 1 = greedy; training.beams overrides it"
    )
    answer: str | None = Field(
        None,
        exclude_if=lambda answer: answer is None,
        description="exact_match compares what the one group of this regular expression finds "
        "first; null = whole texts",
    )
    metrics: Annotated[list[TextMetric], Field(min_length=1)]

    @field_validator("answer")
    @classmethod
    def _one_group(cls, answer: str | None) -> str | None:
        if answer is None:
            return None
        # a faulty pattern is found when the file is read, and not after hours of training
        try:
            groups = re.compile(answer).groups
        except re.error as error:
            raise ValueError(f"{answer!r} is not a regular expression: {error}") from None
        # with no group or several it would be open what is compared
        if groups != 1:
            raise ValueError(
                f"{answer!r} has {groups} groups, expected one: (...) around the answer itself, "
                "(?:...) elsewhere"
            )
        return answer

    @model_validator(mode="after")
    def _answer_is_used(self) -> GenerationTask:
        if self.answer is not None and "exact_match" not in self.metrics:
            raise ValueError(f"answer is what exact_match compares, but metrics are {self.metrics}")
        return self


class InstructionTask(WritingTask):
    """The model follows an instruction.

    It is trained on the response alone, and scored by the perplexity of the response's tokens, of
    which less is better.
    """

    higher_is_better: ClassVar[bool] = False
    item_score: ClassVar[bool] = True

    kind: Literal["instruction"]
    inputs: Annotated[list[str], Field(min_length=1, max_length=2)] = Field(
        description="columns of the instruction and its input"
    )
    without_input: Prompt | None = Field(
        None, description="prompt where the second column is empty; needed if there are two"
    )
    packing: bool = Field(
        False,
        description="train faster with several examples in a sequence, which see those before "
        "them (decoders; training split only)",
    )
    metrics: Annotated[list[Literal["perplexity"]], Field(min_length=1, max_length=1)] = [
        "perplexity"
    ]

    @model_validator(mode="after")
    def _second_prompt_fits(self) -> InstructionTask:
        # with one input there is nothing that could be empty
        if (self.without_input is not None) != (len(self.inputs) == 2):
            raise ValueError(
                "without_input is given exactly when there are two inputs, "
                f"but inputs are {self.inputs}"
            )
        if self.without_input is not None:
            self._check_prompt(self.without_input, self.inputs[:1], key="without_input")
        return self

    def utility(self, score: float) -> float:
        """Minus the mean loss per token, as for a language model."""
        return -math.log(score)


class PretrainTask(BaseTask):
    """The text columns of another task as a corpus to pre-train on.

    It is scored by the mean loss per predicted token. A sweep's `pretrain` makes such a task; no
    file is of this kind.
    """

    higher_is_better: ClassVar[bool] = False
    in_order: ClassVar[bool] = True
    item_score: ClassVar[bool] = True

    kind: Literal["pretrain"] = "pretrain"
    inputs: Annotated[list[str], Field(min_length=1)] = Field(description="the columns of text")
    group: list[str] = Field(
        [],
        exclude_if=lambda group: not group,
        description="those of the other task, so that both have the same rows in a split",
    )
    objective: ObjectiveName
    start: Literal["random", "checkpoint"] = Field(
        description="weights before the first step: new everywhere, or the converted checkpoint's"
    )
    corrupted_frac: float = Field(description="share of tokens to predict; causal-lm predicts all")
    mean_span_tokens: float = Field(description="span-corruption: mean length of a span")
    metrics: Annotated[list[Literal["loss"]], Field(min_length=1, max_length=1)] = ["loss"]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys([*super().columns, *self.group]))

    def utility(self, score: float) -> float:
        return -score


KINDS: dict[str, type[BaseTask]] = {
    "classification": ClassificationTask,
    "multiple-choice": MultipleChoiceTask,
    "question-answering": QuestionAnsweringTask,
    "language-model": LanguageModelTask,
    "generation": GenerationTask,
    "instruction": InstructionTask,
}
DEFAULT_KIND = "classification"


# given plain data, or a task that is already made
def _kind(given: Any) -> Any:
    if isinstance(given, Mapping):
        return given.get("kind", DEFAULT_KIND)
    return getattr(given, "kind", None)


TaskConfig: TypeAlias = Annotated[
    Annotated[ClassificationTask, Tag("classification")]
    | Annotated[MultipleChoiceTask, Tag("multiple-choice")]
    | Annotated[QuestionAnsweringTask, Tag("question-answering")]
    | Annotated[LanguageModelTask, Tag("language-model")]
    | Annotated[GenerationTask, Tag("generation")]
    | Annotated[InstructionTask, Tag("instruction")]
    | Annotated[PretrainTask, Tag("pretrain")],
    Discriminator(_kind),
]
"""A task of any kind."""


def load_task(name: str, *, where: str = "") -> TaskConfig:
    """The task with this name.

    Raises:
        UnknownNameError: No file has this name.
        ConfigError: The file is not valid.
    """
    paths = task_paths()
    if name not in paths:
        # the file may stand there under the name that was asked for, and yet not be taken
        beside = Path.cwd() / "tasks" / f"{name.replace('-', '_')}.py"
        # the file may be anybody's, so it does not run unless somebody asks for it
        if beside.is_file() and task_name(beside) not in paths:
            start = f"{where}: " if where else ""
            raise ConfigError(
                f"{start}task {name!r}: Python is taken from {beside.parent} only if you name "
                f"that folder: {_NAME_FOLDER.format(beside.parent)}"
            )
        raise UnknownNameError("task", name, paths, where=where, advice=_task_advice(name))
    return load_task_file(paths[name])


_NAME_FOLDER = "set SUITE_TASKS={0}, or give --tasks {0} to suite run or submit"


def _task_advice(name: str) -> str:
    """Where tasks were looked for, and what to do with a file."""
    path = Path(name)
    # `os.path` takes any text, also one that is too long for a path.
    if path.suffix in (".yaml", ".py") and os.path.isfile(path):
        return _advice_on_file(path)
    # The working folder may be the checkout, whose tasks are the shipped ones.
    folders = dict.fromkeys([*user_folders("tasks"), shipped_folder("tasks")])
    searched = f"looked in {', '.join(map(str, folders))}"
    if form_of(path) is None:
        return searched
    return f"{searched}; for a task on the rows of a file: suite init --data {name}"


def _advice_on_file(path: Path) -> str:
    """How a task is named whose file was given instead."""
    name = task_name(path)
    said = f"a task is named by its file's stem: write {name}"
    found = task_paths().get(name)
    # Another file of this name would be taken.
    if found is not None and found.samefile(path):
        return said
    where = f"name the folder: {_NAME_FOLDER.format(path.parent)}"
    # Python is never taken from the working folder.
    if path.suffix == ".yaml":
        where = f"put the file into tasks/ of the working folder or {where}"
    return f"{said}, and {where}"


def load_task_file(path: Path) -> TaskConfig:
    """The task in a file.

    Raises:
        ConfigError: The file is not valid.
        DataError: It names files of rows that are absent or cannot be read.
    """
    data, lines = read_task_file(path)
    data = with_own_files(data, lines, path=path)
    return make_task({"name": task_name(path), **data}, where=str(path), lines=lines)


def make_task(data: Mapping[str, Any], *, where: str, lines: Any = None) -> TaskConfig:
    """A task from plain data.

    Raises:
        ConfigError: The data are not valid (as `validate`), or `kind` is unknown.
    """
    # chosen here and not by pydantic, for a message with the line and the nearest known kind
    kind = data.get("kind", DEFAULT_KIND)
    if not isinstance(kind, str) or kind not in KINDS:
        place = where
        if lines and ("kind",) in lines:
            place = f"{where}:{lines[('kind',)]}"
        raise UnknownNameError("kind of task", str(kind), KINDS, where=f"{place}: kind")
    task = validate(KINDS[kind], data, where=where, lines=lines)
    _check_names(task, where=where)
    # `KINDS` has no pre-training: no file is of this kind
    assert not isinstance(task, PretrainTask)
    return cast(TaskConfig, task)


def _check_names(task: BaseTask, *, where: str) -> None:
    """Check what a task file says about columns and metrics.

    Not a validator of the class: records of tasks that were read before stay readable.

    Raises:
        ConfigError: A metric or a column is named twice, the label is among the texts that the
            model reads, or `data.columns` renames a column that the task does not have.
    """
    # The score is the mean over the list, in which one named twice weighs twice.
    for key in ("metrics", "inputs", "choices"):
        named = getattr(task, key, [])
        if len(set(named)) < len(named):
            raise ConfigError(f"{where}: {key}: got {named}, expected different ones")
    if isinstance(task, LabelTask) and task.label.column in task.text_columns:
        raise ConfigError(
            f"{where}: label.column {task.label.column!r} is one of the texts that the model reads"
        )
    # Code that makes the rows gives the raw data names of its own.
    makes_rows = task.code is not None and task.code.rows
    if makes_rows or isinstance(task.data, GeneratedData):
        return
    for name in task.data.columns:
        if name not in task.read_columns:
            raise UnknownNameError(
                "column", name, task.read_columns, where=f"{where}: data.columns"
            )
