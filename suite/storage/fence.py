"""Which driver a process works for, and whether that driver still owns its sweep.

Every rank asks before it commits anything. A claim is a key `leases/<sweep>/<epoch>` that is
created once and never removed. Epochs are consecutive, so the claim of epoch n is the last one
exactly while there is none of epoch n + 1. `suite.storage.lease` makes the claims.
"""

from __future__ import annotations

from dataclasses import dataclass

from suite.errors import StaleDriverError
from suite.storage.urls import open_storage


def claims_key(sweep: str) -> str:
    """The key below which a sweep's claims lie."""
    return f"leases/{sweep}"


def claim_key(sweep: str, epoch: int) -> str:
    return f"{claims_key(sweep)}/{epoch}"


@dataclass(frozen=True, slots=True)
class Fence:
    """The claim of one driver. It travels to the driver's workers.

    Attributes:
        root: Folder or URL below which the sweep's claims lie.
        sweep: Its name.
        epoch: Epoch of the driver's claim; a driver with a higher one has taken the sweep over.
    """

    root: str
    sweep: str
    epoch: int

    def holds(self) -> bool:
        """Whether no other driver has taken the sweep over."""
        # By a listing: NFS may remember of a single name that it is not there.
        claims = open_storage(self.root).keys(claims_key(self.sweep))
        # Epochs have no gaps, so it is enough to look for the next one.
        return claim_key(self.sweep, self.epoch + 1) not in claims

    def check(self) -> None:
        """Raise StaleDriverError once another driver owns the sweep: the caller must not write."""
        if not self.holds():
            raise StaleDriverError(
                f"sweep {self.sweep!r}: another driver took it over "
                f"(claim {self.epoch + 1} below {self.root}); nothing more is written"
            )
