"""One trial while it is trained: what it is, how far it is, and what must survive a cut."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from suite.meters import LocalPhase, PhaseMeter, PhaseRecord, combine
from suite.record.folder import TrialFolder
from suite.record.result import Status
from suite.record.spec import Phase, TrialSpec
from suite.train.batches import TrainBatches
from suite.train.checkpoint import Checkpoints
from suite.train.lr_schedule import lr_multiplier
from suite.train.process_group import gather_objects
from suite.train.warm import Warm

UNSCORED_STEPS = 3
"""Steps after a switch from evaluation to training that are not timed.

Caches and ZeRO's prefetch trace are cold then.
"""


@dataclass(slots=True)
class TrialProgress:
    """How far a trial is. This must survive a cut, so every committed epoch stores it.

    Attributes:
        best_sha256: SHA-256 of the file with the best epoch's weights (confirm phase).
        meters: Accounts by rank, with those of ranks that only an earlier, larger attempt had.
        world_sizes: Ranks of each attempt that the trial goes on from.
        hosts: Hosts of each of them, on which its times depend.
        lanes: The most trials that trained side by side with it, itself included.
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = 0
    best: dict[str, float] = field(default_factory=dict)
    best_score: float | None = None
    best_sha256: str | None = None
    first_half_loss: float | None = None
    step_s: list[float] = field(default_factory=list)
    step_tokens: int = 0
    meters: dict[str, Any] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    resumed_from: list[int] = field(default_factory=list)
    world_sizes: list[int] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)
    checkpoint_bytes: int | None = None
    midway: dict[str, Any] | None = None
    lanes: int = 1

    @property
    def epoch(self) -> int:
        return len(self.epochs)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def retired(self, world_size: int) -> list[dict[str, LocalPhase]]:
        """Accounts of the ranks that this attempt does not have."""
        accounts = []
        for rank, state in self.meters.items():
            if int(rank) >= world_size:
                accounts.append({name: LocalPhase(**phase) for name, phase in state.items()})
        return accounts

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrialProgress:
        return cls(**values)


@dataclass(slots=True)
class RunningTrial:
    """One trial while it is trained."""

    spec: TrialSpec
    folder: TrialFolder
    warm: Warm
    batches: TrainBatches
    meter: PhaseMeter
    checkpoints: Checkpoints
    progress: TrialProgress
    status: Status | None = None
    weights_sha256: str | None = None

    def accounts(self) -> tuple[dict[str, PhaseRecord], dict[str, str]]:
        """What the trial has cost so far, as `combine` gives it. Collective.

        Counts these ranks, and those that only earlier attempts had.
        """
        present = gather_objects(self.meter.local())
        return combine(present + self.progress.retired(self.warm.engine.world_size))

    def note_meters(self) -> None:
        """Put the accounts of all ranks into what a checkpoint keeps. Collective."""
        for rank, state in enumerate(gather_objects(self.meter.state())):
            self.progress.meters[str(rank)] = state

    @property
    def total_steps(self) -> int:
        return len(self.batches) * self.spec.training.epochs

    def learning_rate(self, step: int) -> float:
        """The learning rate at a 0-based step of the trial."""
        return self.spec.learning_rate * lr_multiplier(self.spec.training, step, self.total_steps)

    def improves(self, score: float) -> bool:
        """Whether the epoch's weights are kept in the place of those before."""
        best = self.progress.best_score
        keeps_last = self.spec.training.keep == "last"
        # A pretrain run keeps its last weights, whatever they score.
        if self.spec.phase is Phase.PRETRAIN or keeps_last or best is None:
            return True
        # A higher utility is always better, also where the score is a perplexity.
        return self.spec.task.utility(score) > self.spec.task.utility(best)

    @property
    def out_of_patience(self) -> bool:
        patience = self.spec.training.patience
        return patience is not None and self.progress.epoch - self.progress.best_epoch >= patience

    @property
    def done(self) -> bool:
        return (
            self.status is not None
            or self.progress.epoch >= self.spec.training.epochs
            or self.out_of_patience
        )
