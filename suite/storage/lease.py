"""One live driver per sweep, on any number of machines: claims on the sweep's storage, kept alive by beats, fenced by epochs.

The highest claim `leases/<sweep>/<epoch>` owns the sweep. Its holder rewrites `<epoch>.beat`; who wants the sweep watches that beat for
three intervals and, if it stays as it is, creates the next claim, which only one can. No clocks of two machines are compared. A holder
that was frozen or cut off meanwhile finds the next claim before it writes: here in the driver, by `suite.storage.fence` in its ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
from pydantic import ValidationError

from suite.config.loader import Strict
from suite.errors import StorageError, SweepConflictError
from suite.storage.base import Storage, open_storage
from suite.storage.fence import Fence, claim_key, claims_key

log = logging.getLogger(__name__)
BEAT_S = 10.0
MISSED = 3
"""Beats that a holder misses before its sweep may be taken over."""
SAFE = 2
"""Beats that a holder may miss and still know, without asking, that nobody has."""
LOOKS_PER_BEAT = 8
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's own name for it


class Claim(Strict):
    """Who holds a sweep.

    Attributes:
        id: Random: tells two claims of one process apart.
        host, pid: For people, and for `suite stop`.
        machine: The running kernel and the table of processes in which `pid` counts; "" where there is none to tell.
        started_s: When the process started: a process id is used again.
        beat_s: Seconds between two beats.
        job: Ray's submission id where the driver is a submitted job.
    """

    id: str
    host: str
    pid: int
    machine: str
    started_s: float
    beat_s: float
    job: str = ""

    @property
    def is_here(self) -> bool:
        """Whether its process is one of this machine's."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to have ended."""
        if not self.is_here:
            return False
        try:
            process = psutil.Process(self.pid)
            return (
                process.status() == psutil.STATUS_ZOMBIE
                or abs(process.create_time() - self.started_s) > 1.0
            )
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (job {self.job})" if self.job else "")


class Beat(Strict):
    """A sign of life; `at_s` counts from the machine's start, and means nothing on another one."""

    count: int
    at_s: float
    released: bool = False


