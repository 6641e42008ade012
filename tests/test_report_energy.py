"""Where energy comes from: what is measured, what is an estimate, and what is not known, on the page and while a sweep runs."""

from __future__ import annotations

import functools
import io
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from suite.leaderboard.measures import CellResults, of_preparation
from suite.meters.record import PhaseRecord
from suite.plan.cell_state import read_states
from suite.plan.definition import read_plan
from suite.progress import Board
from suite.record.folder import Home
from suite.record.result import PreparationRecord, TrialResult
from suite.report import charts, tables, values
from suite.report.answer import answer, facts
from suite.report.data import Report, read
from suite.report.document import document
from suite.report.page import page
from suite.report.site import write_site
from suite.tracking import sync
from tests.records import RATES, make_result, make_spec, write_definition, write_trial
from tests.report_home import PROVENANCE

ESTIMATE = "cpu-time-estimate"
METER = {"energy_sources": [ESTIMATE, "rapl"], "watts_per_core": 4.0}
MEASURED = {"load": "rapl", "train": "rapl", "eval": "rapl"}
FELL_BACK = {"load": ESTIMATE, "train": "rapl", "eval": "rapl"}
"""A host with RAPL on which other work ran while the data were read."""


def with_sources(result: TrialResult, sources: Mapping[str, str]) -> TrialResult:
    phases = {}
    for name, phase in result.phases.items():
        phases[name] = phase.model_copy(update={"energy_source": sources[name]})
    provenance = {**PROVENANCE, "meter": METER}
    return result.model_copy(update={"phases": phases, "provenance": provenance})


@pytest.fixture(scope="module")
def report_of(
    tmp_path_factory: pytest.TempPathFactory, empty_db: Path
) -> Callable[[Mapping[str, str]], Report]:
    """Makes the report of two methods whose trials have these sources by phase; it is to be read only."""

    @functools.cache
    def make(*given: tuple[str, str]) -> Report:
        sources = dict(given)
        home = Home(tmp_path_factory.mktemp("home"))
        write_definition(home, ["full", "lora"], ["agreement"], trials=1, seeds=[1, 2])
        for method in ("full", "lora"):
            for seed in (0, 1, 2):
                spec = make_spec(method, seed=seed, learning_rate=RATES[0])
                write_trial(home, spec, with_sources(make_result(spec), sources))
        shutil.copy(empty_db, home.path / "mlflow.db")
        assert sync(home, tracking_uri=home.tracking_uri).unreachable is None
        return read(home.path)

    return lambda sources: make(*sources.items())


