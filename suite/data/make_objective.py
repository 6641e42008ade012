"""Chooses the objective that puts a task to a kind of backbone."""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedTokenizerBase

from suite.backbones.base import Kind
from suite.config.task import (
    GenerationTask,
    InstructionTask,
    LanguageModelTask,
    MultipleChoiceTask,
    PretrainTask,
    QuestionAnsweringTask,
    TaskConfig,
)
from suite.config.training import TrainingConfig
from suite.data.classification_head import HeadObjective
from suite.data.classification_text import DecoderTextObjective, TextToTextObjective
from suite.data.generation import make_generation
from suite.data.instruction import make_instruction
from suite.data.language_model import LanguageModelObjective
from suite.data.multiple_choice import make_choice
from suite.data.objective import Objective
from suite.data.pretraining import make_pretraining
from suite.data.question_answering import make_question_answering
from suite.data.tokenizer import end_ids
from suite.errors import IncompatibleError
from suite.record.spec import TrialSpec


def objective_of(spec: TrialSpec, *, kind: Kind, tokenizer: PreTrainedTokenizerBase) -> Objective:
    """The objective of a trial on a backbone of this kind; errors are those of `make_objective`."""
    return make_objective(
        spec.task,
        kind=kind,
        tokenizer=tokenizer,
        training=spec.training,
        decoder_objective=spec.decoder_objective,
    )


def make_objective(
    task: TaskConfig,
    *,
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    training: TrainingConfig,
    decoder_objective: Literal["head", "text"],
) -> Objective:
    """The objective of a task for a kind of backbone.

    For a class or a number, encoders get a head, encoder-decoders answer in text, and decoders do
    what `decoder_objective` says.

    Raises:
        IncompatibleError: This kind of backbone cannot answer the task; label words do not fit
            into `training.target_max_length` or read alike; a decoder is to write a number as
            text; windows do not overlap; `training.max_length` leaves no room for text; or texts
            are to be written and the tokenizer has no token to end one.
    """
    objective = _make(task, kind, tokenizer, training, decoder_objective)
    if objective.generates and not end_ids(tokenizer):
        raise IncompatibleError(
            f"task {task.name}: this backbone writes its answers, and its tokenizer has no token "
            "to end one; take a tokenizer that has (tokenizer: bytes, or bpe:SIZE:TASK)"
        )
    return objective


def _make(
    task: TaskConfig,
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    training: TrainingConfig,
    decoder_objective: Literal["head", "text"],
) -> Objective:
    if isinstance(task, PretrainTask):
        return make_pretraining(task, tokenizer, training, kind=kind)
    if isinstance(task, LanguageModelTask):
        return LanguageModelObjective(task, tokenizer, training, kind=kind)
    _check_room(task, tokenizer, training)
    if isinstance(task, GenerationTask):
        return make_generation(task, tokenizer, training, kind=kind)
    if isinstance(task, InstructionTask):
        return make_instruction(task, tokenizer, training, kind=kind)
    if isinstance(task, QuestionAnsweringTask):
        return make_question_answering(task, tokenizer, training, kind=kind)
    if isinstance(task, MultipleChoiceTask):
        return make_choice(
            task, tokenizer, training, kind=kind, decoder_objective=decoder_objective
        )
    # here and below: a class or a number
    if kind == "encoder":
        return HeadObjective(task, tokenizer, training, pairs=True)
    if kind == "encoder-decoder":
        return TextToTextObjective(task, tokenizer, training)
    if decoder_objective == "head":
        return HeadObjective(task, tokenizer, training, pairs=False)
    return DecoderTextObjective(task, tokenizer, training)


def _check_room(
    task: TaskConfig, tokenizer: PreTrainedTokenizerBase, training: TrainingConfig
) -> None:
    """Check that the tokenizer cuts texts: where its own tokens do not fit, it cuts nothing."""
    own = tokenizer.num_special_tokens_to_add(pair=True)
    if training.max_length <= own:
        raise IncompatibleError(
            f"task {task.name}: training.max_length is {training.max_length}, and the tokenizer"
            f" puts up to {own} tokens of its own around texts; set it to at least {own + 1}"
        )
