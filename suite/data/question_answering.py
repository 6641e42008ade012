"""Questions on a context: encoders point at the answer, all others write it.

Source: BERT (Devlin et al. 2019, arXiv 1810.04805), 4.2 and 4.3: start and end vectors, overlapping windows, the first token
([CLS]) as the place of "no answer". T5 (Raffel et al. 2020, arXiv 1910.10683), appendix D, for the prompt.
Deviations:
    - An answer has at most `training.target_max_length` tokens (BERT: 30), whoever gives it.
    - "No answer" wins over the best span of all windows when its least score over windows is higher: BERT's threshold is
      tuned on the development set, here it is 0.
    - Models that write read one window: what is too long of a context is cut off, and an answer in there cannot be given.
    - "No answer" is an empty text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.task import QuestionAnsweringTask
from suite.config.training import TrainingConfig
from suite.data.context_windows import Window, Windows
from suite.data.generation import DecoderGeneration, GenerationObjective, TextToTextGeneration
from suite.data.objective import Answered, Batch, Columns, Features, Objective
from suite.data.splits import SplitName
from suite.errors import DataError, IncompatibleError
from suite.metrics.squad import score_spans

Pointed = tuple[float, float, int, int]
"""What a window answers: score of its best span, score of "no answer", first and last token of that span."""


class SpanObjective(Objective):
    """An extractive head on every window of a question; an item is a question, whose best span over all windows is the answer."""

    head = Head("span")
    task: QuestionAnsweringTask

    def __init__(
        self,
        task: QuestionAnsweringTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
    ) -> None:
        super().__init__(task, tokenizer, training)
        stride = training.stride or task.stride
        self.windows = Windows(
            tokenizer, at_most=training.max_length, stride=stride, where=f"task {task.name}"
        )

    def encode(self, columns: Columns) -> Features:
        """One entry per window; `index` is the number of its question."""
        question, context = self.task.inputs
        cut = self.windows.cut(columns[question], columns[context])
        rows = zip(
            cut, columns[context], golds(self.task, columns), columns[self.task.starts], strict=True
        )
        entries = [
            {
                "index": number,
                **_features(window, _span(text, texts[0], starts)),
                "gold": texts,
                "context": text,
            }
            for number, (windows, text, texts, starts) in enumerate(rows)
            for window in windows
        ]
        return {name: [entry[name] for entry in entries] for name in entries[0]}

    def features(
        self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName
    ) -> Iterator[Features]:
        """Windows; those to train on need neither text nor offsets."""
        for index, columns in chunks:
            found = self.encode(columns)
            names = [
                name for name in found if split != "train" or name not in ("context", "offsets")
            ]
            yield {
                **{name: found[name] for name in names},
                "index": [index[number] for number in found["index"]],
            }

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        batch = self._padded(rows, {"input_ids": self.pad_id, "token_type_ids": 0})
        return {
            **batch,
            **{
                name: torch.tensor([row[name] for row in rows])
                for name in ("start_positions", "end_positions")
            },
        }

    def collate_eval(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Without labels, with `inside`: the tokens that an answer may be made of, (B, T)."""
        batch = self._padded(rows, {"input_ids": self.pad_id, "token_type_ids": 0})
        inside = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for mask, row in zip(inside, rows, strict=True):
            mask[row["first"] : row["first"] + len(row["offsets"]) // 2] = True
        return {**batch, "inside": inside}

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[Pointed]:
        output = model(**{name: tensor for name, tensor in batch.items() if name != "inside"})
        start, end = output.start_logits.float(), output.end_logits.float()  # (B, T)
        null = (start[:, 0] + end[:, 0]).tolist()
        best, first, last = best_spans(
            start, end, batch["inside"], longest=self.training.target_max_length
        )
        return list(zip(best.tolist(), null, first.tolist(), last.tolist(), strict=True))

    def merge(self, data: Dataset, predictions: Sequence[Pointed]) -> Answered:
        rows = groupby(zip(data, predictions, strict=True), key=lambda pair: pair[0]["index"])
        found = [(index, *self._answer([*windows])) for index, windows in rows]
        return Answered(
            [index for index, _, _ in found],
            [text for _, text, _ in found],
            [gold for _, _, gold in found],
        )

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        return score_spans(self.task.metrics, predictions, golds)

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "stride": self.windows.stride}

    def _answer(self, windows: list[tuple[Any, Pointed]]) -> tuple[str, list[str]]:
        """The text that a question's windows agree on, and its accepted texts."""
        row, (best, _, first, last) = max(windows, key=lambda pair: pair[1][0])
        silent = self.task.unanswerable and min(null for _, (_, null, _, _) in windows) > best
        if silent or best == -math.inf:  # a context without a single token
            return "", row["gold"]
        low, high = (
            row["offsets"][2 * (first - row["first"])],
            row["offsets"][2 * (last - row["first"]) + 1],
        )
        return row["context"][low:high], row["gold"]


