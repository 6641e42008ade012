"""A storage holds bytes under keys below a URL, for homes, leases and exports.

A storage must create a key only if nobody else has: by a hard link on files, by a conditional put
on S3. A file system that cannot is refused, because two drivers could then both believe that a
sweep is theirs.
"""

from __future__ import annotations

import contextlib
import logging
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from suite.clock import CLOCK
from suite.errors import StorageError

T = TypeVar("T")
PATIENCE_S = 60.0
# Of a command that a person waits for.
SHORT_PATIENCE_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
QUIET_S = 10.0
"""How long a call waits before it says so."""
SAID_EVERY_S = 60.0
log = logging.getLogger(__name__)
# When any storage of this process said last that it waits.
_said_s = -float("inf")


class Storage(ABC):
    """A root with keys such as `a/b/c` below it, which works the same on files and on S3.

    Every method raises `StorageError` if the storage does not do what it is asked, and `OSError` if
    its disk is full, because a sweep waits for room and does not try again.

    Args:
        url: The root as given.
        patience_s: For how long a storage that does not answer is asked again.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        self.url = url.rstrip("/")
        self.patience_s = patience_s

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The bytes of a key, None where there is none."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Set a key: a reader sees the old bytes or the new ones, never a part."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Set a key that does not exist. Of all who try at once, exactly one gets True.

        Args:
            key: The key.
            data: Should differ from what others would write: if an answer is lost, reading the
                key again decides who has won.
        """

    @abstractmethod
    def keys(self, prefix: str = "") -> list[str]:
        """All keys at or below `prefix`, cut at "/", sorted, without hidden ones; "" = all."""

    @abstractmethod
    def delete(self, prefix: str) -> None:
        """Remove a key, or all keys below it; do nothing where there is none."""

    @abstractmethod
    def push(self, local: Path, key: str) -> None:
        """Set a key to a file's content, as `write` does."""

    @abstractmethod
    def pull(self, key: str, local: Path) -> None:
        """Replace a file by a key's content, whole or not at all; the key must exist."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the key has a value."""

    def check(self) -> None:
        """Write, read and remove a key of its own, so that a mistake shows within seconds.

        Raises:
            StorageError: It cannot be reached, written or read.
        """
        # The dot hides the key from listings, in case this process dies before the delete.
        key = f".check-{uuid.uuid4().hex}"
        first = key.encode()
        with self.asked_once():
            # Leases rest on this alone: the second of two writers must be told that it was late.
            keeps_the_first = self.create(key, first) and not self.create(key, b"second")
            if not keeps_the_first or self.read(key) != first:
                raise StorageError(
                    f"storage {self.url}: does not keep the first of two writers; "
                    "expected a disk or a bucket that does"
                )
            self.delete(key)

    @contextlib.contextmanager
    def asked_once(self) -> Iterator[None]:
        """Within the block, give up at the first error."""
        patience_s = self.patience_s
        self.patience_s = 0.0
        try:
            yield
        finally:
            self.patience_s = patience_s

    def patiently(self, call: Callable[[], T], transient: Callable[[Exception], bool]) -> T:
        """Call again, less and less often, while the error may pass and patience lasts."""
        began_s = CLOCK.now_s()
        end_s = began_s + self.patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return call()
            except Exception as error:
                now_s = CLOCK.now_s()
                # A pause that ends after the deadline helps nobody, so it counts as well.
                if not transient(error) or now_s + pause_s > end_s:
                    raise
                if now_s - began_s > QUIET_S:
                    self._say_that_it_waits(error, end_s - now_s)
            # At random, so that a hundred ranks do not come back at once.
            CLOCK.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _say_that_it_waits(self, error: Exception, left_s: float) -> None:
        """Say now and then why nothing goes on; many calls may wait at once."""
        global _said_s
        now_s = CLOCK.now_s()
        if now_s - _said_s < SAID_EVERY_S:
            return
        _said_s = now_s
        log.warning(
            "storage %s does not answer (%s): waiting up to %.0f s for it; what has ended is kept",
            self.url,
            type(error).__name__,
            left_s,
        )


def visible(keys: Iterable[str]) -> list[str]:
    """The keys without a part that begins with a dot (temporary files, checks), sorted."""
    return sorted(key for key in keys if not key.startswith(".") and "/." not in key)


def checked_key(key: str) -> str:
    """The key without outer slashes.

    Raises:
        StorageError: It could leave the root.
    """
    parts = key.strip("/").split("/")
    for part in parts:
        if part in ("", ".", "..") or "\\" in part or "\0" in part:
            raise StorageError(
                f"storage key {key!r}: got a part that is empty or leaves its folder, "
                "expected NAME/NAME"
            )
    return "/".join(parts)
