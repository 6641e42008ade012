"""What all kinds of task have: where rows come from, how they are split, what the answer is."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from suite.config.loader import Strict
from suite.config.names import TASK
from suite.config.numbers import Count
from suite.config.reference import MEAN
from suite.config.task_files import CodeConfig
from suite.tables import EXPECTED, form_of

SplitName = Literal["train", "validation", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "validation", "test")
MOST_STEPS = 100_000
"""Steps of `label.range`, ours: far more than a model could tell apart."""


class HubData(Strict):
    """A data set of the Hugging Face hub, or the same rows under a local data root."""

    hub: str = Field(description="id on the hub, e.g. nyu-mll/glue")
    config: str = "default"
    revision: str = Field("main", description="commit or branch on the hub; recorded as resolved")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="the task's name of a column: the data's name, where they differ; "
        "a dot reaches inside (translation.en)",
    )

    @field_validator("hub")
    @classmethod
    def _no_file(cls, hub: str) -> str:
        # a name that cannot be the hub's must not be looked up there
        if form_of(Path(hub)) is not None or hub.startswith((".", "/", "~")) or hub.count("/") > 1:
            raise ValueError(
                f"{hub!r} is a path, and hub takes the id of a data set; "
                "a file of your own stands in data: {files: FILE}"
            )
        return hub


FILE_KEYS = ("files", *SPLIT_NAMES)


class FileData(Strict):
    """Rows in files of one's own, as they lie there.

    `files` is one file, from which validation and test rows are drawn by a fixed seed; or `train`,
    `validation` and `test` name a file each. Without `validation` its rows are drawn from `train`;
    with `validation` alone, READ's rule makes a test set of it.
    """

    files: str | None = Field(None, description="one file with all rows")
    train: str | None = None
    validation: str | None = None
    test: str | None = None
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="the task's name of a column: the data's name, where they differ",
    )
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = Field(
        None, description="between the values of a CSV file; null = it is found"
    )
    encoding: str | None = Field(
        None, description="of a text file; null = by its first bytes, else UTF-8"
    )
    folder: str | None = Field(
        None, description="where the files were found; never typed, and no part of a trial's hash"
    )
    sha256: dict[str, str] | None = Field(
        None, description="of each file, as it was when the task was read; never typed"
    )

    @model_validator(mode="after")
    def _one_or_each(self) -> FileData:
        if (self.files is None) == (self.train is None):
            raise ValueError("give files (one file with all rows), or train and other splits")
        if self.files is not None and (self.validation or self.test):
            raise ValueError("files holds all rows; beside validation or test, call it train")
        for path in self.paths.values():
            if form_of(Path(path)) is None:
                raise ValueError(f"{path or repr(path)}: expected a file that ends in {EXPECTED}")
        return self

    @field_validator("delimiter")
    @classmethod
    def _readable_delimiter(cls, delimiter: str | None) -> str | None:
        if delimiter is not None and (not delimiter.isascii() or delimiter in '"\r\n\0'):
            raise ValueError(f"{delimiter!r}: expected one ASCII character, no quote or line end")
        return delimiter

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, encoding: str | None) -> str | None:
        # decoded, since Python also knows encodings that are not of text, such as base64
        try:
            b"a".decode(encoding or "utf-8")
        except UnicodeDecodeError:
            # half a character of UTF-16
            pass
        except (LookupError, UnicodeError):
            raise ValueError(
                f"{encoding!r} is no encoding that Python knows; expected utf-8, utf-16, cp1252, "
                "latin-1 or another"
            ) from None
        return encoding

    @property
    def paths(self) -> dict[str, str]:
        """The file of each split that has one, as it was typed; `files` is the split train."""
        train = self.files if self.files is not None else self.train
        named = {"train": train, "validation": self.validation, "test": self.test}
        return {split: path for split, path in named.items() if path is not None}


class GeneratedData(Strict):
    """Rows made by a generator: one of `suite/data/generators`, or the user's own."""

    generator: str
    options: dict[str, Any] = Field(default_factory=dict)


def _origin(given: Any) -> str:
    """The class of data that a mapping means, so that an error is about that kind alone."""
    if isinstance(given, FileData) or (
        isinstance(given, Mapping) and any(key in given for key in FILE_KEYS)
    ):
        return FileData.__name__
    if isinstance(given, GeneratedData) or (isinstance(given, Mapping) and "generator" in given):
        return GeneratedData.__name__
    return HubData.__name__


