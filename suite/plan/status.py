"""Tell where a sweep stands, from its home and without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from suite.plan.cell_state import CellState, CellStatus, read_states
from suite.plan.definition import driver_pid, lease_root, live_claim, read_plan
from suite.plan.pretrain_state import PretrainState
from suite.plan.second_objective import pareto
from suite.record.attempts import counted, is_given_up
from suite.record.cells import Trial, ended
from suite.record.folder import Home
from suite.record.result import DAMAGED, MEND, FailureRecord, Status


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
    """How far a pretrain run is.

    Attributes:
        checkpoint: Its hash, the name of its folder under `pretrained/`.
        state: `waiting`, `begun` or how it ended.
        steps_done: Steps up to the last validation.
        loss: Loss of that validation, nats per predicted token.
        energy_kwh: Of its train phase, as in the leaderboard; None before its end, or unknown.
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
    """What there is to say of one cell: counts of trials, its best so far, its failures.

    Attributes:
        pretrain: The run that comes first; None where the cell needs none.
        running: Trials that are handed out and have not ended; without a live driver the next run
            takes them up first.
        left: Trials that are not handed out yet.
        failures: Trials that ended without a score, and unfinished ones whose attempts failed.
        interrupted: Unfinished trials no attempt of which counts, such as those that left after a
            notice; they go on.
        pruned: Search trials that were ended early; they are no failures.
        extensions: Decades by which the edge guard lengthened the range.
        saved_trials: Search trials that the stop rule saved.
        left_out: Search trials that have ended and count in no figure.
        edge: Whether scores of an ended study may still rise beyond an end of its range.
        workers: Workers of each of its trials, as planned.
        own_code: Commit of the code that the backbone's checkpoint brings; None = only that of the
            libraries runs.
        waits_for: Studies of the cell's architecture contest that are still open once its own has
            ended.
        chosen: Whether its architecture won its contest; None where there is none, or not yet.
        study: What is decided about the study (docs/protocol.md).
        contest: The contest of architectures that the cell takes part in, by name.
        best_utility: The best validation score as a number that is better where it is larger.
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
    chosen: bool | None = None
    study: Mapping[str, Any] = field(default_factory=dict)
    contest: str | None = None
    best_utility: float | None = None
    interrupted: int = 0
    left_out: int = 0

    @property
    def done(self) -> int:
        """Trials that have ended."""
        return self.search_done + self.confirm_done

    @property
    def notes(self) -> list[str]:
        """What became of the study beyond its budget, in words."""
        notes = []
        if self.interrupted:
            notes.append(f"{self.interrupted} interrupted, to go on")
        if self.waits_for:
            notes.append(f"waits for {self.waits_for} more studies of its architectures")
        if self.saved_trials:
            notes.append(f"stopped early, {self.saved_trials} trials saved")
        if self.pruned:
            notes.append(f"{self.pruned} pruned")
        if self.extensions:
            unit = "decade"
            if self.extensions > 1:
                unit = "decades"
            notes.append(f"range + {self.extensions} {unit}")
        if self.edge:
            notes.append("scores may still rise at the edge")
        if self.left_out:
            notes.append(
                f"search trials left out: {self.left_out} (beyond today's budget or range, or from "
                "an earlier definition)"
            )
        if self.own_code is not None:
            notes.append(f"runs code of its checkpoint, {self.own_code}")
        return notes


def status(home: Home, sweep: str) -> list[CellReport]:
    """Every cell of a sweep in the plan's order.

    Raises:
        ConfigError: This home holds no sweep of that name.
    """
    return [cell_status(state) for state in read_states(read_plan(home, sweep), home).values()]


def joined(reports: Sequence[CellReport]) -> list[CellReport]:
    """The reports with one for all architectures that compete on a task.

    It speaks of the architecture that is chosen, or is the best so far, and counts the trials and
    failures of all.
    """
    groups: dict[tuple[str, str], list[CellReport]] = {}
    for report in reports:
        groups.setdefault((report.contest or report.key, report.task), []).append(report)
    return [_joined(group) for group in groups.values()]


def _joined(group: Sequence[CellReport]) -> CellReport:
    best = max(group, key=_standing)
    word = best.status
    if any(report.status is CellStatus.SEARCHING for report in group):
        word = CellStatus.SEARCHING
    failures: list[TrialFailure] = []
    for report in group:
        failures += report.failures
    return replace(
        best,
        status=word,
        search_done=sum(report.search_done for report in group),
        confirm_done=sum(report.confirm_done for report in group),
        running=sum(report.running for report in group),
        left=sum(report.left for report in group),
        total=sum(report.total for report in group),
        failures=tuple(failures),
    )


def _standing(report: CellReport) -> tuple[bool, bool, float]:
    """Sort key whose maximum is the chosen architecture, or else that with the best search."""
    utility = report.best_utility
    return report.chosen is True, utility is not None, utility or 0.0


def driver(home: Home, sweep: str, storage: str | None = None) -> str | None:
    """Who runs a sweep; None = nobody.

    A driver on another machine is named until its sweep is taken over, whether it still lives or
    not.

    Args:
        home: Where the sweep lives.
        sweep: Its name.
        storage: URL that the home is a mirror of; drivers on other machines are known there alone.
    """
    # The lease knows of drivers on other machines too, the lock only of one here. A variable may
    # name a storage that this home has nothing to do with.
    for root in dict.fromkeys((lease_root(home, storage), lease_root(home, None))):
        claim = live_claim(home, sweep, root)
        if claim is not None:
            return str(claim)
    # With --storage the lease lies there, but this machine's lock lies here.
    pid = driver_pid(home, sweep)
    if pid is None:
        return None
    return f"process {pid}"


def cell_status(state: CellState) -> CellReport:
    """What there is to say of one cell."""
    arm = state.cell.arm
    trials = state.trials
    study = study_facts(state)
    with_result = len(ended(trials))
    word = state.status
    waits_for = 0
    if state.contest is not None and word is CellStatus.WAITING:
        waits_for = state.contest.open_studies
    best = state.best()
    best_utility = None
    if best is not None:
        best_utility = best.utility
    left = state.total - len(trials)
    if word is CellStatus.FAILED:  # it may have ended before its confirm runs
        left = 0
    chosen = state.chosen_setting
    return CellReport(
        key=state.cell.key,
        **arm.names,
        task=state.cell.task.name,
        status=word,
        search_done=study["trials"],
        # `trials` holds search and confirm runs, and only the first are part of the study.
        confirm_done=with_result - study["trials"],
        running=len(trials) - with_result,
        left=left,
        total=state.total,
        best_validation_score=state.best_score,
        best_learning_rate=None if chosen is None else chosen.learning_rate,
        failures=_failures(state),
        pretrain=None if state.pretrain is None else pretrain_status(state.pretrain),
        pruned=study["pruned"],
        extensions=study["extensions"],
        saved_trials=study["saved_trials"],
        edge=study["edge"],
        waits_for=waits_for,
        # Whoever reads the numbers should see that code outside the suite made them.
        own_code=arm.own_code,
        workers=state.plan.workers(state.cell),
        chosen=state.won,
        study=study,
        contest=state.cell.contest,
        best_utility=best_utility,
        interrupted=sum(_interrupted(trial) for trial in trials),
        left_out=study["left_out"],
    )


def study_facts(state: CellState) -> dict[str, Any]:
    """What is decided about a cell's study, for programs; each is explained in docs/protocol.md."""
    study = state.study
    trials = ended(state.searched)
    pruned = 0
    for trial in trials:
        if trial.result is not None and trial.result.status is Status.PRUNED:
            pruned += 1
    facts: dict[str, Any] = {
        "ended": study.ended,
        "budget": study.budget,
        "trials": len(trials),
        "left_out": state.left_out,
        "saved_trials": study.saved_trials,
        "low": study.searched.low,
        "high": study.searched.high,
        "extensions": study.extensions,
        # Before the end the guard may still lengthen the range.
        "edge": study.ended is not None and study.edge is not None,
        "pruned": pruned,
        "room": study.room,
    }
    second = state.plan.config.search.second
    if second is not None:
        facts["pareto"] = pareto(state.searched, second)
    return facts


