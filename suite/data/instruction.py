"""Instructions and responses: trained on the response alone, scored by its perplexity.

Source: Stanford Alpaca (Taori et al. 2023): two prompts, with and without an input; no loss on the
    prompt; an end token after the response. Shared Attention (arXiv 2407.12866), section 4,
    fine-tunes with it.
Deviations:
    - `training.max_length` bounds the prompt and `training.target_max_length` the response, as
      where text is generated; Alpaca bounds both together. A prompt that is too long loses the end
      of its instruction or input, never what stands after it.
    - The end token is the tokenizer's, also where Shared Attention's script writes `</s>` as text.
      Its attention mask hides real end tokens; ours hides padding alone.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.config.task import InstructionTask
from suite.config.task_base import SplitName
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED, collate_padded
from suite.data.language_model import LikelihoodObjective, next_token_nll
from suite.data.objective import (
    Batch,
    Columns,
    Features,
    continuation_features,
    fill_row,
    lengths,
    rows_of,
    target_features,
)
from suite.data.tokenizer import end_ids, plain_ids, prompt_ids, start_ids
from suite.errors import IncompatibleError
from suite.metrics.text import perplexity


class InstructionObjective(LikelihoodObjective):
    """The model reads a prompt and is scored on the tokens of the response; an item is a row."""

    task: InstructionTask

    def score(
        self, predictions: Sequence[Any], golds: Sequence[Any], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        return {"perplexity": perplexity(predictions, golds)}

    def fingerprint(self) -> dict[str, Any]:
        own = self.task.model_dump(mode="json", include={"without_input", "packing"})
        return {**super().fingerprint(), **own}

    def _examples(self, columns: Columns) -> Iterator[tuple[str, str, str]]:
        """Yield each row's prompt, the part of it that must not be cut off, and the response."""
        for *texts, response in rows_of(columns, self.task.columns):
            template = self._template(texts)
            prompt = fill_row(template, dict(zip(self.task.inputs, texts, strict=True)))
            yield prompt, _tail(template), response

    def _template(self, texts: Sequence[str]) -> str:
        """The template of a row; one without an input may have a template of its own."""
        without = self.task.without_input
        if without is None or texts[1].strip():
            return self.task.text_to_text
        # Alpaca's prompt for an instruction without an input
        return without


