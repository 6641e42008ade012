"""What a hand-out and a trial's end cost does not grow with what is done already."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from suite.plan.cell_state import CellState
from suite.plan.plan import make_plan
from suite.plan.queue import TrialQueue
from suite.plan.status import study_facts
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from tests.sweeps import chosen, decided, run_all, toy_roots, toy_sweep

__all__ = ["toy_roots"]
pytestmark = pytest.mark.usefixtures("toy_roots")


def many_cells(tmp_path: Path, **changes: Any) -> tuple[Home, TrialQueue]:
    """Twelve cells of three search trials and a seed."""
    methods = [{"name": "lora", "architecture": {"rank": rank}} for rank in range(1, 7)]
    config = toy_sweep(
        **{
            "methods": methods,
            "tasks": ["toy", "toy2"],
            "confirm": {"seeds": [1]},
            "search": {"trials": 3},
        }
        | changes
    )
    home = Home(tmp_path / "home")
    return home, TrialQueue(make_plan(config, where="toy"), home, slots=12)


def test_cells_that_are_over_or_have_nothing_to_hand_out_are_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, schedule = many_cells(tmp_path)
    asked: Counter[str] = Counter()
    ask = CellState.next_spec

    def counted(state: CellState) -> TrialSpec | None:
        asked[state.cell.key] += 1
        return ask(state)

    monkeypatch.setattr(CellState, "next_spec", counted)
    ran = run_all(schedule, home)
    assert len(ran) == 12 * 4
    assert max(asked.values()) <= 4 + 1, "a trial each, and once too often"
    assert schedule.next() is None and sum(asked.values()) <= 12 * 5


def test_what_is_decided_as_trials_end_is_what_a_new_driver_decides(tmp_path: Path) -> None:
    home, schedule = many_cells(tmp_path, methods=["lora", "adapter"], architectures="search")
    ran = run_all(schedule, home)
    facts = {key: study_facts(state) for key, state in schedule.states.items()}
    assert all(entry["ended"] for entry in facts.values())
    assert decided(schedule.plan, home) == facts
    won = {state.cell.arm.key: state.chosen for state in schedule.states.values()}
    assert chosen(schedule.plan, home) == won and True in won.values()
    assert not (home.path / "sweeps").exists(), "a schedule writes nothing beside the trials"
    assert len(ran) == len({s.hash for s in ran})
