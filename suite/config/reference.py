"""The numbers a paper printed, carried by the sweep that repeats them, so that the leaderboard can show both side by side."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from suite.config.loader import Strict

MEAN = "mean"
"""Stands among the tasks of a line for the mean over all of them."""


class ReferenceAttention(Strict):
    """Which attention a line is about."""

    name: str
    options: dict[str, Any] | None = Field(
        None, description="exactly these options; null = whatever they are"
    )


class Reference(Strict):
    """One line of a paper's table: the scores of one arm on some tasks.

    `scores` and `stds` are in the units of the suite's own scores (percent; perplexity as it is), or of lm-eval's where
    `evaluation` is given. `printed` keeps other numbers of the line; they are shown as they are and compared with nothing.
    """

    backbone: str | None = Field(None, description="null = any of the sweep")
    attention: (
        Annotated[
            ReferenceAttention,
            BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given),
        ]
        | None
    ) = Field(None, description="a variant, or {name, options}; null = any of the sweep")
    method: str | None = Field(None, description="null = any of the sweep")
    architecture: dict[str, Any] = Field(
        default_factory=dict, description="settings that the arm must have, beside any others"
    )
    scores: dict[str, float] = Field(description="by task, or mean")
    mean_of: list[str] | None = Field(
        None, description="tasks of the mean; null = those that the line has scores on"
    )
    stds: dict[str, float] = Field(
        default_factory=dict, description="their deviations, where they are printed"
    )
    printed: dict[str, float] = Field(
        default_factory=dict,
        description="other numbers of the line, e.g. trainable_percent, energy_kwh",
    )
    evaluation: Literal["trained", "untrained"] | None = Field(
        None,
        description="scores are those of suite lm-eval, by task/metric, after or before the arm's training",
    )
    source: str = Field(description="paper and table, e.g. READ, table 1")

    @model_validator(mode="after")
    def _something_to_compare(self) -> Reference:
        if not self.scores:
            raise ValueError("scores is empty")
        if extra := sorted(self.stds.keys() - self.scores.keys()):
            raise ValueError(f"stds without a score: {', '.join(extra)}")
        return self

    def matches(
        self,
        *,
        backbone: str,
        attention: str,
        options: Mapping[str, Any],
        method: str | None,
        architecture: Mapping[str, Any],
    ) -> bool:
        """Whether the line is about such an arm; one without a method was not trained, and any method does."""
        if self.backbone not in (None, backbone) or (
            method is not None and self.method not in (None, method)
        ):
            return False
        if self.attention is not None and (
            self.attention.name != attention or self.attention.options not in (None, options)
        ):
            return False
        return all(
            key in architecture and architecture[key] == value
            for key, value in self.architecture.items()
        )

    def score_on(self, task: str, tasks: Set[str]) -> float | None:
        """The printed score on a task, or on `mean`: the latter only where it is over the sweep's `tasks`."""
        if task == MEAN and tasks != set(self.mean_of or self.scores.keys() - {MEAN}):
            return None
        return self.scores.get(task)

    def as_row(self, task: str) -> dict[str, Any]:
        """What a row of the leaderboard keeps of it."""
        return {
            "score": self.scores[task],
            "std": self.stds.get(task),
            "source": self.source,
            "printed": self.printed,
        }

    def __str__(self) -> str:
        names = [self.backbone, self.attention.name if self.attention else None, self.method]
        return f"{' '.join(n for n in names if n) or 'any arm'} ({self.source})"
