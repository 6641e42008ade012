"""The sweep's queue of trials as a Ray Tune searcher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from suite.plan.queue import TrialQueue
from suite.record.spec import TrialSpec


def _never() -> bool:
    return False


class SweepSearcher(Searcher):
    """Hands out the queue's trials to Tune and tells the queue when they end.

    Each attempt at a trial is a Tune trial of its own. An attempt that failed, or that found no
    room in the cluster, is handed back: its trial is suggested again and goes on from the last
    epoch that its folder holds. To the queue it never stopped running.

    Tune saves searchers for its own way to resume, which is not used here: the trial folders hold
    the state.

    Attributes:
        specs: The trials that were handed out, by Tune's id.
        stopped: Says that nothing is to be handed out any more. While nothing runs, Tune asks here
            and nowhere else.
    """

    def __init__(self, queue: TrialQueue) -> None:
        super().__init__()
        self.queue = queue
        self.specs: dict[str, TrialSpec] = {}
        self.stopped: Callable[[], bool] = _never
        self._handed_back: deque[tuple[TrialSpec, int]] = deque()

    def suggest(self, trial_id: str) -> Any:
        """The next trial's specification as JSON, None (ask again later) or `Searcher.FINISHED`."""
        stopped = self.stopped()
        # Trials that were at work come before new ones: others may wait for their result.
        if not stopped and self._handed_back:
            spec, workers = self._handed_back.popleft()
            return self._suggestion(trial_id, spec, workers)
        next_spec = None if stopped else self.queue.next()
        if next_spec is not None:
            return self._suggestion(trial_id, next_spec, next_spec.world_size)
        waits = self.queue.waiting and not stopped
        return None if self.queue.live or waits else Searcher.FINISHED

    def _suggestion(self, trial_id: str, spec: TrialSpec, workers: int) -> dict[str, Any]:
        self.specs[trial_id] = spec
        self.queue.resized(spec, workers)
        return {
            "spec": spec.model_dump_json(),
            "workers": workers,
            "peers": self.queue.peers(spec),
        }

    def hand_back(self, trial_id: str, *, workers: int | None = None) -> None:
        """Suggest a trial again, which Tune is about to end or has ended.

        It is neither a failure nor the trial's end.

        Args:
            trial_id: Tune's id of the attempt.
            workers: Ranks of the next attempt; None = as many as planned.
        """
        spec = self.specs.pop(trial_id)
        self._handed_back.append((spec, workers or spec.world_size))

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the queue that a trial ended; its folder holds the result, if there is one.

        Tune calls this for each attempt. One that failed (`error`) is not the trial's end, and
        `SweepCallback` hands it back; one that was handed back is not either.
        """
        if trial_id in self.specs and not error:
            self.queue.ended(self.specs[trial_id])

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""

    def __getstate__(self) -> dict[str, Any]:
        return {}
