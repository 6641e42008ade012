"""A lease keeps each sweep to one live driver, on any number of machines.

The highest claim `leases/<sweep>/<epoch>` owns the sweep, and its holder rewrites the file
`<epoch>.beat` again and again. Who wants the sweep watches that file for three intervals. If it
does not change, the newcomer creates the next claim, which only one process can. No clocks of two
machines are compared. A holder that was frozen or cut off finds the next claim before it writes
anything: here in the driver, by `suite.storage.fence` in its ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field, ValidationError

from suite.clock import CLOCK, Clock
from suite.config.loader import Strict
from suite.errors import StorageError, SweepConflictError
from suite.redact import printable
from suite.storage.base import PATIENCE_S, Storage
from suite.storage.fence import Fence, claim_key, claims_key, newest_number, read_claim
from suite.storage.urls import open_storage

log = logging.getLogger(__name__)
# Another host may take a dead driver's sweep after `MISSED` of these, so after 30 s.
BEAT_S = 10.0
MOST_BEAT_S = 600.0
"""No claim is waited for longer than for three beats of so many seconds, whatever it says."""
MISSED = 3
"""Beats that a holder misses before another driver may take its sweep over."""
# Less than `MISSED`: a holder begins to doubt before a newcomer may act.
SAFE = 2
"""Beats that a holder may miss and still know, without asking, that nobody has taken it over."""
# A newcomer looks more often than beats come, so that it hears of a release soon.
LOOKS_PER_BEAT = 8
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's own name for it


class Claim(Strict):
    """Who holds a sweep.

    Attributes:
        id: Random: tells two claims of one process apart.
        host, pid: For people, and for `suite stop`.
        machine: The running kernel and the table of processes in which `pid` counts; "" if unknown.
        started_s: Seconds from the machine's start to the process's: the system uses a process id
            again.
        beat_s: Seconds between two beats.
        job: Ray's submission id where the driver is a submitted job.
    """

    id: str
    host: str
    pid: int
    machine: str
    started_s: float
    beat_s: Annotated[float, Field(gt=0, le=MOST_BEAT_S)]
    job: str = ""

    @property
    def is_here(self) -> bool:
        """Whether the claim's process runs, or ran, on this machine."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """Whether the claim's process is known to have ended."""
        if not self.is_here:
            return False
        try:
            process = psutil.Process(self.pid)
            # Another start time means another process with the same id.
            is_other = abs(_started_s(process) - self.started_s) > 1.0
            return is_other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    @property
    def is_of_earlier_boot(self) -> bool:
        """Whether a host of this name made it before a restart, or another host of this name."""
        boot = self.machine.partition(":")[0]
        return self.host == socket.gethostname() and boot != _machine().partition(":")[0]

    def __str__(self) -> str:
        process = f"process {self.pid} on {self.host}"
        if self.job:
            process += f" (job {self.job})"
        # It is logged too, and whoever can write the storage can write a claim.
        return printable(process)


class Beat(Strict):
    """A sign of life; `at_s` counts from the machine's start and means nothing on another one."""

    count: int
    at_s: float
    released: bool = False


