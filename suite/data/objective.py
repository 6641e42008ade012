"""How a task is put to a family of backbones: what the model reads, what it must answer, how its answer is read back."""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from suite.backbones.loading import Head
from suite.config.task import (
    ClassificationTask,
    GenerationTask,
    MultipleChoiceTask,
    QuestionAnsweringTask,
    TaskConfig,
)
from suite.config.task_files import own_score
from suite.config.training import TrainingConfig
from suite.data.collate import collate_padded
from suite.data.splits import SPLIT_NAMES, SplitName
from suite.data.tokenizer import tokenizer_fingerprint
from suite.metrics.quality import score

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
"""What a task's file says of how its rows are put."""

AnyLabelTask: TypeAlias = ClassificationTask | MultipleChoiceTask
Features = dict[str, list[Any]]
Columns = Mapping[str, Sequence[Any]]
Batch = dict[str, torch.Tensor]
Answers = list[Any]


@dataclass(frozen=True, slots=True)
class Answered:
    """The items of a split and what a model answers.

    Attributes:
        index: Names of the items.
        predictions, golds: One per item.
        groups: What each item is a part of, where the task has that; None = each stands by itself.
    """

    index: list[str]
    predictions: list[Any]
    golds: list[Any]
    groups: list[str] | None = None


class Objective(ABC):
    """One task for one tokenizer.

    Attributes:
        head: What the model must end in.
        splits: Those that are encoded.
        item_columns: What gold and answer are called in the file of predictions.
    """

    head: Head
    splits: ClassVar[tuple[SplitName, ...]] = SPLIT_NAMES
    item_columns: ClassVar[tuple[str, str]] = ("gold", "prediction")

    def __init__(
        self, task: TaskConfig, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        self.task, self.tokenizer, self.training = task, tokenizer, training
        pad = (
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        )
        self.pad_id = int(pad)

    @abstractmethod
    def encode(self, columns: Columns) -> Features:
        """Raw rows to features.

        Returns:
            Model inputs without padding, and per row `gold` (what the answer is held against), `length` (tokens of the
            input) and `units` (what the mean of the loss runs over: label tokens for text, 1 for a head).
        """

    def features(
        self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName
    ) -> Iterator[Features]:
        """The items of a split, in parts: its rows, unless a kind of task cuts its text otherwise.

        Args:
            chunks: Names and columns of the split's rows, in order.
            split: Which one.

        Returns:
            As `encode`, with the item's name as `index`.
        """
        for index, columns in chunks:
            yield {"index": index, **self.encode(columns), **self._groups(columns)}

    @abstractmethod
    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Encoded rows to padded inputs of the model's forward, with `labels`; lengths are rounded up to `training.pad_to_multiple`.

        In training every row has `draw`, the seed of what is drawn for it.
        """

    def collate_eval(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Encoded rows of validation or test to what `predict` reads: as `collate`, unless an answer needs more than the loss."""
        return self.collate(rows)

    @abstractmethod
    def predict(self, model: Any, batch: Batch, *, synced: bool) -> Answers:
        """One answer per row: a class id (-1 = an answer that is no label), a number or a text; what `merge` takes.

        Args:
            model: In evaluation mode, called under no_grad.
            batch: As `collate_eval` makes it; labels do not influence the answer.
            synced: Keep all ranks at the same number of forward passes (ZeRO-3).
        """

    def merge(self, data: Dataset, predictions: Sequence[Any]) -> Answered:
        """What the rows of a split answer together: an item per row, unless a kind of task reads an item in several rows.

        Args:
            data: The encoded split.
            predictions: One per row, in order.
        """
        groups = list(data["group"]) if "group" in data.column_names else None
        return Answered(list(data["index"]), list(predictions), list(data["gold"]), groups)

    @abstractmethod
    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Every metric that the kind of task knows, over all items of a split at once; `groups` as in `Answered`."""

    def scores(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        """As `score`, unless the task's file scores by itself."""
        own = own_score(self.task)
        return self.score(predictions, golds, groups) if own is None else own(predictions, golds)

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence that the model sees."""
        return self.training.max_length

    def signatures(self) -> dict[str, str]:
        """Metric -> what exactly it was computed with, for those that come in versions."""
        return {}

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the encoded rows depend on, beside the rows."""
        training = {
            "max_length": self.training.max_length,
            "target_max_length": self.training.target_max_length,
        }
        template = self.task.model_dump(mode="json", include=TEMPLATE)
        return {
            "objective": type(self).__name__,
            **template,
            **training,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
        }

    def _groups(self, columns: Columns) -> Features:
        if not isinstance(self.task, ClassificationTask) or not self.task.group:
            return {}
        return {
            "group": [
                "/".join(map(str, key))
                for key in zip(*(columns[name] for name in self.task.group), strict=True)
            ]
        }

    def _padded(self, rows: Sequence[Mapping[str, Any]], fill: Mapping[str, int]) -> Batch:
        return collate_padded(
            rows, fill, at_most=self.training.max_length, multiple=self.training.pad_to_multiple
        )


def prompts(
    task: AnyLabelTask | GenerationTask | QuestionAnsweringTask, columns: Columns
) -> list[str]:
    """The T5-style prompt of every row."""
    return fill(task.text_to_text, columns)


def fill(template: str, columns: Columns) -> list[str]:
    """A template with the columns that it names, for every row."""
    names = list(
        dict.fromkeys(
            field for _, field, _, _ in string.Formatter().parse(template) if field is not None
        )
    )
    return [
        template.format(**dict(zip(names, row, strict=True)))
        for row in zip(*(columns[name] for name in names), strict=True)
    ]


class LabelObjective(Objective):
    """A class or a number per row, however it is asked for."""

    task: AnyLabelTask

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        return score(self.task.metrics, predictions, golds, groups)

    def _prompts(self, columns: Columns) -> list[str]:
        return prompts(self.task, columns)

    def _gold(self, columns: Columns) -> list[Any]:
        number = float if self.task.is_regression else int
        return [number(value) for value in columns[self.task.label.column]]
