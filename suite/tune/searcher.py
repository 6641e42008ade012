"""The sweep's schedule as a Ray Tune searcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from suite.plan.queue import TrialQueue
from suite.record.spec import TrialSpec


class SweepSearcher(Searcher):
    """Hands out the schedule's trials and tells it their end.

    Tune saves searchers for its own way to resume, which is not used here: the trial folders hold the state.
    """

    def __init__(self, schedule: TrialQueue) -> None:
        super().__init__()
        self.schedule = schedule
        self.specs: dict[str, TrialSpec] = {}
        self.stopped: Callable[[], bool] = lambda: (
            False
        )  # while nothing runs, Tune asks here and nowhere else

    def suggest(self, trial_id: str) -> Any:
        """The next trial's specification as JSON, None (ask again later) or `Searcher.FINISHED`."""
        spec = None if self.stopped() else self.schedule.next()
        if spec is None:
            waiting = self.schedule.waiting and not self.stopped()
            return None if self.schedule.live or waiting else Searcher.FINISHED
        self.specs[trial_id] = spec
        return {
            "spec": spec.model_dump_json(),
            "workers": spec.world_size,
            "peers": self.schedule.peers(spec),
        }

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Also called with `error` when a trial's retries are used up; its folder says which it was."""
        self.schedule.ended(self.specs[trial_id])

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""

    def __getstate__(self) -> dict[str, Any]:
        return {}
