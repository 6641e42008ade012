"""The sweep's queue of trials as a Ray Tune searcher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from suite.plan.queue import TrialQueue
from suite.record.spec import TrialSpec


class SweepSearcher(Searcher):
    """Hands out the queue's trials to Tune and tells the queue when they end.

    Trials that train side by side are one Tune trial, and each attempt is one of its own. An
    attempt that failed, or that found no room in the cluster, is handed back: its trial is
    suggested again and goes on from the last epoch that its folder holds. To the queue it never
    stopped running. Trials that failed side by side go back to the queue, which hands out each of
    them alone.

    Tune saves searchers for its own way to resume, which is not used here: the trial folders hold
    the state.

    Attributes:
        specs: The trials that were handed out, by Tune's id; more than one train side by side.
        stopped: Says that nothing is to be handed out any more. While nothing runs, Tune asks here
            and nowhere else.
    """

    def __init__(self, queue: TrialQueue) -> None:
        super().__init__()
        self.queue = queue
        self.specs: dict[str, tuple[TrialSpec, ...]] = {}
        self.stopped: Callable[[], bool] = lambda: False
        self._handed_back: deque[tuple[tuple[TrialSpec, ...], int]] = deque()

    def suggest(self, trial_id: str) -> Any:
        """The next trials' specifications, None (ask again later) or `Searcher.FINISHED`."""
        stopped = self.stopped()
        # Trials that were at work come before new ones: others may wait for their result.
        if not stopped and self._handed_back:
            specs, workers = self._handed_back.popleft()
            return self._suggestion(trial_id, specs, workers)
        leader = None if stopped else self.queue.next()
        if leader is not None:
            specs = (leader, *self.queue.beside(leader))
            return self._suggestion(trial_id, specs, leader.world_size)
        waits = self.queue.waiting and not stopped
        return None if self.queue.live or waits else Searcher.FINISHED

    def _suggestion(
        self, trial_id: str, specs: tuple[TrialSpec, ...], workers: int
    ) -> dict[str, Any]:
        self.specs[trial_id] = specs
        self.queue.resized(specs[0], workers)
        return {
            "specs": [spec.model_dump_json() for spec in specs],
            "workers": workers,
            "peers": [self.queue.peers(spec) for spec in specs],
        }

    def hand_back(self, trial_id: str, *, workers: int | None = None) -> None:
        """Suggest trials again, which Tune is about to end or has ended.

        It is neither a failure nor their end.

        Args:
            trial_id: Tune's id of the attempt.
            workers: Ranks of the next attempt; None = as many as planned.
        """
        specs = self.specs.pop(trial_id)
        self._handed_back.append((specs, workers or specs[0].world_size))

    def part(self, trial_id: str, *, for_good: bool) -> list[TrialSpec]:
        """Let trials that could not go on side by side go on one by one.

        Args:
            trial_id: Tune's id of the attempt.
            for_good: Whether further trials of their arm would meet the same.

        Returns:
            Those of them that had ended before.
        """
        ended = []
        left = []
        for spec in self.specs.pop(trial_id):
            folder = self.queue.home.trial(spec)
            self.queue.fetch(folder)
            # One that ended earlier has its result.
            if folder.result() is None:
                left.append(spec)
            else:
                self.queue.ended(spec)
                ended.append(spec)
        self.queue.apart(left, for_good=for_good)
        return ended

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the queue that a trial ended; its folder holds the result, if there is one.

        Tune calls this for each attempt. One that failed (`error`) is not the trial's end, and
        `SweepCallback` hands it back; one that was handed back is not either.
        """
        if trial_id not in self.specs or error:
            return
        # `SweepCallback` lets them part.
        if (result or {}).get("apart") is not None:
            return
        for spec in self.specs[trial_id]:
            self.queue.ended(spec)

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""

    def __getstate__(self) -> dict[str, Any]:
        return {}
