"""The search phase: contests of architectures, the edge guard, the stop rule; without Ray, on trial folders alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from suite.cli.leaderboard import columns, with_test_runs
from suite.cli.status import _show_studies
from suite.config.space import LearningRateRange
from suite.config.sweep import SearchConfig
from suite.leaderboard.table import plain
from suite.plan.cell_state import CellStatus, read_states
from suite.plan.definition import check_definition, store_definition
from suite.plan.plan import Plan, make_plan
from suite.plan.queue import TrialQueue
from suite.plan.status import CellReport, joined, status
from suite.plan.study_state import StudyState
from suite.record.cells import Trial
from suite.record.folder import Home
from suite.record.result import Status
from suite.record.spec import Phase, TrialSpec
from tests.commands import Suite, suite
from tests.fake_trainer import score_of
from tests.records import cell_rows, make_result, write_trial
from tests.sweeps import chosen, decided, finish, run_all, toy_roots, toy_sweep
from tests.tiny import tiny_choice

__all__ = ["suite", "toy_roots"]
pytestmark = pytest.mark.usefixtures("toy_roots")
LOW = 1e-4
HIGH = 1e-3
Score = Callable[[TrialSpec], float | None]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def planned(**changes: Any) -> Plan:
    return make_plan(toy_sweep(**changes), where="toy.yaml")


def contest(**changes: Any) -> Plan:
    """LoRA's three ranks on two tasks, two trials each."""
    values: dict[str, Any] = {
        "methods": ["lora"],
        "tasks": ["toy", "toy2"],
        "architectures": "search",
        "search": {"trials": 2},
    }
    return planned(**values | changes)


def guarded(high: float = HIGH, **search: Any) -> Plan:
    """One cell in one decade, with the edge guard."""
    choice = {"name": "full", "learning_rate": {"low": LOW, "high": high}}
    budget = {"trials": 4, "startup_trials": 2, "edge_guard": {"extensions": 2}}
    return planned(methods=[choice], search=budget | search, confirm={"seeds": [1]})


def by_rank(scores: Mapping[int, Mapping[str, float | None]]) -> Score:
    return lambda spec: scores[spec.arm.architecture["rank"]][spec.task.name]


def rising(spec: TrialSpec) -> float:
    """Better and better to the upper end of any range."""
    return 90.0 + 5.0 * math.log10(spec.learning_rate)


def peak(at: float) -> Callable[[TrialSpec], float]:
    return lambda spec: 90.0 - 5.0 * math.log10(spec.learning_rate / at) ** 2


def by_lower_rank(spec: TrialSpec) -> float:
    return score_of(spec, 3) - float(spec.arm.architecture["rank"])


def study_of(plan: Plan, home: Home) -> dict[str, Any]:
    """What is decided about the one study of a plan."""
    (found,) = decided(plan, home).values()
    return found


# ---- contests ----------------------------------------------------------------------------------------------------------


def test_the_architecture_with_the_best_mean_over_tasks_wins_for_all_of_them(home: Home) -> None:
    """Rank 16 is best on neither task and best on average."""
    plan = contest()
    scores = {
        32: {"toy": 90.0, "toy2": 60.0},
        16: {"toy": 80.0, "toy2": 80.0},
        8: {"toy": 60.0, "toy2": 90.0},
    }
    ran = run_all(TrialQueue(plan, home, slots=1), home, score=by_rank(scores))
    assert [s.arm.architecture["rank"] for s in ran if s.phase is Phase.CONFIRM] == [16] * 4
    assert len([s for s in ran if s.phase is Phase.SEARCH]) == 3 * 2 * 2, (
        "every choice has the whole budget on every task"
    )
    assert len(ran) == plan.total_trials == 16
    states = read_states(plan, home)
    expected = {32: CellStatus.NOT_CHOSEN, 16: CellStatus.DONE, 8: CellStatus.NOT_CHOSEN}
    assert {s.cell.arm.architecture["rank"]: s.status for s in states.values()} == expected
    won = chosen(plan, home)
    assert won.pop(states[ran[-1].cell].cell.arm.key) is True
    assert list(won.values()) == [False, False]


