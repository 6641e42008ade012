"""Multiple choice: each of a row's own texts is scored after the stem, and the best is the answer.

Source: the head of width 1 over every choice, with a softmax over choices: GPT (Radford et al.
2018), 3.3, and SWAG in BERT (Devlin et al. 2019, arXiv 1810.04805), 4.4. Text to text: T5 (arXiv
1910.10683), appendix D, which writes the choice's name. Likelihood of a choice per token: GPT-3
(arXiv 2005.14165), 2.4; choices differ in length, and a sum would favour the shortest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.task import MultipleChoiceTask
from suite.config.training import TrainingConfig
from suite.data.classification_head import without_labels
from suite.data.classification_text import TextToTextObjective
from suite.data.collate import IGNORED
from suite.data.language_model import next_token_nll
from suite.data.objective import (
    Batch,
    Columns,
    Features,
    LabelObjective,
    Objective,
    fill,
    rows_of,
)
from suite.data.tokenizer import end_ids, plain_ids, prompt_ids, start_ids
from suite.errors import DataError


class ChoiceHeadObjective(LabelObjective):
    """A new head of width 1 scores every choice.

    Encoders read stem and choice as a pair, decoders read one after the other. A batch is
    (rows, choices, T), with a label per row.
    """

    task: MultipleChoiceTask
    kept_splits = ()  # a row is a sequence per choice

    def __init__(
        self,
        task: MultipleChoiceTask,
        tokenizer: PreTrainedTokenizerBase,
        training: TrainingConfig,
        *,
        pairs: bool,
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.pairs = pairs
        self.head = Head("choice")

    def encode(self, columns: Columns) -> Features:
        stems = fill(self.task.stem, columns)
        features: Features = {}
        for choice in self.task.choices:
            encoded = self._encode_choice(stems, list(columns[choice]))
            for name, values in encoded.items():
                # one list per row, which every choice adds a sequence to
                by_row = features.setdefault(name, [[] for _ in stems])
                for row, value in zip(by_row, values, strict=True):
                    row.append(value)
        longest = []
        for row in features["input_ids"]:
            longest.append(max(map(len, row)))
        features["gold"] = self._gold(columns)
        features["length"] = longest
        features["units"] = [1] * len(stems)
        return features

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        names = [name for name in ("input_ids", "token_type_ids") if name in rows[0]]
        # one sequence per choice, so that all of them are padded to one length
        flat = []
        for row in rows:
            for values in rows_of(row, names):
                flat.append(dict(zip(names, values, strict=True)))
        batch = self._padded(flat, {"input_ids": self.pad_id, "token_type_ids": 0})
        for name, tensor in batch.items():
            batch[name] = tensor.view(len(rows), len(self.task.choices), -1)  # (rows, choices, T)
        batch["labels"] = torch.tensor([row["gold"] for row in rows])
        return batch

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        logits = model(**without_labels(batch)).logits  # (rows, choices)
        answers = logits.float().argmax(-1).tolist()
        return [float(answer) for answer in answers]

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "pairs": self.pairs}

    def _encode_choice(self, stems: list[str], choices: list[str]) -> Features:
        """One choice of every row, after its stem.

        A pair that is too long loses the end of its longer text. Where one text follows the other,
        the stem loses its end.
        """
        limit = self.training.max_length
        if not self.pairs:
            sequences = []
            for stem, choice in zip(stems, choices, strict=True):
                choice_ids = plain_ids(self.tokenizer, " " + choice)
                stem_ids = _fit(prompt_ids(self.tokenizer, stem), choice_ids, limit)
                sequences.append(stem_ids + choice_ids)
            return {"input_ids": sequences}
        # not verbose, or the tokenizer warns of every row that is cut
        encoded = self.tokenizer(stems, choices, truncation=True, max_length=limit, verbose=False)
        features: Features = {"input_ids": encoded["input_ids"]}
        if "token_type_ids" in encoded:
            features["token_type_ids"] = encoded["token_type_ids"]
        return features


class ChoiceLikelihoodObjective(LabelObjective):
    """Decoders read stem and right choice in one sequence; the loss is on the choice's tokens.

    The answer is the choice with the highest mean log-likelihood per token, its end token included.
    """

    head = Head("text")
    task: MultipleChoiceTask

    def __init__(
        self, task: MultipleChoiceTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.end = end_ids(tokenizer)

    def encode(self, columns: Columns) -> Features:
        features: Features = {
            "input_ids": [],
            "labels": [],
            "stems": [],
            "choices": [],
            "gold": self._gold(columns),
            "length": [],
            "units": [],
        }
        texts = fill(self.task.stem, columns)
        choices = rows_of(columns, self.task.choices)
        for text, row, gold in zip(texts, choices, features["gold"], strict=True):
            stems, ids = self._encode_row(text, row)
            # trained on the right choice alone; the others are only for evaluation
            right = ids[gold]
            features["input_ids"].append(stems[gold] + right)
            features["labels"].append([IGNORED] * len(stems[gold]) + right)
            features["stems"].append(stems)
            features["choices"].append(ids)
            features["units"].append(len(right))
            # the longest choice decides how much memory validation needs
            sizes = [len(stem) + len(choice) for stem, choice in zip(stems, ids, strict=True)]
            features["length"].append(max(sizes))
        return features

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return self._padded(rows, {"input_ids": self.pad_id, "labels": IGNORED})

    def collate_eval(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Every choice of every row, (rows x choices, T); the labels are the choices' tokens."""
        flat = []
        for row in rows:
            for stem, choice in zip(row["stems"], row["choices"], strict=True):
                labels = [*[IGNORED] * len(stem), *choice]
                flat.append({"input_ids": [*stem, *choice], "labels": labels})
        return self.collate(flat)

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        """Give the likeliest choice of each row.

        It takes one forward pass over all choices, whatever `synced` says.
        """
        nll = torch.tensor(next_token_nll(model, batch))
        tokens = (batch["labels"] != IGNORED).sum(-1).cpu()
        # per token, because a sum would favour the shortest choice
        answers = (nll / tokens).view(-1, len(self.task.choices)).argmin(-1).tolist()
        return [float(answer) for answer in answers]

    def _encode_row(
        self, text: str, choices: Sequence[str]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The stem before each choice, and each choice, as tokens."""
        # without a token before it, a choice's first one would be in no score
        whole = prompt_ids(self.tokenizer, text) or start_ids(self.tokenizer)
        stems = []
        encoded = []
        for choice in choices:
            ids = [*plain_ids(self.tokenizer, " " + choice), *self.end]
            stems.append(_fit(whole, ids, self.training.max_length))
            encoded.append(ids)
        return stems, encoded


def make_choice(
    task: MultipleChoiceTask,
    tokenizer: PreTrainedTokenizerBase,
    training: TrainingConfig,
    *,
    kind: Kind,
    decoder_objective: Literal["head", "text"],
) -> Objective:
    """The objective of a multiple-choice task.

    Encoders get a head over choices, and so do decoders with `decoder_objective: head`; all others
    answer in text.

    Raises:
        IncompatibleError: Names of choices do not fit into `training.target_max_length`, or read
            alike.
    """
    if kind == "encoder-decoder":
        return TextToTextObjective(task, tokenizer, training)
    if kind == "encoder" or decoder_objective == "head":
        return ChoiceHeadObjective(task, tokenizer, training, pairs=kind == "encoder")
    return ChoiceLikelihoodObjective(task, tokenizer, training)


def _fit(stem: list[int], choice: list[int], at_most: int) -> list[int]:
    """The stem, cut so that the whole choice fits after it.

    Raises:
        DataError: The choice leaves no room for a single token of the stem.
    """
    if len(choice) >= at_most:
        raise DataError(
            f"a choice has {len(choice)} tokens, which leaves none of training.max_length "
            f"{at_most} for its stem; raise it"
        )
    return stem[: at_most - len(choice)]
