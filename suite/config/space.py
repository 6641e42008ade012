"""What is searched for one method: its learning-rate range and its architecture choices."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from suite.config.loader import Strict, load_yaml, validate
from suite.errors import UnknownNameError
from suite.registry import yaml_names


class LearningRateRange(Strict):
    """A closed range, searched on a log scale (READ, appendix D: [1e-6, 3e-3])."""

    low: Annotated[float, Field(gt=0, le=10)]
    high: Annotated[float, Field(gt=0, le=10)]

    @model_validator(mode="after")
    def _ordered(self) -> LearningRateRange:
        if self.low >= self.high:
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
