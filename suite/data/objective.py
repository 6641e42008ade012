"""What an objective is: how a task is put to a family of backbones.

An objective says what the model reads, what it must answer, and how its answer is read back. The
objectives themselves are in files beside this one; `make_objective` chooses among them.
"""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from suite.backbones.loading import Head
from suite.config.task import (
    ClassificationTask,
    GenerationTask,
    MultipleChoiceTask,
    QuestionAnsweringTask,
    TaskConfig,
)
from suite.config.task_base import SPLIT_NAMES, SplitName
from suite.config.task_files import own_score
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED, collate_padded, pad
from suite.data.tokenizer import tokenizer_fingerprint
from suite.errors import IncompatibleError

if TYPE_CHECKING:
    from datasets import Dataset  # at run time it would cost a second, and pandas

TEMPLATE = {
    "inputs",
    "label",
    "target",
    "text_to_text",
    "pair",
    "group",
    "choices",
    "stem",
    "answers",
    "starts",
    "unanswerable",
    "stride",
}
"""Keys of a task's file that say how its rows are put to a model."""

AnyLabelTask: TypeAlias = ClassificationTask | MultipleChoiceTask
Features = dict[str, list[Any]]
Columns = Mapping[str, Sequence[Any]]
Batch = dict[str, torch.Tensor]
Answers = list[Any]


@dataclass(frozen=True, slots=True)
class Answered:
    """The items of a split and what a model answered.

    Attributes:
        index: Names of the items.
        predictions, golds: One per item.
        groups: The group of each item, where the task scores items in groups; None = each item by
            itself.
    """

    index: list[str]
    predictions: list[Any]
    golds: list[Any]
    groups: list[str] | None = None


