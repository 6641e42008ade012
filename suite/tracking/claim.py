"""Keep two copies of one home from overwriting each other in a store.

The experiment of a sweep has a tag for each home: a token, and the folder of the home that wrote
last. Every process that writes puts a token of its own there, and the home remembers all of them.
A home that meets a token which it does not know was copied, and the other copy has written since.
Only the home's content counts, so a home may be moved, restored from a backup, or used from another
host of a shared disk.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import uuid
from pathlib import Path

from suite.errors import TrackingError
from suite.plan.definition import sweeps
from suite.record.folder import Home
from suite.storage.identity import (
    SHARED,
    home_id,
    identity_path,
    keep_name,
    remember_token,
    tokens,
)
from suite.tracking.store import Store, sqlite_path, without_password


class Claim:
    """One process's claim to write a home's runs into a store.

    Args:
        home: The home.
        store: Where its runs go.
        take_over: Whether to write although another copy of the home has written.
    """

    def __init__(self, home: Home, store: Store, *, take_over: bool = False) -> None:
        self.home = home
        self.store = store
        self.take_over = take_over
        self._token = uuid.uuid4().hex[:12]
        path = sqlite_path(store.uri)
        # A database inside the home is copied with it, and nobody else writes to it.
        self._is_own = path is not None and path.is_relative_to(home.path.resolve())

    def take(self, experiment: str) -> None:
        """Claim a sweep's experiment for this home, or find that it still holds it.

        Raises:
            TrackingError: Another copy of the home writes there; the message says how to go on.
        """
        if self._is_own:
            return
        token, place = self._last_writer(experiment)
        if self._is_other(token, place) and not self.take_over:
            raise TrackingError(self._refusal(place))
        mine = self._token
        if SHARED in tokens(self.home):
            mine = SHARED
        if token == mine:
            return
        # The home first: a crash in between leaves one token too many there, which does no harm.
        remember_token(self.home, mine)
        keep_name(self.home)
        self.store.set_experiment_tag(experiment, self._tag(), f"{mine} {self.home.path.resolve()}")

    def is_refused(self) -> bool:
        """Whether `take` would find another copy of the home as the writer of one of its sweeps."""
        if self._is_own:
            return False
        experiments = self.store.experiments()
        for sweep in sweeps(self.home):
            if sweep in experiments and self._is_other(*self._last_writer(experiments[sweep])):
                return True
        return False

    def _tag(self) -> str:
        return f"suite.writer.{home_id(self.home)}"

    def _last_writer(self, experiment: str) -> tuple[str, str]:
        """Token and folder of who wrote a sweep last under the home's name; empty = nobody."""
        token, _, place = self.store.experiment_tag(experiment, self._tag()).partition(" ")
        return token, place

    def _is_other(self, token: str, place: str) -> bool:
        """Whether the last writer is another copy of the home."""
        known = tokens(self.home)
        if not token or SHARED in known:
            return False
        return token not in known or self._is_copy_of(Path(place))

    def _is_copy_of(self, other: Path) -> bool:
        """Whether another folder of this machine is a home of the same name."""
        # A folder that is not there, or not ours to read, is no other home.
        with contextlib.suppress(OSError):
            same_name = identity_path(Home(other)).read_bytes() == home_id(self.home).encode()
            return same_name and not os.path.samefile(other, self.home.path)
        return False

    def _refusal(self, place: str) -> str:
        store = without_password(self.store.uri)
        command = shlex.join(
            ["suite", "sync", "--home", str(self.home.path), "--tracking-uri", store]
        )
        return (
            f"{self.home.path}: got a copy of the home {place}, which writes to "
            f"{store} under the same name ({home_id(self.home)}); "
            "expected one of them, as each would overwrite the other's runs. "
            f"If this copy is to be a home of its own: {command} --new-id. "
            f"If it takes the other's place: {command} --take-over"
        )
