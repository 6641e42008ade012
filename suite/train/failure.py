"""Tell a trial's own end (its numbers, its memory, its bug) from the machine's, and record it."""

from __future__ import annotations

import time
import traceback

import torch
import torch.distributed as dist

from suite.errors import (
    BackboneError,
    CheckpointError,
    ConfigError,
    DataError,
    IncompatibleError,
    OwnCodeError,
    ResourceError,
    StaleDriverError,
    StorageError,
)
from suite.record.attempts import PreemptedError
from suite.record.folder import TrialFolder
from suite.record.result import (
    MESSAGE_CHARS,
    TRACEBACK_CHARS,
    FailureRecord,
    Status,
    TrialResult,
)
from suite.redact import redact

_INFRASTRUCTURE = (
    OSError,
    StaleDriverError,
    StorageError,
    CheckpointError,
    PreemptedError,
    # The driver read the data, the task's code and the backbone before any worker started.
    BackboneError,
    ConfigError,
    DataError,
    # A limit that may be raised between two runs, or hosts that do not go together.
    ResourceError,
    dist.DistBackendError,
    dist.DistNetworkError,
    dist.DistStoreError,
)
_SIGNS = (
    # of a network
    "connection reset",
    "connection closed",
    "connection refused",
    "timed out",
    "timeout",
    "broken pipe",
    "nccl",
    "gloo",
    # of a lost GPU, or of a host whose GPUs cannot reach one another
    "unspecified launch failure",
    "ecc error",
    "nvlink",
    "hardware stack error",
    "system not yet initialized",
    "device unavailable",
    "cuda error: unknown error",
    "no cuda gpus are available",
    "no cuda-capable device",
    "busy or unavailable",
)

NO_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory")
"""What errors say, in small letters, where memory is short."""


def is_infrastructure(error: BaseException) -> bool:
    """Whether another attempt on other machines may succeed.

    Network, disk, a lost device and another driver are the machine's, and so are files that are
    absent or changed since the driver checked them. All else is the trial's.
    """
    error = _raised(error)
    if isinstance(error, IncompatibleError) or _is_out_of_memory(error):
        return False
    if isinstance(error, _INFRASTRUCTURE):
        return True
    # torch raises plain RuntimeErrors for most of what goes wrong in a collective or on a device.
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def status_of(error: BaseException) -> Status:
    """How a trial's own exception ends it: OOM or failed."""
    if _is_out_of_memory(_raised(error)):
        return Status.OOM
    return Status.FAILED


def _raised(error: BaseException) -> BaseException:
    """What was raised first, where that was in the user's own code."""
    if isinstance(error, OwnCodeError) and error.__cause__ is not None:
        return error.__cause__
    return error


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The CPU's allocator, NCCL, cuBLAS and others say it in a RuntimeError of their own.
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in NO_MEMORY)


def failure_record(error: BaseException, *, log_path: str = "") -> FailureRecord:
    # Redacted before it is cut: half a secret is not found.
    text = redact("".join(traceback.format_exception(error)))
    return FailureRecord(
        type=type(error).__name__,
        message=redact(error)[:MESSAGE_CHARS],
        # the end names the cause, so the beginning goes
        traceback=text[-TRACEBACK_CHARS:],
        log_path=log_path,
    )


def write_failed(
    folder: TrialFolder, status: Status, failure: FailureRecord, *, started_at: float
) -> TrialResult:
    """End a trial without a score; an existing result is kept."""
    # Several ranks may fail at once; the first result counts.
    existing = folder.result()
    if existing is not None:
        return existing
    result = TrialResult(
        trial=folder.hash,
        status=status,
        score=None,
        failure=failure,
        missing={"score": f"{status.value}: {failure.message[:200]}"},
        started_at=started_at,
        finished_at=time.time(),
    )
    folder.write_result(result)
    return result
