"""How a task is put to a family of backbones: what the model reads, what it must answer, how its answer is read back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.task import ClassificationTask, GenerationTask, LanguageModelTask, PretrainTask, TaskConfig
from suite.config.training import TrainingConfig
from suite.data.collate import collate_padded
from suite.data.splits import SPLIT_NAMES, SplitName
from suite.data.tokenizer import tokenizer_fingerprint
from suite.metrics.quality import score

Features = dict[str, list[Any]]
Columns = Mapping[str, Sequence[Any]]
Batch = dict[str, torch.Tensor]
Answers = list[float] | list[str]


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

    def __init__(self, task: TaskConfig, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig) -> None:
        self.task, self.tokenizer, self.training = task, tokenizer, training
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.pad_id = int(pad)

    @abstractmethod
    def encode(self, columns: Columns) -> Features:
        """Raw rows to features.

        Returns:
            Model inputs without padding, and per row `gold` (what the answer is held against), `length` (tokens of the
            input) and `units` (what the mean of the loss runs over: label tokens for text, 1 for a head).
        """

    def features(self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName) -> Iterator[Features]:
        """The items of a split, in parts: its rows, unless a kind of task cuts its text otherwise.

        Args:
            chunks: Names and columns of the split's rows, in order.
            split: Which one.

        Returns:
            As `encode`, with the item's name as `index`.
        """
        for index, columns in chunks:
            yield {"index": index, **self.encode(columns)}

    @abstractmethod
    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Encoded rows to padded inputs of the model's forward, with `labels`; lengths are rounded up to `training.pad_to_multiple`.

        In training every row has `draw`, the seed of what is drawn for it.
        """

    @abstractmethod
    def predict(self, model: Any, batch: Batch, *, synced: bool) -> Answers:
        """One answer per row: a class id (-1 = an answer that is no label), a number or a text.

        Args:
            model: In evaluation mode, called under no_grad.
            batch: As `collate` makes it; labels do not influence the answer.
            synced: Keep all ranks at the same number of forward passes (ZeRO-3).
        """

    @abstractmethod
    def score(self, predictions: Sequence[Any], golds: Sequence[Any]) -> dict[str, float]:
        """Every metric of the task over all items of a split at once."""

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence that the model sees."""
        return self.training.max_length

    def signatures(self) -> dict[str, str]:
        """Metric -> what exactly it was computed with, for those that come in versions."""
        return {}

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the encoded rows depend on, beside the rows."""
        training = {"max_length": self.training.max_length, "target_max_length": self.training.target_max_length}
        template = self.task.model_dump(mode="json", include={"inputs", "label", "target", "text_to_text"})
        return {"objective": type(self).__name__, **template, **training, "tokenizer": tokenizer_fingerprint(self.tokenizer)}

    def _padded(self, rows: Sequence[Mapping[str, Any]], fill: Mapping[str, int]) -> Batch:
        return collate_padded(rows, fill, at_most=self.training.max_length, multiple=self.training.pad_to_multiple)


def prompts(task: ClassificationTask | GenerationTask, columns: Columns) -> list[str]:
    """The T5-style prompt of every row."""
    rows = zip(*(columns[column] for column in task.inputs), strict=True)
    return [task.text_to_text.format(**dict(zip(task.inputs, row, strict=True))) for row in rows]


class LabelObjective(Objective):
    """A class or a number per row, however it is asked for."""

    task: ClassificationTask

    def score(self, predictions: Sequence[Any], golds: Sequence[Any]) -> dict[str, float]:
        return score(self.task.metrics, predictions, golds)

    def _prompts(self, columns: Columns) -> list[str]:
        return prompts(self.task, columns)

    def _gold(self, columns: Columns) -> list[Any]:
        number = float if self.task.is_regression else int
        return [number(value) for value in columns[self.task.label.column]]


class HeadObjective(LabelObjective):
    """A new classification or regression head: on an encoder's text or pair, or on a decoder's last token of the prompt."""

    def __init__(self, task: ClassificationTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig, *, pairs: bool) -> None:
        super().__init__(task, tokenizer, training)
        self.pairs = pairs
        self.head = Head("regression" if task.is_regression else "classification", task.num_labels)

    def encode(self, columns: Columns) -> Features:
        texts = [list(columns[column]) for column in self.task.inputs] if self.pairs else [self._prompts(columns)]
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.training.max_length)
        names = ("input_ids", "token_type_ids") if self.pairs else ("input_ids",)
        features: Features = {name: encoded[name] for name in names if name in encoded}
        ids = features["input_ids"]
        return {**features, "gold": self._gold(columns), "length": [len(i) for i in ids], "units": [1] * len(ids)}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        batch = self._padded(rows, {"input_ids": self.pad_id, "token_type_ids": 0})
        dtype = torch.float32 if self.task.is_regression else torch.long
        return {**batch, "labels": torch.tensor([row["gold"] for row in rows], dtype=dtype)}

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits.float()
        answers: list[float] = (logits.squeeze(-1) if self.task.is_regression else logits.argmax(-1)).tolist()
        return [float(answer) for answer in answers]

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "pairs": self.pairs}


def make_objective(
    task: TaskConfig,
    *,
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    training: TrainingConfig,
    decoder_objective: Literal["head", "text"],
) -> Objective:
    """A task in the words of a kind of backbone. For a class or a number encoders get a head, encoder-decoders text to text,
    decoders what `decoder_objective` says.

    Raises:
        IncompatibleError: This kind of backbone cannot answer the task; label words do not fit `training.target_max_length`
            or read alike; regression as decoder text; windows that do not overlap.
    """
    from suite.data.generation import make_generation  # these derive from Objective
    from suite.data.language import LanguageModelObjective
    from suite.data.pretraining import make_pretraining
    from suite.data.text import DecoderTextObjective, TextToTextObjective

    if isinstance(task, PretrainTask):
        return make_pretraining(task, tokenizer, training, kind=kind)
    if isinstance(task, LanguageModelTask):
        return LanguageModelObjective(task, tokenizer, training, kind=kind)
    if isinstance(task, GenerationTask):
        return make_generation(task, tokenizer, training, kind=kind)
    if kind == "encoder":
        return HeadObjective(task, tokenizer, training, pairs=True)
    if kind == "encoder-decoder":
        return TextToTextObjective(task, tokenizer, training)
    if decoder_objective == "head":
        return HeadObjective(task, tokenizer, training, pairs=False)
    return DecoderTextObjective(task, tokenizer, training)