class Lease:
    """A sweep held by this process, kept alive by a thread until it is released or lost."""

    def __init__(self, storage: Storage, fence: Fence, claim: Claim) -> None:
        self.fence, self.claim = fence, claim
        self._storage, self._count, self._lost = storage, 0, False
        self._safe_from_s = -float("inf")
        self._ended = threading.Event()
        self._send()
        self._thread = threading.Thread(target=self._work, name="suite-lease", daemon=True)
        self._thread.start()

    def held(self) -> bool:
        """Whether the sweep is still this process's; asks the storage only where beats were late.

        Raises:
            StorageError: Beats were late, and the storage does not answer.
        """
        if not self._lost and _now_s() - self._safe_from_s > SAFE * self.claim.beat_s:
            self._lost = not self.fence.holds()
        return not self._lost

    def loss(self) -> str:
        """Why this process must stop, or nothing."""
        try:
            if self.held():
                return ""
        except StorageError as error:
            return f"whether the sweep is still this driver's cannot be told: {error}"
        try:
            taker = f": {_read_claim(self._storage, self.fence.sweep, self.fence.epoch + 1)}"
        except (StorageError, SweepConflictError):  # away just now, or of another version
            taker = ""
        return f"another driver took the sweep over{taker}"

    def release(self) -> None:
        """Leave the sweep to whoever wants it next, at once."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(StorageError, OSError):  # then it takes three beats
            if self.held():
                self._send(released=True)

    def _work(self) -> None:
        while not self._lost and not self._ended.wait(self.claim.beat_s):
            try:
                self._send()
            except (StorageError, OSError) as error:
                log.warning("sweep %s: no beat: %s", self.fence.sweep, error)

    def _send(self, *, released: bool = False) -> None:
        """A beat. After one that was late, whoever was about to claim the sweep is given the time to."""
        began_s = _now_s()
        late = self._count > 0 and began_s - self._safe_from_s > SAFE * self.claim.beat_s
        self._count += 1
        beat = Beat(count=self._count, at_s=began_s, released=released)
        self._storage.write(
            _beat_key(self.fence.sweep, self.fence.epoch), beat.model_dump_json().encode()
        )
        if late:
            self._ended.wait(self.claim.beat_s / 2)
        self._lost = self._lost or not self.fence.holds()
        self._safe_from_s = began_s


def acquire(root: str | Path, sweep: str) -> Lease:
    """Take a sweep that nobody holds, or whose holder shows no life for three of its beats.

    Args:
        root: Folder or URL below which its claims lie.
        sweep: Its name.

    Raises:
        SweepConflictError: Its holder is alive; says who it is.
        StorageError: The storage cannot be used.
    """
    storage = open_storage(root)
    while True:
        epoch = newest_epoch(storage, sweep)
        if epoch:
            _await_end(storage, sweep, epoch)
        claim = _own_claim()
        if storage.create(claim_key(sweep, epoch + 1), claim.model_dump_json().encode()):
            return Lease(storage, Fence(storage.url, sweep, epoch + 1), claim)


@contextlib.contextmanager
def held_lease(root: str | Path, sweep: str) -> Iterator[Lease]:
    """`acquire`, released at the end of the block."""
    lease = acquire(root, sweep)
    try:
        yield lease
    finally:
        lease.release()


def holder(root: str | Path, sweep: str) -> Claim | None:
    """Who holds a sweep as far as can be told at once: the last claim, unless it was released or its process has ended.

    One whose machine went down is shown until another driver takes over.
    """
    storage = open_storage(root)
    epoch = newest_epoch(storage, sweep)
    if not epoch:
        return None
    claim, beat = _read_claim(storage, sweep, epoch), _read_beat(storage, sweep, epoch)
    return None if claim.is_gone or (beat is not None and beat.released) else claim


def newest_epoch(storage: Storage, sweep: str) -> int:
    """Of the last claim; 0 where there never was one."""
    names = (key.rpartition("/")[2] for key in storage.keys(claims_key(sweep)))
    return max((int(name) for name in names if name.isdigit()), default=0)


def _await_end(storage: Storage, sweep: str, epoch: int) -> None:
    """Return once the claim is over; raises SweepConflictError as soon as its holder shows life."""
    claim, first = _read_claim(storage, sweep, epoch), _read_beat(storage, sweep, epoch)
    if claim.is_gone or (first is not None and first.released):
        return
    end_s = _now_s() + MISSED * claim.beat_s
    if (
        claim.is_here and first is not None
    ):  # one machine has one clock: the age of its beat is known
        end_s = first.at_s + MISSED * claim.beat_s
        if _now_s() - first.at_s < SAFE * claim.beat_s:
            raise _taken(storage, sweep, claim)
    wait_s = max(0.0, end_s - _now_s())
    log.warning(
        "sweep %s was being run by %s; watching for %.0f s whether it still is",
        sweep,
        claim,
        wait_s,
    )
    while True:
        over = _now_s() >= end_s
        beat = _read_beat(storage, sweep, epoch)
        if claim.is_gone or (beat is not None and beat.released):
            return
        if beat != first:
            raise _taken(storage, sweep, claim)
        if over:
            return
        time.sleep(claim.beat_s / LOOKS_PER_BEAT)


def _taken(storage: Storage, sweep: str, claim: Claim) -> SweepConflictError:
    return SweepConflictError(
        f"{storage.url}: sweep {sweep!r} is being run by {claim}; wait for it, end it (suite stop {sweep}), or choose another --home"
    )


def _own_claim() -> Claim:
    started_s = psutil.Process().create_time()
    return Claim(
        id=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        started_s=started_s,
        beat_s=BEAT_S,
        job=_submission_id(),
    )


def _submission_id() -> str:
    """Of the job whose driver this is, as Ray tells its drivers; "" where there is none."""
    try:
        return str(json.loads(os.environ.get(JOB_VARIABLE, "{}"))["metadata"]["job_submission_id"])
    except (ValueError, KeyError, TypeError):
        return ""


def _read_claim(storage: Storage, sweep: str, epoch: int) -> Claim:
    data = storage.read(claim_key(sweep, epoch))
    try:
        return Claim.model_validate_json(data or b"")
    except ValidationError:
        raise SweepConflictError(
            f"{storage.url}: {claim_key(sweep, epoch)} is no claim of this version of the suite; "
            "end the driver that wrote it and remove the file, or choose another --home"
        ) from None


def _read_beat(storage: Storage, sweep: str, epoch: int) -> Beat | None:
    data = storage.read(_beat_key(sweep, epoch))
    try:
        return None if data is None else Beat.model_validate(json.loads(data))
    except ValueError:
        return None


def _beat_key(sweep: str, epoch: int) -> str:
    return f"{claim_key(sweep, epoch)}.beat"


def _machine() -> str:
    """The kernel that runs here and its table of processes: containers share the one and not the other."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _now_s() -> float:
    """Seconds since this machine started, the time it was suspended among them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
