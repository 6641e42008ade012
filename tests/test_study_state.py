"""A study that several architectures share, batch sizes in it, and what one learns from another."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from suite.config.arm import Arm
from suite.config.sweep import SweepConfig
from suite.errors import SweepConflictError
from suite.plan.cell_state import CellStatus, read_states
from suite.plan.definition import check_definition, store_definition
from suite.plan.hints import link, studies_of
from suite.plan.plan import Plan, make_plan
from suite.plan.queue import TrialQueue
from suite.record.folder import Home
from suite.record.spec import Phase, TrialSpec
from tests.sweeps import run_all, toy_roots, toy_sweep

__all__ = ["toy_roots"]
pytestmark = pytest.mark.usefixtures("toy_roots")
FULL = {"name": "full", "learning_rate": {"low": 1e-6, "high": 3e-3}}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def planned(search: dict[str, Any], **changes: Any) -> Plan:
    shared = {"per": "method", "choose": "curve", "trials": 8}
    return make_plan(toy_sweep(search=shared | search, **changes), where="toy.yaml")


def ranks(search: dict[str, Any], **changes: Any) -> Plan:
    """LoRA's three ranks on one task."""
    return planned(search, methods=["lora"], architectures="search", **changes)


def score(spec: TrialSpec) -> float:
    """Rank 16 is two points better than the others; each is best at 2e-4."""
    gap = 6.0 * math.log10(spec.learning_rate / 2e-4) ** 2
    better = 2.0 if spec.arm.architecture.get("rank") == 16 else 0.0
    larger = 1.0 if spec.training.batch_size == 16 else 0.0
    return 80.0 - gap + better + larger


def test_architectures_share_the_trials_of_their_method(home: Home) -> None:
    plan = ranks({})
    ran = run_all(TrialQueue(plan, home, slots=1), home, score=score)
    search = [spec for spec in ran if spec.phase is Phase.SEARCH]
    assert [spec.number for spec in search] == list(range(8))
    tried = [spec.arm.architecture["rank"] for spec in search]
    assert sorted(tried[:3]) == [8, 16, 32], "each once, before the model chooses"
    confirmed = {
        (spec.arm.architecture["rank"], spec.learning_rate)
        for spec in ran
        if spec.phase is Phase.CONFIRM
    }
    ((rank, rate),) = confirmed
    assert rank == 16
    assert abs(math.log10(rate / 2e-4)) < 0.3
    assert plan.total_trials == len(ran) == 10
    states = read_states(plan, home).values()
    assert sum(state.total for state in states) == 10
    assert sorted(state.status for state in states) == [
        CellStatus.DONE,
        CellStatus.NOT_CHOSEN,
        CellStatus.NOT_CHOSEN,
    ]


def test_a_shared_study_that_is_cut_proposes_what_an_uninterrupted_one_does(
    home: Home, tmp_path: Path
) -> None:
    plan = ranks({"transfer": True}, tasks=["toy", "toy2"])
    whole = run_all(TrialQueue(plan, home, slots=1), home, score=score)
    other = Home(tmp_path / "other")
    cut = []
    while True:
        # A new driver each time, which knows no more than the folders say.
        ran = run_all(TrialQueue(plan, other, slots=1), other, score=score, at_most=1)
        if not ran:
            break
        cut += ran
    # Which task comes first in the end depends on which engine is warm.
    assert {spec.hash for spec in cut} == {spec.hash for spec in whole}


