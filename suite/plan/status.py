"""Where a sweep stands, read from its home without Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass

from suite.plan.cell_state import CellState, CellStatus, PretrainState, read_states
from suite.plan.definition import driver_pid, lease_root, read_plan
from suite.record.attempts import counted, is_given_up
from suite.record.cells import Trial
from suite.record.folder import Home
from suite.record.result import FailureRecord, Status
from suite.storage.lease import holder


@dataclass(frozen=True, slots=True)
class TrialFailure:
    """A trial without a score: why, and where its log is."""

    trial: str
    status: str
    type: str
    message: str
    log_path: str


@dataclass(frozen=True, slots=True)
class PretrainStatus:
    """A pretrain run: `waiting`, `begun` or how it ended, and how far it is.

    Attributes:
        checkpoint: Its hash, the name of its folder under `pretrained/`.
        steps_done: Up to the last validation.
        loss: Of that validation, nats per predicted token.
    """

    checkpoint: str
    state: str
    corpus: str
    steps_done: int
    steps: int
    loss: float | None
    energy_kwh: float | None


@dataclass(frozen=True, slots=True)
class CellReport:
    """One cell: counts of trials, its best so far, its failures.

    Attributes:
        pretrain: The run that comes first; None where the cell needs none.
        running: Handed out and not finished; without a live driver these go on first at the next run.
        left: Not handed out yet.
        failures: Trials that ended without a score, and attempts of unfinished trials that their machine ended.
        pruned: Search trials that were ended early; they are no failures.
        extensions: Decades by which the edge guard lengthened the range.
        saved_trials: Search trials that the stop rule saved.
        edge: Whether the best learning rate of an ended study lies at the end of its range.
        workers: Of each of its trials, as planned.
        own_code: Commit of the code that the backbone's checkpoint brings; None = only that of the libraries runs.
        waits_for: Studies of the cell's architecture contest that are still open once its own has ended.
    """

    key: str
    backbone: str
    attention: str
    attention_options: dict[str, object]
    method: str
    architecture: dict[str, object]
    task: str
    status: CellStatus
    search_done: int
    confirm_done: int
    running: int
    left: int
    total: int
    best_validation_score: float | None
    best_learning_rate: float | None
    failures: tuple[TrialFailure, ...]
    pretrain: PretrainStatus | None = None
    pruned: int = 0
    extensions: int = 0
    saved_trials: int = 0
    edge: bool = False
    waits_for: int = 0
    own_code: str | None = None
    workers: int = 1

    @property
    def done(self) -> int:
        return self.search_done + self.confirm_done

    @property
    def notes(self) -> list[str]:
        """What became of the study beyond its budget, in words."""
        notes = {
            f"waits for {self.waits_for} more studies of its architectures": self.waits_for,
            f"stopped early, {self.saved_trials} trials saved": self.saved_trials,
            f"{self.pruned} pruned": self.pruned,
            f"range + {self.extensions} decade{'s' if self.extensions > 1 else ''}": self.extensions,
            "best learning rate at the edge": self.edge,
        }
        notes |= {f"runs code of its checkpoint, {self.own_code}": self.own_code is not None}
        return [note for note, holds in notes.items() if holds]


def status(home: Home, sweep: str) -> list[CellReport]:
    """Every cell of a sweep in the plan's order.

    Raises:
        ConfigError: This home holds no sweep of that name.
    """
    return [cell_status(state) for state in read_states(read_plan(home, sweep), home).values()]


def driver(home: Home, sweep: str) -> str | None:
    """Who runs a sweep, None = nobody; one on another machine is named until its sweep is taken over, whether it still lives or not."""
    claim = holder(lease_root(home, None), sweep)
    pid = driver_pid(home, sweep) if claim is None else None  # with --storage the lease is not here
    return str(claim) if claim is not None else None if pid is None else f"process {pid}"


def cell_status(state: CellState) -> CellReport:
    """The summary of one cell."""
    arm, best, trials, status = state.cell.arm, state.best(), state.trials, state.status
    total, study = state.total, state.study
    finished = [t for t in trials if t.result is not None]
    search_done = sum(t.result is not None for t in state.searched)
    return CellReport(
        key=state.cell.key,
        backbone=arm.backbone.name,
        attention=arm.attention.name,
        attention_options=arm.attention.options,
        method=arm.method,
        architecture=arm.architecture,
        task=state.cell.task.name,
        status=status,
        search_done=search_done,
        confirm_done=len(finished) - search_done,
        running=len(trials) - len(finished),
        left=0 if status is CellStatus.FAILED else total - len(trials),
        total=total,
        best_validation_score=best.result.score
        if best is not None and best.result is not None
        else None,
        best_learning_rate=best.spec.learning_rate if best is not None else None,
        failures=tuple(
            f
            for t in _behind(state)
            if (f := _failure(t, retries=state.plan.config.failures.retries)) is not None
        ),
        pretrain=None if state.pretrain is None else pretrain_status(state.pretrain),
        pruned=sum(t.result.status is Status.PRUNED for t in finished if t.result is not None),
        extensions=study.extensions,
        saved_trials=study.saved_trials,
        edge=study.ended is not None and study.edge is not None,
        waits_for=state.contest.open_studies
        if state.contest is not None and status is CellStatus.WAITING
        else 0,
        own_code=arm.backbone.revision if arm.backbone.trust_remote_code else None,
        workers=state.plan.workers(state.cell),
    )


def pretrain_status(state: PretrainState) -> PretrainStatus:
    """The summary of one pretrain run."""
    result, spec, epochs = state.result, state.spec, state.folder.epochs()
    phases = [] if result is None else list(result.phases.values())
    energies = [phase.energy_kwh for phase in phases]
    return PretrainStatus(
        checkpoint=spec.hash,
        state=result.status.value
        if result is not None
        else "begun"
        if epochs or state.live
        else "waiting",
        corpus=spec.task.name,
        steps_done=epochs[-1].step if epochs else 0,
        steps=spec.training.epochs * (spec.training.epoch_steps or 0),
        loss=epochs[-1].validation_score if epochs else None,
        energy_kwh=None
        if not energies or None in energies
        else math.fsum(e for e in energies if e is not None),
    )


def _behind(state: CellState) -> list[Trial]:
    """Every run that a cell's scores depend on."""
    pretrain = (
        []
        if state.pretrain is None
        else [Trial(state.pretrain.folder, state.pretrain.spec, state.pretrain.result)]
    )
    return [*pretrain, *state.trials]


def _failure(trial: Trial, *, retries: int) -> TrialFailure | None:
    """Why a trial has no score: its own result says so, or else the last attempt that its machine ended."""
    if trial.result is not None and (
        trial.result.status.has_score or trial.result.status is Status.PRUNED
    ):
        return None
    attempts = counted(trial.folder) or trial.folder.failures() if trial.result is None else []
    unfinished = "gave up" if is_given_up(trial.folder, retries=retries) else "interrupted"
    ending = trial.result.status.value if trial.result is not None else unfinished
    record: FailureRecord | None = (
        trial.result.failure if trial.result is not None else (attempts[-1] if attempts else None)
    )
    if trial.result is None and record is None:
        return None
    record = record or FailureRecord(type=ending, message=f"the trial ended as {ending}")
    return TrialFailure(
        trial.folder.hash,
        ending,
        record.type,
        record.message,
        record.log_path or str(trial.folder.log(0)),
    )