Data: TypeAlias = Annotated[
    Annotated[HubData, Tag(HubData.__name__)]
    | Annotated[GeneratedData, Tag(GeneratedData.__name__)]
    | Annotated[FileData, Tag(FileData.__name__)],
    Discriminator(_origin),
]
PLACE = {"data": {"folder"}}
"""What a dump of a task leaves out to compare it: files that were moved are the same data."""


def _braces_hold_names(prompt: str) -> str:
    try:
        parts = [*string.Formatter().parse(prompt)]
    except ValueError as error:
        raise ValueError(
            f"got {prompt!r}: {error}; write {{column}} for the text of a column, and a brace of "
            "the prompt itself twice"
        ) from None
    for _, field, spec, conversion in parts:
        # `{text:>300000000}` would fill the memory, and `{text:d}` fail in every row
        if spec or conversion:
            raise ValueError(
                f"{{{field}}} has a format or conversion, expected the name of a column alone"
            )
    return prompt


Prompt: TypeAlias = Annotated[str, AfterValidator(_braces_hold_names)]
"""A text with {column} in braces. Which columns it names, its task checks."""


class LabelConfig(Strict):
    """The answer: one of `words` (by class id), or a number in `range` (rounded to `step`)."""

    column: str = "label"
    words: Annotated[list[str], Field(min_length=2)] | None = None
    range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    step: Annotated[float, Field(gt=0)] = 0.2

    @property
    def true_first(self) -> bool:
        """Whether the words are true and false in this order, so that true is class 0."""
        return [word.lower() for word in self.words or ()] == ["true", "false"]

    @field_validator("column", mode="before")
    @classmethod
    def _one_column(cls, column: Any) -> Any:
        if isinstance(column, list):
            raise ValueError(
                f"got {len(column)} columns, {column}, and a task asks for one label; "
                "write a task for each column, and list the tasks in one sweep"
            )
        return column

    @model_validator(mode="after")
    def _one_kind(self) -> LabelConfig:
        # exactly one of them says what kind of answer it is
        if (self.words is None) == (self.range is None):
            raise ValueError(
                "give either words (classification, one for each of `choices`) or range "
                "(regression); words are found for classification on files of your own alone"
            )
        # a model that writes the word could not say which of two classes it means
        if self.words is not None and len(set(self.words)) < len(self.words):
            raise ValueError(f"words are not distinct: {self.words}")
        return self

    @model_validator(mode="after")
    def _range_has_steps(self) -> LabelConfig:
        if self.range is None:
            return self
        low, high = self.range
        # every number of the range is a text that an encoder-decoder may write
        if not self.step <= high - low <= MOST_STEPS * self.step:
            raise ValueError(
                f"range {self.range}: expected from low to high, "
                f"in at least one and at most {MOST_STEPS:,} steps of {self.step}"
            )
        return self


class SplitConfig(Strict):
    """Which splits of the data set are read.

    `rule: read` is READ's (section 4): with fewer than 10,000 training rows the validation split is
    halved into validation and test; with more, the original validation split becomes the test set
    and `held_out` rows of train become the validation set. `rule: named` takes the splits as they
    are. `rule: held-out` is for data without a validation split: `held_out` rows of train become
    it, and where no `test` is named, as many others become the test set.
    """

    rule: Literal["read", "named", "held-out"] = "read"
    train: str = "train"
    validation: str = "validation"
    test: str | None = Field(
        None, description="the split to test on; rule held-out: null = rows of train"
    )
    held_out: Count = 1000

    @model_validator(mode="after")
    def _test_named(self) -> SplitConfig:
        if self.rule != "held-out" and (self.rule == "named") != (self.test is not None):
            raise ValueError(
                f"splits.rule is {self.rule}, test is {self.test!r}; "
                "rule named needs a test, rule read has its own"
            )
        if self.rule == "held-out" and self.validation != "validation":
            raise ValueError(
                "splits.rule held-out takes the validation rows from train; leave validation out"
            )
        # a row in two splits would leak what is tested
        named = self.sources
        if len(set(named)) < len(named):
            raise ValueError(
                f"splits overlap: train, validation and test are {named}; "
                "every row may be in one of them only"
            )
        return self

    @property
    def sources(self) -> list[str]:
        """The splits of the data that are read; GLUE's unlabelled `test` is never among them."""
        names = [self.train]
        # with rule held-out the validation rows come out of train
        if self.rule != "held-out":
            names.append(self.validation)
        if self.test is not None:
            names.append(self.test)
        return names


