"""A run that several sweeps wait for is trained by one of them, whichever hosts they run on.

The claim `claims/<run>/<n>` is created once and names the driver that made it. It is over when
`<n>.released` lies beside it, or when that driver has ended; then claim n + 1 may be made. The
ranks of a driver ask `Fence.check` before they write, as for a sweep.
"""

from __future__ import annotations

import uuid

from suite.clock import CLOCK, Clock
from suite.storage.fence import Fence, RunClaim, newest_run_claim, run_claims_key
from suite.storage.lease import BEAT_S, LOOKS_PER_BEAT, Watch

LOOK_S = BEAT_S / LOOKS_PER_BEAT


class SharedRun:
    """One driver's way to a run that other sweeps may want, too.

    Args:
        fence: The driver's own claim. The claims of runs lie beside it.
        run: Hash of the run.
        clock: By which other drivers are watched.
    """

    def __init__(self, fence: Fence, run: str, *, clock: Clock = CLOCK) -> None:
        self.fence = fence
        self.run = run
        self._storage = fence.open()
        self._clock = clock
        self._taken = 0
        self._watch: tuple[RunClaim, Watch] | None = None
        self._next_look_s = -float("inf")

    def take(self) -> bool:
        """Claim the run, unless another driver has it. Never waits.

        Raises:
            StorageError: The storage does not do what it is asked.
            SweepConflictError: Another version of the suite wrote the newest claim.
        """
        # The queue asks several times a second, and a bucket is paid for by the question.
        if self._clock.now_s() < self._next_look_s:
            return False
        self._next_look_s = self._clock.now_s() + LOOK_S
        number, claim = newest_run_claim(self._storage, self.run)
        if claim is not None and not self._is_over(number, claim):
            return False
        # A driver that was frozen may have lost its sweep without knowing it yet.
        if not self.fence.holds():
            return False
        own = RunClaim(id=uuid.uuid4().hex, sweep=self.fence.sweep, epoch=self.fence.epoch)
        key = f"{run_claims_key(self.run)}/{number + 1}"
        if not self._storage.create(key, own.model_dump_json().encode()):
            return False
        self._taken = number + 1
        return True

    def release(self) -> None:
        """Leave the run to whoever wants it next; does nothing where it was not taken."""
        if self._taken:
            key = _released_key(self.run, self._taken)
            self._storage.create(key, uuid.uuid4().hex.encode())
            self._taken = 0

    def _is_over(self, number: int, claim: RunClaim) -> bool:
        if self._storage.exists(_released_key(self.run, number)):
            return True
        # Its own, from before the attempt that is asked for now.
        if (claim.sweep, claim.epoch) == (self.fence.sweep, self.fence.epoch):
            return True
        # The watch goes on from look to look; another claim needs another one.
        if self._watch is None or self._watch[0] != claim:
            watch = Watch(self._storage, claim.sweep, claim.epoch, clock=self._clock)
            self._watch = (claim, watch)
        return self._watch[1].is_over()


def _released_key(run: str, number: int) -> str:
    return f"{run_claims_key(run)}/{number}.released"
