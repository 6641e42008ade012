"""What a hand-out and a trial's end cost does not grow with what is done already."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from suite.config.sweep import TimeoutConfig
from suite.plan import studies
from suite.plan.cell_state import CellState, read_states
from suite.plan.plan import make_plan
from suite.plan.queue import Schedule
from suite.plan.resources import Layout
from suite.plan.studies import store_studies
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.tune.elastic import request
from suite.tune.group import Settings
from tests.records import make_result, make_spec
from tests.sweeps import finish, run_all, toy_roots, toy_sweep

__all__ = ["toy_roots"]
pytestmark = pytest.mark.usefixtures("toy_roots")


def many_cells(tmp_path: Path, **changes: Any) -> tuple[Home, Schedule]:
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
    return home, Schedule(make_plan(config, where="toy"), home, slots=12)


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


def test_the_end_of_a_trial_looks_at_the_study_of_its_own_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, schedule = many_cells(tmp_path)
    looked: Counter[str] = Counter()
    describe = studies._study

    def counted(state: CellState) -> dict[str, Any]:
        looked[state.cell.key] += 1
        return describe(state)

    monkeypatch.setattr(studies, "_study", counted)
    spec = schedule.next()
    assert spec is not None
    finish(home, spec, 1.0)
    schedule.ended(spec)
    assert looked == {spec.cell: 1}


def test_what_is_stored_as_trials_end_is_what_a_new_driver_would_store(tmp_path: Path) -> None:
    home, schedule = many_cells(tmp_path, methods=["lora", "adapter"], architectures="search")
    ran = run_all(schedule, home)
    kept = home.studies("toy")
    assert kept["chosen"] and all(entry["ended"] for entry in kept["studies"].values())
    home.studies_path("toy").unlink()
    store_studies(read_states(schedule.plan, home), home, "toy")
    assert home.studies("toy") == kept
    assert [p.name for p in home.studies_path("toy").parent.iterdir()] == ["toy.studies"], (
        "nothing is left beside it"
    )
    assert len(ran) == len({s.hash for s in ran})


def test_a_driver_remembers_of_ended_trials_what_decides_and_what_it_is_told_of_them_whole(
    tmp_path: Path,
) -> None:
    home, schedule = many_cells(tmp_path)
    spec = schedule.next()
    assert spec is not None
    full = make_result(spec, provenance={"versions": {"torch": "2"}})
    home.trial(spec).write_result(full)
    assert schedule.ended(spec) == full
    for states in (schedule.states, Schedule(schedule.plan, home, slots=1).states):
        kept = states[spec.cell].search[spec.number].result
        assert kept is not None and (kept.score, kept.status, kept.phases) == (
            full.score,
            full.status,
            {"train": full.phases["train"]},
        )
        assert not kept.epochs and not kept.provenance and kept.parameters is None
    assert read_states(schedule.plan, home)[spec.cell].search[spec.number].result == full


def test_what_tune_keeps_for_every_trial_is_one_for_all(tmp_path: Path) -> None:
    layout = Layout(workers=2, cpus=1.0, gpus=0.0, slots=1)
    settings = Settings(Workspace(Home(tmp_path)), layout, TimeoutConfig())
    assert copy.deepcopy({"settings": settings})["settings"] is settings
    assert request(layout, 2) is request(layout, 2) and request(layout, 3) != request(layout, 2)


def test_a_changed_copy_of_an_arm_or_a_trial_has_a_key_of_its_own() -> None:
    spec = make_spec()
    arm, key, name = spec.arm, spec.arm.key, spec.hash
    assert arm.model_copy(update={"method": "full"}).key.split(".")[2] == "full"
    assert spec.model_copy(update={"seed": 7}).hash != name
    assert (
        (arm.key, spec.hash) == (key, name)
        and spec == make_spec()
        and "key" not in arm.model_dump()
    )


def test_a_cell_that_would_be_going_alone_at_the_end_goes_before_the_warm_one(
    tmp_path: Path,
) -> None:
    """Twelve chains of four trials on eight slots, six rounds: the four cells that had to wait begin in the second, not in the fifth."""
    home, schedule = many_cells(tmp_path)
    schedule.slots = 8
    live, side_by_side, begun = [], 0, {}
    for time in range(12 * 4):
        while (spec := schedule.next()) is not None:
            side_by_side += any(other.cell == spec.cell for other in live)
            begun.setdefault(spec.cell, time)
            live.append(spec)
        ended = live.pop(0)
        finish(home, ended, 1.0)
        schedule.ended(ended)
    assert not live and schedule.next() is None
    assert side_by_side == 0, "no search had to run side by side to keep the slots busy"
    assert max(begun.values()) <= 2 * 8
