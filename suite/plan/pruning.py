"""Decide by Optuna's pruners which search trials end between two epochs.

The decision is a pure function of the study's training curves.

asha: successive halving, Li et al., arXiv 1810.05934, with rungs at 1, 4, 16, ... epochs of which
    the best quarter goes on.
median: a trial whose best epoch so far is below the median of the completed trials at the same
    epoch ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import optuna
from optuna.pruners import BasePruner, MedianPruner, SuccessiveHalvingPruner
from optuna.trial import FrozenTrial, TrialState, create_trial

from suite.config.sweep import PrunerName
from suite.config.task import TaskConfig
from suite.plan.optuna_trials import quiet
from suite.record.folder import Home, TrialFolder
from suite.record.result import EpochRecord
from suite.record.spec import TrialSpec


@dataclass(frozen=True, slots=True)
class Pruning:
    """How a sweep prunes; the median is asked after `startup_trials` completed trials."""

    pruner: PrunerName
    startup_trials: int


def is_weak(
    spec: TrialSpec, epochs: int, peers: Sequence[str], home: Home, pruning: Pruning
) -> bool:
    """Whether a search trial ends after the epochs that it has committed.

    Args:
        spec: The trial.
        epochs: Number of epochs that it has committed.
        peers: Hashes of the study's earlier trials, in number order.
        home: Where their curves are.
    """
    own: dict[int, float] = {}
    for epoch, value in _curve(home.trial(spec), spec.task).items():
        # The file may be ahead: a rank writes it while the driver asks.
        if epoch <= epochs:
            own[epoch] = value
    if not own:
        return False
    curves = []
    for peer in peers:
        folder = home.trial(peer)
        # A median is taken over trials that have a score; halving counts those that are on their
        # way or were pruned as well. One that failed would hold the place of a trial that learns.
        if _is_completed(folder) or (pruning.pruner != "median" and not _has_failed(folder)):
            curves.append(_curve(folder, spec.task))
    with quiet():
        if pruning.pruner == "median":
            return _weak_by_median(curves, own, pruning.startup_trials)
        return _weak_by_halving([*curves, own])


def _weak_by_median(
    completed: Sequence[Mapping[int, float]], own: Mapping[int, float], startup_trials: int
) -> bool:
    study = optuna.create_study(direction="maximize")
    for curve in completed:
        # A folder may have a result and no curve, of which there is no best epoch.
        if curve:
            trial = create_trial(value=max(curve.values()), intermediate_values=dict(curve))
            study.add_trial(trial)
    # Without a completed trial there is no median.
    return _ask(MedianPruner(n_startup_trials=max(1, startup_trials)), study, own)


def _weak_by_halving(curves: Sequence[Mapping[int, float]]) -> bool:
    """Ask about every trial in turn, because Optuna notes a trial's rungs only when it is asked."""
    study = optuna.create_study(direction="maximize")
    weak = False
    for curve in curves:
        # A new pruner each time is enough: Optuna keeps the rungs in the trials.
        weak = _ask(SuccessiveHalvingPruner(min_resource=1, reduction_factor=4), study, curve)
    return weak


def _ask(pruner: BasePruner, study: optuna.Study, curve: Mapping[int, float]) -> bool:
    """Ask the pruner after every epoch of a curve, and return its last answer."""
    trial = study.ask()
    weak = False
    for epoch, value in curve.items():
        trial.report(value, epoch)
        weak = pruner.prune(study, _frozen(study, trial.number))
    return weak


def _frozen(study: optuna.Study, number: int) -> FrozenTrial:
    # Every trial of this study has one of the two states, so its number is its place.
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.COMPLETE))[
        number
    ]


def _curve(folder: TrialFolder, task: TaskConfig) -> dict[int, float]:
    records: list[EpochRecord] = folder.epochs()
    return {record.epoch: task.utility(record.validation_score) for record in records}


def _has_failed(folder: TrialFolder) -> bool:
    result = folder.result()
    return result is not None and result.status.is_failure


def _is_completed(folder: TrialFolder) -> bool:
    result = folder.result()
    return result is not None and result.status.has_score