def test_a_study_begins_where_that_of_another_task_ended(home: Home) -> None:
    plan = planned({"transfer": True}, methods=[FULL], tasks=["toy", "toy2"])
    ran = run_all(TrialQueue(plan, home, slots=1), home, score=score)
    firsts = [spec for spec in ran if spec.phase is Phase.SEARCH and spec.number == 0]
    sources = [home.trial(spec).proposal()["from"] for spec in firsts]
    assert sources == ["start", "hint"]
    told = home.trial(firsts[1]).proposal()["hint"]
    assert told["studies"] == [firsts[0].cell]
    assert abs(math.log10(firsts[1].learning_rate / 2e-4)) < 0.3
    off = Home(home.path / "off")
    alone = planned({}, methods=[FULL], tasks=["toy", "toy2"])
    ran = run_all(TrialQueue(alone, off, slots=1), off, score=score)
    rates = {spec.learning_rate for spec in ran if spec.number == 0 and spec.phase is Phase.SEARCH}
    assert len(rates) == 1, "both begin in the middle of the range"


@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_trial_whose_folder_was_removed_is_proposed_again_as_it_was(
    home: Home, number: int
) -> None:
    plan = planned({"transfer": True}, methods=[FULL], tasks=["toy", "toy2"])
    ran = run_all(TrialQueue(plan, home, slots=1), home, score=score)
    # The study that began where the other one had ended.
    hinted = [spec for spec in ran if "hint" in home.trial(spec).proposal()]
    (removed,) = [spec for spec in hinted if spec.number == number]
    told = home.trial(removed).proposal()
    shutil.rmtree(home.trial(removed).path)
    again = run_all(TrialQueue(plan, home, slots=1), home, score=score)
    assert [spec.hash for spec in again] == [removed.hash]
    assert home.trial(removed).proposal() == told


@pytest.mark.parametrize(
    "hint",
    [
        *(7, {"log_rates": [-4.0]}, {"log_rates": [-4.0, "x"], "values": [0.0, 1.0]}),
        {"log_rates": [-4.0, 10**400], "values": [0.0, 1.0]},
    ],
)
def test_a_damaged_record_of_where_a_study_began_says_nothing(home: Home, hint: object) -> None:
    plan = planned({"transfer": True}, methods=[FULL], tasks=["toy"])
    ran = run_all(TrialQueue(plan, home, slots=1), home, score=score, at_most=2)
    proposal = home.trial(ran[0]).path / "proposal.json"
    proposal.write_text(json.dumps({"from": "hint", "hint": hint}))
    (third,) = run_all(TrialQueue(plan, home, slots=1), home, score=score, at_most=1)
    assert third.number == 2


def test_a_study_may_begin_where_one_of_another_sweep_ended(home: Home) -> None:
    def first(name: str, transfer: object) -> TrialSpec:
        plan = planned({"transfer": transfer}, methods=[FULL], name=name)
        store_definition(plan, home)
        ran = run_all(TrialQueue(plan, home, slots=1), home, score=score)
        return next(spec for spec in ran if spec.phase is Phase.SEARCH)

    first("one", True)
    assert home.trial(first("two", True)).proposal() == {"from": "start"}
    begun = first("three", "home")
    told = home.trial(begun).proposal()
    # Both others have the study, and each is named with its sweep.
    assert [key.split("/")[0] for key in told["hint"]["studies"]] == ["one", "two"]
    assert abs(math.log10(begun.learning_rate / 2e-4)) < 0.3


def test_a_study_that_goes_on_keeps_confirm_runs_that_are_nearly_the_best(home: Home) -> None:
    plan = planned({"trials": 6}, methods=[FULL])
    first = run_all(TrialQueue(plan, home, slots=1), home, score=score)
    confirmed = {spec.hash for spec in first if spec.phase is Phase.CONFIRM}
    longer = planned({"trials": 9}, methods=[FULL])
    more = run_all(TrialQueue(longer, home, slots=1), home, score=score)
    assert [spec.phase for spec in more] == [Phase.SEARCH] * 3
    (state,) = read_states(longer, home).values()
    assert {trial.spec.hash for trial in state.confirmed} == confirmed

    def elsewhere(spec: TrialSpec) -> float:
        return 95.0 - 6.0 * math.log10(spec.learning_rate / 2e-6) ** 2

    longest = planned({"trials": 14}, methods=[FULL])
    moved = run_all(TrialQueue(longest, home, slots=1), home, score=elsewhere)
    assert any(spec.phase is Phase.CONFIRM for spec in moved), "another rate is clearly better"