@pytest.mark.parametrize(
    ("scores", "winner"),
    [
        (
            {
                32: {"toy": 70.0, "toy2": 70.0},
                16: {"toy": 60.0, "toy2": 80.0},
                8: {"toy": 80.0, "toy2": 60.0},
            },
            32,
        ),
        (
            {
                32: {"toy": 99.0, "toy2": None},
                16: {"toy": 50.0, "toy2": 50.0},
                8: {"toy": None, "toy2": 99.0},
            },
            16,
        ),
        (
            {
                32: {"toy": None, "toy2": None},
                16: {"toy": None, "toy2": None},
                8: {"toy": 10.0, "toy2": None},
            },
            8,
        ),
    ],
    ids=[
        "of equals the first",
        "a complete one beats a better one without a score",
        "what can be confirmed is",
    ],
)
def test_ties_and_missing_scores_in_a_contest(
    home: Home, scores: dict[int, dict[str, float | None]], winner: int
) -> None:
    run_all(TrialQueue(contest(), home, slots=1), home, score=by_rank(scores))
    confirmed = {
        s.cell.arm.architecture["rank"] for s in read_states(contest(), home).values() if s.chosen
    }
    assert confirmed == {winner}


SHARED = {"trials": 9, "startup_trials": 3, "per": "method", "choose": "curve"}


def test_points_of_a_contest_weigh_alike_on_tasks_of_different_scales() -> None:
    windows = {"epochs": 3, "batch_size": 8, "stride": 64}
    gpt2 = [tiny_choice("gpt2")]
    plan = planned(methods=["full"], tasks=["toy", "ptb"], backbones=gpt2, training=windows)

    def quality(task: str, score: float) -> float:
        (cell,) = [cell for cell in plan.cells if cell.task.name == task]
        spec = plan.search_spec(cell, 0, 1e-4)
        found = StudyState(plan, (cell,))
        found.add(Trial(Home(Path("none")).trial(spec), spec, make_result(spec, score=score)))
        told = found.quality(cell)
        assert told is not None
        return told

    assert quality("toy", 80.0) == 80.0
    better = quality("ptb", 20.0 / 1.01) - quality("ptb", 20.0)
    assert better == pytest.approx(1.0, abs=0.01), "one percent of a perplexity is a point"


def test_at_the_start_each_trial_has_another_architecture_and_another_batch_size(
    home: Home,
) -> None:
    training = {"epochs": 3, "batch_size": [8, 16]}
    plan = contest(tasks=["toy"], search=SHARED, training=training)
    queue = TrialQueue(plan, home, slots=1)
    begun = []
    for _ in range(3):
        spec = queue.next()
        assert spec is not None
        begun.append((spec.arm.architecture["rank"], spec.training.batch_size))
        finish(home, spec, 80.0)
        queue.ended(spec)
    assert begun == [(32, 8), (16, 16), (8, 8)]


def test_runs_that_all_failed_do_not_hold_a_choice(home: Home) -> None:
    plan = planned(methods=["full"], search={"trials": 4, "choose": "curve"})
    queue = TrialQueue(plan, home, slots=1)
    run_all(queue, home, score=peak(3e-4), at_most=4)
    (state,) = read_states(plan, home).values()
    cell = state.cell
    assert state.chosen_setting is not None
    near = plan.confirm_spec(cell, state.chosen_setting.learning_rate * 1.01, 1)
    home.trial(near).write_spec(near)
    for score in (80.0, None):
        finish(home, near, score, Status.COMPLETED if score else Status.DIVERGED)
        (state,) = read_states(plan, home).values()
        assert state.chosen_setting is not None
        stays = state.chosen_setting.learning_rate == near.learning_rate
        assert stays == (score is not None)


def test_what_was_chosen_from_the_same_trials_stays_chosen_in_another_version(home: Home) -> None:
    """A version that would choose otherwise must not run a finished cell again."""
    plan = planned(methods=["full"], search={"trials": 4, "choose": "curve"})
    run_all(TrialQueue(plan, home, slots=1), home, score=peak(3e-4), at_most=4)
    (state,) = read_states(plan, home).values()
    assert state.chosen_setting is not None
    assert state.chosen_setting.learning_rate == pytest.approx(3e-4, rel=0.2)
    elsewhere = plan.confirm_spec(state.cell, 1e-4, 1)
    for started, stays in ((5.0, True), (0.5, False)):
        made = make_result(elsewhere, score=70.0, started_at=started, finished_at=9.0)
        write_trial(home, elsewhere, made)
        (state,) = read_states(plan, home).values()
        assert state.chosen_setting is not None
        chosen = state.chosen_setting.learning_rate
        assert (chosen == 1e-4) is stays, "the searches' trials ended at 1 s"


