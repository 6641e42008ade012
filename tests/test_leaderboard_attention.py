"""What the leaderboard says of attention variants: retention, elasticity, pretraining, and columns that show where they vary."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from suite.cli.leaderboard import show
from suite.cli.options import Format
from suite.config.sweep import AttentionChoice
from suite.record.folder import Home
from suite.record.result import PretrainRecord
from suite.tracking import sync
from tests.records import PERPLEXITY, RATES, define, make_result, make_spec, write_trial
from tests.test_leaderboard import home, rows

__all__ = ["home"]

PERPLEXITIES = {"mha": 43.0, "sha": 62.0, "mhe-mul": 53.8, "gqa": 50.0}


@pytest.fixture(scope="module")
def perplexities(tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> Home:
    """A synced home, read only: four attention variants on a task of which less is better, gqa with two options."""
    home = Home(tmp_path_factory.mktemp("perplexities"))
    shutil.copy(empty_db, home.path)
    options: dict[str, list[dict[str, Any]]] = {"gqa": [{"kv_heads": 2}, {"kv_heads": 4}]}
    for name, score in PERPLEXITIES.items():
        for chosen in options.get(name, [{}]):
            attention = AttentionChoice(name=name, options=chosen)
            search = make_spec("full", PERPLEXITY, attention=attention)
            confirm = make_spec(
                "full", PERPLEXITY, attention=attention, seed=1, learning_rate=search.learning_rate
            )
            for spec in (search, confirm):
                write_trial(home, spec, make_result(spec, score=score))
    define(home)
    assert sync(home, tracking_uri=home.tracking_uri).unreachable is None
    return home


def test_retention_and_elasticity_are_read_from_mlflow_and_sort_best_first(
    perplexities: Home,
) -> None:
    board = rows(perplexities, sort="peop")
    assert [row["attention"] for row in board] == ["mhe-mul", "gqa", "gqa", "mha", "sha"]
    assert (board[0]["prr"], board[0]["peop"]) == (
        pytest.approx(74.88, abs=0.005),
        pytest.approx(42.32, abs=0.005),
    )
    assert (board[-1]["peop"], board[-1]["peop_missing"]) == (
        None,
        "it is single-head attention itself",
    )
    assert [row["attention"] for row in rows(perplexities, sort="prr")] == [
        "mha",
        "gqa",
        "gqa",
        "mhe-mul",
        "sha",
    ]


def test_the_best_score_is_the_lowest_where_less_is_better(perplexities: Home) -> None:
    board = rows(perplexities)
    assert [row["score_mean"] for row in board] == [43.0, 50.0, 50.0, 53.8, 62.0]
    assert {row["higher_is_better"] for row in board} == {False}


def test_what_pretraining_cost_stands_beside_the_row_that_needed_it(home: Home) -> None:
    stage = PretrainRecord(
        checkpoint="0123456789abcdef",
        steps=500,
        loss=3.2,
        train_s=60.0,
        energy_kwh=0.002,
        weights_sha256="00",
    )
    unmeasured = stage.model_copy(update={"energy_kwh": None})
    for name, pretrain, run in (
        ("sha", stage, "a" * 16),
        ("mha", unmeasured, "b" * 16),
        ("pretrained", None, None),
    ):
        changes: dict[str, Any] = {"attention": AttentionChoice(name=name)}
        for spec in (
            make_spec("full", **changes),
            make_spec("full", **changes, seed=1, learning_rate=RATES[0]),
        ):
            arm = spec.arm.model_copy(update={"pretrain": run})
            spec = spec.model_copy(update={"arm": arm})
            write_trial(home, spec, make_result(spec, pretrain=pretrain))
    define(home)
    sync(home, tracking_uri=home.tracking_uri)
    found = {row["attention"]: row for row in rows(home)}
    costs = {
        name: (row["pretrain_steps"], row["pretrain_s"], row["pretrain_energy_kwh"])
        for name, row in found.items()
    }
    assert costs == {
        "sha": (500, 60.0, 0.002),
        "mha": (500, 60.0, None),
        "pretrained": (None, None, None),
    }
    assert found["sha"]["prr"] is not None, (
        "each variant has a pretrain run of its own, and they are compared all the same"
    )


def test_choosing_an_attention_variant_keeps_its_ratios(perplexities: Home) -> None:
    (row,) = rows(perplexities, attention="mhe-mul")
    assert (row["prr"], row["peop"]) == (
        pytest.approx(74.88, abs=0.005),
        pytest.approx(42.32, abs=0.005),
    )


def test_the_same_variant_with_other_options_is_another_row_that_shows_them(
    perplexities: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(
        row["attention_options"]["kv_heads"] for row in rows(perplexities, attention="gqa")
    ) == [2, 4]
    show(perplexities.tracking_uri, fmt=Format.MD)
    shown = capsys.readouterr().out
    for text in (
        "| gqa kv_heads=2 |",
        "| gqa kv_heads=4 |",
        "| mha |",
        "| 53.8 ↓ |",
        "| PRR |",
        "| 42.3 |",
    ):
        assert text in shown


def test_the_columns_on_attention_are_shown_where_it_varies(
    finished: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    show(finished.tracking_uri, fmt=Format.MD)
    shown = capsys.readouterr().out
    assert "attention pretrained" in shown
    assert "PRR" not in shown and "↓" not in shown and "pretrain steps" not in shown