def best_spans(
    start: torch.Tensor, end: torch.Tensor, inside: torch.Tensor, *, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The span of the highest sum of its start and end logits, exactly.

    Args:
        start, end: Logits, (B, T).
        inside: Tokens that may belong to a span, (B, T); at least one per row.
        longest: Tokens of a span, at most.

    Returns:
        Score, first and last token of each row's best span, (B,) each.
    """
    start, end = (logits.masked_fill(~inside, -torch.inf) for logits in (start, end))
    ends = pad(end, (0, longest - 1), value=-torch.inf).unfold(
        1, longest, 1
    )  # (B, T, longest): from each token on
    best, place = (start[..., None] + ends).flatten(1).max(dim=1)
    first = place // longest
    return best, first, first + place % longest


class WrittenAnswers(GenerationObjective):
    """What the models share that write their answer."""

    task: QuestionAnsweringTask

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        return score_spans(self.task.metrics, predictions, golds)

    def _targets(self, columns: Columns) -> list[str]:
        return [texts[0] for texts in golds(self.task, columns)]

    def _golds(self, columns: Columns) -> list[Any]:
        return [*golds(self.task, columns)]


class TextToTextAnswers(WrittenAnswers, TextToTextGeneration):
    """Encoder-decoders: T5's prompt in, the answer out."""


class DecoderAnswers(WrittenAnswers, DecoderGeneration):
    """Decoders: prompt, cue and answer in one sequence."""

    def __init__(
        self,
        task: QuestionAnsweringTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
    ) -> None:
        super().__init__(task, tokenizer, training)
        if task.unanswerable and not self.end:
            raise IncompatibleError(
                f"task {task.name}: no answer is an empty text, and this backbone's tokenizer has no token to end it"
            )


def make_question_answering(
    task: QuestionAnsweringTask,
    tokenizer: PreTrainedTokenizerBase,
    training: TrainingConfig,
    *,
    kind: Kind,
) -> Objective:
    """Spans for encoders, text for all others.

    Raises:
        IncompatibleError: A tokenizer whose tokens cannot be found in the text; no room for text.
    """
    if kind == "encoder":
        return SpanObjective(task, tokenizer, training)
    return (
        TextToTextAnswers(task, tokenizer, training)
        if kind == "encoder-decoder"
        else DecoderAnswers(task, tokenizer, training)
    )


def golds(task: QuestionAnsweringTask, columns: Columns) -> list[list[str]]:
    """The accepted texts of every question, `[""]` where there is no answer."""
    return [[*texts] or [""] for texts in columns[task.answers]]


def _span(context: str, answer: str, starts: Sequence[int]) -> tuple[int, int] | None:
    """The characters of the first answer, found where it begins nearest to where the data say; None = no answer.

    Raises:
        DataError: It is not in the context.
    """
    if not starts:
        return None
    begins = [found.start() for found in re.finditer(f"(?={re.escape(answer)})", context)]
    if not begins or not answer:
        raise DataError(
            f"answer {answer!r} does not stand in its context {context[:60]!r}...; expected a stretch of it"
        )
    start = min(begins, key=lambda n: abs(n - starts[0]))
    return start, start + len(answer)


def _features(window: Window, span: tuple[int, int] | None) -> dict[str, Any]:
    start, end = (0, 0) if span is None else window.place(span)
    types = {} if window.token_type_ids is None else {"token_type_ids": window.token_type_ids}
    return {
        "input_ids": window.input_ids,
        **types,
        "start_positions": start,
        "end_positions": end,
        "first": window.first,
        "offsets": [number for span in window.offsets for number in span],
        "length": len(window.input_ids),
        "units": 1,
    }
