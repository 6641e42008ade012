"""The report of a sweep: what it says, what it draws, what it writes, and what it refuses."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.figure
import plotly.graph_objects
import pytest
from matplotlib.text import Text

from suite.config.reference import Reference
from suite.config.space import LearningRateRange
from suite.errors import ConfigError, StatisticsError, SuiteError, UnknownNameError
from suite.files import write_json
from suite.record.folder import Home
from suite.record.result import Status
from suite.report import (
    charts,
    content,
    curves,
    document,
    figures,
    interactive,
    live,
    names,
    static,
    tables,
)
from suite.report.answer import answer, facts, verdicts
from suite.report.chart import COLOURS, DASHES, SHAPES, Points
from suite.report.compose import Form, build, write
from suite.report.data import Report, read
from suite.report.live import Source, make_server
from suite.report.page import page
from suite.report.table import clean, escaped
from suite.tracking import open_store, sync
from tests.commands import Suite, suite  # noqa: F401
from tests.records import (
    PERPLEXITY,
    make_home,
    make_result,
    make_spec,
    write_cell,
    write_definition,
    write_trial,
)
from tests.report_home import ATTACK, SECRET, SHARES, TASKS, make_report_home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> Home:
    """Read only."""
    return make_report_home(tmp_path_factory.mktemp("home"), empty_db)


@pytest.fixture
def own(home: Home, tmp_path: Path) -> Home:
    """A copy of `home` that a test may change."""
    return Home(Path(shutil.copytree(home.path, tmp_path / "own")))


@pytest.fixture(scope="module")
def report(home: Home) -> Report:
    return read(home.path)


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return page(report)


@pytest.fixture
def other(tmp_path: Path, empty_db: Path) -> Home:
    """An empty home with a ready database."""
    shutil.copy(empty_db, tmp_path / "mlflow.db")
    return Home(tmp_path)


def said(report: Report) -> str:
    return "\n".join(f"{s.head} {s.rest}" for s in answer(report))


def ranked(report: Report, **ranks: str | None) -> Report:
    """The same with other ranks, by method."""
    rows = [{**row, "rank": ranks.get(row["method"], row["rank"])} for row in report.rows]
    return replace(report, rows=rows)


# ---- the answer ----------------------------------------------------------------------------------------------------------------


def test_the_answer_names_the_leader_its_rivals_and_what_they_save(report: Report) -> None:
    first, *_, last = answer(report)
    leader = "full" if first.head.startswith("full") else "lora"
    rival = "lora" if leader == "full" else "full"
    assert re.fullmatch(
        rf"{leader} leads on the mean over 2 tasks with [\d.]+ \(3 seeds\): {rival} cannot be told"
        rf" apart from it; read is significantly worse than {leader}\.",
        first.head,
    )
    assert verdicts(report) == [first.head]
    assert re.search(rf"Cannot be told apart from it: {rival} \(.*, 3 seeds;", first.rest)
    assert "the same energy" in first.rest, "both spent the same"
    assert f"Significantly worse than {leader}: read (" in first.rest
    assert (
        last.head == "2 rows are rejected and not ranked:"
        and "bitfit on agreement and entailment" in last.rest
    )


def test_the_answer_follows_the_ranks_and_not_the_scores_alone(report: Report) -> None:
    alike = said(ranked(report, full="1-3", lora="1-3", read="1-3"))
    assert (
        "No test tells the 3 ranked arms apart on the mean over 2 tasks (3 seeds)." in alike
        and "leads" not in alike
    )
    alone = answer(ranked(report, full="1", lora="2-3", read="2-3"))[0]
    assert (
        "Cannot be told apart" not in alone.rest
        and "lora (" in alone.rest.partition("Significantly worse than full:")[2]
    )
    # Two arms are worse than some other, and one of them than the leader: ranks do not say which.
    unclear = answer(ranked(report, full="1-2", lora="2-3", read="2-3"))[0]
    assert unclear.head.endswith("are significantly worse than at least one arm.")


def test_where_no_row_of_rank_one_is_left_the_best_rank_leads(report: Report) -> None:
    first = answer(ranked(report, full="2", lora="3-4", read="3-4"))[0]
    assert (
        first.head.startswith("full leads on the mean over 2 tasks with ")
        and "lora (" in first.rest.partition("Significantly worse than at least one arm:")[2]
    )


def test_arms_without_a_rank_are_named_beside_the_ranked_ones_and_one_ranked_arm_leads_nobody(
    report: Report,
) -> None:
    assert re.search(
        r"Not ranked yet: read \(\d+\.\d, 3 seeds\)\.$", answer(ranked(report, read=None))[0].rest
    )
    alone = answer(ranked(report, lora=None, read=None))[0]
    assert (
        "scores highest" in alone.head
        and "No test says whether that is more than luck" in alone.rest
    )


def test_an_arm_that_alone_has_a_score_that_counts_is_not_called_the_only_arm(
    report: Report,
) -> None:
    def only(**status: str) -> str:
        rows = []
        for row in report.rows:
            state = status.get(row["method"], "done")
            if state == "rejected":
                row = row | {"admitted": False}
            elif state != "done":
                row = row | {"status": state, "score_mean": None}
            rows.append(row)
        return answer(replace(report, rows=rows))[0].head

    where = "arms on the mean over 2 tasks with a score that counts"
    # `bitfit` is rejected in all of them.
    over = only(lora="failed", read="rejected")
    assert over.startswith(f"full is the only one of 4 {where}, with ")
    one_open = only(lora="failed", read="partial")
    assert one_open.startswith(f"full is the only one of 4 {where} so far, with ")
    rows = [row for row in report.rows if row["method"] == "full"]
    alone = "full is the only arm on the mean over 2 tasks"
    assert report.cells and not report.absent("mean")
    assert answer(replace(report, rows=rows))[0].head.startswith(f"{alone}, with ")
    begun = {key: cell for key, cell in report.cells.items() if cell.method == "full"}
    unbegun = replace(report, rows=rows, cells=begun)
    assert answer(unbegun)[0].head.startswith(f"{alone} so far, with ")


def test_without_ranks_the_answer_says_that_nothing_was_tested(report: Report) -> None:
    rows = [{**row, "rank": None, "rank_missing": "only one seed"} for row in report.rows]
    first = answer(replace(report, rows=rows))[0]
    assert (
        "scores highest" in first.head
        and "No test says whether that is more than luck: only one seed" in first.rest
    )


def test_arms_that_are_not_shown_to_learn_are_named_beside_the_constant_answer_baseline(
    report: Report,
) -> None:
    def learning(*methods: str) -> Report:
        rows = []
        for row in report.rows:
            values = {"constant_score": 5.0, "shown_to_learn": row["method"] in methods}
            if row["task"] == "mean" or row["admitted"] is False:
                values["shown_to_learn"] = None
            rows.append(row | values)
        return replace(report, rows=rows)

    every = learning("full", "lora", "read")
    some = learning("full")
    none = learning()
    assert "constant-answer baseline" not in said(every)
    better = "significantly better than the constant-answer baseline (5.0):"
    where = f"On agreement these arms are not {better} "
    assert re.search(
        re.escape(where) + r"\w+ \([\d.]+, 3 seeds\) and \w+ \([\d.]+, 3 seeds\)\.", said(some)
    )
    assert f"On entailment no arm is {better}" in said(none)
    shown = tables.leaderboard_columns(some)
    assert {"constant-answer baseline", "shown to learn"} <= {column.head for column in shown}
    (column,) = [column for column in shown if column.head == "constant-answer baseline"]
    assert {column.show(row) for row in some.rows if row["method"] == "full"} == {"-"}
    assert {column.show(row) for row in some.rows if row["method"] == "lora"} == {"5.0", "-"}
    (column,) = [column for column in shown if column.head == "shown to learn"]
    assert {column.show(row) for row in some.rows} == {"yes", "no", "-"}


@pytest.fixture
def perplexities(other: Home) -> Report:
    """Two methods on one backbone, of which less is better."""
    write_definition(other, ["full", "lora"], [PERPLEXITY], trials=1)
    for method in ("full", "lora"):
        write_cell(other, method, PERPLEXITY, trials=1)
    sync(other, tracking_uri=other.tracking_uri)
    return read(other.path)


def test_of_a_perplexity_the_lowest_leads(perplexities: Report) -> None:
    report = perplexities
    best = min(report.scored(PERPLEXITY), key=lambda row: row["score_mean"])
    assert answer(report)[0].head.startswith(f"{best['method']} scores lowest on {PERPLEXITY} with")
    chart = charts.score_against_energy(report, PERPLEXITY)
    assert chart is not None and chart.y.title.endswith("(less is better)")


def test_perplexities_of_two_backbones_are_not_set_beside_each_other(perplexities: Report) -> None:
    alone = perplexities
    chart = charts.score_against_energy(alone, PERPLEXITY)
    assert chart is not None and "On the Pareto front" in chart.text
    assert '"task": "' + PERPLEXITY in page(alone)
    rows = []
    for row in alone.rows:
        rows.append(row | ({"backbone": "another"} if row["method"] == "lora" else {}))
    report = replace(alone, rows=rows)
    for drawn in (charts.score_against_energy, charts.score_against_memory):
        chart = drawn(report, PERPLEXITY)
        assert chart is not None and "No Pareto front: a score of which less" in chart.text
        assert not any(row["on_front"] for row in chart.table.rows)
    scores = charts.score_heat_map(report)
    assert scores is not None
    assert "another" in scores.text and scores.text.count(PERPLEXITY) >= 3
    (heat,) = scores.marks
    assert [shade for (shade,) in heat.shade] == [1.0, 1.0]
    assert '"task": "' + PERPLEXITY not in page(report)


def test_what_was_run_is_told_from_the_definition_and_the_records(report: Report) -> None:
    found = dict(facts(report))
    assert found["Budget"].startswith("2 trials per architecture and task") and found[
        "Budget"
    ].endswith("seeds 1, 2 and 3")
    assert found["Hardware"] == "2 cores of AMD <EPYC>, 16.0 GiB, no GPU; 2 ranks on cpu"
    assert found["Commit"] == "f32476f1eccb" and "torch 2.13.0" in found["Versions"]
    assert found["Energy"] == "estimated, not measured: processor time x 4 W per core"


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"sampler": "grid"}, "2 trials per architecture and task (a grid over the range); "),
        ({}, "2 trials per architecture and task (3 evenly over the range, then gp); "),
        ({"transfer": True}, "where finished studies of other tasks were best, then gp); "),
    ],
)
def test_the_budget_says_in_which_order_the_sampler_tries_rates(
    report: Report, search: dict[str, Any], said: str
) -> None:
    assert report.plan is not None
    config = report.plan.config
    config = config.model_copy(update={"search": config.search.model_copy(update=search)})
    changed = replace(report, plan=replace(report.plan, config=config))
    assert said in dict(facts(changed))["Budget"]


def test_the_budget_says_that_a_fixed_rate_is_not_searched(report: Report) -> None:
    assert report.plan is not None
    _, *others = report.plan.cells
    fixed = [
        replace(cell, learning_rate=LearningRateRange(low=1e-3, high=1e-3, fixed=True))
        for cell in report.plan.cells
    ]
    every = replace(report, plan=replace(report.plan, cells=tuple(fixed)))
    budget = dict(facts(every))["Budget"]
    assert budget.startswith("every learning rate is fixed: one trial for each ")
    assert "evenly" not in budget and "2 trials" not in budget
    one = replace(report, plan=replace(report.plan, cells=(fixed[0], *others)))
    assert "; where the learning rate is fixed, one trial for each " in dict(facts(one))["Budget"]


def test_a_damaged_record_does_not_say_when_the_sweep_ran(own: Home) -> None:
    before = dict(facts(read(own.path)))["Run"]
    (next(own.trials()).path / "result.json").write_text("{")
    damaged = read(own.path)
    assert 0.0 in [trial["started_at"] for trial in damaged.trials]
    found = dict(facts(damaged))["Run"]
    assert found.startswith("2023-11-14 ") and before.startswith("2023-11-14 ")


# ---- figures -------------------------------------------------------------------------------------------------------------------


def row(score: float, cost: float) -> dict[str, Any]:
    return {"score_mean": score, "cost": cost}


def test_the_front_holds_what_nothing_beats_and_nothing_else() -> None:
    rows = [row(80, 5), row(70, 1), row(69, 2), row(75, 3), row(75, 4), row(70, 0.5)]
    assert [
        (r["score_mean"], r["cost"]) for r in charts.pareto(rows, "cost", higher_is_better=True)
    ] == [(70, 0.5), (75, 3), (80, 5)]
    lower = [row(9.0, 1), row(8.0, 2), row(8.5, 3)]
    assert [r["score_mean"] for r in charts.pareto(lower, "cost", higher_is_better=False)] == [
        9.0,
        8.0,
    ]


def test_rejected_arms_are_hollow_and_on_no_front(report: Report) -> None:
    chart = charts.score_against_energy(report, "agreement")
    assert chart is not None
    points = {mark.name: mark for mark in chart.marks if isinstance(mark, Points)}
    assert points["bitfit (rejected)"].hollow and not points["full"].hollow
    assert {r["label"]: r["on_front"] for r in chart.table.rows}["bitfit"] is False
    assert "Hollow: 1 rejected" in chart.text and "a mean over 3 seeds" in chart.text
    assert chart.x.title == "energy of a training run, estimate, mWh"
    assert chart.table.rows[0]["energy_wh"] == pytest.approx(0.022)
    assert points["full"].x == [pytest.approx(22.0)], "the axis has the unit of the table"


def test_without_a_row_that_counts_there_is_no_front(report: Report) -> None:
    rejected = replace(report, rows=[row | {"admitted": False} for row in report.rows])
    chart = charts.score_against_memory(rejected, "agreement")
    assert chart is not None and "No Pareto front: no row counts." in chart.text


def failed(report: Report, method: str) -> Report:
    """The same where a confirm run of a method has no score, and the seeds that survived do best."""
    own = {"status": "failed", "rank": None, "score_mean": 99.0}
    return replace(
        report, rows=[row | own if row["method"] == method else row for row in report.rows]
    )


def test_what_failed_trials_took_is_not_counted_as_nothing(report: Report) -> None:
    whole = dict(facts(report))["Trials"]
    assert "not known" not in whole
    first, *others = report.trials
    mute = {**first, "status": "failed", "phases": {}}
    told = dict(facts(replace(report, trials=[mute, *others])))["Trials"]
    assert told.endswith(", and what the 1 took that failed, which is not known")
    assert told.split()[0] == whole.split()[0]


def test_a_failed_row_is_neither_answer_nor_choice_nor_on_a_front(report: Report) -> None:
    report = failed(report, "read")
    state = "failed: nothing is left to run, and a confirm run has no score."
    assert f"2 of 8 cells {state}" in report.missing
    first = answer(report)[0]
    assert "read" not in first.head
    assert first.rest.endswith(" Not ranked, as a confirm run has no score: read (99.0, 3 seeds).")
    assert {row["method"] for row in report.admitted("agreement")} == {"full", "lora"}
    chart = charts.score_against_energy(report, "agreement")
    assert chart is not None
    points = {mark.name: mark for mark in chart.marks if isinstance(mark, Points)}
    assert points["read (failed)"].hollow
    assert not {row["label"]: row["on_front"] for row in chart.table.rows}["read"]
    assert "Hollow: 1 rejected by a check of validity and 1 failed, as" in chart.text
    heat = charts.score_heat_map(report)
    assert heat is not None and "(read)" not in heat.text and "99.0 *" in str(heat.marks)
    html = page(report)
    assert html.count('class="failed"') == 6, "in the leaderboard and in the arm's own part"
    (choices,) = re.findall(r'id="choices"[^>]*>(.*?)</script>', html)
    assert {choice["arm"] for choice in json.loads(choices)} == {"full", "lora"}


def test_what_a_confirm_run_without_a_score_took_is_not_known(report: Report) -> None:
    def confirming(changed: Report) -> dict[str, float | None]:
        chart = charts.search_cost(changed)
        assert chart is not None
        return {row["label"]: row["confirm_wh"] for row in chart.table.rows}

    assert None not in confirming(report).values()
    # A run that was given up has no record, and its row says so; one that ended has one.
    rows = failed(report, "lora")
    lost = {"status": "oom", "test_score": None, "phases": {}}
    trials = []
    for trial in report.trials:
        is_lost = ".lora" in trial["arm"] and (trial["phase"], trial["seed"]) == ("confirm", 1)
        trials.append(trial | lost if is_lost else trial)
    for changed in (rows, replace(report, trials=trials)):
        found = confirming(changed)
        assert found["lora"] is None and found["full"] is not None


@pytest.mark.parametrize("backend", ["plotly", "matplotlib"])
def test_every_figure_is_drawn_by_both_libraries(report: Report, backend: figures.Backend) -> None:
    kind = {"plotly": plotly.graph_objects.Figure, "matplotlib": matplotlib.figure.Figure}[backend]
    for draw in (
        figures.score_against_energy,
        figures.score_against_memory,
        figures.learning_rate_curves,
        figures.training_curves,
    ):
        assert isinstance(draw(report, "agreement", backend=backend), kind)
    for draw_all in (figures.score_heat_map, figures.energy_by_phase, figures.search_cost):
        assert isinstance(draw_all(report, backend=backend), kind)


def test_a_figure_that_cannot_be_drawn_says_why(report: Report) -> None:
    with pytest.raises(StatisticsError, match="carries no printed numbers"):
        figures.beside_the_paper(report)
    with pytest.raises(UnknownNameError, match="did you mean agreement"):
        figures.score_against_energy(report, "agrement")
    with pytest.raises(UnknownNameError, match="unknown backend 'bokeh'"):
        figures.score_heat_map(report, backend="bokeh")  # type: ignore[arg-type]


def test_a_learning_rate_curve_rings_the_chosen_rate_and_crosses_failures(report: Report) -> None:
    chart = next(
        c
        for c in curves.learning_rate_curves(report, "agreement")
        if c.title.startswith("read / agreement")
    )
    marks = {mark.name: mark for mark in chart.marks if isinstance(mark, Points)}
    assert marks["chosen"].ring and list(marks["chosen"].x) == [1e-4]
    assert marks["no score"].shape == "x" and list(marks["no score"].x) == [3e-4]
    assert "1 of them without a score (crosses)" in chart.text
    axis = interactive.single(chart).layout.xaxis
    assert list(axis.ticktext) == ["1e-6", "1e-5", "1e-4", "1e-3"]
    scales = {c.y.limits for c in curves.learning_rate_curves(report, "agreement")}
    assert len(scales) == 1, "one scale for all cells of a task"


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1e-6, 3e-3, [1e-6, 1e-5, 1e-4, 1e-3]),
        (2e-4, 8e-4, [2e-4, 4e-4, 6e-4, 8e-4]),
        (9e-5, 4e-3, [1e-4, 3e-4, 1e-3, 3e-3]),
        (1e-12, 1e3, [1e-12, 1e-8, 1e-4, 1.0]),
        (1.02e-4, 1.04e-4, [1.02e-4, 1.04e-4]),
    ],
)
def test_a_logarithmic_axis_has_labels_however_narrow_or_wide_its_range_is(
    low: float, high: float, labels: list[float]
) -> None:
    assert interactive.log_ticks(low, high) == labels


def test_the_foot_of_the_page_has_the_command_that_writes_it_again(home: Home, html: str) -> None:
    assert f"suite report --home {home.path} --sweep demo" in "".join(Outline(html).text)
    sorted_ = read(home.path, tracking_uri=home.tracking_uri, sort="energy")
    assert sorted_.command.endswith(f"--tracking-uri {home.tracking_uri} --sort energy")
    assert "docs/metrics.md" in html and "docs/statistics.md" in html


def test_the_first_screen_is_a_sentence_a_picture_and_the_table(html: str, report: Report) -> None:
    first = html.index('class="verdict"')
    picture = html.index('class="plot"')
    assert first < picture < html.index('id="board"') < html.index('id="findings"')
    assert html.index('class="answer"') > html.index('<details id="findings">')
    shown = [column.head for column in tables.leaderboard_columns(report) if not column.extra]
    assert shown[:4] == ["arm", "rank", "task", "score"]
    assert {"energy, estimate", "memory", "seeds"} <= {*shown}
    assert not {"learning rate", "trials", "status"} & {*shown}


def test_three_hundred_arms_look_different_from_each_other() -> None:
    looks = {
        (COLOURS[n % len(COLOURS)], SHAPES[n % len(SHAPES)], DASHES[n % len(DASHES)])
        for n in range(315)
    }
    assert len(looks) == 315


def test_a_tenth_of_a_point_is_not_shown_as_day_and_night(report: Report) -> None:
    chart = charts.score_heat_map(
        replace(
            report,
            rows=[{**r, "score_mean": 80.0 + 0.1 * (r["method"] == "full")} for r in report.rows],
        )
    )
    assert chart is not None
    shades = [shade for mark in chart.marks for line in mark.shade for shade in line]  # type: ignore[union-attr]
    assert min(shades) == pytest.approx(0.98, abs=1e-9) and max(shades) == 1.0


def test_of_many_arms_only_those_of_the_front_are_named(report: Report) -> None:
    whole = report.scored("agreement")[0]
    rows = [
        {
            **whole,
            "arm": f"a{n}",
            "architecture": {"n": n},
            "score_mean": n,
            "energy_kwh": 1e-5 * (1 + n % 7),
        }
        for n in range(1, 31)
    ]
    chart = charts.score_against_energy(replace(report, rows=rows), "agreement")
    assert (
        chart is not None and not chart.legend and "Only arms of the front are named." in chart.text
    )
    named = {label for mark in chart.marks if isinstance(mark, Points) for label in mark.labels}
    assert named == {r["label"] for r in chart.table.rows if r["on_front"]} and 0 < len(named) < 14


@pytest.mark.parametrize("panels", [1, 4])
def test_names_in_a_picture_do_not_cover_each_other(report: Report, panels: int) -> None:
    chart = charts.score_against_memory(report, "agreement")
    assert chart is not None
    points = [mark for mark in chart.marks if isinstance(mark, Points) and mark.labels]
    marks = [
        replace(mark, x=[1.0 + n / 50], y=[80.0], low=[70.0], high=[90.0])
        for n, mark in enumerate(points * 3)
    ]
    axis = replace(chart.x, log=False, limits=(0.0, 2.0))
    figure = static.draw([replace(chart, marks=marks, x=axis)] * panels)
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [Text.get_window_extent(label) for label in axes.texts]
        assert len(boxes) == 12
        for n, box in enumerate(boxes):
            # The edges of two boxes may touch.
            assert not any(box.padded(-0.5).overlaps(other) for other in boxes[:n])


def test_confirm_runs_whose_energy_is_not_known_are_said_not_to_be(report: Report) -> None:
    lora = [
        {**t, "phases": {"train": (1.0, None)}}
        if ".lora" in t["arm"] and t["phase"] == "confirm"
        else t
        for t in report.trials
    ]
    chart = charts.search_cost(replace(report, trials=lora))
    assert (
        chart is not None
        and "lora (confirm: not known)" in chart.y.categories
        and "full" in chart.y.categories
    )
    assert (
        chart.text.endswith("Not known: the confirm runs of lora.")
        and "Dearest: lora" not in chart.text
    )
    assert (
        "(estimate)" in chart.text
        and {r["label"]: r["confirm_wh"] for r in chart.table.rows}["lora"] is None
    )
    none = charts.search_cost(replace(report, trials=[]))
    assert (
        none is not None
        and "confirming an unknown amount" in none.text
        and "Dearest" not in none.text
    )


def test_confirm_runs_at_a_rate_that_is_no_longer_chosen_are_not_mixed_in(report: Report) -> None:
    old = [
        {**t, "learning_rate": 9.0, "phases": {"train": (1.0, 5.0)}}
        for t in report.trials
        if t["phase"] == "confirm"
    ]
    # Of another batch size at the same rate none is mixed in either.
    sized = {key: replace(cell, batch_size=8) for key, cell in report.cells.items()}
    report = replace(report, cells=sized, trials=[t | {"batch_size": 8} for t in report.trials])
    old += [{**t, "batch_size": 4} for t in report.trials if t["phase"] == "confirm"]
    more = replace(report, trials=[*report.trials, *old])
    for draw in (
        charts.energy_by_phase,
        charts.search_cost,
        lambda r: curves.training_curves(r, "agreement")[0],
    ):
        mixed = draw(more)
        alone = draw(report)
        assert mixed is not None and alone is not None and mixed.table == alone.table


def test_architectures_that_lost_their_contest_reach_neither_front_nor_heat_map(
    report: Report,
) -> None:
    lost = replace(
        report,
        rows=[{**r, "status": "not chosen"} if r["method"] == "full" else r for r in report.rows],
    )
    for chart in (charts.score_against_energy(lost, "agreement"), charts.score_heat_map(lost)):
        assert (
            chart is not None
            and chart.table.rows
            and not any(r["method"] == "full" for r in chart.table.rows)
        )


def test_the_best_of_a_heat_map_is_an_admitted_one(report: Report) -> None:
    worst = {"admitted": False}
    rows = [row | (worst if row["method"] == "full" else {}) for row in report.rows]
    rejected = charts.score_heat_map(replace(report, rows=rows))
    assert rejected is not None and "(full)" not in rejected.text and "(lora)" in rejected.text


def test_no_front_is_drawn_over_measured_and_estimated_energy(report: Report) -> None:
    measured = {"energy_source": "nvml"}
    rows = [row | (measured if row["method"] == "lora" else {}) for row in report.rows]
    mixed = charts.score_against_energy(replace(report, rows=rows), "agreement")
    assert mixed is not None and "No Pareto front" in mixed.text
    assert not any(row["on_front"] for row in mixed.table.rows)
    one = charts.score_against_energy(report, "agreement")
    assert one is not None and "where no arm scores better at less cost" in one.text


def test_searched_batch_sizes_are_all_named(report: Report) -> None:
    assert report.plan is not None
    config = report.plan.config
    search = config.search.model_copy(update={"batch_sizes": [16, 32]})
    plan = replace(report.plan, config=config.model_copy(update={"search": search}))
    assert (
        "batches of 16 or 32, as searched," in dict(facts(replace(report, plan=plan)))["Training"]
    )


def test_the_leaderboard_of_a_report_has_the_chosen_batch_size(report: Report) -> None:
    table = tables.leaderboard(report)
    assert "batch_size" in table.columns
    assert {row["batch_size"] for row in table.rows} > {None}


def test_the_power_of_each_backbone_is_said_of_it(report: Report) -> None:
    other = [row | {"backbone": "other", "arm": f"other.{row['arm']}"} for row in report.rows]
    both = replace(report, rows=[*report.rows, *other], trials=[])
    assert f"with other, {report.rows[0]['seeds']} seeds can show" in said(both)


def test_the_energy_of_phases_adds_up_to_that_of_the_runs(report: Report) -> None:
    chart = charts.energy_by_phase(report)
    assert chart is not None
    trials = [
        t for t in report.trials if t["phase"] == "confirm" and t["arm"].split(".")[2] == "full"
    ]
    whole = 1000 * sum(kwh for t in trials for _, kwh in t["phases"].values()) / len(trials)
    assert sum(r["energy_wh"] for r in chart.table.rows if r["label"] == "full") == pytest.approx(
        whole, rel=1e-9
    )


def test_the_energy_of_phases_is_of_the_tasks_that_all_arms_have_run(report: Report) -> None:
    trials = []
    for trial in report.trials:
        dear = trial["task"] == "entailment"
        if dear and ".lora" in trial["arm"]:
            continue
        scale = 100 if dear else 1
        phases = {name: (s, scale * kwh) for name, (s, kwh) in trial["phases"].items()}
        trials.append(trial | {"phases": phases})
    chart = charts.energy_by_phase(replace(report, trials=trials))
    whole = charts.energy_by_phase(report)
    assert chart is not None and whole is not None
    assert "tasks that all of these have run: agreement." in chart.text
    assert "have run" not in whole.text
    # A run whose energy is not known in all phases is not drawn, and so compares nothing.
    unknown = []
    for trial in report.trials:
        dear = trial["task"] == "entailment" and ".lora" in trial["arm"]
        phases = {name: (s, None if dear else kwh) for name, (s, kwh) in trial["phases"].items()}
        unknown.append(trial | {"phases": phases})
    of_known = charts.energy_by_phase(replace(report, trials=unknown))
    assert of_known is not None and of_known.text == chart.text
    apart = []
    for trial in report.trials:
        if (trial["task"] == "entailment") == (".lora" in trial["arm"]):
            apart.append(trial)
    of_other_tasks = charts.energy_by_phase(replace(report, trials=apart))
    assert of_other_tasks is not None and "no task in common yet" in of_other_tasks.text
    dearest = max(row["energy_wh"] for row in whole.table.rows)
    assert max(row["energy_wh"] for row in chart.table.rows) < 2 * dearest


def test_ours_stand_beside_the_printed_numbers(other: Home) -> None:
    home = make_home(other.path, trials=1)
    path = home.sweep_definition("demo")
    line = Reference(
        method="lora", scores={"agreement": 0.5}, stds={"agreement": 0.1}, source="READ, table 1"
    )
    write_json(path, {**json.loads(path.read_text()), "reference": [line.model_dump(mode="json")]})
    sync(home, tracking_uri=home.tracking_uri)
    report = read(home.path)
    chart = charts.beside_the_paper(report)
    assert (
        chart is not None
        and "1 printed scores beside ours" in chart.text
        and "READ, table 1" in chart.text
    )
    (found,) = chart.table.rows
    assert (found["label"], found["task"], found["reference_score"]) == ("lora", "agreement", 0.5)
    assert 'id="paper"' in page(report) and "ours - paper" in page(report)
    # A row that does not count is hollow, and agrees with nothing.
    for ours, why in (
        ({"admitted": False, "rejected": ["NaN"]}, "1 rejected by a check of validity"),
        ({"status": "failed"}, "1 failed, as a confirm run has no score"),
        ({"admitted": True, "rejected": []}, ""),
    ):
        inside = {"score_mean": 50.0, "ci_low": 0.0, "ci_high": 100.0, "difference": 0.0} | ours
        rows = [row | inside if row["reference_score"] else row for row in report.rows]
        chart = charts.beside_the_paper(replace(report, rows=rows))
        assert chart is not None
        counted = 0 if why else 1
        assert f"of which {counted} are measured so far; {counted} printed" in chart.text
        assert f"Hollow circles, not counted: {why}." in chart.text or not why
        points = {mark.name: mark for mark in chart.marks if isinstance(mark, Points)}
        assert list(points["ours"].x) == [50.0] * counted
        assert not why or points["ours (rejected or failed)"].hollow


UGLY = "$x_{ $y^ <b>bold</b> &amp;"


def test_names_that_look_like_formulas_or_html_are_drawn_as_they_are(
    report: Report, tmp_path: Path
) -> None:
    rows = [
        {**row, "method": UGLY if row["method"] == "full" else row["method"]} for row in report.rows
    ]
    ugly = replace(report, rows=rows)
    found = [
        charts.score_against_energy(ugly, "agreement"),
        charts.score_heat_map(ugly),
        charts.energy_by_phase(ugly),
    ]
    drawn_ones = [chart for chart in found if chart is not None]
    assert len(drawn_ones) == len(found)
    static.save(
        static.draw([*drawn_ones, *curves.learning_rate_curves(ugly)]), tmp_path / "chart.png"
    )
    for chart in drawn_ones:
        drawn = json.loads(interactive.as_json(chart))
        assert "<b>" not in json.dumps(drawn) and "&lt;b&gt;bold&lt;/b&gt; &amp;amp;" in json.dumps(
            drawn
        )
        for axis in (drawn["layout"]["xaxis"], drawn["layout"]["yaxis"]):
            places = {
                place
                for trace in drawn["data"]
                for place in (*trace["x"], *trace["y"])
                if isinstance(place, str)
            }
            assert "categoryarray" not in axis or {*axis["categoryarray"]} <= places


def test_a_secret_that_json_writes_in_another_way_is_taken_out_before(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = 'hunter2"ü-hunter2'
    monkeypatch.setenv("MY_PASSWORD", secret)
    clean.cache_clear()
    rows = [
        {**row, "method": f"m {secret}" if row["method"] == "full" else row["method"]}
        for row in report.rows
    ]
    shown = page(replace(report, rows=rows))
    assert not any(
        form in shown
        for form in (secret, json.dumps(secret)[1:-1], "ü-hunter2", "\\u00fc-hunter2", "&#34;ü")
    )
    assert "m ***" in shown
    clean.cache_clear()


# ---- names ---------------------------------------------------------------------------------------------------------------------


def test_a_chosen_architecture_goes_by_its_method_and_the_others_by_what_differs() -> None:
    def of(rank: int, status: str, score: float | None) -> dict[str, Any]:
        common = {
            "backbone": "b",
            "attention": "pretrained",
            "attention_options": {},
            "method": "lora",
            "task": "mean",
        }
        return common | {
            "arm": f"lora{rank}",
            "architecture": {"rank": rank, "alpha": 8},
            "status": status,
            "score_mean": score,
            "higher_is_better": True,
        }

    found = names.arms_of(
        [of(8, "not chosen", None), of(16, "done", 80.0), of(32, "not chosen", None)]
    )
    assert {key: arm.label for key, arm in found.items()} == {
        "lora16": "lora",
        "lora8": "lora rank=8",
        "lora32": "lora rank=32",
    }
    assert found["lora16"].style == 0 and found["lora16"].settings == "rank=16"


def test_arms_that_differ_in_nothing_that_has_a_name_are_told_apart_by_their_keys(
    report: Report,
) -> None:
    rows = [
        {**report.rows[0], "arm": key, "status": "done"}
        for key in ("a.lora.11111111", "a.lora.22222222")
    ]
    assert {arm.label[-8:] for arm in names.arms_of(rows).values()} == {"11111111", "22222222"}


def test_long_lists_are_cut_short() -> None:
    assert names.listed("ab") == "a and b"
    assert names.listed("abcde", most=3) == "a, b, c and 2 more"


# ---- the page ------------------------------------------------------------------------------------------------------------------


class Outline(HTMLParser):
    """Elements that were opened, with their attributes, and the text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text.append(data)


