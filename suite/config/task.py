"""A task: where its rows come from, what the model sees, what it must answer, how that is scored.

Three kinds, by the key `kind` of the file: `classification` (the default; also regression), `language-model`, `generation`.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from suite.config.loader import Strict, load_yaml, validate
from suite.errors import UnknownNameError
from suite.registry import yaml_names

LabelMetric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
TextMetric = Literal["bleu", "rouge1", "rouge2", "rougeL"]
ObjectiveName = Literal["mlm", "causal-lm", "span-corruption"]
Positive = Annotated[int, Field(ge=1)]


class HubData(Strict):
    """A data set of the Hugging Face hub, or the same rows under a local data root."""

    hub: str = Field(description="id on the hub, e.g. nyu-mll/glue")
    config: str = "default"
    revision: str = Field("main", description="commit or branch on the hub; recorded as resolved")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="the task's name of a column: the data's, where they differ; a dot reaches inside (translation.en)",
    )


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
    held_out: Positive = 1000

    @model_validator(mode="after")
    def _test_named(self) -> SplitConfig:
        if (self.rule == "named") != (self.test is not None):
            raise ValueError("test is given exactly when rule is named")
        return self


class BaseTask(Strict):
    """What all kinds of task have: one file `tasks/<name>.yaml`; `name` is the file's stem.

    Attributes:
        higher_is_better: Of the score.
        in_order: Whether rows are one running text, so that a limit takes the first rows instead of any.
    """

    higher_is_better: ClassVar[bool] = True
    in_order: ClassVar[bool] = False

    name: str
    description: str
    source: str
    version: Positive = 1
    data: HubData | GeneratedData
    inputs: Annotated[list[str], Field(min_length=1, max_length=2)] = Field(description="columns of text that the model reads")
    metrics: list[Any]
    headline: str | None = Field(None, description="the metric that is the score; null = the mean of all")
    splits: SplitConfig = SplitConfig()

    @model_validator(mode="after")
    def _headline_is_a_metric(self) -> BaseTask:
        if self.headline is not None and self.headline not in self.metrics:
            raise ValueError(f"headline {self.headline!r} is none of the metrics {self.metrics}")
        return self

    @property
    def columns(self) -> list[str]:
        """Every column that must exist in the data."""
        return [*self.inputs]

    @property
    def text_columns(self) -> list[str]:
        """Those that hold text, in the order in which one reads them."""
        return [*self.inputs]

    def score_of(self, scores: Mapping[str, float]) -> float:
        """The one number of the task: its headline metric, or the mean of its metrics (GLUE: MRPC and QQP of F1 and accuracy)."""
        chosen = [self.headline] if self.headline is not None else self.metrics
        return math.fsum(scores[name] for name in chosen) / len(chosen)

    def utility(self, score: float) -> float:
        """A score on the scale on which more is better: what every comparison of scores uses."""
        return score

    @staticmethod
    def _check_prompt(prompt: str, inputs: list[str]) -> None:
        used = {field for _, field, _, _ in string.Formatter().parse(prompt) if field is not None}
        if used != set(inputs):
            raise ValueError(f"text_to_text uses {sorted(used)}, but inputs are {inputs}")


class ClassificationTask(BaseTask):
    """A class or a number per row."""

    kind: Literal["classification"] = "classification"
    label: LabelConfig
    text_to_text: str = Field(description="T5-style prompt with {column} in braces")
    metrics: Annotated[list[LabelMetric], Field(min_length=1)] = Field(description="the headline score is their mean")

    @model_validator(mode="after")
    def _prompt_uses_columns(self) -> ClassificationTask:
        self._check_prompt(self.text_to_text, self.inputs)
        return self

    @property
    def columns(self) -> list[str]:
        return [*self.inputs, self.label.column]

    @property
    def is_regression(self) -> bool:
        return self.label.range is not None

    @property
    def num_labels(self) -> int:
        """Classes, or 1 for regression: the width of a task head."""
        return len(self.label.words) if self.label.words is not None else 1


class LanguageModelTask(BaseTask):
    """Running text, every token predicted from those before it; scored by perplexity, of which less is better."""

    higher_is_better: ClassVar[bool] = False
    in_order: ClassVar[bool] = True

    kind: Literal["language-model"]
    inputs: Annotated[list[str], Field(min_length=1, max_length=1)] = Field(description="the column of text")
    stride: Positive = Field(256, description="tokens from one scored window to the next (MHE: 256); training.stride overrides it")
    metrics: Annotated[list[Literal["perplexity"]], Field(min_length=1, max_length=1)] = ["perplexity"]

    def utility(self, score: float) -> float:
        """Minus the mean loss per token: perplexities of a study span orders of magnitude, their logarithms do not."""
        return -math.log(score)


class GenerationTask(BaseTask):
    """A text per row, written by the model; scored over the whole split at once."""

    kind: Literal["generation"]
    target: str = Field(description="the column of text to write")
    text_to_text: str = Field(description="T5-style prompt with {column} in braces")
    beams: Positive = Field(1, description="beams of the search; 1 = greedy; training.beams overrides it")
    metrics: Annotated[list[TextMetric], Field(min_length=1)]

    @model_validator(mode="after")
    def _prompt_uses_columns(self) -> GenerationTask:
        self._check_prompt(self.text_to_text, self.inputs)
        if self.target in self.inputs:
            raise ValueError(f"target {self.target!r} is one of the inputs")
        return self

    @property
    def columns(self) -> list[str]:
        return [*self.inputs, self.target]

    @property
    def text_columns(self) -> list[str]:
        return [*self.inputs, self.target]


class PretrainTask(BaseTask):
    """The text columns of another task as a corpus to pre-train on, scored by the mean loss per predicted token.

    Made from a sweep's `pretrain`; no file is of this kind.
    """

    higher_is_better: ClassVar[bool] = False
    in_order: ClassVar[bool] = True

    kind: Literal["pretrain"] = "pretrain"
    inputs: Annotated[list[str], Field(min_length=1)] = Field(description="the columns of text")
    objective: ObjectiveName
    start: Literal["random", "checkpoint"] = Field(
        description="weights before the first step: new everywhere, or the converted checkpoint's"
    )
    corrupted_frac: float = Field(description="share of tokens to predict; not of causal-lm")
    mean_span_tokens: float = Field(description="span-corruption: mean length of a span")
    metrics: Annotated[list[Literal["loss"]], Field(min_length=1, max_length=1)] = ["loss"]

    def utility(self, score: float) -> float:
        return -score


KINDS: dict[str, type[BaseTask]] = {
    "classification": ClassificationTask,
    "language-model": LanguageModelTask,
    "generation": GenerationTask,
}
DEFAULT_KIND = "classification"


def _kind(given: Any) -> Any:
    return given.get("kind", DEFAULT_KIND) if isinstance(given, Mapping) else getattr(given, "kind", None)


TaskConfig: TypeAlias = Annotated[
    Annotated[ClassificationTask, Tag("classification")]
    | Annotated[LanguageModelTask, Tag("language-model")]
    | Annotated[GenerationTask, Tag("generation")]
    | Annotated[PretrainTask, Tag("pretrain")],
    Discriminator(_kind),
]
"""A task of any kind."""


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
    return make_task({"name": name, **data}, where=str(paths[name]), lines=lines)


def make_task(data: Mapping[str, Any], *, where: str, lines: Any = None) -> TaskConfig:
    """A task from plain data.

    Raises:
        ConfigError: As `validate`; an unknown `kind`.
    """
    kind = data.get("kind", DEFAULT_KIND)
    if not isinstance(kind, str) or kind not in KINDS:
        line = f":{lines[('kind',)]}" if lines and ("kind",) in lines else ""
        raise UnknownNameError("kind of task", str(kind), KINDS, where=f"{where}{line}: kind")
    task = validate(KINDS[kind], data, where=where, lines=lines)
    assert isinstance(task, ClassificationTask | LanguageModelTask | GenerationTask)
    return task
