"""What the verdicts of a sweep will be able to tell apart, said before any run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from suite.errors import SuiteError
from suite.plan.definition import sweeps

if TYPE_CHECKING:
    from suite.plan.plan import Plan
    from suite.record.cells import Cell
    from suite.record.folder import Home
    from suite.stats.power import Spread

ASSUMED_DEVIATION = 1.0
"""Standard deviation of seeds, in points or in units of a perplexity, where nothing has run yet.

It is ours, a round number.
"""
Place = tuple[str, str]
"""A backbone and a task."""


def verdict_rows(plan: Plan, home: Home) -> list[dict[str, Any]]:
    """What ranks could tell apart with the sweep's seeds, one row per backbone and task.

    The spread is that of the home's finished arms of the same backbone and task, of this sweep
    where it has any. Where the home has none, it is assumed.
    """
    seeds = len(plan.config.confirm.seeds)
    arms = plan.arms_by_place()
    directions = {cell.task.name: cell.task.higher_is_better for cell in plan.cells}
    found = []
    # One seed needs no spread, and reading the home may take long.
    known = {}
    if seeds > 1:
        known = _spreads(home, plan.config.name, set(arms))
    for place, names in arms.items():
        row: dict[str, Any] = {
            "backbone": place[0],
            "task": place[1],
            "seeds": seeds,
            "arms": len(names),
            "higher_is_better": directions[place[1]],
            "shown_difference": None,
            "seeds_for_point": None,
            "basis": None,
        }
        if seeds > 1 and len(names) > 1:
            row |= _power(known.get(place), row)
        found.append(row)
    return found


def _power(known: tuple[Spread, str] | None, row: dict[str, Any]) -> dict[str, Any]:
    from suite.stats.power import Spread, power_of, unit_of
    from suite.stats.ranks import pairs_of

    spread = Spread(ASSUMED_DEVIATION**2, 0.0)
    deviation = f"{ASSUMED_DEVIATION:g} {unit_of(row['higher_is_better'])}"
    basis = f"assuming a standard deviation of {deviation} between seeds, and none by test items"
    if known is not None:
        spread, basis = known
    power = power_of(spread, seeds=row["seeds"], pairs=pairs_of(row["arms"]))
    return {
        "shown_difference": power.shown,
        "seeds_for_point": power.seeds_for_point,
        "basis": basis,
    }


def verdict_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The same for people; places of which the same is said share a line."""
    # One seed is answered without scipy, which takes a third of a second to import.
    places: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        places[_words(row)].append(f"{row['task']} on {row['backbone']}")
    # Most sweeps have said everything with one line.
    if len(places) == 1:
        return [f"verdicts   {words}" for words in places]
    return [f"verdicts   {', '.join(names)}: {words}" for words, names in places.items()]


def _words(row: dict[str, Any]) -> str:
    if row["seeds"] == 1:
        return "one seed: no rank and no p-value; give confirm.seeds five or more for them"
    if row["arms"] == 1:
        return "one arm: nothing to tell it apart from"
    from suite.stats.power import sentence_of

    said = sentence_of(row)
    return f"{said}; ranks of {row['arms']} arms, {row['basis']}"


def _spreads(home: Home, own: str, wanted: set[Place]) -> dict[Place, tuple[Spread, str]]:
    """The spread by place of finished arms that no check rejects, and where it comes from."""
    from suite.leaderboard.validity import judge
    from suite.plan.cell_state import CellStatus, read_states
    from suite.plan.definition import read_plan

    found: dict[Place, tuple[Spread, str]] = {}
    names = sweeps(home)
    # The sweep's own runs say most about it, so they come first.
    names.sort(key=lambda name: name != own)
    for name in names:
        by_place: dict[Place, list[Cell]] = defaultdict(list)
        try:
            states = read_states(read_plan(home, name), home)
        # A sweep that cannot be read says nothing about this one.
        except SuiteError:
            continue
        for state in states.values():
            cell = state.as_cell()
            # Half of the seeds, or scores that may be wrong, do not say how the seeds will vary.
            if state.status != CellStatus.DONE:
                continue
            if judge(cell.confirmed(), cell.search)["admitted"] is False:
                continue
            place = (cell.arm.backbone.name, cell.task)
            if place in wanted and place not in found:
                by_place[place].append(cell)
        for place, cells in by_place.items():
            spread = _spread(cells)
            if spread is not None:
                found[place] = (spread, f"by the spread of the finished arms of {name}")
    return found


def _spread(cells: Sequence[Cell]) -> Spread | None:
    """The spread of the arms that have several confirm runs; None where it cannot be told."""
    from suite.stats.answers import read_answers
    from suite.stats.compare import gather
    from suite.stats.power import spread_of

    answers = []
    for cell in cells:
        scored = [trial for trial in cell.confirmed() if trial.result is not None]
        if len(scored) > 1:
            # An arm whose answers are gone says nothing about the others.
            try:
                answers.append(read_answers(scored))
            except SuiteError:
                continue
    if len(answers) < 2:
        return None
    # Arms that were asked different questions have no common spread.
    try:
        return spread_of(gather(answers))
    except SuiteError:
        return None
