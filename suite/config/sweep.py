"""A sweep: the axes, the budget, the seeds and the resources, as a person writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from suite.config.loader import Strict, apply_overrides, load_yaml, validate
from suite.config.pretrain import PretrainConfig
from suite.config.space import LearningRateRange
from suite.config.training import TrainingConfig

Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Count = Annotated[int, Field(ge=1)]
Named = BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given)
"""In a list of choices, a bare name stands for a choice without options."""


class BackboneChoice(Strict):
    """A backbone by name; with `config` it starts from random weights of that shape (no download)."""

    name: str = Field(description="a known name (suite list backbones), a hub id, a folder, or package:NAME/FOLDER")
    revision: str = Field("main", description="commit or branch on the hub; recorded as resolved")
    config: dict[str, Any] | None = Field(None, description="start from random weights: changes to the named preset's configuration")
    tokenizer: str | None = Field(
        None, description="another tokenizer: a hub id, a folder, package:NAME/FOLDER, bytes, or bpe:SIZE:TASK, trained on a task's text"
    )
    trust_remote_code: Literal[False] = False


class AttentionChoice(Strict):
    """An attention variant with its options."""

    name: str = "pretrained"
    options: dict[str, Any] = Field(default_factory=dict)


class MethodChoice(Strict):
    """A PETL method, with another architecture or learning-rate range than its search space's if given."""

    name: str
    architecture: dict[str, Any] | None = Field(None, description="instead of the search space's choices")
    learning_rate: LearningRateRange | None = Field(None, description="instead of the search space's range")


class SearchConfig(Strict):
    """The budget of one study, the same for every arm."""

    sampler: Literal["gp", "tpe", "random", "grid"] = "gp"
    trials: Count = Field(8, description="learning rates tried per cell (READ: up to 32)")
    startup_trials: Count = Field(4, description="quasi-random trials before the model of the sampler is used")
    seed: Annotated[int, Field(ge=0)] = 0


class ConfirmConfig(Strict):
    """Runs of the best learning rate; test data is read only here."""

    seeds: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = Field(
        [1, 2, 3], description="fresh seeds; 0 is the search's"
    )

    @model_validator(mode="after")
    def _distinct(self) -> ConfirmConfig:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are not distinct: {self.seeds}")
        return self


class LimitConfig(Strict):
    """At most so many rows of a split, drawn by seed; null = all."""

    train: Count | None = None
    validation: Count | None = None
    test: Count | None = None


class ResourceConfig(Strict):
    """What one trial gets. Default: one worker per GPU when the cluster has any, else two CPU workers."""

    workers: Count | None = None
    cpus_per_worker: Annotated[float, Field(gt=0)] = 1.0
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    concurrent_trials: Count | None = Field(None, description="upper bound on trials at a time; null = what fits")


class TimeoutConfig(Strict):
    """Deadlines, in seconds; nothing waits for ever."""

    setup_s: Annotated[float, Field(gt=0)] = 900.0
    epoch_s: Annotated[float, Field(gt=0)] = 6 * 3600.0
    collective_s: Annotated[float, Field(gt=0)] = 600.0
    placement_s: Annotated[float, Field(gt=0)] = 1800.0


class FailureConfig(Strict):
    """How often a trial is tried again after its machine, not its mathematics, failed."""

    retries: Annotated[int, Field(ge=0)] = 3


class SweepConfig(Strict):
    """One file `sweeps/<name>.yaml`."""

    name: Slug
    description: str = ""
    backbones: Annotated[list[Annotated[BackboneChoice, Named]], Field(min_length=1)]
    attention: Annotated[list[Annotated[AttentionChoice, Named]], Field(min_length=1)] = [AttentionChoice()]
    methods: Annotated[list[Annotated[MethodChoice, Named]], Field(min_length=1)]
    tasks: Annotated[list[str], Field(min_length=1)]
    architectures: Literal["first", "all"] = Field("first", description="first = the search space's first choice; all = one arm per choice")
    decoder_objective: Literal["head", "text"] = Field(
        "head", description="decoder-only backbones: classification head, or scoring of label words"
    )
    pretrain: PretrainConfig | None = Field(None, description="a model first, for variants that have none")
    search: SearchConfig = SearchConfig()
    confirm: ConfirmConfig = ConfirmConfig()
    limit: LimitConfig = LimitConfig()
    training: TrainingConfig = TrainingConfig()
    resources: ResourceConfig = ResourceConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    failures: FailureConfig = FailureConfig()


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep file; `overrides` are `key=value` items from the command line.

    Raises:
        ConfigError: With file, line and key.
    """
    data, lines = load_yaml(path)
    data = apply_overrides(data, overrides)
    return validate(SweepConfig, data, where=str(path), lines=lines)
