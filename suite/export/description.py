"""`suite.json`: what an exported folder holds, and how `suite.load` makes a model of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from suite.backbones.heads import Head
from suite.config.arm import Arm
from suite.config.task import TaskConfig
from suite.config.training import TrainingConfig
from suite.config.trust import refuse_trust
from suite.errors import ConfigError
from suite.files import write_json
from suite.meters.record import Record

FILE = "suite.json"
SCHEMA_VERSION = 1
TENSORS = "trained.safetensors"
BASE = "base"

Format = Literal["transformers", "peft", "suite"]
BasePlace = Literal["name", "copy", "none"]


class Reading(Record):
    """How the model reads a text and says its answer: all that `predict` needs beside the model."""

    task: TaskConfig = Field(description="its inputs, templates and label words")
    training: TrainingConfig = Field(description="its lengths and beams; no other key is read")
    decoder_objective: Literal["head", "text"]


class Description(Record):
    """One exported model."""

    schema_version: int = SCHEMA_VERSION
    format: Format = Field(
        description=(
            "transformers: plain weights; peft: an adapter beside its base;"
            " suite: for `suite.load` alone"
        )
    )
    base: BasePlace = Field(
        description=(
            "name: found by the name in `arm.backbone`; copy: in the folder `base`;"
            " none: the weights here are all there are"
        )
    )
    base_identity: dict[str, str] = Field(
        description="the base's exact version: commit of the hub, or SHA-256 of the files"
    )
    arm: Arm
    head: dict[str, Any] = Field(description="the task head of the model")
    dtype: Literal["float32", "bfloat16"]
    task: str
    reading: Reading | None = Field(
        None, description="null = written by a version of the suite that stored none"
    )
    trial: str = Field(description="hash of the trial")
    seed: int
    note: str = Field(
        "", description="why it is not in a library's format, or what differs in that format"
    )

    @property
    def made_head(self) -> Head:
        return Head(**self.head)

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, self.model_dump(mode="json"))


def read_description(folder: Path) -> Description:
    """Read the description that `suite export` wrote.

    Raises:
        ConfigError: The folder holds none, one of another version of the suite, or one that trusts
            code.
    """
    expected = "expected a folder that `suite export` wrote"
    try:
        description = Description.model_validate_json((folder / FILE).read_bytes())
    except OSError as error:
        raise ConfigError(f"{folder}: holds no suite.json; {expected}") from error
    except ValidationError as error:
        # The first fault is enough: a file of another kind has dozens.
        what = error.errors()[0]["msg"]
        raise ConfigError(
            f"{folder}: its suite.json is not readable: {what}; {expected}"
        ) from error
    # A newer layout may also parse here, and mean something else.
    if description.schema_version != SCHEMA_VERSION:
        raise ConfigError(
            f"{folder / FILE}: got schema version {description.schema_version}, expected"
            f" {SCHEMA_VERSION}; load it with the version of the suite that wrote it"
        )
    # A folder cannot vouch for its own code, nor for that of its base.
    refuse_trust(description.arm.backbone.model_dump(), where=str(folder / FILE))
    return description
