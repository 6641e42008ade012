"""Tell a trial's own end (its numbers, its memory, its bug) from the machine's, and record it."""

from __future__ import annotations

import time
import traceback

import torch
import torch.distributed as dist

from suite.errors import CheckpointError, StaleDriverError, StorageError
from suite.record.attempts import PreemptedError
from suite.record.folder import TrialFolder
from suite.record.result import FailureRecord, Status, TrialResult
from suite.redact import redact

_NETWORK = (
    "connection reset",
    "connection closed",
    "connection refused",
    "timed out",
    "timeout",
    "broken pipe",
    "nccl",
    "gloo",
)
_CUDA_LOST = (
    "device-side assert",
    "unspecified launch failure",
    "ecc error",
    "device unavailable",
    "busy or unavailable",
)


def is_infrastructure(error: BaseException) -> bool:
    """Whether another attempt on other machines may succeed: network, disk, lost device, another driver. Everything else is the trial's."""
    if isinstance(
        error, (OSError, StaleDriverError, StorageError, CheckpointError, PreemptedError)
    ):
        return True
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in (*_NETWORK, *_CUDA_LOST)
    )


def status_of(error: BaseException) -> Status:
    """OOM or failed: how a trial's own exception ends it."""
    return (
        Status.OOM
        if isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or "out of memory" in str(error).lower()
        else Status.FAILED
    )


def failure_record(error: BaseException, *, log_path: str = "") -> FailureRecord:
    text = redact(
        "".join(traceback.format_exception(error))
    )  # before it is cut: half a secret is not found
    return FailureRecord(
        type=type(error).__name__,
        message=redact(error)[:2000],
        traceback=text[-20_000:],
        log_path=log_path,
    )


def write_failed(
    folder: TrialFolder, status: Status, failure: FailureRecord, *, started_at: float
) -> TrialResult:
    """End a trial without a score; an existing result is kept."""
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