def test_what_is_said_of_one_architecture_names_it(home: Home, suite: Suite) -> None:
    store_definition(contest(tasks=["toy"]), home)
    run_all(TrialQueue(contest(tasks=["toy"]), home, slots=1), home)
    store_definition(contest(tasks=["toy"], search={"trials": 1}), home)
    _, out, _ = suite("status", "--home", home.path)
    said = [line for line in out.splitlines() if "search trials left out: 1 (beyond" in line]
    assert len(set(said)) == 3 and all("rank=" in line for line in said)


def test_what_the_study_of_one_architecture_says_names_it(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    store_definition(contest(tasks=["toy"]), home)
    reports = status(home, "toy")
    for extensions, said in (((1, 1, 1), [("", 1)]), ((1, 2, 0), [("rank", 1), ("rank", 2)])):
        _show_studies(list(map(extended_by, reports, extensions)))
        lines = capsys.readouterr().out.splitlines()[2:]
        assert len(lines) == len(said)
        for line, (named, decades) in zip(lines, said, strict=True):
            assert named in line and ("rank" in line) == bool(named)
            assert f"range + {decades} decade" in line


def extended_by(report: CellReport, decades: int) -> CellReport:
    return replace(report, extensions=decades)


def test_a_contest_waits_for_its_last_study_and_says_so(home: Home) -> None:
    plan = contest()
    store_definition(plan, home)
    schedule = TrialQueue(plan, home, slots=1)
    run_all(schedule, home, at_most=11)
    report = status(home, "toy")
    assert [cell.status for cell in report] == [CellStatus.WAITING] * 5 + [CellStatus.SEARCHING]
    assert "waits for 1 more studies of its architectures" in report[0].notes
    assert (
        sum(cell.total for cell in report) == plan.total_trials
        and sum(cell.left for cell in report) == 5
    )
    assert set(chosen(plan, home).values()) == {None}
    run_all(schedule, home)
    report = status(home, "toy")
    assert (
        sum(cell.done for cell in report) == sum(cell.total for cell in report) == plan.total_trials
    )
    assert all(cell.left == 0 and not cell.failures for cell in report)


def test_methods_with_one_choice_are_confirmed_at_once(home: Home) -> None:
    plan = contest(methods=["full", {"name": "lora", "architecture": {"rank": 4}}])
    assert len(plan.cells) == 4 and all(cell.contest is None for cell in plan.cells)
    ran = run_all(TrialQueue(plan, home, slots=1), home)
    assert [s.phase for s in ran[:4]] == [Phase.SEARCH, Phase.SEARCH, Phase.CONFIRM, Phase.CONFIRM]


def test_backbones_attention_and_methods_have_contests_of_their_own() -> None:
    plan = contest(methods=["lora", "adapter"], attention=["pretrained", "mqa"])
    groups: dict[str | None, set[tuple[str, str]]] = {}
    for cell in plan.cells:
        groups.setdefault(cell.contest, set()).add((cell.arm.attention.name, cell.arm.method))
    assert len(groups) == 4 and all(len(members) == 1 for members in groups.values())


def test_first_and_all_architectures_are_no_contest() -> None:
    first = contest(architectures="first")
    every = contest(architectures="all")
    assert (len(first.cells), len(every.cells), first.total_trials, every.total_trials) == (
        2,
        6,
        8,
        24,
    )
    assert {cell.contest for cell in (*first.cells, *every.cells)} == {None}


def test_the_leaderboard_marks_architectures_that_were_not_chosen(home: Home) -> None:
    plan = contest(tasks=["toy"])
    store_definition(plan, home)
    run_all(TrialQueue(plan, home, slots=1), home)
    rows = cell_rows(home, "toy")
    assert sorted(row.status for row in rows) == ["done", "not chosen", "not chosen"]


def test_a_table_has_one_line_for_the_architectures_of_a_contest(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = contest(tasks=["toy"])
    store_definition(plan, home)
    schedule = TrialQueue(plan, home, slots=1)
    run_all(schedule, home, at_most=2)
    [line] = joined(status(home, "toy"))
    assert (line.status, line.done, line.total) == (CellStatus.SEARCHING, 2, plan.total_trials)
    assert line.left == plan.total_trials - 2
    run_all(schedule, home)
    [line] = joined(status(home, "toy"))
    assert (line.status, line.left, line.chosen) == (CellStatus.DONE, 0, True)
    [winner] = [row.architecture for row in cell_rows(home, "toy") if row.status == "done"]
    assert line.architecture == winner

    rows = plain(cell_rows(home, "toy"))
    shown = with_test_runs(rows)
    assert [row["architecture"] for row in shown] == [winner]
    assert capsys.readouterr().err == "2 architectures lost their contests; --all shows them\n"
    # The one that is left still says which it is.
    heads = {column.head for column in columns(shown, among=rows)}
    assert "architecture" in heads and "machine" not in heads
    for row, machine in zip(rows, ("EPYC", "Xeon"), strict=False):
        row["machine"] = machine
    assert "machine" in {column.head for column in columns(rows, among=rows)}
    # The runs of one row were on both.
    one = {**rows[0], "machine": "EPYC+Xeon"}
    assert "machine" in {column.head for column in columns([one], among=rows)}


# ---- edge guard --------------------------------------------------------------------------------------------------------


def test_a_best_learning_rate_at_the_edge_extends_the_range_at_most_twice(home: Home) -> None:
    plan = guarded()
    ran = [
        s
        for s in run_all(TrialQueue(plan, home, slots=1), home, score=rising)
        if s.phase is Phase.SEARCH
    ]
    rates = {s.number: s.learning_rate for s in ran}
    assert len(ran) == 4 + 2 + 2
    assert HIGH < rates[4] < 10 * HIGH < rates[6] < 100 * HIGH, (
        "the first of each extension lies in the new decade"
    )
    assert max(rates[n] for n in range(4)) <= HIGH
    entry = study_of(plan, home)
    assert (entry["ended"], entry["budget"], entry["trials"], entry["saved_trials"]) == (
        "budget",
        8,
        8,
        0,
    )
    assert (entry["extensions"], entry["low"], entry["high"], entry["edge"]) == (
        2,
        LOW,
        100 * HIGH,
        True,
    )


def test_a_best_learning_rate_inside_needs_no_extension(home: Home) -> None:
    run_all(TrialQueue(guarded(), home, slots=1), home, score=peak(3e-4))
    entry = study_of(guarded(), home)
    assert (entry["extensions"], entry["edge"], entry["budget"], entry["high"]) == (
        0,
        False,
        4,
        HIGH,
    )


def test_an_extension_that_finds_the_best_inside_is_the_last(home: Home) -> None:
    ran = run_all(TrialQueue(guarded(trials=5), home, slots=1), home, score=peak(3e-5))
    entry = study_of(guarded(trials=5), home)
    assert (entry["extensions"], entry["edge"], entry["low"], entry["high"]) == (
        1,
        False,
        LOW / 10,
        HIGH,
    )
    assert (
        ran[5].learning_rate < LOW
        and ran[-1].phase is Phase.CONFIRM
        and ran[-1].learning_rate < LOW
    )


def test_without_the_guard_the_row_still_says_edge(home: Home) -> None:
    plan = guarded(edge_guard={"extensions": 0})
    store_definition(plan, home)
    run_all(TrialQueue(plan, home, slots=1), home, score=rising)
    entry = study_of(plan, home)
    assert (entry["extensions"], entry["budget"], entry["edge"]) == (0, 4, True)
    (row,) = cell_rows(home, "toy")
    assert row.edge is True


def test_the_leaderboard_counts_the_extra_trials_and_the_longer_range(home: Home) -> None:
    plan = guarded()
    store_definition(plan, home)
    run_all(TrialQueue(plan, home, slots=1), home, score=peak(2e-3))
    (row,) = cell_rows(home, "toy")
    assert (
        (row.search_trials, row.status, row.edge) == (6, "done", False)
        and row.learning_rate is not None
        and row.learning_rate > HIGH
    )


def test_no_learning_rate_is_above_ten(home: Home) -> None:
    ran = run_all(TrialQueue(guarded(high=5.0), home, slots=1), home, score=rising)
    entry = study_of(guarded(high=5.0), home)
    assert max(s.learning_rate for s in ran) <= 10.0 == entry["high"] and entry["edge"]
    assert entry["extensions"] == 1, "there was no room for another"


def test_a_fixed_learning_rate_has_no_edge(home: Home) -> None:
    plan = planned(
        methods=[{"name": "full", "learning_rate": 0.003}],
        search={"trials": 4, "edge_guard": {"extensions": 2}},
    )
    ran = run_all(TrialQueue(plan, home, slots=1), home)
    assert [s.phase for s in ran] == [Phase.CONFIRM, Phase.CONFIRM]
    assert not study_of(plan, home)["edge"]


@pytest.mark.parametrize("sampler", ["gp", "tpe", "random", "grid"])
def test_every_sampler_goes_on_in_the_longer_range_and_repeats_nothing(
    home: Home, sampler: str
) -> None:
    ran = run_all(
        TrialQueue(guarded(sampler=sampler, trials=8), home, slots=1),
        home,
        score=rising,
        at_most=12,
    )
    rates = [s.learning_rate for s in ran if s.phase is Phase.SEARCH]
    assert len(set(rates)) == len(rates)
    if len(rates) > 8:  # a random search may not have come near the end
        assert HIGH < rates[8] < 10 * HIGH
    assert sampler == "random" or len(rates) > 8


def test_a_budget_that_is_raised_after_an_extension_takes_its_trials_in(home: Home) -> None:
    run_all(TrialQueue(guarded(), home, slots=1), home, score=rising)
    plan = guarded(trials=6)
    run_all(TrialQueue(plan, home, slots=1), home, score=rising)
    (state,) = read_states(plan, home).values()
    assert (
        state.status is CellStatus.DONE and state.study.budget == len(state.searched) == 6 + 2 + 2
    )


# ---- stop rule -----------------------------------------------------------------------------------------------------------


def test_a_flat_curve_ends_early_and_says_what_it_saved(home: Home) -> None:
    plan = guarded(trials=12, stop={"tolerance": 0.5}, edge_guard={"extensions": 0})
    store_definition(plan, home)
    ran = run_all(
        TrialQueue(plan, home, slots=1),
        home,
        score=lambda spec: 80.0 + 1e-3 * math.log10(spec.learning_rate) ** 2,
    )
    search = [s for s in ran if s.phase is Phase.SEARCH]
    assert 4 <= len(search) < 12 and len(ran) == len(search) + 1
    entry = study_of(plan, home)
    (cell,) = status(home, "toy")
    assert entry["ended"] == "stopped" and entry["room"] < 0.5
    assert entry["saved_trials"] == cell.saved_trials == 12 - len(search) and cell.left == 0
    (row,) = cell_rows(home, "toy")
    assert row.status == "done"


def test_a_curve_with_room_is_searched_to_the_end(home: Home) -> None:
    """Scores that jump by points from trial to trial: the model cannot exclude that there is more."""
    plan = planned(
        methods=["full"], search={"trials": 8, "startup_trials": 3, "stop": {"tolerance": 0.1}}
    )
    run_all(
        TrialQueue(plan, home, slots=1),
        home,
        score=lambda spec: peak(2e-4)(spec) + 3.0 * (-1) ** spec.number,
    )
    entry = study_of(plan, home)
    assert entry["ended"] == "budget" and entry["saved_trials"] == 0


def test_the_rule_is_not_asked_too_early_or_at_an_end_that_will_be_extended(home: Home) -> None:
    flat: Score = lambda spec: 80.0 + 1e-9 * rising(spec)  # noqa: E731
    stop = {"tolerance": 100.0, "min_trials": 6}
    plan = guarded(trials=8, stop=stop, edge_guard={"extensions": 0})
    run_all(TrialQueue(plan, home, slots=1), home, score=flat)
    assert study_of(plan, home)["trials"] == 6
    other = Home(home.path / "other")
    plan = guarded(trials=8, stop=stop | {"min_trials": None})
    run_all(TrialQueue(plan, other, slots=1), other, score=peak(1.5e-3))
    entry = study_of(plan, other)
    assert entry["extensions"] == 1 and entry["ended"] == "stopped" and entry["trials"] == 9, (
        "after the first in the new decade"
    )


def test_tolerance_is_in_points_of_the_tasks_own_scale() -> None:
    from suite.config.task import load_task

    assert load_task("sst2").point == 1.0
    perplexity = load_task("ptb")
    assert perplexity.point == pytest.approx(
        perplexity.utility(100.0) - perplexity.utility(101.0), rel=0.01
    ), "one percent"


# ---- resume --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "score"),
    [
        (lambda: contest(tasks=["toy"], search={"trials": 3, "startup_trials": 2}), by_lower_rank),
        (guarded, rising),
        (lambda: guarded(trials=10, stop={"tolerance": 5.0}), peak(1.2e-3)),
    ],
    ids=["contest", "edge guard", "both rules"],
)
def test_a_sweep_killed_after_any_trial_decides_what_an_uninterrupted_one_would(
    tmp_path: Path, plan: Callable[[], Plan], score: Score
) -> None:
    whole_home = Home(tmp_path / "whole")
    whole = run_all(TrialQueue(plan(), whole_home, slots=1), whole_home, score=score)
    home = Home(tmp_path / "cut")
    for expected in whole:
        in_flight = TrialQueue(
            plan(), home, slots=1
        ).next()  # handed out, then the driver is killed
        resumed = TrialQueue(plan(), home, slots=1)
        assert resumed.next() == in_flight == expected
        finish(home, expected, score(expected))
        resumed.ended(expected)
    assert TrialQueue(plan(), home, slots=1).next() is None
    assert decided(plan(), home) == decided(plan(), whole_home)
    assert chosen(plan(), home) == chosen(plan(), whole_home)


# ---- what may change, and what cannot be ---------------------------------------------------------------------------------


def test_the_rules_may_change_between_two_runs_of_a_sweep(home: Home) -> None:
    store_definition(planned(search={"trials": 4}), home)
    rules = {"trials": 4, "edge_guard": {"extensions": 1}, "stop": {"tolerance": 1.0}}
    check_definition(planned(search=rules, architectures="search"), home)


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ({"stop": {"tolerance": 0.0}}, "greater than 0"),
        ({"stop": {"tolerance": -1.0}}, "greater than 0"),
        ({"edge_guard": {"extensions": -1}}, "greater than or equal to 0"),
        ({"sampler": "grid", "objective": ["score", "energy"]}, "grid follows no objective"),
        ({"objective": ["score", "energy"], "stop": {"tolerance": 0.5}}, "stop: null"),
        ({"objective": ["score", "energy"], "pruner": "asha"}, "pruner: null"),
        ({"objective": ["energy", "score"]}, "expected score, or"),
        ({"objective": ["score"]}, "expected score, or"),
        ({"objective": ["score", "speed"]}, "energy"),
        ({"pruner": "hyperband"}, "asha"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(search: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        SearchConfig.model_validate(search)


def test_a_pruner_needs_more_than_one_epoch() -> None:
    with pytest.raises(ValidationError, match=r"training\.epochs is 1"):
        toy_sweep(search={"pruner": "median"}, training={"epochs": 1, "batch_size": 8})


def test_a_range_with_nothing_to_search_says_how_to_fix_a_rate() -> None:
    with pytest.raises(ValidationError, match=r"nothing to search.*write the number alone: 0.001"):
        LearningRateRange(low=1e-3, high=1e-3)


def test_with_two_objectives_the_stop_rule_is_off_unless_asked_for() -> None:
    config = SearchConfig.model_validate({"objective": ["score", "energy"]})
    assert config.stop is None and SearchConfig().stop is not None
    assert SearchConfig.model_validate_json(config.model_dump_json()) == config


def test_a_failed_trial_does_not_end_a_study(home: Home) -> None:
    schedule = TrialQueue(guarded(), home, slots=1)
    while (spec := schedule.next()) is not None:
        failed = spec.phase is Phase.SEARCH and spec.number % 2 == 1
        finish(
            home,
            spec,
            None if failed else 70.0 + spec.number,
            Status.DIVERGED if failed else Status.COMPLETED,
        )
        schedule.ended(spec)
    (state,) = read_states(guarded(), home).values()
    assert state.status is CellStatus.DONE and len(state.searched) == state.study.budget
