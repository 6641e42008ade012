"""What EleutherAI's lm-eval library is to measure.

These are the options of `suite lm-eval`, and the key `lm_eval` of a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from suite.config.loader import Strict
from suite.config.numbers import Count, Seed

DEFAULT_TASKS = ("glue", "gsm8k:5", "hellaswag", "mmlu")


@dataclass(frozen=True, slots=True)
class Request:
    """A task, group or tag of lm-eval.

    Attributes:
        name: The name by which lm-eval knows it.
        shots: Solved examples before each question; None = as many as the task's own file says.
    """

    name: str
    shots: int | None = None

    def __str__(self) -> str:
        if self.shots is None:
            return self.name
        return f"{self.name}:{self.shots}"


class LmEvalConfig(Strict):
    """Evaluation of causal backbones by lm-eval.

    By default the tasks and shots are those of Shared Attention (arXiv 2407.12866, table 1).
    """

    tasks: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] = Field(
        list(DEFAULT_TASKS),
        description="lm-eval tasks, groups or tags; gsm8k:5 = five examples before each question",
    )
    include_path: str | None = Field(
        None, description="a folder of task files of your own, searched before lm-eval's"
    )
    limit: Count | None = Field(
        None,
        description="only the first so many questions of each task: to try it out, not to report",
    )
    batch_size: Count | Literal["auto"] | None = Field(
        None, description="questions per forward pass; null = auto on a GPU, 8 on a CPU"
    )
    max_length: Count | None = Field(
        None, description="tokens that the model sees at a time; null = what its positions allow"
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="type of the weights; auto = bf16 on a GPU that has it, else fp32"
    )
    seed: Seed = Field(1234, description="draws the examples (lm-eval's default)")
    before: bool = Field(False, description="also evaluate what each arm starts from, untrained")

    @model_validator(mode="after")
    # lm-eval keeps results by name, so the same task with two numbers of shots would overwrite
    # itself
    def _distinct(self) -> LmEvalConfig:
        names = [request.name for request in parse_requests(self.tasks)]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks are not distinct: {self.tasks}")
        return self


def parse_requests(tasks: Sequence[str]) -> list[Request]:
    """Read items such as `gsm8k:5`, which is gsm8k with five shots.

    Raises:
        ValueError: Nothing stands before the colon, or no whole number after it.
    """
    return [_parse(text.strip()) for text in tasks]


def _parse(text: str) -> Request:
    # no name of a task in lm-eval holds a colon
    name, colon, shots = text.partition(":")
    if not name or (colon and not shots.isdecimal()):
        raise ValueError(
            f"lm-eval task {text!r}: expected NAME or NAME:SHOTS, such as hellaswag or gsm8k:5"
        )
    if not colon:
        return Request(name)
    return Request(name, int(shots))
