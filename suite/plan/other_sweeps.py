"""The studies of the other sweeps of a home."""

from __future__ import annotations

from suite.plan.definition import known_plan, sweeps
from suite.plan.hints import studies_of
from suite.plan.plan import Plan
from suite.plan.study_state import StudyState
from suite.record.cells import read_cells
from suite.record.folder import Home


def studies_elsewhere(plan: Plan, home: Home) -> list[StudyState]:
    """Studies of other sweeps of a home in which a plan's studies may begin; by name of the sweep.

    Empty unless the plan has `search.transfer: home`, because to read them takes time.

    Raises:
        ConfigError: Another version of the suite wrote the definition of a sweep.
    """
    studies: list[StudyState] = []
    if plan.config.search.transfer != "home":
        return studies
    for name in sweeps(home):
        if name == plan.config.name:
            continue
        other = known_plan(home, name)
        # A sweep that another driver is just storing has nothing to tell.
        if other is not None:
            studies += _with_trials(other, home)
    return studies


def _with_trials(plan: Plan, home: Home) -> list[StudyState]:
    studies = studies_of(plan, plan.cells)
    found = read_cells(home, plan.config.name)
    for cell in plan.cells:
        trials = found.get(cell.key)
        if trials is None:
            continue
        for trial in trials.search:
            if plan.includes(cell, trial):
                studies[cell.key].add(trial.outcome())
    return list({id(study): study for study in studies.values()}.values())
