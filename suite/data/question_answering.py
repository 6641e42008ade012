"""Questions on a context: encoders point at the answer, all other backbones write it.

Source: BERT (Devlin et al. 2019, arXiv 1810.04805), 4.2 and 4.3: start and end vectors, overlapping
windows, the first token ([CLS]) as the place of "no answer". T5 (Raffel et al. 2020, arXiv
1910.10683), appendix D, for the prompt.
Deviations:
    - An answer has at most `training.target_max_length` tokens (BERT: 30), whoever gives it.
    - "No answer" wins over the best span of all windows when its least score over windows is
      higher. BERT tunes this threshold on the development set; here it is 0.
    - Models that write read one window: a context that is too long is cut off, and an answer in the
      part that is cut off cannot be given.
    - "No answer" is an empty text.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.task import QuestionAnsweringTask
from suite.config.task_base import SplitName
from suite.config.training import TrainingConfig
from suite.data.context_windows import Span, Windows
from suite.data.generation import DecoderGeneration, GenerationObjective, TextToTextGeneration
from suite.data.objective import Answered, Batch, Columns, Features, Objective, rows_of
from suite.errors import DataError
from suite.metrics.squad import score_spans

if TYPE_CHECKING:
    from datasets import Dataset  # at run time it would cost a second, and pandas

Pointed = tuple[float, float, int, int]
"""A window's answer: score of its best span, score of "no answer", span's first and last token."""


class SpanObjective(Objective):
    """An extractive head on every window of a question.

    An item is a question; its answer is the best span over all its windows.
    """

    head = Head("span")
    task: QuestionAnsweringTask

    def __init__(
        self,
        task: QuestionAnsweringTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.windows = Windows(
            tokenizer,
            at_most=training.max_length,
            stride=training.stride or task.stride,
            where=f"task {task.name}",
        )

    def encode(self, columns: Columns) -> Features:
        """One entry per window; `index` is the number of its question."""
        question, context = self.task.inputs
        cut = self.windows.cut(columns[question], columns[context])
        rows = rows_of(columns, (context, self.task.starts))
        features: Features = {}
        for number, (windows, (text, starts), texts) in enumerate(
            zip(cut, rows, golds(self.task, columns), strict=True)
        ):
            # trained on the first accepted text; all of them count when answers are scored
            span = _span(text, texts[0], starts)
            for window in windows:
                # a window that does not hold the answer is taught to say "no answer"
                start, end = (0, 0) if span is None else window.place(span)
                entry: dict[str, Any] = {"index": number, "input_ids": window.input_ids}
                if window.token_type_ids is not None:
                    entry["token_type_ids"] = window.token_type_ids
                entry["start_positions"] = start
                entry["end_positions"] = end
                entry["first"] = window.first
                # flat, because Arrow stores a list of pairs as lists of lists
                entry["offsets"] = [place for offset in window.offsets for place in offset]
                entry["length"] = len(window.input_ids)
                entry["units"] = 1
                entry["gold"] = texts
                entry["context"] = text
                for name, value in entry.items():
                    features.setdefault(name, []).append(value)
        return features

    def features(
        self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName
    ) -> Iterator[Features]:
        for index, columns in chunks:
            features = self.encode(columns)
            features["index"] = [index[number] for number in features["index"]]
            if split == "train":
                # only an answer is read out of the text, and training gives none
                del features["context"], features["offsets"]
            yield features

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        batch = self._padded(rows, {"input_ids": self.pad_id, "token_type_ids": 0})
        for name in ("start_positions", "end_positions"):
            batch[name] = torch.tensor([row[name] for row in rows])
        return batch

    def collate_eval(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """A batch without labels, with `inside`: the tokens that may be an answer, (B, T)."""
        batch = self._padded(rows, {"input_ids": self.pad_id, "token_type_ids": 0})
        inside = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for mask, row in zip(inside, rows, strict=True):
            tokens = len(row["offsets"]) // 2
            mask[row["first"] : row["first"] + tokens] = True
        batch["inside"] = inside
        return batch

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[Pointed]:
        inputs = dict(batch)
        inside = inputs.pop("inside")
        output = model(**inputs)
        start = output.start_logits.float()  # (B, T)
        end = output.end_logits.float()  # (B, T)
        # the first token stands for "no answer", as in training
        null = start[:, 0] + end[:, 0]
        longest = self.training.target_max_length
        best, first, last = best_spans(start, end, inside, longest=longest)
        return list(zip(best.tolist(), null.tolist(), first.tolist(), last.tolist(), strict=True))

    def merge(self, data: Dataset, predictions: Sequence[Pointed]) -> Answered:
        answered = Answered([], [], [])
        windows = zip(data, predictions, strict=True)
        # the windows of a question follow one another
        for index, group in groupby(windows, key=lambda window: window[0]["index"]):
            text, gold = self._answer(list(group))
            answered.index.append(index)
            answered.predictions.append(text)
            answered.golds.append(gold)
        return answered

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        return score_spans(self.task.metrics, predictions, golds)

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "stride": self.windows.stride}

    def _answer(self, windows: list[tuple[Any, Pointed]]) -> tuple[str, list[str]]:
        """The text that a question's windows agree on, and its accepted texts."""
        row, (best, _, first, last) = max(windows, key=lambda window: window[1][0])
        least_null = min(null for _, (_, null, _, _) in windows)
        # where every question has an answer, silence is never right
        silent = self.task.unanswerable and least_null > best
        # -inf is the score of a context without a single token
        if silent or best == -math.inf:
            return "", row["gold"]
        low = row["offsets"][2 * (first - row["first"])]
        high = row["offsets"][2 * (last - row["first"]) + 1]
        return row["context"][low:high], row["gold"]