class Lease:
    """A sweep that this process holds. A thread keeps it alive until it is released or lost."""

    def __init__(
        self, storage: Storage, fence: Fence, claim: Claim, *, clock: Clock = CLOCK
    ) -> None:
        self.fence = fence
        self.claim = claim
        self._storage = storage
        self._clock = clock
        self._count = 0
        self._lost = False
        # Whether the storage did not answer when it was asked last.
        self._away = False
        # Nothing is safe until the first beat is written and the fence was asked.
        self._safe_from_s = -float("inf")
        self._ended = threading.Event()
        # Sent here, before the thread: a storage that fails raises in the caller.
        self._send()
        # A daemon: beats must not keep a process alive whose work is over.
        self._thread = threading.Thread(target=self._work, name="suite-lease", daemon=True)
        self._thread.start()

    def held(self) -> bool:
        """Whether this process still holds the sweep. The storage is asked only if beats were late.

        Raises:
            StorageError: Beats were late, and the storage does not answer.
        """
        if not self._lost and self._is_late(self._clock.now_s()):
            # Its whole patience once: whoever ends a sweep asks several times.
            away, self._away = self._away, True
            self._lost = not self.fence.holds(once=away)
            self._away = False
        return not self._lost

    def loss(self) -> str:
        """Say why this process must stop; "" while it may go on."""
        try:
            if self.held():
                return ""
        except StorageError as error:
            return f"cannot tell whether this driver still holds the sweep: {error}"
        taker = ""
        # The storage may be away just now, or another version may have written the claim.
        with contextlib.suppress(StorageError, SweepConflictError):
            taker = f": {_read_claim(self._storage, self.fence.sweep, self.fence.epoch + 1)}"
        return f"another driver took the sweep over{taker}"

    def release(self) -> None:
        """Leave the sweep to whoever wants it next, at once."""
        self._ended.set()
        # Waited for, so that no beat of the thread comes after the one that says released. On a
        # hard mount a write may hang for ever; after this time the next driver needs no release.
        self._thread.join(MISSED * self.claim.beat_s)
        if self._thread.is_alive():
            log.warning("sweep %s: not released: its last beat hangs", self.fence.sweep)
            return
        # If this fails, the next driver waits for three beats.
        with contextlib.suppress(StorageError, OSError):
            if self.held():
                self._send(released=True)

    def _work(self) -> None:
        while not self._lost and not self._clock.wait(self._ended, self.claim.beat_s):
            try:
                self._send()
            # One lost beat does no harm: `held` asks the storage itself when beats are late. But a
            # thread that ends, for whatever error, gives away a sweep that goes on.
            except Exception as error:  # noqa: BLE001 - see above
                log.warning("sweep %s: no beat: %s", self.fence.sweep, error)

    def _send(self, *, released: bool = False) -> None:
        """Write a beat. After a late one, leave whoever wants the sweep time to claim it."""
        began_s = self._clock.now_s()
        # Nobody can have watched before the first beat, so that one is never late.
        late = self._count > 0 and self._is_late(began_s)
        self._count += 1
        beat = Beat(count=self._count, at_s=began_s, released=released)
        key = _beat_key(self.fence.sweep, self.fence.epoch)
        self._storage.write(key, beat.model_dump_json().encode())
        if late:
            self._clock.wait(self._ended, self.claim.beat_s / 2)
        # Asked after the beat: who has not claimed by now finds the beat and withdraws.
        if not self.fence.holds():
            self._lost = True
        # Counted from before the write, because the write may have taken long.
        self._safe_from_s = began_s

    def _is_late(self, now_s: float) -> bool:
        """Whether another driver may have watched for long enough to take the sweep over."""
        return now_s - self._safe_from_s > SAFE * self.claim.beat_s


def acquire(
    root: str | Path,
    sweep: str,
    *,
    beat_s: float | None = None,
    patience_s: float = PATIENCE_S,
    clock: Clock = CLOCK,
) -> Lease:
    """Take a sweep that nobody holds, or whose holder misses three beats.

    Args:
        root: Folder or URL that holds the claims.
        sweep: Its name.
        beat_s: Seconds between two beats of the new holder; None = `BEAT_S`.
        patience_s: How long the new holder and its workers ask a storage again that is away.
        clock: By which the beats are sent and watched.

    Raises:
        SweepConflictError: Its holder is alive; says who it is.
        StorageError: The storage cannot be used.
    """
    storage = open_storage(root)
    while True:
        epoch = newest_epoch(storage, sweep)
        if epoch:
            _await_end(storage, sweep, epoch, clock)
        claim = _own_claim(BEAT_S if beat_s is None else beat_s)
        # Of several drivers that got here one creates the claim; the others look again.
        if storage.create(claim_key(sweep, epoch + 1), claim.model_dump_json().encode()):
            fence = Fence(storage.url, sweep, epoch + 1, patience_s)
            return Lease(storage, fence, claim, clock=clock)


@contextlib.contextmanager
def held_lease(root: str | Path, sweep: str, *, patience_s: float = PATIENCE_S) -> Iterator[Lease]:
    """Hold a sweep for the time of a block: `acquire` it, then release it."""
    lease = acquire(root, sweep, patience_s=patience_s)
    try:
        yield lease
    finally:
        lease.release()


def holder(root: str | Path, sweep: str) -> Claim | None:
    """Say who holds a sweep, as far as that can be told without waiting.

    This is the last claim, unless it was released or its process has ended. If the holder's machine
    went down, it is shown until another driver takes over.
    """
    storage = open_storage(root)
    epoch = newest_epoch(storage, sweep)
    if not epoch:
        return None
    claim = _read_claim(storage, sweep, epoch)
    if _is_over(claim, _read_beat(storage, sweep, epoch)):
        return None
    return claim


def newest_epoch(storage: Storage, sweep: str) -> int:
    """Return the epoch of the last claim; 0 where there never was one."""
    return newest_number(storage, claims_key(sweep))