def pretrain_status(state: PretrainState) -> PretrainStatus:
    """How far one pretrain run is."""
    spec = state.spec
    epochs = state.folder.epochs()
    word = "waiting"
    energy_kwh = None
    steps_done = 0
    loss = None
    if epochs:
        steps_done = epochs[-1].step
        loss = epochs[-1].validation_score
    if state.result is not None:
        word = state.result.status.value
        train = state.result.phases.get("train")
        if train is not None:
            energy_kwh = train.energy_kwh
    elif epochs or state.live:
        word = "begun"
    return PretrainStatus(
        checkpoint=spec.hash,
        state=word,
        corpus=spec.task.name,
        steps_done=steps_done,
        steps=spec.training.epochs * (spec.training.epoch_steps or 0),
        loss=loss,
        energy_kwh=energy_kwh,
    )


def _failures(state: CellState) -> tuple[TrialFailure, ...]:
    """Every run without a score that the cell's scores depend on."""
    trials = state.trials
    if state.pretrain is not None:
        # All scores of the cell depend on this run, so its failure comes first.
        pretrain = Trial(state.pretrain.folder, state.pretrain.spec, state.pretrain.result)
        trials = [pretrain, *trials]
    found = []
    for trial in trials:
        failure = _failure(trial, retries=state.plan.config.failures.retries)
        if failure is not None:
            found.append(failure)
    return tuple(found)


def _interrupted(trial: Trial) -> bool:
    """Whether a trial has not ended, was begun before, and no attempt of it counts."""
    folder = trial.folder
    return trial.result is None and bool(folder.failures()) and not counted(folder)


def _failure(trial: Trial, *, retries: int) -> TrialFailure | None:
    """Why a trial has no score, by its result or by the last attempt that counts."""
    result = trial.result
    record: FailureRecord | None
    if result is None:
        attempts = counted(trial.folder)
        if not attempts:
            return None
        record = attempts[-1]
        # The retries are the sweep's, so the same failures may end one sweep and not another.
        ending = "interrupted"
        if is_given_up(trial.folder, retries=retries):
            ending = "gave up"
    elif result.damaged is not None:
        record = FailureRecord(type=DAMAGED, message=f"{result.damaged}; {MEND}")
        ending = "damaged"
    # A pruned trial ended as the sweep asked, so it is no failure.
    elif result.status.has_score or result.status is Status.PRUNED:
        return None
    else:
        record = result.failure
        ending = result.status.value
    # Even a result without a record of its failure gets a line that says how it ended.
    if record is None:
        record = FailureRecord(type=ending, message=f"the trial ended as {ending}")
    log_path = record.log_path or str(trial.folder.log(0))
    return TrialFailure(trial.folder.hash, ending, record.type, record.message, log_path)
