"""What is searched for one method: its learning-rate range and its architecture choices."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from suite.config.loader import Strict, load_yaml, validate
from suite.errors import UnknownNameError
from suite.registry import yaml_names


class LearningRateRange(Strict):
    """A closed range, searched on a log scale (READ, appendix D: [1e-6, 3e-3]); a plain number is a fixed rate, tried once."""

    low: Annotated[float, Field(gt=0, le=10)]
    high: Annotated[float, Field(gt=0, le=10)]
    fixed: bool = Field(False, description="nothing is searched: low is high")

    @model_validator(mode="before")
    @classmethod
    def _number(cls, given: Any) -> Any:
        return {"low": given, "high": given, "fixed": True} if isinstance(given, float) else given

    def trials(self, budget: int) -> int:
        """Search trials that a study gets of a sweep's budget."""
        return 1 if self.fixed else budget

    @model_validator(mode="after")
    def _ordered(self) -> LearningRateRange:
        if self.fixed and self.low != self.high:
            raise ValueError(f"fixed, but low {self.low} is not high {self.high}; leave fixed out")
        if self.low >= self.high and not self.fixed:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


class SearchSpace(Strict):
    """One file `search_spaces/<method>.yaml`."""

    description: str
    source: str
    learning_rate: LearningRateRange
    architectures: Annotated[list[dict[str, Any]], Field(min_length=1, description="the first is the default")]


def load_space(name: str, *, where: str = "") -> SearchSpace:
    """The search space of a method (`lora`, or `peft:ia3` read from `peft-ia3.yaml`).

    Raises:
        UnknownNameError: There is no such file.
        ConfigError: The file is not valid.
    """
    paths = yaml_names("search_spaces")
    stem = name.replace(":", "-")
    if stem not in paths:
        raise UnknownNameError("search space", name, paths, where=where)
    data, lines = load_yaml(paths[stem])
    return validate(SearchSpace, data, where=str(paths[stem]), lines=lines)