class Watch:
    """Tells by looks from time to time whether a driver has ended. Never waits.

    Args:
        storage: Holds the driver's claim.
        sweep: The driver's.
        epoch: Of its claim.
        clock: By which missed beats are counted.
    """

    def __init__(self, storage: Storage, sweep: str, epoch: int, *, clock: Clock = CLOCK) -> None:
        self._storage = storage
        self._sweep = sweep
        self._epoch = epoch
        self._clock = clock
        self._beat: Beat | None = None
        self._since_s: float | None = None

    def is_over(self) -> bool:
        """Whether the driver has ended, lost its sweep, or missed three beats since a look."""
        # Before the look: a beat that comes between the two still counts.
        now_s = self._clock.now_s()
        if newest_epoch(self._storage, self._sweep) > self._epoch:
            return True
        claim = _read_claim(self._storage, self._sweep, self._epoch)
        beat = _read_beat(self._storage, self._sweep, self._epoch)
        if _is_over(claim, beat):
            return True
        if self._since_s is None or beat != self._beat:
            self._beat = beat
            self._since_s = now_s
        return now_s - self._since_s >= MISSED * claim.beat_s


def _await_end(storage: Storage, sweep: str, epoch: int, clock: Clock) -> None:
    """Return once the claim is over; raise SweepConflictError as soon as its holder shows life."""
    claim = _read_claim(storage, sweep, epoch)
    first = _read_beat(storage, sweep, epoch)
    if _is_over(claim, first):
        return
    # Another machine's clock says nothing here, so the watch begins now.
    end_s = clock.now_s() + MISSED * claim.beat_s
    # One machine has one clock, so the age of a beat is known here.
    if claim.is_here and first is not None:
        end_s = first.at_s + MISSED * claim.beat_s
        # A fresh beat is a sign of life already.
        if clock.now_s() - first.at_s < SAFE * claim.beat_s:
            raise _taken(storage, sweep, claim)
    wait_s = max(0.0, end_s - clock.now_s())
    log.warning("sweep %s: %s may still run it; watching for %.0f s", sweep, claim, wait_s)
    while True:
        # Before the look: a beat that comes between the two still counts.
        is_last_look = clock.now_s() >= end_s
        beat = _read_beat(storage, sweep, epoch)
        if _is_over(claim, beat):
            return
        if beat != first:
            raise _taken(storage, sweep, claim)
        if is_last_look:
            return
        clock.sleep(claim.beat_s / LOOKS_PER_BEAT)


def _is_over(claim: Claim, beat: Beat | None) -> bool:
    return claim.is_gone or (beat is not None and beat.released)


def _taken(storage: Storage, sweep: str, claim: Claim) -> SweepConflictError:
    return SweepConflictError(
        f"{storage.url}: sweep {sweep!r} is being run by {claim}; wait for it, end it"
        f" (suite stop {sweep}, with the same --home or --storage), or choose another --home"
    )


def _own_claim(beat_s: float) -> Claim:
    return Claim(
        id=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        started_s=_started_s(psutil.Process()),
        beat_s=beat_s,
        job=_submission_id(),
    )


def _started_s(process: psutil.Process) -> float:
    """Seconds from the machine's start to a process's.

    The time of the day would change for a process that lives when somebody sets the clock.
    """
    return float(process.create_time() - psutil.boot_time())


def of_job(part: str, name: str) -> Any:
    """What Ray says of the job that this process drives; None where it drives none."""
    try:
        # Ray sets the variable for submitted jobs; a driver started by hand lacks it.
        return json.loads(os.environ.get(JOB_VARIABLE, "{}"))[part][name]
    except (ValueError, KeyError, TypeError):
        return None


def _submission_id() -> str:
    """Return Ray's id of the job that this process drives; "" where there is none."""
    return str(of_job("metadata", "job_submission_id") or "")


def _read_claim(storage: Storage, sweep: str, epoch: int) -> Claim:
    return read_claim(storage, claim_key(sweep, epoch), Claim)


def _read_beat(storage: Storage, sweep: str, epoch: int) -> Beat | None:
    data = storage.read(_beat_key(sweep, epoch))
    if data is None:
        return None
    try:
        # A beat that cannot be read counts as one that is not there.
        return Beat.model_validate_json(data)
    except ValidationError:
        return None


def _beat_key(sweep: str, epoch: int) -> str:
    return f"{claim_key(sweep, epoch)}.beat"


def _machine() -> str:
    """Name this kernel and its table of processes. Two containers share only the kernel."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The process namespace tells containers on one kernel apart.
        return f"{boot_id}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
