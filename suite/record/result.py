"""The record of a finished trial: the one source of every table, figure and MLflow run.

A missing measurement is `None` and its reason stands in `missing`; there are no sentinels and no
zeros that mean "unknown".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from suite.config.hashing import canonical_json
from suite.config.training import Precision
from suite.errors import EVERYWHERE
from suite.files import json_bytes, parse_json
from suite.meters.record import PhaseRecord, Record
from suite.redact import redact

# 1: what a method prepared is not told apart; 2: it has a record of its own.
SCHEMA_VERSION = 2
MESSAGE_CHARS = 2000
TRACEBACK_CHARS = 20_000
"""What is kept of an error: the beginning of its message, and the end of its traceback."""
DAMAGED = "DamagedRecord"
"""`FailureRecord.type` of a trial whose `result.json` is not as it was written."""
MEND = (
    "copy the file back from where it is whole (a backup, or suite sync --storage after it was "
    f"removed here), or remove it ({EVERYWHERE}), and the trial runs again"
)
MEND_SPEC = (
    "copy the file back from where it is whole (a backup, or suite sync --storage after its folder "
    f"was removed here), or remove the folder ({EVERYWHERE}), and the trial runs again"
)
LOST_WEIGHTS = (
    f"lost or changed since it was written; remove its folder ({EVERYWHERE}) to train it again"
)
"""What is said of the weights of a pretrain run, after their path."""


class Status(StrEnum):
    """How a trial ended. Each of these is final; a trial without a result file has not ended."""

    COMPLETED = "completed"
    DIVERGED = "diverged"
    OOM = "oom"
    FAILED = "failed"
    PRUNED = "pruned"

    @property
    def has_score(self) -> bool:
        return self is Status.COMPLETED

    @property
    def is_failure(self) -> bool:
        """Whether it ended without a score by itself; the search ends a pruned one."""
        return self not in (Status.COMPLETED, Status.PRUNED)


class ParameterCount(Record):
    """Counted by `ds_numel`: partitioned parameters count whole, shared tensors once."""

    total: int
    trainable: int
    trainable_head: int = Field(description="part of `trainable` that is the task's own head")
    stored_bytes: int = Field(description="size of the trained tensors as saved")
    attention_parameters: int | None = Field(
        None,
        description="weights of every attention sublayer of the converted backbone, "
        "output projection included, biases not",
    )
    kv_bytes_per_token: int | None = Field(
        None,
        description="cached by the decoder's self-attention for each of its tokens, at fp16; "
        "null for encoders",
    )


class StepTiming(Record):
    """Seconds per scored optimizer step; the first three after a mode switch are not scored."""

    p50_s: float | None
    p95_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None


class EpochRecord(Record):
    """One epoch of the training curve."""

    epoch: int
    step: int
    train_loss: float
    validation_score: float
    validation_scores: dict[str, float]
    learning_rate: float
    seconds: float
    energy_kwh: float | None = None


class FailureRecord(Record):
    """Why a trial has no score. The record leaves out secrets that the error shows."""

    type: str
    message: str
    traceback: str = ""
    log_path: str = ""
    epoch: int | None = Field(
        None,
        description="epochs that the attempt had behind it; "
        "null in records from before this was kept",
    )

    @field_validator("message", "traceback")
    @classmethod
    # This runs before the record exists, so no secret reaches a file or a store.
    def _without_secrets(cls, text: str) -> str:
        return redact(text)


class PretrainRecord(Record):
    """The pretrain run behind a trial: what it cost and what it gave."""

    checkpoint: str = Field(description="hash of the run, name of its folder")
    steps: int
    loss: float | None = Field(description="mean validation loss per predicted token, nats")
    train_s: float
    energy_kwh: float | None
    weights_sha256: str


PREPARE_PHASE = "prepare"
"""Phase in which a method prepares weights from training data."""
STATES_PHASE = "states"
"""Phase in which frozen stacks make the states that are kept."""
MADE_BEFORE = (PREPARE_PHASE, STATES_PHASE)
"""Phases of a trial that others have use of: a search pays for them once."""


class PreparationRecord(Record):
    """What was computed from the data before step 0, and what that cost.

    That is what a method prepares from training data, or what frozen stacks without dropout give.

    One trial does this for an arm, its frozen weights and the data. The home's cache keeps what
    came of it, with this record, and later trials take it from there. A run from scratch would pay
    the whole cost, so every trial's record has it, whoever did the work.
    """

    key: str = Field(description="name of the folder in the home's cache")
    made_by: str = Field(description="hash of the trial that did the work")
    reused: bool = Field(False, description="another trial did the work, and this one paid nothing")
    cost: PhaseRecord | None = Field(
        description="phase `prepare` (of frozen stacks: `states`) of the trial that did it, over "
        "all of its ranks"
    )
    world_size: int = 1
    hardware: dict[str, Any] = Field({}, description="of the machine that did it")
    missing: dict[str, str] = Field({}, description="field of `cost` -> why it is null")


class ValidityRecord(Record):
    """What a trial checked about itself (docs/metrics.md, "What is admitted")."""

    trainable_as_intended: bool = Field(
        description="names and sizes of what trained are those of a fresh build of the arm"
    )
    strays: list[str] = Field(default=[], description="the first parameters for which they are not")
    output_changed: bool = Field(
        description="the trained model answers the first training rows otherwise than at step 0"
    )
    output_start_sha256: str
    output_end_sha256: str
    loss_fell: bool | None = Field(
        description="`loss_last` is below `loss_first`, which luck alone gives half the time; "
        "null for a single epoch of fewer than ten steps"
    )
    loss_first: float | None = Field(
        description="mean training loss of the first epoch; of a single epoch, of its first half"
    )
    loss_last: float | None = Field(
        description="the lowest of a later epoch; of a single epoch, of its second half"
    )
    no_nan: bool = Field(description="of the trained model's answer to these rows")

    def problems(self) -> list[str]:
        """What makes the run no evidence, in plain words.

        A loss that did not fall is not among them: at a given budget, not learning is a result.
        """
        found = []
        if not self.trainable_as_intended:
            strays = ", ".join(self.strays)
            found.append(f"other parameters trained than intended ({strays})")
        # Any step that trains moves some bit of the output, so nothing was trained here.
        if not self.output_changed:
            found.append("training did not change the output")
        if not self.no_nan:
            found.append("the output holds NaN")
        return found


class TrialResult(Record):
    """Everything one trial says about itself; written once as `result.json`."""

    # A record of a newer version may mean other things by the same names, so it is refused.
    schema_version: Annotated[int, Field(le=SCHEMA_VERSION)] = SCHEMA_VERSION
    trial: str = Field(description="hash of the specification")
    status: Status
    score: float | None = Field(
        description="headline metric: on test in the confirm phase, else best validation"
    )
    scores: dict[str, float] = Field(
        default_factory=dict, description="every metric behind `score`"
    )
    validation_score: float | None = None
    test_score: float | None = None
    best_epoch: int | None = None
    epochs: list[EpochRecord] = []
    phases: dict[str, PhaseRecord] = {}
    timing: StepTiming | None = None
    lanes: int = Field(
        1,
        description="most trials that trained side by side with it over one frozen pass, itself "
        "included; with others its energy and time are shares, and memory and timing are null",
    )
    precision: Precision | None = Field(
        None, description="what the trial computed in; null in records of trials that failed"
    )
    parameters: ParameterCount | None = None
    checkpoint_bytes: int | None = None
    pretrain: PretrainRecord | None = Field(
        None, description="null where the weights come from no pretrain stage"
    )
    preparation: PreparationRecord | None = Field(
        None, description="null where the method prepares nothing, and in records of version 1"
    )
    frozen_dropout: Literal["off", "no effect"] | None = Field(
        None,
        description="off = the frozen stacks ran without dropout, and their states were kept; no "
        "effect = that was asked for, but the method has gradients in the backbone; null = it was "
        "not asked for",
    )
    frozen_states: PreparationRecord | None = Field(
        None,
        description="the pass over the data whose states the trial read, with frozen_dropout off",
    )
    weights_sha256: str | None = Field(
        None,
        description="of a pretrain run's model.safetensors, or a confirm run's best.safetensors; "
        "null before it was kept",
    )
    splits: dict[str, int] = Field(default={}, description="rows per split that were used")
    data_hash: str = ""
    frozen_sha256: str | None = Field(
        None, description="fingerprint of the frozen weights at the end, for any number of ranks"
    )
    # Records that lack one of these fields stay readable, so each has a default.
    validity: ValidityRecord | None = Field(
        None, description="null without a score, and in results from before it was recorded"
    )
    missing: dict[str, str] = Field(default={}, description="field -> why it is null")
    failure: FailureRecord | None = None
    resumed_from_epochs: list[int] = Field(
        default=[], description="epochs at which the run was taken up again"
    )
    provenance: dict[str, Any] = Field(
        default={},
        description="versions, hardware, git revision, seeds, revisions, engine settings",
    )
    started_at: float
    finished_at: float
    checksum: str | None = Field(
        None,
        exclude=True,
        description="SHA-256 of everything else in the file, as canonical JSON; absent in records "
        "from before it was kept, and null once it was checked",
    )
    damaged: str | None = Field(
        None,
        exclude=True,
        description="found when the file is read, never written: why its content is not what was "
        "written",
    )

    @property
    def worked_s(self) -> float:
        """Seconds of wall time that its attempts took, without the time between them."""
        if self.resumed_from_epochs:
            # Side by side, the phases of each are its share.
            return math.fsum(phase.seconds for phase in self.phases.values()) * self.lanes
        return self.finished_at - self.started_at

    @property
    def machine(self) -> str | None:
        """The model of the processor or board that rank 0 computed on; None = not recorded."""
        said: str | None = self.provenance.get("machine")
        # Records from before it was kept list all boards of the host.
        if said is None and self.provenance.get("device") == "cpu":
            said = self.provenance.get("hardware", {}).get("cpu_model")
        return said

    @property
    def made_before(self) -> list[PreparationRecord]:
        """What was computed from the data before the first step, perhaps by another trial."""
        return [made for made in (self.preparation, self.frozen_states) if made is not None]

    def as_bytes(self) -> bytes:
        """The content of `result.json`, with its checksum."""
        content = self.model_dump(mode="json")
        content["checksum"] = checksum(content)
        return json_bytes(content)


def checksum(content: Mapping[str, Any]) -> str:
    """The checksum of a result's content, which its field of this name has no part in."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(canonical_json(rest).encode()).hexdigest()


def damage(data: bytes) -> str | None:
    """Why the bytes of a `result.json` are not what was written; None where nothing shows."""
    try:
        content = parse_json(data)
        if not isinstance(content, dict):
            return "is not whole JSON"
        # A record from before checksums has none to compare.
        if content.get("checksum") in (None, checksum(content)):
            return None
    # NaN has no checksum, nor has what is nested as deep as can be read at all.
    except (ValueError, RecursionError):
        return "is not whole JSON"
    return "has another content than its checksum says: it was changed after it was written"


def unreadable(trial: str, why: str) -> TrialResult:
    """The record that stands for one that cannot be read: a trial that ended, without a score."""
    return TrialResult(
        trial=trial,
        status=Status.FAILED,
        score=None,
        failure=FailureRecord(type=DAMAGED, message=why),
        missing={"score": why},
        started_at=0.0,
        finished_at=0.0,
        damaged=why,
    )