def test_energy_that_a_counter_measured_is_not_said_to_come_from_the_estimate_beside_it(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    report = report_of(MEASURED)
    found = dict(facts(report))
    assert found["Energy"] == "measured by rapl"
    assert "estimate" not in found["Trials"] and report.spent_note == ""
    phases = charts.energy_by_phase(report)
    assert phases is not None and "Over all of them: train 88%" in phases.text


def test_a_phase_that_fell_back_to_the_estimate_is_named_and_not_added_to_what_was_measured(
    report_of: Callable[[Mapping[str, str]], Report], tmp_path: Path
) -> None:
    report = report_of(FELL_BACK)
    assert report.energy_note == "", "training was measured"
    assert report.spent_note == ", partly estimated" and not report.estimated
    found = dict(facts(report))
    assert found["Energy"] == (
        "measured by rapl; or estimated, not measured: processor time x 4 W per core"
    )
    # Six trials load for 1e-6 kWh; the rest is 2.2e-5 kWh each, and 1e-6 more a seed.
    assert found["Trials"].endswith("energy 138 mWh and 6.00 mWh estimated")
    assert {row["search_energy_kwh"] for row in report.rows} == {None}
    phases = charts.energy_by_phase(report)
    assert phases is not None and phases.x.title == "Wh, partly estimated"
    assert "Estimated in some run: load;" in phases.text and "%" not in phases.text
    heads = {column.head for column in tables.leaderboard_columns(report)}
    assert {"energy", "search energy, partly estimated"} <= heads
    assert "Some energy here is an <strong>estimate</strong>" in page(report)
    assert "Energy is partly an estimate" in document(report, {})
    index = write_site([report], tmp_path / "site")[0].read_text()
    assert "search energy, partly estimated" in index


def test_phases_of_no_energy_at_all_have_no_shares(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    report = report_of(MEASURED)
    trials = []
    for trial in report.trials:
        phases = {phase: (seconds, 0.0) for phase, (seconds, _) in trial["phases"].items()}
        trials.append(trial | {"phases": phases})
    chart = charts.energy_by_phase(replace(report, trials=trials))
    assert chart is not None and chart.text.endswith("for 2 arms.")


def test_a_search_that_was_measured_in_part_has_no_sum(tmp_path: Path) -> None:
    spec = make_spec("lora")
    measured = with_sources(make_result(spec), MEASURED)
    mixed = with_sources(make_result(spec), FELL_BACK)
    assert CellResults([], [measured]).of_search("energy_kwh") == pytest.approx(2.3e-5)
    assert CellResults([], [measured, mixed]).of_search("energy_kwh") is None
    assert CellResults([], [measured, mixed]).of_search("seconds") == pytest.approx(50.0)
    # nor does one that was measured where the row's own energy was estimated
    estimated = make_result(spec)
    assert CellResults([estimated], [measured]).of_search("energy_kwh") is None
    assert CellResults([measured], [measured]).of_search("energy_kwh") == pytest.approx(2.3e-5)


def test_what_is_prepared_has_no_sum_of_a_measurement_and_an_estimate() -> None:
    def record(source: str) -> PreparationRecord:
        cost = PhaseRecord(seconds=1.0, energy_kwh=1e-6, energy_source=source)
        return PreparationRecord(key=source, made_by="x", reused=True, cost=cost)

    spec = make_spec("lora")
    read_energy = of_preparation("energy_kwh")
    same = make_result(spec, preparation=record("rapl"), frozen_states=record("rapl"))
    mixed = make_result(spec, preparation=record("rapl"), frozen_states=record(ESTIMATE))
    assert read_energy(same) == pytest.approx(2e-6) and read_energy(mixed) is None


def test_no_arm_saves_energy_beside_one_whose_energy_has_another_source(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    report = report_of(MEASURED)

    def said(rank: dict[str, str], source: str) -> str:
        rows = []
        for row in report.rows:
            own = {"rank": rank[row["method"]]}
            if row["method"] == "lora":
                own |= {"energy_source": source, "energy_kwh": row["energy_kwh"] / 2}
            rows.append(row | own)
        return answer(replace(report, rows=rows))[0].rest

    led = {"full": "1-2", "lora": "1-2"}
    assert "the least energy" in said(led, "rapl")
    assert "the least energy" not in said(led, ESTIMATE) and "the least memory" in said(
        led, ESTIMATE
    )
    third = {**report.rows[0], "arm": "x", "method": "read", "rank": "3", "score_mean": 1.0}
    report = replace(report, rows=[*report.rows, third])
    ranks = {"full": "1-2", "lora": "1-2", "read": "3"}
    assert "% less energy" in said(ranks, "rapl") or "% more energy" in said(ranks, "rapl")
    for source in (ESTIMATE, f"{ESTIMATE}+rapl"):
        assert "energy" not in said(ranks, source).partition("told apart from it:")[2]


def test_energy_is_not_compared_between_rows_of_several_machines(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    report = report_of(MEASURED)
    rows = [row | {"machine": "Xeon", "rank": "1-2"} for row in report.rows]
    one = replace(report, rows=rows)
    front = charts.score_against_energy(one, "agreement")
    assert front is not None and "On the Pareto front" in front.text
    assert "the least energy" in answer(one)[0].rest
    assert "machine" not in {column.head for column in tables.leaderboard_columns(one)}
    assert 'data-limit="energy_kwh"' in page(one)
    # Another arm's runs, or some of this arm's runs, were on another machine.
    for machine in ("EPYC", "EPYC+Xeon"):
        several = changed(one, "lora", machine=machine)
        front = charts.score_against_energy(several, "agreement")
        assert front is not None and "or not on one machine" in front.text
        assert not any(row["on_front"] for row in front.table.rows)
        assert "the least energy" not in answer(several)[0].rest
        html = page(several)
        assert 'data-limit="energy_kwh"' not in html and 'data-limit="peak_memory_bytes"' in html
        (column,) = [c for c in tables.leaderboard_columns(several) if c.head == "machine"]
        assert {column.show(row) for row in several.rows} == {"Xeon", machine}
    alone = {"machine": "EPYC+Xeon", "energy_source": "rapl"}
    assert not values.comparable_energy([alone, alone])


def test_a_trial_that_was_estimated_says_so_where_others_were_measured(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    report = report_of(MEASURED)
    trials = [t | {"energy_source": ESTIMATE} if t["seed"] == 1 else t for t in report.trials]
    mixed = replace(report, trials=trials)
    (column,) = [c for c in tables.trial_columns(mixed) if c.head == "energy, partly estimated"]
    shown = {trial["seed"]: column.show(trial) for trial in trials}
    assert shown[1].endswith(" est.") and not shown[2].endswith(" est.")


# ---- what it took to choose ----------------------------------------------------------------------------------------------------


def changed(report: Report, method: str, **values: Any) -> Report:
    rows = [row | values if row["method"] == method else row for row in report.rows]
    return replace(report, rows=rows)


def test_an_unknown_search_of_beaten_architectures_is_not_drawn_as_none(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    report = report_of(MEASURED)
    chart = charts.search_cost(
        changed(report, "lora", selection_trials=5, selection_energy_kwh=None)
    )
    assert chart is not None
    others = {row["label"]: row["others_wh"] for row in chart.table.rows}
    assert others == {"full": 0.0, "lora": None}
    assert "lora (others: not known)" in chart.y.categories
    assert "Not known: the search of the other architectures of lora." in chart.text
    assert ", as far as known, and" in chart.text and "Dearest: full." in chart.text


def test_an_arm_whose_own_search_is_not_known_is_named(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    report = report_of(MEASURED)
    unknown = {"search_energy_kwh": None, "selection_energy_kwh": None}
    chart = charts.search_cost(changed(report, "lora", **unknown))
    assert chart is not None and "lora (search: not known)" in chart.y.categories
    assert chart.text.endswith("Not known: the search of lora.")
    assert {row["label"] for row in chart.table.rows} == {"full", "lora"}


def test_searches_of_tasks_that_were_measured_and_estimated_are_not_added_up(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    report = report_of(MEASURED)
    (lora,) = [row for row in report.rows if row["method"] == "lora"]
    for source, known in (("rapl", True), (ESTIMATE, False)):
        other = {**lora, "task": "entailment", "energy_source": source}
        chart = charts.search_cost(replace(report, rows=[*report.rows, other]))
        assert chart is not None
        (bar,) = [row for row in chart.table.rows if row["label"] == "lora"]
        assert (bar["search_wh"] is not None) == known and bar["others_wh"] == 0.0


def test_an_arm_that_searched_nothing_has_a_search_of_no_energy(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    nothing: dict[str, Any] = {"search_trials": 0, "selection_trials": 0}
    nothing |= {"search_energy_kwh": None, "selection_energy_kwh": None}
    chart = charts.search_cost(changed(report_of(MEASURED), "lora", **nothing))
    assert chart is not None and "Not known" not in chart.text
    assert {row["label"]: row["search_wh"] for row in chart.table.rows}["lora"] == 0.0


def test_confirm_runs_that_were_measured_in_part_have_no_sum_and_the_page_says_what_is_not_drawn(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    report = report_of(FELL_BACK)
    assert charts.search_cost(report) is None, "nothing of it is one kind of energy"
    assert "Not drawn: the energy to tune and confirm" in page(report)
    measured = replace(report, rows=[row | {"search_energy_kwh": 1e-6} for row in report.rows])
    chart = charts.search_cost(measured)
    assert chart is not None and "full (confirm: not known)" in chart.y.categories


def test_what_arms_measured_and_estimated_is_not_added_up(
    report_of: Callable[[Mapping[str, str]], Report],
) -> None:
    report = report_of(MEASURED)
    one = charts.search_cost(report)
    assert one is not None and "Searching took 46.0 mWh and confirming" in one.text
    rows = {row["method"]: row["arm"] for row in report.rows}
    trials = []
    for trial in report.trials:
        if trial["arm"] == rows["lora"]:
            sources = dict.fromkeys(trial["sources"], ESTIMATE)
            trial = trial | {"energy_source": ESTIMATE, "sources": sources}
        trials.append(trial)
    mixed = charts.search_cost(replace(report, trials=trials))
    assert mixed is not None and "Searching took" not in mixed.text
    assert "some was measured and some estimated, which is not added up" in mixed.text


# ---- while a sweep runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "unknown", "shown"),
    [
        (MEASURED, False, "energy 23.0 mWh\n"),
        (FELL_BACK, False, "energy 22.0 mWh and 1.00 mWh estimated\n"),
        (dict.fromkeys(MEASURED, ESTIMATE), False, "energy 23.0 mWh estimated\n"),
        (MEASURED, True, "energy 20.0 mWh, 2 phases not known\n"),
    ],
)
def test_the_heading_of_a_running_sweep_tells_estimated_energy_and_what_is_not_known(
    sources: Mapping[str, str], unknown: bool, shown: str, tmp_path: Path
) -> None:
    home = Home(tmp_path)
    write_definition(home, ["lora"], ["agreement"], trials=2)
    result = with_sources(make_result(make_spec("lora")), sources)
    if unknown:
        phases = dict(result.phases)
        for name in ("load", "eval"):
            phases[name] = phases[name].model_copy(update={"energy_kwh": None})
        result = result.model_copy(update={"phases": phases})
    write_trial(home, make_spec("lora"), result)
    out = io.StringIO()
    board = Board(Console(file=out, width=200))
    plan = read_plan(home, "demo")
    # As the queue of a sweep that goes on has read them.
    board.on_start(plan, read_states(plan, home, outcomes=True))
    board.console.print(board)
    heading = next(line for line in out.getvalue().splitlines() if ", energy " in line)
    assert f"{heading.rstrip()}\n".endswith(shown)
