"""Define what one trial is: everything that decides its numbers, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from suite.config.arm import Arm, without_cached
from suite.config.hashing import derive_seed, short_hash
from suite.config.loader import Strict
from suite.config.numbers import Seed
from suite.config.sweep import LimitConfig
from suite.config.task import PretrainTask, TaskConfig
from suite.config.task_base import PLACE
from suite.config.training import TrainingConfig

# 1: rows come in the order of a permutation, and a trial's seed draws what Fisher importances see.
# 2: batches come from windows of rows sorted by length, and all seeds share the importances.
RECIPE = 2
"""Raise this number when the same specification trains otherwise than before.

It is part of a trial's hash, so that trials of two recipes never share a cell.
"""
# LST 3: its side blocks, down- and up-projections start as in the official code.
# OSF 3: it leaves the task head alone.
RECIPES = {"lst": 3, "peft:osf": 3}
"""The number of a method that alone trains otherwise than before."""
# 3: it leaves the task head alone, as OSF does, which adapts all maps by default.
ALL_LINEAR = 3
"""The number of every method of peft with `target_modules: all-linear`."""
RECIPE_NUMBERS = (RECIPE, RECIPES, ALL_LINEAR)
"""All of them, for what is kept of results and must not outlive a change."""


def cell_key(arm: str, task: str) -> str:
    """The name of a cell: the key of its arm and its task."""
    return f"{arm}/{task}"


class Phase(StrEnum):
    """The half of READ's protocol that a trial belongs to, or the stage before it.

    Test data exists only in `CONFIRM`.
    """

    SEARCH = "search"
    CONFIRM = "confirm"
    PRETRAIN = "pretrain"


class TrialSpec(Strict):
    """One training run. Its hash names its folder and gates its resume.

    A pretrain run is one too: method `full` on a corpus. It belongs to no sweep, and its checkpoint
    is the same thing whatever number of workers made it, so neither is part of its hash.
    """

    sweep: str
    arm: Arm
    task: TaskConfig
    training: TrainingConfig
    limit: LimitConfig = LimitConfig()
    decoder_objective: Literal["head", "text"] = "head"
    world_size: Annotated[int, Field(ge=1)] = 1
    phase: Phase = Phase.SEARCH
    number: Annotated[int, Field(ge=0)] = Field(
        0, description="search: trial number in its study; confirm: 0"
    )
    learning_rate: Annotated[float, Field(gt=0)]
    seed: Seed = Field(0, description="replicate: 0 in the search, the sweep's seeds in confirm")

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits over the whole specification as given, and over the recipe."""
        # To rename, add or remove a field changes every hash, and existing homes lose their trials.
        # A new one is left out where it has its default (`exclude_if`).
        left_out: dict[str, Any] = {"task": PLACE}
        if self.phase is Phase.PRETRAIN:
            left_out |= {"sweep": True, "world_size": True}
        given = self.model_dump(mode="json", exclude=left_out)
        return short_hash(given | {"recipe": self.recipe})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        # Pydantic copies the cached hash as well, which a changed field may have made wrong.
        return without_cached("hash", super().model_copy(update=update, deep=deep))

    @property
    def recipe(self) -> int:
        """The number of the code's way to train it."""
        if self.arm.architecture.get("target_modules") == "all-linear":
            return ALL_LINEAR
        return RECIPES.get(self.arm.method, RECIPE)

    @property
    def random_start(self) -> bool:
        """Whether training starts from random weights although the backbone has others."""
        return isinstance(self.task, PretrainTask) and self.task.start == "random"

    @property
    def cell(self) -> str:
        """The arm and the task, which name the study that this trial belongs to."""
        return cell_key(self.arm.key, self.task.name)

    @property
    def engine_key(self) -> str:
        """A key that trials share if they differ only in learning rate, number, phase and seed.

        One warm engine serves all trials with the same key. Another seed draws its initial weights
        anew.
        """
        differs = {"learning_rate", "number", "phase", "seed", "sweep"}
        return short_hash(self.model_dump(mode="json", exclude=differs))

    def stream(self, name: str, *parts: int) -> int:
        """The seed of a named random stream.

        It depends on task, replicate and stream, so it is the same for all arms of a comparison.
        """
        return derive_seed(self.task.name, self.seed, name, *parts)

    @property
    def preparation_seed(self) -> int:
        """The seed of what a method prepares from training data, the same for all seeds."""
        return derive_seed(self.task.name, "preparation")
