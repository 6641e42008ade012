"""Learning-rate curves, their sensitivity, the cost of search and the energy to a target: by hand, and as the leaderboard shows them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from suite.cli.curves import columns, points
from suite.leaderboard.collect import sweep_rows
from suite.leaderboard.costs import with_energy_to_target, with_selection_cost
from suite.leaderboard.curves import (
    confirmed_point,
    epochs_at_best,
    is_chosen,
    learning_rate_curve,
    sensitivity_decades,
)
from suite.leaderboard.fields import Row
from suite.leaderboard.names import Names, distinct
from suite.meters.record import ESTIMATE, PhaseRecord
from suite.plan.definition import read_plan, store_definition
from suite.record.cells import Trial, read_cells
from suite.record.folder import Home
from suite.record.result import EpochRecord, PreparationRecord, Status
from suite.report.chart import Points
from suite.report.curves import learning_rate_curve as drawn_curve
from suite.report.curves import of_cells
from suite.tracking import leaderboard, sync, to_rows
from tests.commands import Suite, suite
from tests.records import (
    PERPLEXITY,
    RATES,
    define,
    make_result,
    make_spec,
    write_cell,
    write_definition,
    write_trial,
)

__all__ = ["suite"]


@pytest.fixture
def home(tmp_path: Path, empty_db: Path) -> Home:
    shutil.copy(empty_db, tmp_path)
    return Home(tmp_path)


def row_of(home: Home, **options: Any) -> dict[str, Any]:
    sync(home, tracking_uri=home.tracking_uri)
    (row,) = to_rows(leaderboard(home.tracking_uri, **options))
    return row


# ---- the curve ---------------------------------------------------------------------------------------------------------------


def test_the_curve_holds_every_ended_trial_in_its_order(home: Home) -> None:
    write_definition(home, ["lora"], ["agreement"])
    specs = [
        make_spec(number=n, learning_rate=rate) for n, rate in enumerate((1e-3, 1e-5, 2e-3, 1e-2))
    ]
    for spec, score in zip(specs, (80.0, 50.0, 79.5, None), strict=False):
        status = Status.COMPLETED if score is not None else Status.DIVERGED
        write_trial(home, spec, make_result(spec, score=score, status=status))
    write_trial(home, make_spec(number=4, learning_rate=0.5))  # handed out, not ended
    (cell,) = read_cells(home, "demo").values()
    curve = [
        [1e-3, 80.0, "completed", 8],
        [1e-5, 50.0, "completed", 8],
        [2e-3, 79.5, "completed", 8],
        [1e-2, None, "diverged", 8],
    ]
    assert learning_rate_curve(cell.search) == curve
    sync(home, tracking_uri=home.tracking_uri)
    (row,) = to_rows(leaderboard(home.tracking_uri))
    assert row["lr_sensitivity_decades"] == pytest.approx(math.log10(2), abs=1e-12)


def study(*points: tuple[float, float | None]) -> list[list[Any]]:
    return [
        [rate, score, "completed" if score is not None else "diverged", 8] for rate, score in points
    ]


@pytest.mark.parametrize(
    ("points", "higher", "decades"),
    [
        ([(1e-5, 70.0), (1e-4, 89.2), (1e-3, 90.0), (1e-2, 89.0), (1e-1, 10.0)], True, 2.0),
        ([(1e-2, 89.0), (1e-4, 89.2), (1e-3, 90.0)], True, 2.0),  # in any order
        (
            [(1e-5, 89.5), (1e-4, 88.0), (1e-3, 90.0), (1e-2, 89.5)],
            True,
            1.0,
        ),  # the run is unbroken
        ([(1e-4, 89.5), (3e-4, None), (1e-3, 90.0)], True, 0.0),  # a failed trial breaks it
        ([(1e-4, 88.9), (1e-3, 90.0)], True, 0.0),
        ([(1e-4, 20.15), (1e-3, 20.0), (1e-2, 20.3)], False, 1.0),  # one percent of a perplexity
        ([(1e-4, 76.6), (1e-3, 77.60000000000001)], True, 1.0),  # one point, rounded
        ([(1e-3, 90.0)], True, None),
        ([(1e-4, None), (1e-3, None)], True, None),
        ([], True, None),
    ],
)
def test_the_sensitivity_is_the_width_of_the_top_that_was_tried(
    points: Sequence[tuple[float, float | None]], higher: bool, decades: float | None
) -> None:
    width = sensitivity_decades(study(*points), higher_is_better=higher)
    assert width == (None if decades is None else pytest.approx(decades, abs=1e-12))


def test_what_is_decided_about_the_study_stands_in_the_row(home: Home) -> None:
    """The best rate lies at the upper end, so the range grew by a decade, where the best lies inside."""
    write_definition(
        home, ["lora"], ["agreement"], trials=2, learning_rates=(1e-6, 1e-3), extensions=1
    )
    rates = (1e-4, 1e-3, 3e-3, 9e-3)
    for number, rate in enumerate(rates):
        spec = make_spec(number=number, learning_rate=rate)
        write_trial(home, spec, make_result(spec, score=80.0 - abs(number - 2)))
    row = row_of(home)
    found = [row["saved_trials"], row["extensions"], row["chosen"]]
    assert found == [0, 1, None]
    assert (row["learning_rate_low"], row["learning_rate_high"]) == (1e-6, pytest.approx(1e-2))


def make_cell(**fields: Any) -> Row:
    names = {
        "sweep": "demo",
        "backbone": "b",
        "attention": "pretrained",
        "method": "lora",
        "architecture": {},
        "task": "a",
    }
    return Row(**{**names, "arm": "x", "conditions": "same", **fields})


def test_outside_of_a_contest_the_cost_of_selection_is_that_of_the_search() -> None:
    alone = make_cell(search_trials=3, search_s=7.0, search_energy_kwh=None)
    won = make_cell(chosen=True, search_trials=4, selection_trials=10, selection_s=30.0)
    rows = with_selection_cost([alone, won, make_cell(chosen=False, search_trials=6)])
    costs = [(row.selection_trials, row.selection_s, row.selection_energy_kwh) for row in rows]
    assert costs == [(3, 7.0, None), (10, 30.0, None), (None, None, None)]


def test_what_an_architecture_that_lost_found_best_was_not_confirmed() -> None:
    cell = make_cell(learning_rate=1e-3, batch_size=8, curve=[[1e-3, 50.0, "completed", 8]])
    assert is_chosen(cell, 1e-3, 8) and is_chosen(replace(cell, chosen=True), 1e-3, 8)
    lost = replace(cell, chosen=False)
    assert not is_chosen(lost, 1e-3, 8)
    assert confirmed_point(replace(lost, validation_score=None)) == []


def test_frozen_states_that_architectures_share_are_paid_for_once(home: Home) -> None:
    def collected(sources: Sequence[str]) -> Row:
        specs = []
        for width, source in zip((64, 128), sources, strict=True):
            spec = make_spec("read")
            arm = spec.arm.model_copy(update={"architecture": {"hidden": width}})
            spec = spec.model_copy(update={"arm": arm})
            specs.append(spec)
            states = PhaseRecord(seconds=70.0, energy_kwh=5e-4, energy_source=ESTIMATE)
            shared = PreparationRecord(
                key="states", made_by=specs[0].hash, reused=spec is not specs[0], cost=states
            )
            result = make_result(spec, frozen_states=shared)
            for name, phase in result.phases.items():
                result.phases[name] = phase.model_copy(update={"energy_source": source})
            write_trial(home, spec, result)
        write_definition(home, ["read"], ["agreement"], trials=1, seeds=[1])
        plan = read_plan(home, "demo")
        cells = [
            replace(plan.cells[0], arm=spec.arm, contest="widths", choice=place)
            for place, spec in enumerate(specs)
        ]
        store_definition(replace(plan, cells=tuple(cells)), home)
        rows = sweep_rows(home, "demo")
        assert [row.search_trials for row in rows] == [1, 1]
        (won,) = [row for row in with_selection_cost(rows) if row.chosen]
        (kept,) = [row for row in sweep_rows(home, "demo", known=[won]) if row.chosen]
        assert kept == won, "it is stored, and read again as it is"
        return won

    won = collected([ESTIMATE, ESTIMATE])
    assert won.search_s is not None and won.search_energy_kwh is not None
    assert won.selection_trials == 2
    assert won.selection_s == pytest.approx(2 * won.search_s - 70.0)
    assert won.selection_energy_kwh == pytest.approx(2 * won.search_energy_kwh - 5e-4)
    mixed = collected([ESTIMATE, "rapl"])
    assert mixed.selection_s == won.selection_s and mixed.selection_energy_kwh is None


# ---- energy to target ----------------------------------------------------------------------------------------------------------


def epochs(*scores: float, energy_kwh: float | None = 1.0) -> list[EpochRecord]:
    return [
        EpochRecord(
            epoch=n,
            step=n,
            train_loss=1.0,
            validation_score=score,
            validation_scores={"accuracy": score},
            learning_rate=1e-3,
            seconds=1.0,
            energy_kwh=energy_kwh,
        )
        for n, score in enumerate(scores, start=1)
    ]


def test_progress_keeps_the_epochs_that_were_the_best_so_far(home: Home) -> None:
    runs = []
    for seed, scores in ((1, (50.0, 40.0, 60.0, 60.0)), (2, (70.0,))):
        spec = make_spec(seed=seed, learning_rate=RATES[2])
        runs.append(Trial(home.trial(spec), spec, make_result(spec, epochs=epochs(*scores))))
    assert epochs_at_best(runs, higher_is_better=True) == [
        [1, 1.0, 50.0],
        [1, 3.0, 60.0],
        [2, 1.0, 70.0],
    ]
    assert epochs_at_best(runs, higher_is_better=False) == [
        [1, 1.0, 50.0],
        [1, 2.0, 40.0],
        [2, 1.0, 70.0],
    ]


FULL = make_cell(arm="full", method="full", validation_score=80.0, higher_is_better=True)


def energy(cell: Row, *others: Row, target_frac: float = 0.95) -> tuple[float | None, str | None]:
    # Where a test names no scores, all runs have one.
    scores = cell.seed_scores or {str(seed): 1.0 for seed, _, _ in cell.progress}
    row = with_energy_to_target([replace(cell, seed_scores=scores), *others], target_frac)[0]
    return row.energy_to_target_kwh, row.energy_to_target_missing


def test_the_energy_to_target_is_spent_until_the_score_is_first_near_that_of_full_fine_tuning() -> (
    None
):
    cell = make_cell(progress=[[1, 1.0, 70.0], [1, 3.0, 77.0], [1, 9.0, 90.0], [2, 2.0, 76.0]])
    assert energy(cell, FULL) == (
        2.5,
        None,
    )  # 76 is the target: 3 kWh with seed 1, 2 kWh with seed 2
    assert energy(cell, FULL, target_frac=0.875) == (1.5, None)


def test_a_perplexity_is_near_when_it_is_not_much_higher() -> None:
    full = replace(FULL, validation_score=19.0, higher_is_better=False)
    cell = make_cell(
        progress=[[1, 1.0, 30.0], [1, 2.0, 20.0], [1, 3.0, 18.0]], higher_is_better=False
    )
    assert energy(cell, full) == (2.0, None)  # 19 / 0.95
    assert energy(cell, full, target_frac=1.0) == (3.0, None)


@pytest.mark.parametrize(
    ("cell", "others", "reason"),
    [
        ({"progress": [[1, 1.0, 90.0]]}, [], "no row of method full"),
        ({"progress": [[1, 1.0, 90.0]]}, [replace(FULL, task="b")], "no row of method full"),
        (
            {"progress": [[1, 1.0, 90.0]]},
            [FULL, replace(FULL, arm="other")],
            "2 rows of this sweep are of method full",
        ),
        (
            {"progress": [[1, 1.0, 90.0]]},
            [replace(FULL, validation_score=None)],
            "no validation score yet",
        ),
        (
            {"progress": [[1, 1.0, 90.0]]},
            [replace(FULL, validation_score=0.0)],
            "is 0, of which no share",
        ),
        ({"progress": [[1, 1.0, 90.0]]}, [replace(FULL, admitted=False)], "is rejected"),
        ({"progress": [[1, 1.0, 90.0]]}, [replace(FULL, status="failed")], "full failed, and so"),
        ({"progress": []}, [FULL], "no confirm run has ended"),
        (
            {"progress": [[1, 1.0, 90.0], [2, 1.0, 75.9]]},
            [FULL],
            "seed 2 never reaches a validation score of 76",
        ),
        (
            {"progress": [[1, 1.0, 90.0]], "status": "failed"},
            [FULL],
            "a confirm run ended without a score",
        ),
        (
            {"progress": [[1, 1.0, 90.0], [2, 1.0, 90.0]], "seed_scores": {"1": 90.0}},
            [FULL],
            "a confirm run ended without a score",
        ),
        ({"progress": [[1, None, 90.0]]}, [FULL], "energy of the run with seed 1 was not measured"),
    ],
)
def test_an_energy_to_target_that_is_missing_says_why(
    cell: dict[str, Any], others: list[Row], reason: str
) -> None:
    value, missing = energy(make_cell(**cell), *others)
    assert value is None and missing is not None and reason in missing


def test_an_architecture_that_lost_is_no_target() -> None:
    cell = make_cell(progress=[[1, 1.0, 76.0]])
    assert energy(cell, replace(FULL, chosen=True), replace(FULL, arm="lost", chosen=False)) == (
        1.0,
        None,
    )


def test_the_leaderboard_joins_full_fine_tuning_and_takes_the_share_that_is_asked_for(
    home: Home,
) -> None:
    write_definition(home, ["full", "lora"], ["agreement"], trials=1, seeds=[1])
    for method, curve in (("full", (70.0, 80.0)), ("lora", (74.0, 77.0))):
        for seed in (0, 1):
            spec = make_spec(method, seed=seed, learning_rate=RATES[2])
            write_trial(
                home,
                spec,
                make_result(spec, score=max(curve), epochs=epochs(*curve, energy_kwh=0.5)),
            )
    row = row_of(home, method="lora")
    assert (row["energy_to_target_kwh"], row["energy_to_target_missing"]) == (1.0, None)
    assert row_of(home, method="lora", target_frac=0.9)["energy_to_target_kwh"] == 0.5
    row = row_of(home, method="lora", target_frac=1.0)
    assert (
        row["energy_to_target_kwh"] is None
        and "never reaches a validation score of 80" in row["energy_to_target_missing"]
    )


def test_a_mean_row_says_which_task_has_no_energy_to_target(home: Home) -> None:
    for task in ("agreement", "entailment"):
        write_cell(home, "lora", task, trials=1, seeds=[1])
    write_cell(home, "full", "agreement", trials=1, seeds=[1])
    define(home)
    sync(home, tracking_uri=home.tracking_uri)
    (mean,) = to_rows(leaderboard(home.tracking_uri, method="lora", task="mean"))
    assert mean["energy_to_target_missing"].startswith(
        "entailment: this sweep has no row of method full"
    )


# ---- suite curves --------------------------------------------------------------------------------------------------------------


def test_suite_curves_prints_and_draws_what_was_tried(
    home: Home, suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_definition(
        home, ["full", "lora"], ["agreement", PERPLEXITY], learning_rates=(1e-6, 1e-3), trials=3
    )
    write_cell(home, "lora", "agreement", trials=3)
    write_cell(home, "full", "agreement", trials=3)
    bad = make_spec("lora", PERPLEXITY, learning_rate=1e-2)
    write_trial(home, bad, make_result(bad, status=Status.DIVERGED))
    sync(home, tracking_uri=home.tracking_uri)
    code, out, _ = suite(
        "curves",
        "lora/agreement",
        "--home",
        home.path,
        "--format",
        "json",
        "--figure",
        tmp_path / "c.png",
    )
    found = json.loads(out)
    assert code == 0
    assert [(p["learning_rate"], p["chosen"]) for p in found] == [
        (1e-4, False),
        (3e-4, False),
        (1e-3, True),
    ]
    assert {(p["learning_rate_low"], p["learning_rate_high"], p["edge"]) for p in found} == {
        (1e-6, 1e-3, True)
    }
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    code, out, _ = suite("curves", "--home", home.path)
    assert code == 0 and "chosen (edge)" in out and "diverged" in out
    monkeypatch.setenv("COLUMNS", "40")
    _, out, err = suite("curves", "lora/agreement", "--home", home.path)
    head, rule, *lines = out.splitlines()[1:]
    assert head.split() == ["method", "rate", "validation"] and len(rule) <= 40
    assert [line.split()[:2] for line in lines] == [
        ["lora", "0.0001"],
        ["lora", "0.0003"],
        ["lora", "0.001"],
    ]
    said = " ".join(err.split())
    assert "no room here for: attention, architecture, task, status, choice;" in said
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = suite("curves", "--home", home.path)
    assert "agreement" in out and PERPLEXITY in out
    monkeypatch.delenv("COLUMNS")
    code, _, err = suite("curves", "lorra", "--home", home.path)
    assert code == 2 and "did you mean lora" in err
    code, _, err = suite("curves", "--home", home.path, "--figure", "c.pdf")
    assert code == 2 and "ends in .png" in err


def test_cells_of_two_homes_are_told_apart() -> None:
    cell = make_cell(home="h", curve=[[1e-3, 60.0, "completed", 8]])
    cells = [cell, replace(cell, home="other")]
    assert [point["home"] for one in cells for point in points(one)] == ["h", "other"]
    assert "home" in [column.head for column in columns(cells)]
    assert "home" not in [column.head for column in columns([cell, cell])]
    assert [chart.title for chart in of_cells(cells)] == ["lora @ h / a", "lora @ other / a"]
    sweeps = [cell, replace(cell, sweep="other")]
    assert [chart.title for chart in of_cells(sweeps)] == ["demo:lora / a", "other:lora / a"]


def test_panels_of_one_variant_are_told_apart_by_its_options() -> None:
    cells = []
    for heads in (2, 4):
        options = {"kv_heads": heads}
        curve = [[1e-3, 60.0, "completed", 8]]
        cells.append(make_cell(attention="gqa", attention_options=options, curve=curve))
    titles = [chart.title for chart in of_cells(cells)]
    assert "kv_heads=2" in titles[0] and "kv_heads=4" in titles[1]


def test_panels_of_one_method_are_told_apart_by_what_differs_in_their_architectures() -> None:
    lora = [Names("t5", "mha", "lora", {"rank": rank, "alpha": 8}) for rank in (8, 32)]
    assert distinct([*lora, Names("t5", "mha", "full", {})]) == [
        "lora rank=8",
        "lora rank=32",
        "full",
    ]
    assert distinct([lora[0], Names("t5", "gqa", "lora", {"rank": 8, "alpha": 8})]) == [
        "mha lora",
        "gqa lora",
    ]


@pytest.mark.parametrize(("higher", "best"), [(True, 62.0), (False, 61.0)])
def test_batch_sizes_have_lines_of_their_own_and_the_ring_is_at_what_was_confirmed(
    higher: bool, best: float
) -> None:
    tried = [(1e-3, 62.0, 16), (1e-3, 66.0, 32), (1e-4, 60.0, 16), (1e-3, 61.0, 16)]
    row = Row(
        home="h",
        sweep="demo",
        backbone="b",
        attention="pretrained",
        method="lora",
        task="agreement",
        arm="x",
        higher_is_better=higher,
        learning_rate=1e-3,
        batch_size=16,
        validation_score=best,
        curve=[[rate, score, "completed", size] for rate, score, size in tried],
    )
    chart = drawn_curve(row, "lora")
    marks = {mark.name: mark for mark in chart.marks if isinstance(mark, Points)}
    assert list(marks["batch size 16"].x) == [1e-4, 1e-3, 1e-3] and chart.legend
    assert list(marks["batch size 32"].y) == [66.0]
    assert list(marks["chosen"].y) == [62.0, 61.0]
    assert chart.text.startswith(
        "2 learning rates tried in 4 trials with 2 batch sizes; chosen (ringed) 0.001 at batches "
        f"of 16 with {best:.1f} on validation"
    )
    assert [point["chosen"] for point in points(row)] == [False, True, False, True]
    elsewhere = replace(row, curve=[[1e-3, 66.0, "completed", 32]])
    assert [point["status"] for point in points(elsewhere)] == ["completed", "confirmed"]
    chart = drawn_curve(elsewhere, "lora")
    marks = {mark.name: mark for mark in chart.marks if isinstance(mark, Points)}
    assert list(marks["tried"].y) == [66.0] and list(marks["chosen"].y) == [best]
    assert chart.text == (
        "1 learning rate tried; chosen (ringed) 0.001 at batches of 16, which no search trial "
        f"tried, with {best:.1f} on validation (mean of its confirm runs)."
    )