def best_spans(
    start: torch.Tensor, end: torch.Tensor, inside: torch.Tensor, *, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The span with the highest sum of its start and end logits, found exactly.

    Args:
        start, end: Logits, (B, T).
        inside: Tokens that may belong to a span, (B, T); at least one per row.
        longest: Tokens of a span, at most.

    Returns:
        Score, first and last token of each row's best span, (B,) each.
    """
    start = start.masked_fill(~inside, -torch.inf)
    end = end.masked_fill(~inside, -torch.inf)
    # the end logits of the `longest` tokens from each token on, (B, T, longest)
    ends = pad(end, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    best, place = (start[..., None] + ends).flatten(1).max(dim=1)
    # `place` counts through a table with `longest` columns, one row for each first token
    first = place // longest
    return best, first, first + place % longest


class WrittenAnswers(GenerationObjective):
    """What all models that write their answer have in common."""

    task: QuestionAnsweringTask

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        return score_spans(self.task.metrics, predictions, golds)

    def _targets(self, columns: Columns) -> list[str]:
        return [texts[0] for texts in golds(self.task, columns)]

    def _golds(self, columns: Columns) -> list[Any]:
        return list(golds(self.task, columns))


class TextToTextAnswers(WrittenAnswers, TextToTextGeneration):
    """Encoder-decoders read T5's prompt and write the answer."""


class DecoderAnswers(WrittenAnswers, DecoderGeneration):
    """Decoders read prompt, cue and answer in one sequence."""

    def __init__(
        self,
        task: QuestionAnsweringTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
    ) -> None:
        super().__init__(task, tokenizer, training)


def make_question_answering(
    task: QuestionAnsweringTask,
    tokenizer: PreTrainedTokenizerBase,
    training: TrainingConfig,
    *,
    kind: Kind,
) -> Objective:
    """Spans for encoders, text for all others.

    Raises:
        IncompatibleError: The tokens of this tokenizer cannot be found in the text, or there is no
            room for text.
    """
    if kind == "encoder":
        return SpanObjective(task, tokenizer, training)
    if kind == "encoder-decoder":
        return TextToTextAnswers(task, tokenizer, training)
    return DecoderAnswers(task, tokenizer, training)


def golds(task: QuestionAnsweringTask, columns: Columns) -> list[list[str]]:
    """The accepted texts of every question, `[""]` where there is no answer."""
    # an empty text, so that whoever writes can learn to write nothing
    return [[*texts] or [""] for texts in columns[task.answers]]


def _span(context: str, answer: str, starts: Sequence[int]) -> Span | None:
    """The characters of the first answer; None = there is no answer.

    The answer is found where it begins nearest to the place that the data give.

    Raises:
        DataError: The answer is not in the context.
    """
    if not starts:
        return None
    # a lookahead finds places that overlap as well
    begins = [found.start() for found in re.finditer(f"(?={re.escape(answer)})", context)]
    if not begins or not answer:
        raise DataError(
            f"answer {answer!r} does not stand in its context {context[:60]!r}...; "
            "expected a stretch of it"
        )
    start = min(begins, key=lambda begin: abs(begin - starts[0]))
    end = start + len(answer)
    # Tokens need not cover spaces, accents and hidden characters at its edges, which a window has
    # not cut off then.
    while end - start > 1 and _is_edge(context[end - 1]):
        end -= 1
    while end - start > 1 and _is_edge(context[start]):
        start += 1
    return start, end


def _is_edge(character: str) -> bool:
    # marks, and what is not seen: tokenizers drop them as they clean a text
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Mn")
    return hidden or character.isspace() or unicodedata.combining(character) > 0
