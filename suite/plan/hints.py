"""Where a study may begin: at the best of finished studies of the same model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from suite.config.hashing import short_hash
from suite.config.space import Near, load_space, space_path
from suite.plan.curve_model import Hint
from suite.plan.plan import Plan, PlannedCell
from suite.plan.study_state import StudyState


def studies_of(plan: Plan, cells: Iterable[PlannedCell]) -> dict[str, StudyState]:
    """The study of every cell by its key, without trials.

    The architectures of a method may share one.
    """
    groups: dict[str, list[PlannedCell]] = {}
    for cell in cells:
        groups.setdefault(plan.study_of(cell), []).append(cell)
    studies: dict[str, StudyState] = {}
    for members in groups.values():
        study = StudyState(plan, tuple(members))
        for cell in members:
            studies[cell.key] = study
    return studies


def link(studies: Iterable[StudyState], others: Iterable[StudyState] = ()) -> None:
    """Let every study begin where another one of its model ended.

    Args:
        studies: Those of the sweep.
        others: Those of other sweeps.
    """
    by_model: dict[str, list[StudyState]] = {}
    # A study comes once for each of its cells, and a dict keeps the order of the plan.
    own = list({id(study): study for study in studies}.values())
    for study in (*own, *others):
        by_model.setdefault(_model_of(study), []).append(study)
    for study in own:
        study.neighbours = partial(_curves_beside, study, by_model[_model_of(study)])


def _model_of(study: StudyState) -> str:
    """What two studies must have in common for one to begin where the other ended, as a hash."""
    arm = study.cells[0].arm
    # A method of one's own has code that no method beside it shares: see `_by_other_code`.
    return short_hash(arm.model_dump(mode="json", exclude={"method", "architecture", "code"}))


def _curves_beside(study: StudyState, others: Iterable[StudyState]) -> list[tuple[str, Hint]]:
    """Names and curves of finished studies from which a study may begin, in their order.

    These are studies of the same architectures. While there are none, they are those of the method
    that the search space names as near.
    """
    near = _near(study.cells[0].arm.method)
    same: list[tuple[str, Hint]] = []
    by_rule: list[tuple[str, Hint]] = []
    for other in others:
        if other is study or other.study.ended is None or other.model is None:
            continue
        name = other.key
        if other.plan.config.name != study.plan.config.name:
            name = f"{other.plan.config.name}/{name}"
        curve = other.model.curve()
        if other.arms == study.arms:
            same.append((name, curve))
        elif near is not None and other.cells[0].arm.method == near.method:
            if _by_other_code(study, other):
                continue
            by_rule.append((name, curve.moved(near.times)))
    return same or by_rule


def _by_other_code(study: StudyState, other: StudyState) -> bool:
    """Whether another sweep's model may be of another file of the user's own.

    In one sweep two codes differ by their methods alone; over two, an attention variant or a
    backbone of the same name may have been edited between them.
    """
    if other.plan.config.name == study.plan.config.name:
        return False
    return other.cells[0].arm.code not in (None, study.cells[0].arm.code)


def _near(method: str) -> Near | None:
    """The published rule about a method's learning rate; None where its search space has none."""
    # A sweep may give range and architecture itself, and then there need not be a search space.
    if space_path(method) is None:
        return None
    return load_space(method).near