def test_a_rate_beyond_a_range_that_became_smaller_again_is_not_confirmed(home: Home) -> None:
    def rises(spec: TrialSpec) -> float:
        return 80.0 - math.log10(spec.learning_rate / 2e-2) ** 2

    for extensions, most in ((2, 3e-2), (0, 3e-3)):
        search = {"trials": 6, "edge_guard": {"extensions": extensions}}
        plan = planned(search, methods=[FULL])
        run_all(TrialQueue(plan, home, slots=1), home, score=rises)
        (state,) = read_states(plan, home).values()
        assert state.chosen_setting is not None
        assert most / 10 < state.chosen_setting.learning_rate <= most


def test_architectures_with_trials_of_their_own_do_not_become_one_search(home: Home) -> None:
    """Each had the whole budget, so the method would have it several times."""
    plan = planned({}, methods=["lora"], architectures="all")
    store_definition(plan, home)
    check_definition(ranks({}), home)
    run_all(TrialQueue(plan, home, slots=1), home, score=score, at_most=1)
    with pytest.raises(SweepConflictError, match="architectures: all -> search"):
        check_definition(ranks({}), home)


def test_an_extension_of_a_grid_over_several_choices_stays_in_the_new_part(home: Home) -> None:
    search = {
        "sampler": "grid",
        "choose": "best",
        "edge_guard": {"extensions": 1, "trials": 4},
    }
    plan = planned(search, methods=[FULL], training={"epochs": 3, "batch_size": [8, 16]})
    ran = run_all(
        TrialQueue(plan, home, slots=1), home, score=lambda spec: math.log10(spec.learning_rate)
    )
    (state,) = read_states(plan, home).values()
    opened = state.study.opened
    assert opened is not None
    later = [s for s in ran if s.phase is Phase.SEARCH and s.number >= opened.first]
    assert len(later) == 4 and min(spec.learning_rate for spec in later) > 3e-3


def with_code(plan: Plan, method: str, code: str | None) -> Plan:
    """The plan as it is where this method's arms have code of the user's own."""
    cells = []
    for cell in plan.cells:
        arm = cell.arm
        if arm.method == method:
            arm = Arm.model_validate(arm.model_dump() | {"code": code})
        cells.append(replace(cell, arm=arm))
    return replace(plan, cells=tuple(cells))


@pytest.mark.parametrize(
    ("code", "begins"), [(None, True), ("1" * 16, True), ("2" * 16, False)], ids=str
)
def test_code_that_was_edited_between_two_sweeps_gives_no_hint(
    home: Home, code: str | None, begins: bool
) -> None:
    before = with_code(planned({}, methods=[FULL]), "full", code)
    run_all(TrialQueue(before, home, slots=1), home, score=score)
    (ended,) = read_states(before, home).values()
    now = with_code(planned({}, methods=["lora"]), "lora", "1" * 16)
    now = replace(now, config=now.config.model_copy(update={"name": "another"}))
    (study,) = {id(study): study for study in studies_of(now, now.cells).values()}.values()
    link([study], [ended.searching])
    assert [name for name, _ in study.neighbours()] == [f"toy/{before.cells[0].key}"] * begins


@pytest.mark.parametrize("code", [None, "1" * 16], ids=["shipped", "own code"])
def test_lora_begins_at_ten_times_the_rate_of_full_while_no_study_of_lora_has_ended(
    home: Home, code: str | None
) -> None:
    plan = with_code(planned({"transfer": True}, methods=[FULL, "lora"]), "lora", code)

    def ten_times(spec: TrialSpec) -> float:
        best = 2e-5 if spec.arm.method == "full" else 2e-4
        return 80.0 - 6.0 * math.log10(spec.learning_rate / best) ** 2

    ran = run_all(TrialQueue(plan, home, slots=1), home, score=ten_times)
    search = [spec for spec in ran if spec.phase is Phase.SEARCH and spec.number == 0]
    first = {spec.arm.method: spec for spec in search}
    told = home.trial(first["lora"]).proposal()
    assert told["hint"]["studies"] == [first["full"].cell]
    assert abs(math.log10(first["lora"].learning_rate / 2e-4)) < 0.35


