"""Test scores that were read from several sets of confirm runs: counted, shown, and corrected for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from suite.errors import ConfigError
from suite.leaderboard.collect import sweep_rows
from suite.leaderboard.learning import with_learning
from suite.leaderboard.table import choose
from suite.plan.definition import read_plan, store_definition
from suite.record.folder import Home
from suite.record.looks import FOLDER, Looks, from_json, joint, names
from suite.stats.compare import Evidence
from suite.stats.ranks import rank_groups
from suite.stats.significance import counted
from suite.storage.mirror import Mirror
from suite.storage.urls import open_storage
from tests.answers import some_right, write_confirmed
from tests.commands import Suite, suite  # noqa: F401  (a fixture)
from tests.records import RATES, make_result, make_spec, write_cell, write_definition, write_trial

METHODS = ["full", "lora"]


def two_arms(path: Path) -> Home:
    """A home with `full` and `lora`, five seeds each, of which `full` is better."""
    rng = np.random.default_rng(0)
    home = Home(path)
    for method, share in (("full", 0.75), ("lora", 0.62)):
        write_confirmed(home, method, some_right(rng, share, items=400, seeds=5))
    write_definition(home, METHODS, ["agreement"], trials=1, seeds=range(1, 6))
    return home


def ask(home: Home, seeds: Sequence[int], *, trials: int = 4) -> None:
    """Run the sweep with these seeds, as far as its definition and its trial folders show."""
    write_definition(home, ["lora"], ["agreement"], trials=trials, seeds=seeds)
    write_cell(home, trials=trials, seeds=seeds)


def looks(home: Home) -> tuple[int, str | None]:
    (row,) = sweep_rows(home, "demo")
    return row.test_looks, row.looks_warning


def test_seeds_that_were_added_after_a_look_are_further_looks(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ask(home, [1, 2, 3])
    assert looks(home) == (1, None)
    ask(home, [3, 2, 1])  # the same runs in another order
    assert looks(home)[0] == 1
    ask(home, range(1, 6))
    ask(home, range(1, 9))
    count, warning = looks(home)
    assert count == 3
    assert (
        warning is not None and "seeds 1, 2, 3 at" in warning and "p is multiplied by 3" in warning
    )
    ask(home, range(1, 9))  # running the same sweep again is no look
    assert looks(home)[0] == 3 and len(names(home, "demo")) == 2


def test_seeds_decided_before_there_is_a_test_score_are_one_look(tmp_path: Path) -> None:
    home = Home(tmp_path)
    write_definition(home, ["lora"], ["agreement"], seeds=[1, 2, 3])
    write_cell(home, seeds=[])
    ask(home, range(1, 6))
    assert looks(home) == (1, None) and names(home, "demo") == []


def test_runs_that_were_tested_and_are_left_out_stay_visible(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ask(home, range(1, 6))
    write_definition(home, ["lora"], ["agreement"], seeds=[2, 3, 5])
    (row,) = sweep_rows(home, "demo")
    assert row.seed_scores.keys() == {"2", "3", "5"}
    # All five, and the ten ways in which three of five can be chosen.
    assert row.test_looks == 11
    assert row.looks_warning is not None and "in 10 ways" in row.looks_warning


def test_left_out_runs_show_where_no_record_was_kept(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ask(home, range(1, 6))
    path = home.sweep_definition("demo")
    config = json.loads(path.read_text())
    config["confirm"]["seeds"] = [2, 3, 5]
    path.write_text(json.dumps(config))
    assert names(home, "demo") == [] and looks(home)[0] == 11


def test_another_learning_rate_is_a_further_look(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ask(home, [1, 2, 3])
    other = make_spec("lora", seed=1, learning_rate=RATES[1])
    write_trial(home, other, make_result(other, score=99.0))
    count, warning = looks(home)
    assert count == 2 and warning is not None and f"seeds 1 at {RATES[1]:.3g}" in warning


def test_a_rate_that_was_tested_and_chosen_again_with_more_seeds_is_a_further_look(
    tmp_path: Path,
) -> None:
    """The search chose another rate in between, which hid that the first one had been tested."""
    home = Home(tmp_path)
    ask(home, [1, 2, 3])
    better = make_spec("lora", number=4, learning_rate=2e-3)
    write_trial(home, better, make_result(better, score=99.0))
    write_definition(home, ["lora"], ["agreement"], trials=5, seeds=[1, 2, 3])
    ask(home, range(1, 6))
    count, warning = looks(home)
    assert count == 2 and warning is not None and "seeds 1, 2, 3 at" in warning


def test_another_architecture_that_was_tested_is_a_further_look(tmp_path: Path) -> None:
    """A search that goes on may choose otherwise, after a test score of its first choice."""
    home = Home(tmp_path)
    arms = []
    for rank, score in ((4, 50.0), (8, 60.0)):
        spec = make_spec("lora")
        arms.append(spec.arm.model_copy(update={"architecture": {"rank": rank}}))
        for seed in (None, 1):
            spec = make_spec("lora", seed=seed) if seed else make_spec("lora")
            spec = spec.model_copy(update={"arm": arms[-1]})
            write_trial(home, spec, make_result(spec, score=score))
    write_definition(home, ["lora"], ["agreement"], trials=1, seeds=[1])
    plan = read_plan(home, "demo")
    cells = [
        replace(plan.cells[0], arm=arm, contest="ranks", choice=place)
        for place, arm in enumerate(arms)
    ]
    store_definition(replace(plan, cells=tuple(cells)), home)
    rows = {row.arm: row for row in sweep_rows(home, "demo")}
    chosen = rows[arms[1].key]
    assert chosen.test_looks == 2
    assert chosen.looks_warning is not None and "1 of other architectures" in chosen.looks_warning
    assert rows[arms[0].key].test_looks == 1, "it won nothing by what was seen"


def test_a_record_of_another_host_changes_the_row(tmp_path: Path) -> None:
    """Every host that shares a storage counts the looks of all."""
    there = Home(tmp_path / "there")
    storage = open_storage((tmp_path / "storage").as_uri())
    ask(there, [1, 2, 3])
    ask(there, range(1, 6))
    mirror = Mirror(there, storage)
    mirror.push_home()
    mirror.push_definition("demo")
    here = Home(tmp_path / "here")
    Mirror(here, storage).fetch_home()
    assert names(here, "demo") == names(there, "demo") != []
    (row,) = sweep_rows(here, "demo")
    assert row.test_looks == 2
    # A row that was made before the record came does not hold.
    for file in (here.path / "sweeps" / FOLDER / "demo").iterdir():
        file.unlink()
    (older,) = sweep_rows(here, "demo", known=[row])
    assert older.test_looks == 1 and older.digest != row.digest


def test_looks_at_several_cells_are_put_together() -> None:
    three = (1, 2, 3)
    five = (1, 2, 3, 4, 5)
    low = (0.1, 16)
    high = (0.2, 16)
    larger = (0.1, 32)
    grown = Looks(((low, five), (low, three)))
    moved = Looks(((high, three), (low, three)))
    batched = Looks(((larger, three), (low, three)))
    assert joint([]) == joint([Looks(), Looks(((low, three),))]) == 1
    assert joint([grown, grown]) == 2  # the seeds of all cells change at once
    assert joint([moved, moved]) == 3  # their learning rates do not
    assert batched.count == 2 and "at 0.1 in batches of 16" in str(batched.warning)
    assert joint([grown, Looks(((low, three),), choices=10)]) == 11
    assert from_json(json.loads(json.dumps(grown.as_json()))) == grown
    assert from_json({}).count == 0


def test_a_rank_and_a_comparison_need_more_after_a_further_look(
    tmp_path: Path,
    suite: Suite,  # noqa: F811
) -> None:
    home = two_arms(tmp_path / "home")
    once = [row.rank for row in sweep_rows(home, "demo")]
    command = ("compare", "full", "lora", "--home", home.path, "--format", "json")
    before = json.loads(suite(*command)[1])
    for seeds in (range(1, 4), range(2, 5), range(1, 6)):
        write_definition(home, METHODS, ["agreement"], trials=1, seeds=seeds)
    rows = sweep_rows(home, "demo")
    after = json.loads(suite(*command)[1])
    assert (once, [row.rank for row in rows]) == (["1", "2"], ["1-2", "1-2"])
    assert [row.test_looks for row in rows] == [3, 3]
    assert (before[0]["test_looks"], after[0]["test_looks"]) == (1, 3)
    assert after[0]["p"] == before[0]["p"]
    assert after[0]["p_holm"] == pytest.approx(min(1.0, 3 * before[0]["p_holm"]))


def test_a_mean_row_counts_the_looks_of_all_its_tasks(tmp_path: Path) -> None:
    home = Home(tmp_path)
    tasks = ["agreement", "entailment"]
    for seeds in ([1, 2, 3], [1, 2, 3, 4]):
        write_definition(home, ["lora"], tasks, seeds=seeds)
        for task in tasks:
            write_cell(home, "lora", task, seeds=seeds)
    rows = choose(sweep_rows(home, "demo")).rows
    assert [(row.task, row.test_looks) for row in rows] == [
        ("agreement", 2),
        ("entailment", 2),
        ("mean", 2),
    ]
    assert (
        rows[-1].looks_warning is not None and "entailment: 2 test looks" in rows[-1].looks_warning
    )


def test_the_constant_answer_is_beaten_by_more_after_a_further_look(tmp_path: Path) -> None:
    home = Home(tmp_path)
    right = some_right(np.random.default_rng(1), 0.6, items=200)
    write_confirmed(home, "lora", right)
    write_definition(home, ["lora"], ["agreement"], trials=1, seeds=[1, 2, 3])
    (once,) = sweep_rows(home, "demo")
    plan = read_plan(home, "demo")
    other = replace(plan.cells[0])
    spec = plan.confirm_spec(other, RATES[3], 1)
    write_trial(home, spec, make_result(spec, score=50.0))
    (twice,) = sweep_rows(home, "demo")
    assert once.constant_p is not None and twice.test_looks == 2
    assert twice.constant_p == once.constant_p
    # One row is its own family, so that the looks alone correct.
    (corrected,) = with_learning([twice])
    assert corrected.constant_p_holm == pytest.approx(min(1.0, 2 * once.constant_p))


def test_adding_seeds_until_arms_differ_is_paid_for() -> None:
    """Whoever stops at the first of 3, 5 and 8 seeds that tells two equal arms apart, 1,000 times."""
    rng = np.random.default_rng(0)
    told = [0, 0]
    for _ in range(1000):
        scores = rng.normal(size=(2, 8))
        for corrected in (0, 1):
            for look, seeds in enumerate((3, 5, 8)):
                evidence = Evidence(tuple(range(seeds)), scores[:, :seeds], np.zeros((2, 2)), 100)
                groups = rank_groups(evidence, higher_is_better=True, looks=1 + corrected * look)
                if groups[0] != groups[1]:
                    told[corrected] += 1
                    break
    # What other schedules come to: python -m benchmarks.protocol.looks
    assert told[0] > 55 and told[1] < 55
    assert counted(0.03, 3) == pytest.approx(0.09) and counted(0.9, 2) == 1


@pytest.mark.parametrize("edit", ["cut", "empty", "edited"])
def test_a_record_that_was_cut_or_edited_is_no_record_less(tmp_path: Path, edit: str) -> None:
    home = Home(tmp_path)
    ask(home, [1, 2, 3])
    ask(home, range(1, 6))
    (file,) = (home.path / "sweeps" / FOLDER / "demo").iterdir()
    whole = file.read_bytes()
    edited = whole.replace(b"3\n", b"5\n")
    assert edited != whole
    file.write_bytes({"cut": whole[:40], "empty": b"", "edited": edited}[edit])
    with pytest.raises(ConfigError, match=rf"{file.name}.*cut or edited.*copy it back"):
        looks(home)
    file.write_bytes(whole)
    assert looks(home)[0] == 2


def test_what_ranks_can_show_counts_the_looks_of_a_pair_and_not_of_an_arm_with_itself(
    tmp_path: Path,
    suite: Suite,  # noqa: F811
) -> None:
    home = two_arms(tmp_path / "home")
    plan = read_plan(home, "demo")
    spec = plan.confirm_spec(plan.cells[1], RATES[3], 1)
    write_trial(home, spec, make_result(spec, score=50.0))
    rows = sweep_rows(home, "demo")
    assert sorted(row.test_looks for row in rows) == [1, 2]
    command = ("compare", "full", "lora", "--home", home.path, "--format", "json")
    (pair,) = json.loads(suite(*command)[1])
    assert pair["test_looks"] == 2
    assert rows[0].shown_difference == pytest.approx(pair["shown_difference"])
