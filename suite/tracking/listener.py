"""MLflow kept up to date while a sweep runs."""

from __future__ import annotations

from collections.abc import Callable

from suite.errors import SuiteError
from suite.record.folder import Home
from suite.tracking.follower import Follower
from suite.tracking.store import load_mlflow, open_store
from suite.tracking.writer import Syncer


class TrackingListener(Follower):
    """Writes every trial that ends.

    Args:
        home: The sweep's home.
        tracking_uri: As `resolve_uri` gives it.
        sweep: Only this sweep; None = all in the home.
        say: As in `Follower`, and what follows it.
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
        self.home, self.tracking_uri, self.sweep = home, tracking_uri, sweep
        self._syncer: Syncer | None = None

    def prepare(self) -> None:
        load_mlflow()  # here and not in the thread, as Ray imports it in this one before its first trial

    def bring_up_to_date(self) -> str | None:
        """After a problem the syncer is dropped, so that the next attempt looks at the store afresh."""
        try:
            syncer = self._syncer or Syncer(self.home, open_store(self.tracking_uri))
            problem = syncer.run(self.sweep).unreachable
        except SuiteError as error:
            problem = str(error)
        self._syncer = None if problem is not None else syncer
        return problem