def test_a_batch_size_is_searched_and_confirmed(home: Home) -> None:
    plan = planned({}, methods=[FULL], training={"epochs": 3, "batch_size": [8, 16]})
    assert plan.config.training.batch_size == 16, "what fits is planned for the largest"
    ran = run_all(TrialQueue(plan, home, slots=1), home, score=score)
    tried = {spec.training.batch_size for spec in ran if spec.phase is Phase.SEARCH}
    confirmed = {spec.training.batch_size for spec in ran if spec.phase is Phase.CONFIRM}
    assert (tried, confirmed) == ({8, 16}, {16})
    (state,) = read_states(plan, home).values()
    assert state.status is CellStatus.DONE
    assert state.chosen_setting is not None and state.chosen_setting.batch_size == 16


@pytest.mark.parametrize("sizes", [[], [8], [8, 8], [8, "16"], [8, 0], [True, 8]])
def test_batch_sizes_that_are_none_to_choose_from_are_refused(sizes: list[Any]) -> None:
    with pytest.raises(ValidationError, match=r"training\.batch_size: got .* expected one number"):
        toy_sweep(training={"epochs": 3, "batch_size": sizes})


@pytest.mark.parametrize("search", ["gp", [1], "", 0])
def test_a_search_that_is_no_mapping_is_refused_beside_batch_sizes(search: Any) -> None:
    given = toy_sweep().model_dump() | {"search": search}
    with pytest.raises(ValidationError, match=r"search\n +Input should be a valid dictionary"):
        SweepConfig.model_validate(given | {"training": {"batch_size": [8, 16]}})


def test_a_study_whose_best_may_lie_beyond_an_end_tries_the_end_first(home: Home) -> None:
    beyond = {"name": "full", "learning_rate": {"low": 1e-6, "high": 3e-5}}
    plan = planned({"trials": 4, "edge_guard": {"extensions": 1}}, methods=[beyond])
    ran = run_all(TrialQueue(plan, home, slots=1), home, score=score)
    search = [spec for spec in ran if spec.phase is Phase.SEARCH]
    assert max(spec.learning_rate for spec in search) > 3e-5
    first_beyond = min(spec.number for spec in search if spec.learning_rate > 3e-5)
    assert any(spec.learning_rate == 3e-5 for spec in search if spec.number < first_beyond)
    confirmed = [spec.learning_rate for spec in ran if spec.phase is Phase.CONFIRM]
    assert confirmed[0] > 3e-5


def test_with_a_fixed_rate_lanes_try_every_choice_once(home: Home) -> None:
    read = {"name": "read", "learning_rate": 1e-3}
    training = {"epochs": 3, "batch_size": [2, 4, 8, 16, 32]}
    plan = planned({"lanes": 4}, methods=[read], training=training)
    ran = run_all(TrialQueue(plan, home, slots=1), home, score=score)
    tried = [spec.training.batch_size for spec in ran if spec.phase is Phase.SEARCH]
    assert tried == [2, 4, 8, 16, 32]


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_rounds_of_lanes_take_the_choices_in_turn(home: Home, sampler: str) -> None:
    search = {"sampler": sampler, "lanes": 4, "trials": 16, "startup_trials": 4}
    plan = planned(search, methods=["read"], training={"epochs": 3, "batch_size": [8, 16]})
    ran = run_all(TrialQueue(plan, home, slots=1), home, score=score)
    tried = [spec.training.batch_size for spec in ran if spec.phase is Phase.SEARCH]
    assert tried == [8, 16] * 2 + [8] * 4 + [16] * 4 + [8] * 4
