"""Keeps MLflow up to date while a sweep runs."""

from __future__ import annotations

from collections.abc import Callable

from suite.clock import CLOCK
from suite.errors import SuiteError
from suite.record.folder import Home
from suite.tracking.follower import Follower
from suite.tracking.store import load_mlflow, open_store
from suite.tracking.writer import Syncer

SHARE = 0.1
"""The largest share of the time that syncs may take, once the first is done."""


class TrackingListener(Follower):
    """Writes every trial that ends, and the rows of the sweep.

    The time that a sync takes grows with the sweep (0.1 s for 100 cells, seconds for 10,000), so a
    pause follows each that is nine times as long. Trials that end meanwhile are written together.

    Args:
        home: The sweep's home.
        tracking_uri: As `resolve_uri` gives it.
        sweep: Only this sweep; None = all in the home.
        say: `Follower` describes this argument and those after it.
    """

    def __init__(
        self,
        home: Home,
        tracking_uri: str,
        *,
        sweep: str | None = None,
        say: Callable[[str], None] | None = None,
        patience_s: float = 20.0,
        retry_s: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        super().__init__("MLflow", say=say, patience_s=patience_s, retry_s=retry_s)
        self.home = home
        self.tracking_uri = tracking_uri
        self.sweep = sweep
        self._syncer: Syncer | None = None
        # Zero lets the first sync begin at once.
        self._pause_until_s = 0.0

    def prepare(self) -> None:
        """Import MLflow here and not in the thread: Ray imports it in this one, too."""
        load_mlflow()

    def bring_up_to_date(self) -> str | None:
        """Write what is lacking, and return why that failed, as `Follower` describes."""
        # The end of the sweep ends the pause.
        CLOCK.wait(self._ended, max(0.0, self._pause_until_s - CLOCK.now_s()))
        began_s = CLOCK.now_s()
        known = self._syncer
        # Put back after success alone: whatever goes wrong below, the next attempt looks afresh.
        self._syncer = None
        try:
            # A syncer remembers what the store has, which saves the searches of each further sync.
            syncer = known or Syncer(self.home, open_store(self.tracking_uri))
            problem = syncer.run(self.sweep, step=self._note_step).unreachable
        except SuiteError as error:
            return str(error)
        if problem is not None:
            return problem
        # The first sync may write a whole home and says nothing about the next, so no pause follows
        # it.
        if known is not None:
            took_s = CLOCK.now_s() - began_s
            self._pause_until_s = CLOCK.now_s() + took_s * (1 / SHARE - 1)
        self._syncer = syncer
        return None

    def _note_step(self, *_: int) -> None:
        # A home of many trials takes minutes: a sweep that ends meanwhile was not without MLflow.
        self._reached = True