def test_what_others_wrote_is_text_on_the_page_and_secrets_are_not(html: str) -> None:
    outline = Outline(html)
    assert all("onerror" not in attributes for _, attributes in outline.found)
    assert not any(tag == "img" for tag, _ in outline.found)
    assert any("<script>document.title='owned'</script>" in text for text in outline.text), (
        "shown as it was written"
    )
    assert SECRET not in html and "postgresql://***@db/x" in html
    assert sum(tag == "script" for tag, _ in outline.found) == html.count("<script"), (
        "no script that a text opened"
    )


def test_the_page_asks_nobody_for_anything(html: str) -> None:
    outline = Outline(html)
    links = [
        value
        for _, attributes in outline.found
        for key, value in attributes.items()
        if key in ("src", "href") and value is not None
    ]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    (policy,) = [
        a["content"]
        for tag, a in outline.found
        if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None and "default-src 'none'" in policy and "connect-src 'none'" in policy


def test_plotly_is_there_once(html: str) -> None:
    assert html.count("plotly.js v") == 1 and len(html) < 6_000_000


def test_every_figure_has_its_text_and_its_data(html: str, report: Report) -> None:
    outline = Outline(html)
    plots = [a for tag, a in outline.found if a.get("class") == "plot"]
    made = content.content(report)
    assert [plot["data-key"] for plot in plots] and {plot["data-key"] for plot in plots} == {
        chart.key for chart in made.figures
    }
    assert all(plot["role"] == "img" and len(plot["aria-label"] or "") > 60 for plot in plots)
    data = [a["href"] for tag, a in outline.found if tag == "a" and "download" in a]
    assert len(data) == len(plots) + 1, "one each, and the leaderboard"
    heads = []
    for link in data:
        text = base64.b64decode((link or "").partition("base64,")[2]).decode()
        heads.append(next(csv.reader(io.StringIO(text)))[:2])
    assert heads.count(["rank", "arm"]) == 1, "that of the leaderboard"


def test_ids_are_unique_and_every_link_inside_the_page_leads_somewhere(html: str) -> None:
    found = Outline(html).found
    ids = [a["id"] for _, a in found if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {
        (a["href"] or "")[1:]
        for tag, a in found
        if tag == "a" and (a.get("href") or "").startswith("#")
    }
    assert targets <= set(ids) and {
        arm
        for arm in ids
        if arm and arm.startswith("arm-") and arm.count("-rows") + arm.count("-trials") == 0
    }


def test_an_arm_has_all_of_its_trials_on_the_page(html: str, report: Report) -> None:
    for trial in report.trials:
        assert trial["trial"] in html
    assert len(report.trials) == len(SHARES) * len(TASKS) * 5


def test_estimated_energy_is_called_an_estimate(html: str, report: Report) -> None:
    assert (
        report.estimated
        and "energy, estimate" in html
        and "All energy here is an <strong>estimate</strong>" in html
    )
    measured = replace(report, trials=[{**t, "energy_source": "nvml"} for t in report.trials])
    assert measured.energy_note == ""
    mixed = replace(
        report,
        trials=[
            {**t, "energy_source": "nvml" if t["seed"] else "cpu-time-estimate"}
            for t in report.trials
        ],
    )
    assert mixed.energy_note == ", partly estimated"
    columns = {column.head for column in tables.leaderboard_columns(mixed)}
    assert "energy, partly estimated" in columns


def test_trials_that_the_search_ended_early_are_counted_and_are_no_failures(other: Home) -> None:
    write_definition(other, ["lora"], ["agreement"], trials=2)
    write_cell(other, "lora", trials=1)
    spec = make_spec("lora", number=1, learning_rate=3e-4)
    write_trial(other, spec, make_result(spec, status=Status.PRUNED))
    sync(other, tracking_uri=other.tracking_uri)
    report = read(other.path)
    shown = page(report)
    assert report.failures == [] and "The search ended 1 trial early (pruned)." in shown
    assert "every other trial that ended has a score" in shown


def test_that_every_trial_has_a_score_is_said_only_where_all_were_read(report: Report) -> None:
    whole = replace(report, failures=[])
    claim = "that ended has a score"
    some = "Not all trial folders were read"
    none = "This home holds no trial of the sweep"
    assert claim in page(whole) and none not in page(whole)
    unread = page(replace(whole, unread_trials=5))
    assert claim not in unread and some in unread and none not in unread
    without = page(replace(whole, trials=[]))
    assert claim not in without and none in without and some not in without


def test_the_page_opens_on_a_place_that_has_a_score(report: Report) -> None:
    assert '<option value="mean" selected>' in page(report)
    rows = [
        {**row, "score_mean": None} if row["task"] in ("mean", "agreement") else row
        for row in report.rows
    ]
    assert '<option value="entailment" selected>' in page(replace(report, rows=rows))


def test_a_table_that_is_cut_in_a_document_says_so(report: Report) -> None:
    text = document.document(replace(report, failures=report.failures * 201), {})
    assert (
        f"Left out here: {201 * len(report.failures) - 200:,} rows; the CSV files have all" in text
    )


@pytest.mark.slow
def test_a_large_sweep_is_capped_and_says_so(report: Report) -> None:
    rows = [
        {
            **report.rows[0],
            "arm": f"arm{n}",
            "task": "agreement",
            "architecture": {"n": n},
            "status": "done",
        }
        for n in range(1200)
    ]
    many = replace(report, rows=rows, cells={}, trials=[])
    made = content.content(many)
    assert len(made.arms) == content.MOST_ARMS
    assert made.left_out == [
        "Left out here: 1,100 arms in figures, which draw the 100 of the best scores; the CSV files have all (suite report --format csv).",
        "Left out here: 1,050 arms without a part of their own; the CSV files have all (suite report --format csv).",
        "Left out here: 200 rows of the leaderboard beyond 1,000; the CSV files have all (suite report --format csv).",
    ]
    shown = page(many)
    assert all(sentence in shown for sentence in made.left_out)
    assert len(content.content(many, whole=True).arms) == 1200


# ---- files ---------------------------------------------------------------------------------------------------------------------


def test_tables_hold_every_number_and_say_what_it_means(report: Report, tmp_path: Path) -> None:
    paths = {path.name.removeprefix("demo-"): path for path in write(report, tmp_path, Form.CSV)}
    rows = {name: list(csv.DictReader(path.open())) for name, path in paths.items()}
    assert len(rows["leaderboard.csv"]) == len(report.rows) and len(rows["trials.csv"]) == len(
        report.trials
    )
    assert len(rows["learning-rates.csv"]) == len(SHARES) * len(TASKS) * 2
    meant = {(line["file"], line["column"]) for line in rows["columns.csv"]}
    assert meant == {
        (name, column)
        for name, found in rows.items()
        if found and name != "columns.csv"
        for column in found[0]
    }
    assert (
        SECRET not in paths["failures.csv"].read_text()
        and "<script>" in paths["failures.csv"].read_text()
    )


def test_what_a_spreadsheet_would_run_is_kept_from_it(report: Report) -> None:
    table = replace(
        tables.failures(report),
        rows=[{**report.failures[0], "message": "=HYPERLINK(1)", "learning_rate": -1.0}],
    )
    (line,) = csv.DictReader(io.StringIO(table.csv()))
    assert line["message"] == "'=HYPERLINK(1)" and line["learning_rate"] == "-1.0"


def test_a_document_has_tables_and_figures_that_exist(report: Report, tmp_path: Path) -> None:
    text, *pictures = write(report, tmp_path, Form.MD)
    shown = re.findall(r"^!\[(.+)\]\((.+)\)$", text.read_text(), re.MULTILINE)
    assert {name for _, name in shown} == {path.name for path in pictures} and all(
        alternative for alternative, _ in shown
    )
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures)
    assert "<script" not in text.read_text() and SECRET not in text.read_text()
    lines = text.read_text().splitlines()
    heads = [line for line in lines if line.startswith("| arm |")]
    assert len(heads) >= 3 and "energy, estimate" in heads[0]


def test_markdown_of_others_stays_text() -> None:
    assert escaped("a|b\n<b> [x](y) `c` *d*") == "a\\|b &lt;b&gt; \\[x](y) \\`c\\` \\*d\\*"
    # One backslash would make another one text, and the link live.
    assert escaped(r"\[x](y)") == r"\\\[x](y)"
    assert escaped("Lora.__init__() _x_ a_b ~~c~~ $d$") == (
        r"Lora.\_\_init\_\_() \_x\_ a_b \~\~c\~\~ \$d\$"
    )


def test_build_gives_the_page_that_a_tracking_server_may_keep(home: Home, tmp_path: Path) -> None:
    path = build(home, "demo", out=tmp_path)
    assert path == tmp_path / "demo.html" and path.read_text().startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [path], "nothing temporary is left"


def test_a_folder_that_cannot_be_written_is_an_error(report: Report, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/file: cannot be written"):
        write(report, tmp_path / "file", Form.HTML)


# ---- what is not there ---------------------------------------------------------------------------------------------------------


def test_a_half_finished_sweep_says_what_is_missing_and_draws_the_rest(other: Home) -> None:
    write_definition(other, ["full", "lora", "read"], ["agreement"], trials=4)
    write_cell(other, "full", trials=4)
    write_cell(other, "lora", trials=2, seeds=[])
    write_trial(other, make_spec("lora", number=2))  # handed out
    sync(other, tracking_uri=other.tracking_uri)
    report = read(other.path)
    assert [line.partition(":")[0] for line in report.missing] == [
        "1 of 3 planned cells have no ended trial yet",
        "1 of 2 cells are still searched.",
        "1 trials were handed out and have not ended.",
    ]
    shown = page(report)
    assert (
        "Not finished." in shown
        and 'id="rates"' in shown
        and "full is the only arm on agreement so far, with " in shown
    )


def test_before_the_first_confirm_run_the_page_shows_the_search(other: Home) -> None:
    write_definition(other, ["lora"], ["agreement"], trials=4)
    write_cell(other, "lora", trials=2, seeds=[])
    sync(other, tracking_uri=other.tracking_uri)
    shown = page(read(other.path))
    assert (
        "Nothing can be said yet:" in shown
        and 'id="rates"' in shown
        and 'id="tradeoffs"' not in shown
    )


def test_a_home_without_results_says_what_to_do(other: Home, suite: Suite, tmp_path: Path) -> None:  # noqa: F811
    (other.path / "trials").mkdir()
    code, _, err = suite("report", "--home", other.path)
    assert code == 2 and "no results yet" in err and "suite run" in err
    code, _, err = suite("report", "--home", tmp_path / "nowhere")
    assert code == 2 and "holds no trials" in err


def test_names_that_do_not_exist_are_answered_with_those_that_do(home: Home, suite: Suite) -> None:  # noqa: F811
    code, _, err = suite("report", "--home", home.path, "--sweep", "dmo")
    assert code == 2 and "did you mean demo?" in err
    code, _, err = suite("report", "--home", home.path, "--sort", "beauty")
    assert code == 2 and "peop" in err
    with pytest.raises(UnknownNameError, match="unknown sort key 'zzz'; known: energy, memory"):
        read(home.path, sort="zzz")


def test_records_of_a_newer_version_are_refused_and_not_misread(own: Home) -> None:
    folder = next(own.trials())
    data = json.loads((folder.path / "result.json").read_text())
    write_json(folder.path / "result.json", {**data, "schema_version": 99, "checksum": None})
    with pytest.raises(
        ConfigError,
        match=r"not a record of this version of the suite \(schema_version\); use the version that wrote it",
    ):
        read(own.path)
    write_json(folder.path / "result.json", data)
    definition = own.sweep_definition("demo")
    write_json(definition, {**json.loads(definition.read_text()), "of_tomorrow": 1})
    with pytest.raises(ConfigError, match="not a definition of this version of the suite"):
        read(own.path)


def test_of_several_sweeps_one_that_cannot_be_read_keeps_no_other_from_its_report(
    suite: Suite,  # noqa: F811
    tmp_path: Path,
    own: Home,
) -> None:
    store = open_store(own.tracking_uri)
    store.client.create_experiment("a-broken-one", tags={"suite.kind": "sweep"})
    assert "a-broken-one" in store.experiments()
    code, out, err = suite("report", "--home", own.path, "--out", tmp_path, "--format", "csv")
    assert (
        code == 2
        and "no report of a-broken-one: " in err
        and str(tmp_path / "demo-leaderboard.csv") in out
    )


def test_rows_and_curves_are_of_the_same_homes(home: Home, tmp_path: Path) -> None:
    """A home that has an id and no row in the store (it was copied, or another one's store is read) shows what there is."""
    shutil.copytree(home.path, tmp_path / "copy")
    (tmp_path / "copy" / "tracking-id").write_text("somebody-else")
    found = read(tmp_path / "copy")
    assert {(row["arm"], row["task"]) for row in found.rows if row["task"] != "mean"} == {
        *found.cells
    } and found.cells


def test_a_name_of_the_home_that_is_no_text_is_as_good_as_another(
    home: Home, tmp_path: Path
) -> None:
    shutil.copytree(home.path, tmp_path / "copy")
    (tmp_path / "copy" / "tracking-id").write_bytes(b"\xff\xfe")
    assert read(tmp_path / "copy").cells


def test_the_command_writes_what_it_names(home: Home, suite: Suite, tmp_path: Path) -> None:  # noqa: F811
    code, out, _ = suite("report", "--home", home.path, "--out", tmp_path, "--format", "png")
    paths = [Path(line) for line in out.splitlines()]
    assert (
        code == 0
        and len(paths) >= 8
        and all(path.exists() and path.parent == tmp_path for path in paths)
    )
    code, _, err = suite("report", "--home", home.path, "--live", "--out", tmp_path)
    assert code == 2 and "--live: serves a page and writes no file" in err


# ---- live ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def served(source: Source) -> Iterator[str]:
    server = make_server(source)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(
        urllib.request.Request(url, headers=headers), timeout=30
    ) as answer_:
        return str(answer_.read().decode())


def test_a_served_page_follows_the_sweep_and_is_built_only_when_something_changed(
    other: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_definition(other, ["full", "lora"], ["agreement"], trials=1)
    source = Source(other.path)
    built = []
    real = live.read
    monkeypatch.setattr(
        live, "read", lambda *args, **options: built.append(1) or real(*args, **options)
    )
    with served(source) as url:
        assert "no results yet" in get(f"{url}/")
        before = get(f"{url}/demo?version")
        write_cell(other, "full", trials=1)
        sync(other, tracking_uri=other.tracking_uri)
        assert get(f"{url}/demo?version") != before
        built.clear()
        assert "full is the only arm" in get(f"{url}/") and "full is the only arm" in get(
            f"{url}/demo"
        )
        assert len(built) == 1
        assert get(f"{url}/?version") == get(f"{url}/?version")
        write_cell(other, "lora", trials=1)
        sync(other, tracking_uri=other.tracking_uri)
        assert "lora" in get(f"{url}/") and len(built) == 2


def test_a_served_page_knows_its_version_so_that_nothing_is_missed_between_page_and_question(
    home: Home,
) -> None:
    source = Source(home.path)
    shown = re.search(r'data-version="([0-9a-f]{16})"', source.page("demo"))
    assert shown is not None and shown[1] == source.version()
    assert "data-version" not in page(read(home.path))


def test_a_failure_that_is_half_written_breaks_neither_question_nor_server(
    own: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(own.path)
    before = source.version()
    (next(own.trials()).path / "failure-1.json").write_text("{")
    with served(source) as url:
        assert get(f"{url}/?version") not in ("", before)
        assert "demo" in get(f"{url}/demo")

        def fail(_source: Source, _name: str | None = None) -> str:
            raise RuntimeError("in a state that nobody thought of")

        monkeypatch.setattr(Source, "page", fail)
        with pytest.raises(urllib.error.HTTPError, match="500") as answered:
            get(f"{url}/demo")
        assert b"looks again every five seconds" in answered.value.read()


def test_a_server_of_one_sweep_refuses_others(home: Home) -> None:
    assert "unknown sweep" in Source(home.path, "demo").page("other")


def test_a_port_without_live_is_refused(home: Home, suite: Suite) -> None:  # noqa: F811
    code, _, err = suite("report", "--home", home.path, "--port", 8000)
    assert code == 2 and "--port: got it without --live" in err


def test_another_sites_script_cannot_read_a_served_page(home: Home) -> None:
    with served(Source(home.path)) as url, pytest.raises(urllib.error.HTTPError, match="403"):
        get(f"{url}/", Host="evil.example")


def test_a_port_that_is_taken_is_an_error(home: Home) -> None:
    server = make_server(Source(home.path))
    try:
        with pytest.raises(SuiteError, match=r"--port \d+: Address already in use"):
            make_server(Source(home.path), server.server_port)
    finally:
        server.server_close()


def test_the_attack_is_one(report: Report) -> None:
    """Guards the tests above: what they look for is really in the records, and escaping it is what kept it out."""
    assert (
        any("<script>" in failure["message"] for failure in report.failures)
        and "<script>" in ATTACK
    )