class Objective(ABC):
    """One task for one tokenizer.

    Attributes:
        head: What the model must end in.
        generates: Whether `predict` writes token after token, each with a forward pass of its own.
        splits: The splits that are encoded.
        kept_splits: The splits whose rows are one sequence each, the same every time and read in
            one forward pass, so that what frozen stacks give for a row can be kept.
        item_columns: Names of gold and answer in the file of predictions.
    """

    head: Head
    generates: ClassVar[bool] = False
    splits: ClassVar[tuple[SplitName, ...]] = SPLIT_NAMES
    # validation may score several sequences for a row, or write text
    kept_splits: ClassVar[tuple[SplitName, ...]] = ("train",)
    item_columns: ClassVar[tuple[str, str]] = ("gold", "prediction")

    def __init__(
        self, task: TaskConfig, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.training = training
        pad_id = tokenizer.pad_token_id
        if pad_id is None:
            # GPT-2 and Llama have none; any id will do, since the attention mask hides it
            pad_id = tokenizer.eos_token_id
        self.pad_id = int(pad_id)

    @abstractmethod
    def encode(self, columns: Columns) -> Features:
        """Turn raw rows into features.

        Returns:
            Model inputs without padding, and for each row `gold` (what the answer is compared
            with), `length` (tokens of the input) and `units` (what the mean of the loss runs over:
            label tokens for text, 1 for a head).
        """

    def features(
        self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName
    ) -> Iterator[Features]:
        """The encoded items of a split, in parts.

        An item is a row, unless a kind of task cuts its text in another way.

        Args:
            chunks: Names and columns of the split's rows, in order.
            split: Which split this is.

        Returns:
            What `encode` returns, with the item's name as `index`.
        """
        for index, columns in chunks:
            yield {"index": index, **self.encode(columns), **self._groups(columns)}

    @abstractmethod
    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Pad encoded rows to the inputs of the model's forward, with `labels`.

        Lengths are rounded up to a multiple of `training.pad_to_multiple`. In training every row
        has `draw`, the seed of whatever is drawn for it.
        """

    def collate_eval(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Pad encoded rows of validation or test to what `predict` reads.

        The same as `collate`, unless an answer needs more than the loss does.
        """
        return self.collate(rows)

    @abstractmethod
    def predict(self, model: Any, batch: Batch, *, synced: bool) -> Answers:
        """One answer per row: a class id (-1 = the answer is no label), a number or a text.

        Args:
            model: In evaluation mode; called under no_grad.
            batch: As `collate_eval` makes it. Labels do not influence the answer.
            synced: Keep all ranks at the same number of forward passes: each one gathers weights.
        """

    def merge(self, data: Dataset, predictions: Sequence[Any]) -> Answered:
        """The items of a split, from the answers to its encoded rows.

        An item is a row, unless a kind of task spreads an item over several rows.

        Args:
            data: The encoded split.
            predictions: One per encoded row, in order.
        """
        groups = None
        if "group" in data.column_names:
            groups = data["group"][:]
        return Answered(data["index"][:], list(predictions), data["gold"][:], groups)

    @abstractmethod
    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Every metric that the kind of task knows, over all items of a split at once.

        Args:
            predictions, golds, groups: As in `Answered`.
        """

    def scores(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        """The task file's own score where it has one, else `score`."""
        # a task file's own score comes first, because it defines what the metrics' names mean
        own = own_score(self.task)
        if own is not None:
            return own(predictions, golds)
        return self.score(predictions, golds, groups)

    def check_can_keep(self) -> None:
        """Check that what frozen stacks give for the training rows can be kept.

        Raises:
            IncompatibleError: It cannot.
        """
        if "train" not in self.kept_splits:
            raise IncompatibleError(
                f"training.frozen_dropout: off keeps what frozen stacks give for a row, and a row"
                f" of task {self.task.name} is not one sequence that reads the same every time;"
                " leave it on"
            )

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence that the model sees."""
        return self.training.max_length

    @property
    def trained_positions(self) -> int:
        """Tokens of the longest sequence that the model trains on."""
        return self.positions

    @property
    def trained_targets(self) -> int:
        """Tokens of the longest text that an encoder-decoder learns to write."""
        return self.training.target_max_length

    def signatures(self) -> dict[str, str]:
        """Metric -> how exactly it was computed, for metrics that come in versions."""
        return {}

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the encoded rows depend on, apart from the raw rows."""
        return {
            # another way to encode the rows must get another class or another key here
            "objective": type(self).__name__,
            **self.task.model_dump(mode="json", include=TEMPLATE),
            "max_length": self.training.max_length,
            "target_max_length": self.training.target_max_length,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            # How the names of groups are made of several columns, since it changed.
            **({"group_names": 2} if len(getattr(self.task, "group", ())) > 1 else {}),
        }

    def _groups(self, columns: Columns) -> Features:
        """The column `group`, where the task has groups."""
        if not isinstance(self.task, ClassificationTask) or not self.task.group:
            return {}
        names = []
        # one name of several columns, since Arrow and the file of predictions hold one column
        for key in rows_of(columns, self.task.group):
            names.append("/".join(map(_escaped, key) if len(key) > 1 else map(str, key)))
        return {"group": names}

    def _padded(self, rows: Sequence[Mapping[str, Any]], fill: Mapping[str, int]) -> Batch:
        return collate_padded(
            rows, fill, at_most=self.training.max_length, multiple=self.training.pad_to_multiple
        )

    def _padded_with_target(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Inputs for the encoder, and labels for the decoder, which have a length of their own."""
        batch = self._padded(rows, {"input_ids": self.pad_id})
        batch["labels"] = pad(
            [row["labels"] for row in rows],
            IGNORED,
            at_most=self.training.target_max_length,
            multiple=self.training.pad_to_multiple,
        )
        return batch


def _escaped(part: Any) -> str:
    """A part of a group's name, in which a slash is not the one between parts."""
    return str(part).replace("\\", "\\\\").replace("/", "\\/")


class LabelObjective(Objective):
    """Asks for a class or a number per row; each subclass asks in its own way."""

    task: AnyLabelTask

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        # imports scikit-learn, which whoever only checks a plan does without
        from suite.metrics.quality import score

        return score(self.task.metrics, predictions, golds, groups)

    def _gold(self, columns: Columns) -> list[Any]:
        number = float if self.task.is_regression else int
        return [number(value) for value in columns[self.task.label.column]]


def rows_of(columns: Columns, names: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    """The values of some columns, row by row."""
    return zip(*[columns[name] for name in names], strict=True)


def prompts(
    task: AnyLabelTask | GenerationTask | QuestionAnsweringTask, columns: Columns
) -> list[str]:
    """The T5-style prompt of every row."""
    return fill(task.text_to_text, columns)


def fill(template: str, columns: Columns) -> list[str]:
    """Fill a template, for every row, with the columns that it names."""
    names: dict[str, None] = {}  # a dict, because it keeps the order and drops repetitions
    for _, field, _, _ in string.Formatter().parse(template):
        if field is not None:
            names[field] = None
    texts = []
    for row in rows_of(columns, names):
        texts.append(fill_row(template, dict(zip(names, row, strict=True))))
    return texts


def fill_row(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template with the values of one row."""
    parts = []
    # not `str.format`, which takes `{a.b}` for an attribute and not for the column of that name
    for text, field, _, _ in string.Formatter().parse(template):
        parts.append(text)
        if field is not None:
            parts.append(str(values[field]))
    return "".join(parts)


def lengths(sequences: Iterable[Sequence[Any]]) -> list[int]:
    """The length of each sequence."""
    return [len(sequence) for sequence in sequences]


def target_features(
    inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], golds: Sequence[Any]
) -> Features:
    """Features for encoder-decoders, which read one sequence and write another."""
    return {
        "input_ids": list(inputs),
        "labels": list(targets),
        "gold": list(golds),
        "length": lengths(inputs),
        "units": lengths(targets),
    }


def continuation_features(
    starts: Iterable[list[int]], ends: Iterable[list[int]], golds: Sequence[Any]
) -> Features:
    """Features for decoders: start and end in one sequence, with loss on the end alone."""
    features: Features = {
        "input_ids": [],
        "labels": [],
        "gold": list(golds),
        "length": [],
        "units": [],
    }
    for start, end in zip(starts, ends, strict=True):
        features["input_ids"].append(start + end)
        features["labels"].append([IGNORED] * len(start) + end)
        features["length"].append(len(start) + len(end))
        features["units"].append(len(end))
    return features
