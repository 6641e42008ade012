"""`suite.json`: what an exported folder holds, and how `suite.load` makes a model of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from suite.backbones.heads import Head
from suite.config.arm import Arm
from suite.errors import ConfigError
from suite.files import write_json
from suite.meters.record import Record

FILE = "suite.json"
SCHEMA_VERSION = 1
TENSORS = "trained.safetensors"
BASE = "base"

Format = Literal["transformers", "peft", "suite"]
Where = Literal["name", "copy", "none"]


class Description(Record):
    """One exported model."""

    schema_version: int = SCHEMA_VERSION
    format: Format = Field(
        description="transformers: plain weights; peft: an adapter beside its base; suite: for `suite.load` alone"
    )
    base: Where = Field(
        description="name: found as `arm.backbone` says; copy: the folder `base`; none: the weights here are all there are"
    )
    base_identity: dict[str, str] = Field(
        description="what exactly the base was: commit of the hub, or SHA-256 of the files"
    )
    arm: Arm
    head: dict[str, Any] = Field(description="what the model ends in")
    dtype: Literal["float32", "bfloat16"]
    task: str
    trial: str = Field(description="hash of the trial")
    seed: int
    note: str = Field(
        "", description="why it is not in a format of a library, or what differs there"
    )

    @property
    def made_head(self) -> Head:
        return Head(**self.head)

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, self.model_dump(mode="json"))


def head_fields(head: Head) -> dict[str, Any]:
    return asdict(head)


def read_description(folder: Path) -> Description:
    """What `suite export` wrote.

    Raises:
        ConfigError: It wrote nothing here, or a later version did.
    """
    try:
        description = Description.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError) as error:
        what = (
            "holds no suite.json"
            if isinstance(error, OSError)
            else f"its suite.json is not readable: {error.errors()[0]['msg']}"
        )
        raise ConfigError(
            f"{folder}: {what}; expected a folder that `suite export` wrote"
        ) from error
    if description.schema_version != SCHEMA_VERSION:
        got = f"schema version {description.schema_version}"
        raise ConfigError(
            f"{folder / FILE}: got {got}, expected {SCHEMA_VERSION}; load it with the version of the suite that wrote it"
        )
    return description
