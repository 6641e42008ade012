"""Multiple choice: each of a row's own texts is scored after the stem, and the best is the answer.

Source: the head of width 1 over every choice, with a softmax over choices: GPT (Radford et al. 2018), 3.3, and SWAG in BERT
(Devlin et al. 2019, arXiv 1810.04805), 4.4. Text to text: T5 (arXiv 1910.10683), appendix D, which writes the choice's name.
Likelihood of a choice per token: GPT-3 (arXiv 2005.14165), 2.4; choices differ in length, and a sum would favour the shortest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.task import MultipleChoiceTask
from suite.config.training import TrainingConfig
from suite.data.classification_text import TextToTextObjective
from suite.data.collate import IGNORED
from suite.data.objective import Batch, Columns, Features, LabelObjective, Objective, fill
from suite.data.tokenizer import plain_ids, prompt_ids
from suite.errors import DataError


class ChoiceHeadObjective(LabelObjective):
    """A new head of width 1 scores every choice: encoders read stem and choice as a pair, decoders one after the other.

    A batch is (rows, choices, T), with a label per row.
    """

    task: MultipleChoiceTask

    def __init__(
        self,
        task: MultipleChoiceTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
        *,
        pairs: bool,
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.pairs, self.head = pairs, Head("choice")
        self.parts = ("input_ids", "token_type_ids") if pairs else ("input_ids",)

    def encode(self, columns: Columns) -> Features:
        stems = fill(self.task.stem, columns)
        encoded = [self._encoded(stems, list(columns[choice])) for choice in self.task.choices]
        parts = [name for name in self.parts if name in encoded[0]]
        features: Features = {
            name: [list(row) for row in zip(*(one[name] for one in encoded), strict=True)]
            for name in parts
        }
        lengths = [max(map(len, row)) for row in features["input_ids"]]
        return {
            **features,
            "gold": self._gold(columns),
            "length": lengths,
            "units": [1] * len(lengths),
        }

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        names = [name for name in self.parts if name in rows[0]]
        flat = [
            dict(zip(names, one, strict=True))
            for row in rows
            for one in zip(*(row[name] for name in names), strict=True)
        ]
        batch = self._padded(flat, {"input_ids": self.pad_id, "token_type_ids": 0})
        shaped = {
            name: tensor.view(len(rows), len(self.task.choices), -1)
            for name, tensor in batch.items()
        }
        return {**shaped, "labels": torch.tensor([row["gold"] for row in rows])}

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        logits = model(
            **{name: tensor for name, tensor in batch.items() if name != "labels"}
        ).logits  # (rows, choices)
        answers = logits.float().argmax(-1).tolist()
        return [float(answer) for answer in answers]

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "pairs": self.pairs}

    def _encoded(self, stems: list[str], choices: list[str]) -> Any:
        """What is too long for a pair loses its end; where one text follows the other, the stem does."""
        limit = self.training.max_length
        if self.pairs:
            return self.tokenizer(stems, choices, truncation=True, max_length=limit, verbose=False)
        ids = [
            _fit(prompt_ids(self.tokenizer, s), plain_ids(self.tokenizer, " " + c), limit)
            for s, c in zip(stems, choices, strict=True)
        ]
        return {"input_ids": [stem + choice for stem, choice in ids]}


class ChoiceLikelihoodObjective(LabelObjective):
    """Decoders: stem and right choice in one sequence with loss on the choice's tokens; the answer is the choice of the highest
    mean log-likelihood per token, its end token among them."""

    head = Head("text")
    task: MultipleChoiceTask

    def __init__(
        self, task: MultipleChoiceTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

    def encode(self, columns: Columns) -> Features:
        gold, rows = self._gold(columns), self._rows(columns)
        right = [row[number] for row, number in zip(rows, gold, strict=True)]
        return {
            "input_ids": [stem + choice for stem, choice in right],
            "labels": [[IGNORED] * len(stem) + choice for stem, choice in right],
            "stems": [[stem for stem, _ in row] for row in rows],
            "choices": [[choice for _, choice in row] for row in rows],
            "gold": gold,
            "length": [max(len(stem) + len(choice) for stem, choice in row) for row in rows],
            "units": [len(choice) for _, choice in right],
        }

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return self._padded(rows, {"input_ids": self.pad_id, "labels": IGNORED})

    def collate_eval(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Every choice of every row, (rows x choices, T); labels are the choices' tokens."""
        pairs = [pair for row in rows for pair in zip(row["stems"], row["choices"], strict=True)]
        return self.collate(
            [{"input_ids": [*s, *c], "labels": [*[IGNORED] * len(s), *c]} for s, c in pairs]
        )

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        """One forward pass over all choices, whatever `synced`."""
        sums, tokens = label_scores(model, batch)
        answers = (sums / tokens).view(-1, len(self.task.choices)).argmax(-1).tolist()
        return [float(answer) for answer in answers]

    def _rows(self, columns: Columns) -> list[list[tuple[list[int], list[int]]]]:
        """Stem and choice as tokens, per row and choice."""
        stems = [prompt_ids(self.tokenizer, text) for text in fill(self.task.stem, columns)]
        choices = zip(*(columns[choice] for choice in self.task.choices), strict=True)
        return [
            [self._pair(stem, text) for text in texts]
            for stem, texts in zip(stems, choices, strict=True)
        ]

    def _pair(self, stem: list[int], text: str) -> tuple[list[int], list[int]]:
        return _fit(
            stem, [*plain_ids(self.tokenizer, " " + text), *self.end], self.training.max_length
        )


def make_choice(
    task: MultipleChoiceTask,
    tokenizer: PreTrainedTokenizerBase,
    training: TrainingConfig,
    *,
    kind: Kind,
    decoder_objective: Literal["head", "text"],
) -> Objective:
    """A head over choices for encoders, and for decoders with `decoder_objective: head`; else in text.

    Raises:
        IncompatibleError: Names of choices do not fit `training.target_max_length` or read alike.
    """
    if kind == "encoder-decoder":
        return TextToTextObjective(task, tokenizer, training)
    if kind == "encoder" or decoder_objective == "head":
        return ChoiceHeadObjective(task, tokenizer, training, pairs=kind == "encoder")
    return ChoiceLikelihoodObjective(task, tokenizer, training)


def _fit(stem: list[int], choice: list[int], at_most: int) -> tuple[list[int], list[int]]:
    """A stem short enough to stand before the whole choice, with at least one token."""
    if len(choice) >= at_most:
        raise DataError(
            f"a choice has {len(choice)} tokens, which leaves none of training.max_length {at_most} for its stem; raise it"
        )
    return stem[: at_most - len(choice)], choice


def label_scores(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-likelihood in nats of each row's labels, summed over its tokens, and how many they are, (rows,) each."""
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits = logits[:, -labels.shape[1] :]  # some methods put positions of their own in front
    scored = [wanted[1:] != IGNORED for wanted in labels]
    sums = [
        -cross_entropy(row[:-1][where].float(), wanted[1:][where], reduction="sum")
        for row, wanted, where in zip(logits, labels, scored, strict=True)
    ]
    return torch.stack(sums), torch.stack([where.sum() for where in scored])
