"""Which driver a process works for, and whether that driver still owns its sweep.

Every rank asks before it commits anything. A claim is a key `leases/<sweep>/<epoch>` that is
created once and never removed. Epochs are consecutive, so the claim of epoch n is the last one
exactly while there is none of epoch n + 1. `suite.storage.lease` makes the claims.
"""

from __future__ import annotations

import socket
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from suite.config.loader import Strict
from suite.errors import ResourceError, StaleDriverError, SweepConflictError
from suite.storage.base import PATIENCE_S, Storage
from suite.storage.urls import open_storage

C = TypeVar("C", bound=BaseModel)

SHARED = (
    "expected a path on a disk that all nodes share, or a bucket that all reach"
    " (--storage s3://BUCKET/PREFIX)"
)
"""What a host is told that does not see a sweep's home."""


def claims_key(sweep: str) -> str:
    """The key below which a sweep's claims lie."""
    return f"leases/{sweep}"


def claim_key(sweep: str, epoch: int) -> str:
    return f"{claims_key(sweep)}/{epoch}"


def run_claims_key(run: str) -> str:
    """The key below which the claims of a run lie that several sweeps share."""
    return f"claims/{run}"


class RunClaim(Strict):
    """Which driver trains a run that several sweeps share.

    Attributes:
        id: Random: tells two claims of one driver apart.
        sweep, epoch: The driver's own claim.
    """

    id: str
    sweep: str
    epoch: int


def newest_run_claim(storage: Storage, run: str) -> tuple[int, RunClaim | None]:
    """The number and the content of the last claim of a run; 0 and None where there never was one.

    Raises:
        SweepConflictError: Another version of the suite wrote it.
    """
    number = newest_number(storage, run_claims_key(run))
    if not number:
        return 0, None
    return number, read_claim(storage, f"{run_claims_key(run)}/{number}", RunClaim)


def read_claim(storage: Storage, key: str, kind: type[C]) -> C:
    """A claim as it was written.

    Raises:
        SweepConflictError: Another version of the suite wrote it, or it is gone.
    """
    try:
        # A claim that is gone reads as empty and is refused like a foreign one.
        return kind.model_validate_json(storage.read(key) or b"")
    except ValidationError:
        raise SweepConflictError(
            f"{storage.url}: {key} is no claim of this version of the suite; "
            "end the driver that wrote it and remove the file, or choose another --home"
        ) from None


def newest_number(storage: Storage, prefix: str) -> int:
    """The highest number among the keys `<prefix>/<number>`; 0 where there is none."""
    newest = 0
    for key in storage.keys(prefix):
        name = key.rpartition("/")[2]
        # In ASCII: `²` counts as a digit, which `int` refuses, and `int` reads those of any script.
        if name.isascii() and name.isdigit():
            newest = max(newest, int(name))
    return newest


@dataclass(frozen=True, slots=True)
class Fence:
    """The claim of one driver. It travels to the driver's workers.

    Attributes:
        root: Folder or URL below which the sweep's claims lie.
        sweep: Its name.
        epoch: Epoch of the driver's claim; a driver with a higher one has taken the sweep over.
        patience_s: How long a storage is asked again that is away.
    """

    root: str
    sweep: str
    epoch: int
    patience_s: float = PATIENCE_S

    def open(self) -> Storage:
        """The storage of the claims."""
        return open_storage(self.root, patience_s=self.patience_s)

    def holds(self, *, once: bool = False) -> bool:
        """Whether no other driver has taken the sweep over.

        Args:
            once: Give up at the first error.
        """
        storage = self.open()
        with storage.asked_once() if once else nullcontext():
            # By a listing: NFS may remember of a single name that it is not there.
            claims = storage.keys(claims_key(self.sweep))
        # Epochs have no gaps, so it is enough to look for the next one.
        return claim_key(self.sweep, self.epoch + 1) not in claims

    def check_seen(self) -> None:
        """Raise ResourceError where the claim cannot be seen: what is written here is lost."""
        claims = self.open().keys(claims_key(self.sweep))
        if claim_key(self.sweep, self.epoch) not in claims:
            raise ResourceError(
                f"{socket.gethostname()}: does not see {self.root}, where the sweep's driver"
                f" writes; {SHARED}"
            )

    def check(self, *, shared: str | None = None) -> None:
        """Raise StaleDriverError once another driver owns what is written: the caller must not.

        Args:
            shared: Hash of the run that is written where several sweeps share it; None = a trial
                of this sweep.
        """
        if not self.holds():
            raise StaleDriverError(
                f"sweep {self.sweep!r}: another driver took it over "
                f"(claim {self.epoch + 1} below {self.root}); nothing more is written"
            )
        if shared is None:
            return
        _, claim = newest_run_claim(self.open(), shared)
        if claim is not None and (claim.sweep, claim.epoch) != (self.sweep, self.epoch):
            raise StaleDriverError(
                f"pretrain run {shared}: the driver of sweep {claim.sweep!r} took it over while "
                f"that of {self.sweep!r} gave no sign of life; nothing more is written"
            )
