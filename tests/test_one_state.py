"""A cell stands where its trial folders say: every command agrees, and nothing derived is needed to know it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from suite.leaderboard.collect import sweep_rows
from suite.leaderboard.file import read_rows, write_rows
from suite.plan.definition import store_definition
from suite.plan.plan import Plan, make_plan
from suite.plan.queue import TrialQueue
from suite.plan.status import status
from suite.record.folder import Home
from suite.record.result import Status
from suite.tracking import leaderboard, to_rows
from tests.records import make_result, make_spec, synced, write_cell, write_definition, write_trial
from tests.report_home import make_report_home
from tests.sweeps import run_all, toy_roots, toy_sweep

ROOT = Path(__file__).parents[1]

__all__ = ["toy_roots"]


def words(home: Home, sweep: str = "demo") -> tuple[list[str], list[str]]:
    """What `suite status` and the leaderboard call the cells."""
    rows = sweep_rows(home, sweep)
    return [cell.status.value for cell in status(home, sweep)], [row.status for row in rows]


def test_an_extended_study_is_done_without_any_file_beside_its_trials(tmp_path: Path) -> None:
    """Four rates of which the highest is best, then two in the decade that was opened, then three seeds."""
    home = Home(tmp_path)
    ranges = {"learning_rates": (1e-6, 1e-3), "extensions": 1}
    write_definition(home, ["lora"], ["agreement"], trials=4, seeds=(1, 2, 3), **ranges)
    rates = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    scores = (60.0, 70.0, 80.0, 85.0, 90.0, 75.0)
    for number, (rate, score) in enumerate(zip(rates, scores, strict=True)):
        spec = make_spec(number=number, learning_rate=rate)
        write_trial(home, spec, make_result(spec, score=score))
    for seed in (1, 2, 3):
        spec = make_spec(seed=seed, learning_rate=3e-3)
        write_trial(home, spec, make_result(spec, score=90.0))
    (row,) = sweep_rows(home, "demo")
    assert (row.status, row.learning_rate, row.seeds, row.score_mean) == ("done", 3e-3, 3, 90.0)
    assert (row.search_trials, row.extensions) == (6, 1)
    assert words(home) == (["done"], ["done"])


def test_a_seed_without_a_score_is_called_the_same_everywhere(tmp_path: Path) -> None:
    home = Home(tmp_path)
    write_definition(home, ["lora"], ["agreement"])
    rate = write_cell(home, seeds=(1, 2))[-1].learning_rate
    third = make_spec(seed=3, learning_rate=rate)
    assert words(home) == (["partial"], ["partial"]), "the third seed is still to run"
    write_trial(home, third)
    assert words(home) == (["partial"], ["partial"]), "it runs"
    write_trial(home, third, make_result(third, status=Status.DIVERGED))
    assert words(home) == (["failed"], ["failed"]), "nothing is left to run"
    (row,) = sweep_rows(home, "demo")
    assert (row.seeds, row.rank_missing) == (2, "only finished rows are ranked")


def without_home(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The id of a home is drawn anew where it was deleted."""
    return [{key: value for key, value in row.items() if key != "home"} for row in rows]


def test_everything_derived_is_made_again_from_definitions_and_trials(
    tmp_path: Path, empty_db: Path
) -> None:
    home = make_report_home(tmp_path / "home", empty_db)
    before = to_rows(leaderboard(home.tracking_uri, rejected=True))
    assert {row["rank"] for row in before} > {None}
    for path in home.path.iterdir():
        if path.name == "sweeps":
            for file in path.iterdir():
                if file.suffix not in (".json", ".cells"):
                    shutil.rmtree(file) if file.is_dir() else file.unlink()
        elif path.is_file():
            path.unlink()
        elif path.name not in ("trials", "pretrained"):
            shutil.rmtree(path)
    assert {path.name for path in home.path.iterdir()} == {"sweeps", "trials"}
    synced(home, empty_db)
    after = to_rows(leaderboard(home.tracking_uri, rejected=True))
    assert without_home(after) == without_home(before)


# ---- a driver that is killed between two writes ---------------------------------------------------------------------------


def contest() -> Plan:
    """Two architectures that compete on one task, an edge guard, and a random search, which needs no torch."""
    search = {"trials": 2, "sampler": "random", "edge_guard": {"extensions": 1, "trials": 1}}
    methods = [
        {"name": "lora", "learning_rate": {"low": 1e-5, "high": 1e-3}},
    ]
    config = toy_sweep(methods=methods, search=search, architectures="search")
    config = config.model_copy(update={"confirm": config.confirm.model_copy(update={"seeds": [1]})})
    return make_plan(config, where="toy")


def drive(home: Home, plan: Plan) -> None:
    """What a driver writes: its definition, specifications, results, and rows as trials end."""
    store_definition(plan, home)
    path = home.path / "rows.parquet"
    queue = TrialQueue(plan, home, slots=1)
    ran = True
    while ran:
        known = read_rows(path) if path.exists() else []
        write_rows(path, sweep_rows(home, "toy", known=known))
        ran = bool(run_all(queue, home, at_most=1))


def killed_at(count: int, before: bool, act: Callable[[], None]) -> bool:
    """Run in a child that ends, as by SIGKILL, at its n-th replacement of a file; whether it came to that."""
    pid = os.fork()
    if pid == 0:
        left = count
        replace = os.replace

        def cut(*args: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0 and before:
                os._exit(77)
            replace(*args)
            if left == 0:
                os._exit(77)

        os.replace = cut  # type: ignore[assignment]
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 77)
    return code == 77


def outcome(home: Home) -> Any:
    results = {folder.hash: folder.result() for folder in home.trials()}
    own = ("home", "digest", "ranked", "mean_ranked")  # times of files, and the id of the home
    rows = [
        {key: value for key, value in vars(row).items() if key not in own}
        for row in read_rows(home.path / "rows.parquet")
    ]
    return results, rows, words(home, "toy")


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_driver_killed_at_any_write_goes_on_as_if_it_had_not_been(
    tmp_path: Path, toy_roots: Path, before: bool
) -> None:
    plan = contest()
    whole = Home(tmp_path / "whole")
    drive(whole, plan)
    expected = outcome(whole)
    assert "done" in expected[2][0] and "not chosen" in expected[2][0]
    count = 0
    while True:
        count += 1
        home = Home(tmp_path / str(count))
        if not killed_at(count, before, lambda home=home: drive(home, plan)):  # type: ignore[misc]
            break
        drive(home, plan)
        assert outcome(home) == expected, f"killed at write {count}"
        shutil.rmtree(home.path)
    assert count > 2 * len(expected[0])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_driver_is_no_traceback() -> None:
    """Homes are shared on a workstation, and signals are not."""
    program = (
        "import os\n"
        "from types import SimpleNamespace\n"
        "from suite.cli.stop import _end\n"
        "from suite.errors import ResourceError\n"
        "os.setuid(65534)\n"
        "try: _end(SimpleNamespace(pid=os.getppid(), is_gone=False))\n"
        "except ResourceError as error: print(error)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "belongs to another user" in told.stdout
