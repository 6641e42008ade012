"""A task: where its rows come from, what the model sees, what it must answer, how that is scored."""

from __future__ import annotations

import string
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from suite.config.loader import Strict, load_yaml, validate
from suite.errors import UnknownNameError
from suite.registry import yaml_names

MetricName = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]


class HubData(Strict):
    """A data set of the Hugging Face hub, or the same rows under a local data root."""

    hub: str = Field(description="id on the hub, e.g. nyu-mll/glue")
    config: str = "default"
    revision: str = Field("main", description="commit or branch on the hub; recorded as resolved")


class GeneratedData(Strict):
    """Rows made by a generator of `suite/data/generators` (or the user's own)."""

    generator: str
    options: dict[str, Any] = Field(default_factory=dict)


class LabelConfig(Strict):
    """The answer: one of `words` (by class id), or a number in `range` rounded to `step` in text."""

    column: str = "label"
    words: Annotated[list[str], Field(min_length=2)] | None = None
    range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    step: Annotated[float, Field(gt=0)] = 0.2

    @model_validator(mode="after")
    def _one_kind(self) -> LabelConfig:
        if (self.words is None) == (self.range is None):
            raise ValueError("give either words (classification) or range (regression)")
        if self.words is not None and len(set(self.words)) < len(self.words):
            raise ValueError(f"words are not distinct: {self.words}")
        return self


class SplitConfig(Strict):
    """Which splits of the data set are read.

    `rule: read` is READ's (section 4): with fewer than 10,000 training rows the validation split is halved into
    validation and test; with more, the original validation split becomes the test set and `held_out` rows of train
    become the validation set. `rule: named` takes the splits as they are.
    """

    rule: Literal["read", "named"] = "read"
    train: str = "train"
    validation: str = "validation"
    test: str | None = Field(None, description="rule named: the split to test on")
    held_out: Annotated[int, Field(ge=1)] = 1000

    @model_validator(mode="after")
    def _test_named(self) -> SplitConfig:
        if (self.rule == "named") != (self.test is not None):
            raise ValueError("test is given exactly when rule is named")
        return self


class TaskConfig(Strict):
    """One file `tasks/<name>.yaml`; `name` is the file's stem."""

    name: str
    description: str
    source: str
    version: Annotated[int, Field(ge=1)] = 1
    data: HubData | GeneratedData
    inputs: Annotated[list[str], Field(min_length=1, max_length=2)] = Field(description="columns an encoder reads, one or a pair")
    label: LabelConfig
    text_to_text: str = Field(description="T5-style prompt with {column} in braces")
    metrics: Annotated[list[MetricName], Field(min_length=1)] = Field(description="the headline score is their mean")
    splits: SplitConfig = SplitConfig()

    @model_validator(mode="after")
    def _prompt_uses_columns(self) -> TaskConfig:
        used = {field for _, field, _, _ in string.Formatter().parse(self.text_to_text) if field is not None}
        if used != set(self.inputs):
            raise ValueError(f"text_to_text uses {sorted(used)}, but inputs are {self.inputs}")
        return self

    @property
    def columns(self) -> list[str]:
        """Every column that must exist in the data."""
        return [*self.inputs, self.label.column]

    @property
    def is_regression(self) -> bool:
        return self.label.range is not None

    @property
    def num_labels(self) -> int:
        """Classes, or 1 for regression: the width of a task head."""
        return len(self.label.words) if self.label.words is not None else 1


def load_task(name: str, *, where: str = "") -> TaskConfig:
    """The task of a name.

    Raises:
        UnknownNameError: There is no such file.
        ConfigError: The file is not valid.
    """
    paths = yaml_names("tasks")
    if name not in paths:
        raise UnknownNameError("task", name, paths, where=where)
    data, lines = load_yaml(paths[name])
    return validate(TaskConfig, {"name": name, **data}, where=str(paths[name]), lines=lines)