class TextToTextInstruction(InstructionObjective):
    """In an encoder-decoder the encoder reads the prompt, and the decoder writes the response."""

    def __init__(
        self, task: InstructionTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        if task.packing:
            raise IncompatibleError(
                f"task {task.name}: packing is for decoders; "
                "an encoder-decoder reads one prompt at a time"
            )

    def encode(self, columns: Columns) -> Features:
        end = end_ids(self.tokenizer)
        # the end token is added here, because a cut prompt must have it too
        room = self.training.max_length - len(end)
        inputs = []
        responses = []
        for prompt, tail, response in self._examples(columns):
            inputs.append([*_cut(self.tokenizer, prompt, tail, room, self.task), *end])
            responses.append(response)
        targets = self.tokenizer(
            text_target=responses, truncation=True, max_length=self.training.target_max_length
        )["input_ids"]
        # the number of scored tokens is what a perplexity's "gold" is
        return target_features(inputs, targets, lengths(targets))

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return self._padded_with_target(rows)


class DecoderInstruction(InstructionObjective):
    """Decoders read prompt and response in one sequence.

    With `packing`, training rows share a sequence, in order and whole, as long as they fit.
    """

    def __init__(
        self, task: InstructionTask, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
    ) -> None:
        super().__init__(task, tokenizer, training)
        self.end = end_ids(tokenizer)
        if training.target_max_length <= len(self.end):
            raise IncompatibleError(
                f"task {task.name}: training.target_max_length {training.target_max_length} "
                "leaves no room; raise it"
            )

    @property
    def positions(self) -> int:
        return self.training.max_length + self.training.target_max_length

    def encode(self, columns: Columns) -> Features:
        room = self.training.target_max_length - len(self.end)
        prompts = []
        responses = []
        for prompt, tail, text in self._examples(columns):
            ids = _cut(self.tokenizer, prompt, tail, self.training.max_length, self.task)
            # without a token before it, the response's first one would be in no score
            prompts.append(ids or start_ids(self.tokenizer))
            # the response is cut and not its end token, so that the model always learns to stop
            responses.append([*plain_ids(self.tokenizer, text)[:room], *self.end])
        return continuation_features(prompts, responses, lengths(responses))

    def features(
        self, chunks: Iterable[tuple[list[str], Columns]], split: SplitName
    ) -> Iterator[Features]:
        for part in super().features(chunks, split):
            if self.task.packing and split == "train":
                part = self._packed(part)
            yield part

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return collate_padded(
            rows,
            {"input_ids": self.pad_id, "labels": IGNORED},
            at_most=self.positions,
            multiple=self.training.pad_to_multiple,
        )

    def predict(self, model: Any, batch: Batch, *, synced: bool) -> list[float]:
        return next_token_nll(model, batch)

    def _packed(self, rows: Features) -> Features:
        """Rows joined in order as long as they fit; their names are joined by `+`."""
        packed: Features = {name: [] for name in rows}
        for number, length in enumerate(rows["length"]):
            # sizes of the sequences so far; rows keep their order, so only the last one can be
            # filled
            sizes = packed["length"]
            fits = bool(sizes) and sizes[-1] + length <= self.positions
            for name, values in rows.items():
                value = values[number]
                # one that does not fit starts the next sequence
                if not fits:
                    packed[name].append(value)
                elif name == "index":
                    packed[name][-1] += f"+{value}"
                else:
                    # lists of tokens are joined, counts are added; `+=` would change `rows` too
                    packed[name][-1] = packed[name][-1] + value
        return packed


def make_instruction(
    task: InstructionTask,
    tokenizer: PreTrainedTokenizerBase,
    training: TrainingConfig,
    *,
    kind: Kind,
) -> InstructionObjective:
    """Text to text for encoder-decoders, one sequence for decoders.

    Raises:
        IncompatibleError: The backbone is an encoder, which writes nothing; rows are to be packed
            for an encoder-decoder; or there is no room for text.
    """
    if kind == "encoder":
        raise IncompatibleError(
            f"task {task.name}: an encoder backbone cannot write a response; "
            "use an encoder-decoder or a decoder-only backbone"
        )
    objective: InstructionObjective
    if kind == "encoder-decoder":
        objective = TextToTextInstruction(task, tokenizer, training)
    else:
        objective = DecoderInstruction(task, tokenizer, training)
    # a bare template stands for the longest prompt, so that a lack of room is found before any row
    for template in (task.text_to_text, task.without_input):
        if template is not None:
            _cut(tokenizer, template, _tail(template), training.max_length - 1, task)
    return objective


def _tail(template: str) -> str:
    """The text that follows the last column of a template."""
    # A stretch of a template is a text and the field after it, or a text up to a brace.
    tail = ""
    for text, field, _, _ in string.Formatter().parse(template):
        tail += text
        if field is not None:
            tail = ""
    return tail


def _cut(
    tokenizer: PreTrainedTokenizerBase, prompt: str, tail: str, room: int, task: InstructionTask
) -> list[int]:
    """Tokens of a prompt to continue; one longer than `room` tokens loses some before its tail.

    Raises:
        IncompatibleError: There is no room for the tail.
    """
    ids = prompt_ids(tokenizer, prompt)
    if len(ids) <= room:
        return ids
    end = plain_ids(tokenizer, tail)
    if len(end) >= room:
        raise IncompatibleError(
            f"task {task.name}: training.max_length leaves {room} tokens, "
            "no room for a prompt; raise it"
        )
    return [*ids[: room - len(end)], *end]