class BaseTask(Strict):
    """What all kinds of task have.

    A task is one file `tasks/<name>.yaml` (or `.py`, see `task_files`); `name` is the file's stem.

    Attributes:
        higher_is_better: Whether a higher score is better.
        in_order: Whether rows are one running text, so that a limit takes the first rows and not
            any.
        item_score: Whether predictions are negative log-likelihoods and golds are numbers of
            tokens, so that only perplexity fits.
    """

    higher_is_better: ClassVar[bool] = True
    in_order: ClassVar[bool] = False
    item_score: ClassVar[bool] = False

    name: Annotated[str, Field(pattern=f"^{TASK}$")]
    description: str
    source: str
    version: Count = 1
    code: CodeConfig | None = Field(
        None,
        exclude_if=lambda code: code is None,
        description="the hash of a task's Python file; never typed",
    )
    data: Data
    id: str | None = Field(
        None,
        exclude_if=lambda id: id is None,
        description="column that names a row, unique over all splits; null = the row's number",
    )
    inputs: Annotated[list[str], Field(min_length=1, max_length=2)] = Field(
        description="columns of text that the model reads"
    )
    metrics: list[Any]
    headline: str | None = Field(
        None, description="the metric that is the score; null = the mean of all"
    )
    splits: SplitConfig = SplitConfig()

    @field_validator("name")
    @classmethod
    def _is_no_mean(cls, name: str) -> str:
        if name == MEAN:
            raise ValueError(f"{MEAN!r} names the mean over tasks in every table; rename the file")
        return name

    @field_validator("metrics", mode="wrap")
    @classmethod
    def _own_metrics(
        cls, given: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        """A task file that scores by itself names its metrics as it likes."""
        # `code` stands above `metrics` in the class: pydantic checks fields in this order
        code = info.data.get("code")
        if code is None or not code.score:
            return check(given)
        # predictions are log-likelihoods there, in which a score() would find no answers
        if cls.item_score:
            raise ValueError(
                "its score is made of what every item adds, "
                "so the file cannot have a score() of its own"
            )
        names = given if isinstance(given, list) else []
        distinct = {name for name in names if isinstance(name, str) and name}
        if not names or len(distinct) < len(names):
            raise ValueError(f"got {given!r}, expected distinct names, those that score() gives")
        return given

    # each kind declares other names, and pydantic would warn of a file's own
    @field_serializer("metrics")
    def _plain(self, metrics: list[Any]) -> list[Any]:
        return metrics

    @model_validator(mode="after")
    def _headline_is_a_metric(self) -> BaseTask:
        # else every trial would fail at its first validation
        if self.headline is not None and self.headline not in self.metrics:
            raise ValueError(f"headline {self.headline!r} is none of the metrics {self.metrics}")
        return self

    @property
    def columns(self) -> list[str]:
        """Every column that must exist in the data."""
        return self.text_columns

    @property
    def read_columns(self) -> list[str]:
        """`columns`, and the one that names rows."""
        names = dict.fromkeys(self.columns)
        if self.id is not None:
            names[self.id] = None
        return list(names)

    @property
    def text_columns(self) -> list[str]:
        """The columns that hold text, in the order in which a person reads them."""
        return [*self.inputs]

    def score_of(self, scores: Mapping[str, float]) -> float:
        """The task's score: its headline metric, or the mean of its metrics.

        GLUE scores MRPC and QQP by the mean of F1 and accuracy.
        """
        if self.headline is not None:
            return float(scores[self.headline])
        # `fsum` rounds once, so the order of the metrics does not change the last digit
        return math.fsum(scores[name] for name in self.metrics) / len(self.metrics)

    def utility(self, score: float) -> float:
        """The score on a scale on which more is better; every comparison of scores uses it."""
        return score

    @property
    def point(self) -> float:
        """The difference in utility that is called a point.

        It is one of a hundred, or one percent of a perplexity.
        """
        return 0.01 if self.item_score else 1.0

    @staticmethod
    def _check_prompt(prompt: str, inputs: list[str], *, key: str = "text_to_text") -> None:
        parts = string.Formatter().parse(prompt)
        used = {field for _, field, _, _ in parts if field is not None}
        if used != set(inputs):
            raise ValueError(f"{key} uses {sorted(used)}, but inputs are {inputs}")
