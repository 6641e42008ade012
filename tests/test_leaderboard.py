"""The leaderboard: what each number of a row is made of, what counts as finished, and what the mean rows may say."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from suite.cli.leaderboard import _title_of, show
from suite.cli.options import Format
from suite.errors import TrackingError, UnknownNameError
from suite.leaderboard.collect import sweep_rows
from suite.leaderboard.fields import COLUMNS, Row
from suite.leaderboard.file import read_rows, write_rows
from suite.leaderboard.table import choose, mean_rows, plain
from suite.meters.record import ESTIMATE, PhaseRecord
from suite.plan.definition import read_plan, store_definition
from suite.plan.plan import make_plan
from suite.plan.queue import TrialQueue
from suite.plan.status import status as cell_reports
from suite.record.folder import Home
from suite.record.result import Status
from suite.record.spec import TrialSpec
from suite.tracking import leaderboard, open_store, sync, to_rows
from tests.answers import some_right, write_answers, write_confirmed
from tests.records import (
    RATES,
    cell_rows,
    define,
    make_result,
    make_spec,
    write_cell,
    write_definition,
    write_trial,
)
from tests.sweeps import run_all, toy_roots, toy_sweep

__all__ = ["toy_roots"]
KEYS = [
    *[
        "backbone",
        "attention",
        "method",
        "architecture",
        "task",
        "score_mean",
        "score_std",
        "seeds",
        "validation_score",
        "learning_rate",
    ],
    *[
        "trainable_parameters",
        "total_parameters",
        "energy_kwh",
        "energy_source",
        "peak_memory_bytes",
        "train_s",
        "samples_per_s",
    ],
    *["search_trials", "search_energy_kwh", "status"],
]


@pytest.fixture
def home(tmp_path: Path, empty_db: Path) -> Home:
    """An empty home with a ready database."""
    shutil.copy(empty_db, tmp_path)
    return Home(tmp_path)


def rows(home: Home, **options: Any) -> list[dict[str, Any]]:
    return to_rows(leaderboard(home.tracking_uri, **options))


def only_row(home: Home) -> Row:
    (row,) = cell_rows(home)
    return row


def test_the_columns_are_the_documented_ones_in_order(finished: Home) -> None:
    assert list(COLUMNS[: len(KEYS)]) == KEYS
    assert list(leaderboard(finished.tracking_uri).columns[: len(KEYS)]) == KEYS


def test_later_columns_come_after_those_that_were_there_before(finished: Home) -> None:
    assert list(leaderboard(finished.tracking_uri).columns[len(KEYS) :]) == [
        *["sweep", "arm", "edge", "search_s", "home"],
        *[
            "attention_options",
            "attention_parameters",
            "kv_bytes_per_token",
            "prr",
            "prr_missing",
            "peop",
            "peop_missing",
        ],
        *["higher_is_better", "pretrain_energy_kwh", "pretrain_s", "pretrain_steps"],
        *[
            "lr_sensitivity_decades",
            "learning_rate_low",
            "learning_rate_high",
            "extensions",
            "saved_trials",
            "chosen",
        ],
        *[
            "selection_trials",
            "selection_s",
            "selection_energy_kwh",
            "energy_to_target_kwh",
            "energy_to_target_missing",
        ],
        *["reference_score", "reference_std", "reference_source", "difference", "reference"],
        "lm_eval",
        *["rank", "rank_missing", "ci_low", "ci_high", "ci_of", "ci_missing"],
        *["admitted", "rejected", "dirty", "own_code"],
        *["constant_score", "constant_p", "constant_missing"],
        *["constant_p_holm", "shown_to_learn", "loss_fall", "loss_fall_p", "precision", "machine"],
        *["shown_difference", "seeds_for_point", "test_looks", "looks_warning"],
        *["search_best", "prepare_energy_kwh", "prepare_s"],
        *["prepare_memory_bytes", "train_memory_bytes", "prepare_missing", "unverified"],
        *["batch_size", "frozen_dropout"],
    ]


def test_a_row_is_made_of_its_trials(finished: Home) -> None:
    (row,) = [r for r in rows(finished, method="lora") if r["task"] == "entailment"]
    confirm = [
        make_result(make_spec("lora", "entailment", seed=s, learning_rate=RATES[2]))
        for s in (1, 2, 3)
    ]
    scores = [r.score for r in confirm]
    expected = {
        "backbone": "tiny-bert",
        "attention": "pretrained",
        "method": "lora",
        "architecture": {"rank": 8},
        "task": "entailment",
        "score_mean": pytest.approx(mean(scores), abs=1e-12),
        "score_std": pytest.approx(stdev(scores), abs=1e-12),
        "seeds": 3,
        "validation_score": pytest.approx(mean(scores), abs=1e-12),
        "search_best": make_result(make_spec("lora", "entailment", number=2)).score,
        "learning_rate": RATES[2],
        "trainable_parameters": 50_000,
        "total_parameters": 4_050_000,
        "energy_kwh": pytest.approx(2.2e-5, abs=1e-12),
        "energy_source": "cpu-time-estimate",
        "peak_memory_bytes": 10_000_003,
        "train_s": 22.0,
        "samples_per_s": 82.0,
        "search_trials": 4,
        "search_energy_kwh": pytest.approx(4 * 2.3e-5, abs=1e-12),
        "status": "done",
        "sweep": "demo",
        "edge": False,
        "search_s": 100.0,
        "attention_options": {},
        "attention_parameters": 16_384,
        "kv_bytes_per_token": 256,
        "prr": 100.0,
        "prr_missing": None,
        "peop": None,
        "peop_missing": "this sweep has no row with attention sha on the same backbone, method, architecture and task",
        "higher_is_better": True,
        "pretrain_energy_kwh": None,
        "pretrain_s": None,
        "pretrain_steps": None,
    }
    assert {key: row[key] for key in expected} == expected


def test_rows_are_strict_json_with_whole_numbers_and_null(home: Home) -> None:
    write_cell(home, trials=2, seeds=[1])
    define(home)
    sync(home, tracking_uri=home.tracking_uri)
    (row,) = json.loads(json.dumps(rows(home), allow_nan=False))
    assert row["score_std"] is None
    assert isinstance(row["trainable_parameters"], int)
    assert isinstance(row["seeds"], int)


def test_the_leaderboard_needs_mlflow_only(finished: Home, tmp_path: Path) -> None:
    with (
        closing(sqlite3.connect(finished.path / "mlflow.db")) as source,
        closing(sqlite3.connect(tmp_path / "elsewhere.db")) as copy,
    ):
        source.backup(copy)
    shutil.copytree(finished.path / "mlartifacts", tmp_path / "mlartifacts")
    assert to_rows(leaderboard(f"sqlite:///{tmp_path}/elsewhere.db")) == rows(finished)


def test_only_confirm_runs_of_the_chosen_learning_rate_count(home: Home) -> None:
    write_cell(home, trials=4, seeds=[1, 2])
    stale = make_spec("lora", seed=3, learning_rate=RATES[1])
    write_trial(home, stale, make_result(stale, score=0.1))
    write_definition(home, ["lora"], ["agreement"])
    assert only_row(home).seed_scores.keys() == {"1", "2"}


def test_trials_beyond_a_lowered_budget_or_of_an_edited_task_do_not_count(home: Home) -> None:
    write_cell(home, trials=4, seeds=[1, 2, 3])
    write_definition(home, ["lora"], ["agreement"], trials=2, seeds=[1, 2])
    row = only_row(home)
    assert (row.search_trials, row.learning_rate, row.status) == (2, RATES[1], "partial")
    (report,) = cell_reports(home, "demo")
    assert report.left_out == 2 and report.notes[-1].startswith("search trials left out: 2 (beyond")
    plan = read_plan(home, "demo")
    (cell,) = plan.cells
    edited = replace(cell, task=cell.task.model_copy(update={"version": 2}))
    for changed in (replace(plan, cells=(edited,)), replace(plan, world_size=4)):
        store_definition(changed, home)
        (row,) = sweep_rows(home, "demo")
        assert (row.search_trials, row.status) == (0, "searching")
        (report,) = cell_reports(home, "demo")
        assert report.left_out == 4
    write_definition(home, ["lora"], ["agreement"], trials=4, seeds=[1, 2])
    (report,) = cell_reports(home, "demo")
    assert report.left_out == 0 and "left out" not in " ".join(report.notes)


def end(home: Home, *specs: TrialSpec, status: Status = Status.COMPLETED) -> None:
    for spec in specs:
        write_trial(home, spec, make_result(spec, status=status))


SEARCH = [make_spec("lora", number=n) for n in range(2)]
CONFIRM = [make_spec("lora", seed=s, learning_rate=RATES[1]) for s in (1, 2)]


@pytest.mark.parametrize(
    ("scored", "without", "status", "seeds"),
    [
        (SEARCH[:1], [], "searching", 0),
        (SEARCH, [], "partial", 0),
        ([*SEARCH, CONFIRM[0]], [], "partial", 1),
        ([*SEARCH, CONFIRM[0]], [CONFIRM[1]], "failed", 1),
        ([*SEARCH, *CONFIRM], [], "done", 2),
        ([SEARCH[1], *CONFIRM], [SEARCH[0]], "done", 2),
        (SEARCH, CONFIRM, "failed", 0),
        ([], SEARCH, "failed", 0),
        ([], SEARCH[:1], "searching", 0),
    ],
)
def test_the_status_says_what_is_left(
    home: Home, scored: list[TrialSpec], without: list[TrialSpec], status: str, seeds: int
) -> None:
    write_definition(home, ["lora"], ["agreement"], trials=2, seeds=[1, 2])
    end(home, *scored)
    end(home, *without, status=Status.DIVERGED)
    row = only_row(home)
    assert (row.status, row.seeds) == (status, seeds)
    (report,) = cell_reports(home, "demo")
    assert report.status == row.status, "suite status says the same"


def test_a_cell_of_which_nothing_has_ended_has_a_row_of_nulls(home: Home) -> None:
    write_definition(home, ["lora"], ["agreement"])
    write_trial(home, make_spec("lora"))
    sync(home, tracking_uri=home.tracking_uri)
    (row,) = rows(home)
    assert (
        row["status"],
        row["search_trials"],
        row["score_mean"],
        row["trainable_parameters"],
    ) == ("searching", 0, None, None)


@pytest.mark.parametrize(("trials", "edge"), [(3, True), (4, False)])
def test_the_edge_is_where_nobody_has_seen_the_curve_fall(
    home: Home, trials: int, edge: bool
) -> None:
    """The best rate is the third; the fourth lies beyond it, at the end of the range."""
    write_definition(home, ["lora"], ["agreement"], trials=trials, learning_rates=(1e-6, 3e-3))
    write_cell(home, trials=trials)
    assert only_row(home).edge is edge


def test_a_missing_measurement_makes_its_mean_or_sum_null_and_nothing_else(home: Home) -> None:
    write_cell(home, trials=3, seeds=[1])
    for spec in (make_spec("lora", seed=2, learning_rate=RATES[2]), make_spec("lora", number=3)):
        write_trial(
            home, spec, make_result(spec, phases={"train": PhaseRecord(seconds=10.0)}, timing=None)
        )
    define(home)
    summary = only_row(home)
    assert (
        summary.energy_kwh,
        summary.peak_memory_bytes,
        summary.samples_per_s,
        summary.search_energy_kwh,
    ) == (None, None, None, None)
    assert (summary.train_s, summary.search_s, summary.seeds) == (15.5, 85.0, 2)


def test_energy_that_was_measured_for_some_seeds_and_estimated_for_others_has_no_mean(
    home: Home,
) -> None:
    write_cell(home, "full", trials=3, seeds=[1, 2])
    spec = make_spec("full", seed=2, learning_rate=RATES[2])
    result = make_result(spec)
    train = result.phases["train"].model_copy(update={"energy_source": "rapl"})
    write_trial(home, spec, result.model_copy(update={"phases": result.phases | {"train": train}}))
    define(home)
    (row,) = choose(sweep_rows(home, "demo")).rows
    assert row.energy_source == f"{ESTIMATE}+rapl"
    assert (row.energy_kwh, row.energy_to_target_kwh) == (None, None)
    assert row.energy_to_target_missing is not None and "estimated" in row.energy_to_target_missing


def test_no_energy_of_a_mean_row_adds_a_measured_task_to_an_estimated_one(home: Home) -> None:
    for task in ("agreement", "entailment"):
        for spec in write_cell(home, "full", task, trials=3, seeds=[1, 2]):
            result = make_result(spec)
            phases = result.phases
            if task == "agreement":
                phases = {}
                for name, phase in result.phases.items():
                    phases[name] = phase.model_copy(update={"energy_source": "nvml"})
            write_trial(home, spec, result.model_copy(update={"phases": phases}))
    define(home)
    found = {row.task: row for row in choose(sweep_rows(home, "demo")).rows}
    for name in ("energy_kwh", "search_energy_kwh", "selection_energy_kwh"):
        assert getattr(found["agreement"], name) is not None
        assert getattr(found["mean"], name) is None
    assert found["mean"].search_s is not None


def test_the_row_of_a_cell_whose_answers_were_changed_is_made_again(home: Home) -> None:
    (spec,) = write_confirmed(home, "lora", [[True] * 10])
    define(home)
    before = sweep_rows(home, "demo")
    write_answers(home, spec, {"index": ["test/0"], "gold": [1], "prediction": [0.0]})
    assert sweep_rows(home, "demo", known=before)[0].digest != before[0].digest


@pytest.mark.parametrize("status", [Status.FAILED, Status.OOM])
def test_trials_that_recorded_no_cost_leave_the_search_cost_open(
    home: Home, status: Status
) -> None:
    write_cell(home, trials=3, seeds=[1])
    define(home)
    assert only_row(home).search_s == 75.0
    spec = make_spec("lora", number=3)
    write_trial(home, spec, make_result(spec, status=status, phases={}, parameters=None))
    define(home)
    (row,) = choose(sweep_rows(home, "demo")).rows
    assert (row.status, row.search_trials, row.selection_trials) == ("done", 4, 4)
    assert (row.search_s, row.search_energy_kwh) == (None, None)
    assert (row.selection_s, row.selection_energy_kwh) == (None, None)


def test_a_number_can_become_null_again(home: Home) -> None:
    write_definition(home, ["lora"], ["agreement"])
    write_cell(home)
    sync(home, tracking_uri=home.tracking_uri)
    assert rows(home)[0]["status"] == "done"
    for seed in (1, 2, 3):
        shutil.rmtree(home.trial(make_spec("lora", seed=seed, learning_rate=RATES[2])).path)
    sync(home, tracking_uri=home.tracking_uri)
    assert (rows(home)[0]["status"], rows(home)[0]["score_mean"]) == ("partial", None)


def test_the_cells_metrics_in_mlflow_are_those_of_the_last_sync(home: Home) -> None:
    write_cell(home, seeds=[1])
    define(home)
    sync(home, tracking_uri=home.tracking_uri)
    spec = make_spec("lora", seed=2, learning_rate=RATES[2])
    write_trial(home, spec, make_result(spec, score=0.1))
    define(home)
    sync(home, tracking_uri=home.tracking_uri)
    store = open_store(home.tracking_uri)
    (run,) = store.runs([store.experiment("demo")], {"suite.kind": "cell"})
    assert (
        store.client.get_run(run.id).data.metrics["score_mean"] == rows(home)[0]["score_mean"] < 0.6
    )
    assert run.status == "FINISHED"


def test_rows_survive_their_file(tmp_path: Path) -> None:
    rows = [
        make_summary("a", 0.5, seed_scores={"1": 0.25, "2": 0.75}, energy_kwh=1e-9, edge=True),
        make_summary(
            "b", None, status="searching", rejected=["why"], curve=[[1e-3, None, "oom", 8]]
        ),
    ]
    write_rows(tmp_path / "rows.parquet", rows)
    assert read_rows(tmp_path / "rows.parquet") == rows
    write_rows(tmp_path / "rows.parquet", [])
    assert read_rows(tmp_path / "rows.parquet") == []


def test_a_file_of_rows_that_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(TrackingError, match=r"no such file; run: suite sync"):
        read_rows(path)
    write_rows(path, [make_summary("a", 0.5)])
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"not parquet"):
        path.write_bytes(damaged)
        with pytest.raises(TrackingError, match="not a whole file of rows"):
            read_rows(path)
    path.write_bytes(whole)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"suite-rows": "0"}), path)
    with pytest.raises(TrackingError, match=r"schema version 0, expected \w+: another version"):
        read_rows(path)
    pq.write_table(table.replace_schema_metadata({}), path)
    with pytest.raises(TrackingError, match="no file of rows"):
        read_rows(path)
    for changed in (
        table.drop_columns(["digest"]),
        table.append_column("digest", table.column("digest")),
        table.set_column(0, "backbone", pa.array([1])),
        table.set_column(3, "architecture", pa.array(["{"])),
        table.set_column(3, "architecture", pa.array(["[" * 10**5])),
        table.set_column(3, "architecture", pa.array([None], pa.string())),
    ):
        pq.write_table(changed, path)
        with pytest.raises(TrackingError, match="remove it and run: suite sync, then import"):
            read_rows(path)


def make_summary(
    task: str, score: float | None, *, arm: str = "x", status: str = "done", **fields: Any
) -> Row:
    names = {
        "sweep": "demo",
        "backbone": "b",
        "attention": "pretrained",
        "method": "lora",
        "architecture": {"rank": 8},
    }
    return Row(**names, home="h", task=task, arm=arm, score_mean=score, status=status, **fields)


def mean_of(*cells: Row) -> list[Row]:
    return mean_rows(cells)


def test_a_mean_row_averages_tasks_and_spreads_over_the_seeds_means() -> None:
    left = make_summary(
        "a",
        0.5,
        seed_scores={"1": 0.4, "2": 0.6},
        seeds=2,
        energy_kwh=1.0,
        peak_memory_bytes=10,
        learning_rate=1e-3,
    )
    right = make_summary(
        "b",
        0.8,
        seed_scores={"1": 0.9, "2": 0.7},
        seeds=2,
        energy_kwh=3.0,
        peak_memory_bytes=13,
        learning_rate=1e-4,
    )
    (row,) = mean_of(left, right)
    assert (row.task, row.status, row.seeds, row.energy_kwh, row.learning_rate) == (
        "mean",
        "done",
        2,
        2.0,
        None,
    )
    assert row.score_mean == pytest.approx(0.65, abs=1e-12)
    assert row.score_std == pytest.approx(
        0.0, abs=1e-12
    )  # 0.65 with either seed, though each task varies
    assert row.peak_memory_bytes == 12


def test_a_mean_row_is_null_where_a_task_has_no_score_and_has_no_spread_where_seeds_differ() -> (
    None
):
    (row,) = mean_of(
        make_summary("a", 0.5), make_summary("b", None, status="partial", energy_kwh=1.0)
    )
    assert (row.score_mean, row.energy_kwh, row.status) == (None, None, "partial")
    left = make_summary("a", 0.5, seed_scores={"1": 0.4, "2": 0.6})
    right = make_summary("b", 0.9, seed_scores={"1": 0.9})
    assert mean_of(left, right)[0].score_std is None


@pytest.mark.parametrize(
    ("other", "status"), [("done", "failed"), ("failed", "failed"), ("partial", "partial")]
)
def test_a_mean_row_with_a_failed_task_says_so_and_has_no_score(other: str, status: str) -> None:
    scores: dict[str, Any] = {"seed_scores": {"1": 0.4, "2": 0.6}, "validation_score": 0.5}
    (row,) = mean_of(
        make_summary("a", 0.5, status="failed", **scores),
        make_summary("b", 0.5, status=other, energy_kwh=1.0, **scores),
    )
    assert (row.status, row.rank_missing) == (status, "only finished rows are ranked")
    assert (row.score_mean, row.score_std, row.validation_score) == (None, None, None)
    assert row.seed_scores == {}


def test_a_mean_row_needs_several_tasks_and_all_tasks_of_the_sweep() -> None:
    assert mean_of(make_summary("a", 0.5)) == []
    cells = [make_summary(task, 0.5, arm="x") for task in "ab"] + [
        make_summary(task, 0.7, arm="y") for task in "abc"
    ]
    lacking, whole = mean_of(*cells)
    assert (lacking.score_mean, lacking.status) == (None, "searching")
    assert (whole.score_mean, whole.status) == (pytest.approx(0.7, abs=1e-12), "done")


def test_a_mean_waits_for_a_task_that_nobody_has_begun(home: Home) -> None:
    write_definition(home, ["full", "lora"], ["agreement", "entailment", "third"], trials=1)
    for task in ("agreement", "entailment"):
        for method, share in (("full", 0.9), ("lora", 0.5)):
            right = some_right(np.random.default_rng(0), share)
            write_confirmed(home, method, right, task)
    found = [row for row in choose(sweep_rows(home, "demo")).rows if row.task == "mean"]
    assert [(row.score_mean, row.status, row.rank) for row in found] == [
        (None, "searching", None)
    ] * 2


def test_mean_rows_of_real_cells(finished: Home) -> None:
    board = rows(finished, method="lora")
    assert [row["task"] for row in board] == ["agreement", "entailment", "mean"]
    assert board[2]["score_mean"] == pytest.approx(
        (board[0]["score_mean"] + board[1]["score_mean"]) / 2, abs=1e-12
    )
    by_seed = [
        mean(
            make_result(make_spec("lora", task, seed=seed, learning_rate=RATES[2])).score
            for task in ("agreement", "entailment")
        )
        for seed in (1, 2, 3)
    ]
    assert board[2]["score_std"] == pytest.approx(stdev(by_seed), abs=1e-12)


@pytest.mark.parametrize(
    ("sort", "key", "best_first"),
    [
        ("score", "score_mean", True),
        ("trainable", "trainable_parameters", False),
        ("energy", "energy_kwh", False),
    ],
)
def test_rows_are_sorted_within_tasks_and_mean_rows_come_last(
    finished: Home, sort: str, key: str, best_first: bool
) -> None:
    board = rows(finished, sort=sort)
    assert [row["task"] for row in board] == ["agreement"] * 2 + ["entailment"] * 2 + ["mean"] * 2
    for task in ("agreement", "entailment", "mean"):
        values = [row[key] for row in board if row["task"] == task]
        assert values == sorted(values, reverse=best_first)


def test_unknown_values_sort_last_and_ties_keep_their_order(home: Home) -> None:
    for method in ("full", "lora", "read"):
        write_cell(home, method, trials=3, seeds=[1])
    write_trial(home, make_spec("adapter"))
    define(home)
    sync(home, tracking_uri=home.tracking_uri)
    assert [row["method"] for row in rows(home, sort="energy")] == [
        "full",
        "lora",
        "read",
        "adapter",
    ]
    assert [row["method"] for row in rows(home, sort="trainable")] == [
        "read",
        "lora",
        "full",
        "adapter",
    ]
    assert rows(home, sort="score")[-1]["method"] == "adapter"


@pytest.mark.usefixtures("toy_roots")
def test_the_title_counts_seeds_of_scores_and_not_of_architectures_that_lost(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    search = {"per": "method", "choose": "curve", "trials": 3}
    sweep = toy_sweep(search=search, methods=["lora"], architectures="search")
    plan = make_plan(sweep, where="toy.yaml")
    store_definition(plan, home)
    run_all(TrialQueue(plan, home, slots=1), home)
    sync(home, tracking_uri=home.tracking_uri)
    assert sorted(row["seeds"] for row in rows(home)) == [0, 0, 2]
    for lost_too in (False, True):
        show(home.tracking_uri, fmt=Format.MD, rejected=lost_too)
        out, _ = capsys.readouterr()
        assert ("not chosen" in out) == lost_too
        assert ", seeds: 2" in out and "0 to" not in out


@pytest.mark.usefixtures("toy_roots")
def test_the_edge_is_that_of_the_architecture_in_the_row(home: Home) -> None:
    """On one task rank 8 is best, inside the range; over both it is rank 16, which rises to the end."""
    search = {"per": "method", "sampler": "grid", "trials": 9}
    sweep = toy_sweep(search=search, methods=["lora"], architectures="search")
    sweep = sweep.model_copy(update={"tasks": ["toy", "toy2"]})
    plan = make_plan(sweep, where="toy.yaml")
    searched = plan.cells[0].learning_rate

    def score(spec: TrialSpec) -> float:
        # 0 at the lower end of the range, 1 at the upper one
        place = math.log(spec.learning_rate / searched.low) / math.log(searched.high / searched.low)
        rank = spec.arm.architecture["rank"]
        if spec.task.name == "toy2":
            return (95 if rank == 16 else 50) - 40 * (place - 0.5) ** 2
        if rank == 16:
            return 84 - 40 * (place - 1.2) ** 2
        return (86 if rank == 8 else 60) - 40 * (place - 0.5) ** 2

    store_definition(plan, home)
    run_all(TrialQueue(plan, home, slots=1), home, score=score)
    edges = {row.task: row.edge for row in sweep_rows(home, "toy") if row.chosen}
    assert edges == {"toy": True, "toy2": False}


def test_the_title_of_rows_that_share_nothing_else_is_their_seeds() -> None:
    first = Row(sweep="a", backbone="bert", attention="gqa", score_mean=80.0, seeds=2)
    second = Row(sweep="b", backbone="t5", attention="sha", score_mean=70.0, seeds=2)
    assert _title_of(plain([first, second])) == "seeds: 2"


def test_sweeps_tasks_and_methods_can_be_chosen(home: Home) -> None:
    write_cell(home, trials=1, seeds=[1])
    write_cell(home, "read", "entailment", trials=1, seeds=[1], sweep="other")
    define(home)
    define(home, "other")
    sync(home, tracking_uri=home.tracking_uri)
    assert [row["sweep"] for row in rows(home)] == ["demo", "other"]
    assert [row["task"] for row in rows(home, sweep="other")] == ["entailment"]
    assert [row["method"] for row in rows(home, task="agreement")] == ["lora"]
    assert [row["sweep"] for row in rows(home, method="read")] == ["other"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sweep": "dmeo"}, "unknown sweep 'dmeo'; did you mean demo"),
        ({"method": "lore"}, "unknown method 'lore'; did you mean lora"),
        ({"task": "cola"}, "unknown task 'cola'"),
        ({"attention": "pretraind"}, "unknown attention 'pretraind'; did you mean pretrained"),
    ],
)
def test_names_that_do_not_exist_are_answered_with_near_ones(
    finished: Home, options: dict[str, str], message: str
) -> None:
    with pytest.raises(TrackingError, match=message):
        leaderboard(finished.tracking_uri, **options)


def test_a_sort_key_that_does_not_exist_is_answered_before_anything_is_read() -> None:
    message = r"^unknown sort key 'energie'; did you mean energy\?$"
    with pytest.raises(UnknownNameError, match=message):
        leaderboard("sqlite:////nowhere/mlflow.db", sort="energie")
    with pytest.raises(UnknownNameError, match=message):
        choose([], sort="energie")


def test_no_results_yet_is_said_and_nothing_is_created(home: Home, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"no results yet: .*absent\.db does not exist"):
        leaderboard(f"sqlite:///{tmp_path}/absent.db")
    assert not (tmp_path / "absent.db").exists()
    with pytest.raises(TrackingError, match=r"no results yet in .*suite run"):
        leaderboard(home.tracking_uri)
