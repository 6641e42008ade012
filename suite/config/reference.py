"""The numbers that a paper printed.

The sweep that repeats them carries them, so that the leaderboard shows both side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from suite.config.loader import Strict

MEAN = "mean"
"""Name, among the tasks of a line, of the mean over all of them."""


class ReferenceAttention(Strict):
    """The attention variant that a line is about."""

    name: str
    options: dict[str, Any] | None = Field(
        None, description="exactly these options; null = whatever they are"
    )


class Reference(Strict):
    """One line of a paper's table: the scores of one arm on some tasks.

    `scores` and `stds` are in the units of the suite's own scores (percent; perplexity as it is),
    or of lm-eval's where `evaluation` is given. `printed` keeps other numbers of the line; they are
    shown as they are and compared with nothing.
    """

    backbone: str | None = Field(None, description="null = any backbone of the sweep")
    attention: (
        Annotated[
            ReferenceAttention,
            # a bare name stands for a variant with any options
            BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given),
        ]
        | None
    ) = Field(None, description="a variant, or {name, options}; null = any variant of the sweep")
    method: str | None = Field(None, description="null = any method of the sweep")
    architecture: dict[str, Any] = Field(
        default_factory=dict, description="settings that the arm must have, whatever others it has"
    )
    scores: dict[str, float] = Field(description="score by task, or of their mean")
    mean_of: list[str] | None = Field(
        None, description="tasks of the mean; null = those that the line has scores on"
    )
    stds: dict[str, float] = Field(
        default_factory=dict,
        description="standard deviations of the scores, where the paper prints them",
    )
    printed: dict[str, float] = Field(
        default_factory=dict,
        description="other numbers of the line, e.g. trainable_percent, energy_kwh",
    )
    evaluation: Literal["trained", "untrained"] | None = Field(
        None,
        description="the scores are those of suite lm-eval, by task/metric, "
        "after or before the arm's training",
    )
    source: str = Field(description="paper and table, e.g. READ, table 1")
    unlike: str | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="why the scores cannot be set beside the suite's: then no difference is shown",
    )

    @model_validator(mode="after")
    def _something_to_compare(self) -> Reference:
        if not self.scores:
            raise ValueError("scores is empty")
        # nearly always a typing mistake in the name of a task
        extra = sorted(self.stds.keys() - self.scores.keys())
        if extra:
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
        """Whether the line is about such an arm.

        Args:
            backbone, attention, options, architecture: Those of the arm.
            method: None = the arm was not trained, so a line about any method fits.
        """
        if self.backbone not in (None, backbone):
            return False
        if method is not None and self.method not in (None, method):
            return False
        if self.attention is not None:
            if self.attention.name != attention:
                return False
            # all of them must be equal: with one option more it is another variant
            if self.attention.options not in (None, options):
                return False
        for key, value in self.architecture.items():
            # a setting that the arm lacks is not the same as null
            if key not in architecture or architecture[key] != value:
                return False
        return True

    def score_on(self, task: str, tasks: Set[str]) -> float | None:
        """The printed score on a task, or on `mean`.

        A mean counts only where it is over the sweep's `tasks`.
        """
        if task == MEAN:
            # means over different tasks cannot be compared, however close their names are
            averaged = self.mean_of or self.scores.keys() - {MEAN}
            if tasks != set(averaged):
                return None
        return self.scores.get(task)

    def as_row(self, task: str) -> dict[str, Any]:
        """What a row of the leaderboard shows of the line."""
        return {
            "score": self.scores[task],
            "std": self.stds.get(task),
            "source": self.source if self.unlike is None else f"{self.source}; {self.unlike}",
            "comparable": self.unlike is None,
            "printed": self.printed,
        }

    def __str__(self) -> str:
        attention = self.attention.name if self.attention else None
        names = [name for name in (self.backbone, attention, self.method) if name]
        return f"{' '.join(names) or 'any arm'} ({self.source})"
