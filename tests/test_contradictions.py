"""Records that contradict themselves: the row says so, readers go on, and nothing runs again in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suite.errors import ConfigError, TrackingError
from suite.leaderboard.collect import sweep_rows
from suite.plan.definition import store_definition
from suite.plan.plan import make_plan
from suite.plan.preflight import check_records
from suite.plan.status import status
from suite.record.folder import Home
from suite.record.result import damage
from suite.storage.mirror import Mirror
from suite.storage.urls import open_storage
from suite.tracking import sync
from suite.tracking.exchange import export_results, import_results
from tests.answers import some_right, write_confirmed
from tests.commands import Suite, suite
from tests.records import make_home, write_definition
from tests.sweeps import finish, toy_roots, toy_sweep

__all__ = ["suite", "toy_roots"]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """One cell with answers that give its scores."""
    made = Home(tmp_path / "home")
    write_confirmed(made, "lora", some_right(np.random.default_rng(0), 0.8, items=100))
    write_definition(made, ["lora"], ["agreement"], trials=1)
    return made


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **values}))


def confirm_run(home: Home) -> Path:
    (found,) = [f for f in home.trials() if (spec := f.spec()) and spec.seed == 2]
    return found.path / "result.json"


def test_a_row_with_a_damaged_record_is_rejected_and_names_the_file(
    home: Home, suite: Suite
) -> None:
    (before,) = sweep_rows(home, "demo")
    assert before.admitted is not False and before.unverified is None
    path = confirm_run(home)
    change(path, best_epoch=3)
    (row,) = sweep_rows(home, "demo")
    assert row.admitted is False and row.rank is None
    (reason,) = row.rejected
    assert f"trials/{path.parent.name}/result.json" in reason and "checksum" in reason
    (cell,) = status(home, "demo")
    (failure,) = cell.failures
    assert (failure.trial, failure.status) == (path.parent.name, "damaged")
    _, out, _ = suite("status", "--home", home.path)
    assert "copy the file back" in out


def test_a_record_that_is_no_json_does_not_stop_readers(home: Home) -> None:
    path = confirm_run(home)
    path.write_bytes(path.read_bytes()[:-20])
    (row,) = sweep_rows(home, "demo")
    assert (row.seeds, row.admitted, row.status) == (2, False, "failed")
    (cell,) = status(home, "demo")
    assert (cell.running, cell.left) == (0, 0), "it is not taken for a trial that has not ended"


def test_a_damaged_search_trial_rejects_the_row_that_it_chose(home: Home) -> None:
    (search,) = [f for f in home.trials() if (spec := f.spec()) and spec.phase == "search"]
    change(search.path / "result.json", score=51.0)
    (row,) = sweep_rows(home, "demo")
    assert row.admitted is False and search.hash in row.rejected[0]


def test_answers_that_give_another_score_reject_the_row(home: Home) -> None:
    folder = home.trial(confirm_run(home).parent.name)
    found = folder.result()
    assert found is not None
    # A record that is whole in itself: only the answers tell.
    folder.write_result(found.model_copy(update={"score": 99.0}))
    (row,) = sweep_rows(home, "demo")
    assert row.admitted is False
    assert "seed 2: its answers score" in row.rejected[0] and "record says 99" in row.rejected[0]


def test_a_row_without_answers_says_that_it_cannot_be_verified(
    home: Home, suite: Suite, empty_db: Path
) -> None:
    shutil.copy(empty_db, home.path / "mlflow.db")
    home.trial(confirm_run(home).parent.name).predictions("test").unlink()
    (row,) = sweep_rows(home, "demo")
    assert row.admitted is not False
    assert row.unverified is not None and row.unverified.startswith("not verifiable here: seed 2")
    assert sync(home, tracking_uri=home.tracking_uri).unreachable is None
    _, out, _ = suite("leaderboard", "--home", home.path, "--format", "md")
    assert "done, not verifiable here" in out


@pytest.mark.parametrize("defined", [True, False], ids=["defined", "definition lost"])
def test_a_run_stops_at_a_damaged_record_before_any_worker(
    tmp_path: Path, toy_roots: Path, defined: bool
) -> None:
    from suite.tune.driver import run_sweep

    config = toy_sweep(methods=["full"], search={"trials": 2}, confirm={"seeds": [1]})
    home = Home(tmp_path / "runs")
    plan = make_plan(config, where="toy", world_size=2)
    if defined:
        store_definition(plan, home)
    spec = plan.search_spec(plan.cells[0], 0, 0.001)
    home.trial(spec).write_spec(spec)
    finish(home, spec, 50.0)
    change(home.trial(spec).path / "result.json", score=60.0)
    with pytest.raises(
        ConfigError, match=rf"(?s)trials/{spec.hash}/result.json .*nothing was run; copy"
    ):
        run_sweep(config.model_copy(), home=home, data_root=toy_roots)


@pytest.mark.parametrize("left", ["", None])
def test_a_finished_trial_that_does_not_say_what_it_was_is_named_and_not_planned_again(
    home: Home, suite: Suite, left: str | None
) -> None:
    path = confirm_run(home).parent / "spec.json"
    if left is None:
        path.unlink()
    else:
        path.write_text(left)
    said = f"trials/{path.parent.name}/spec.json is missing or cut short"
    with pytest.raises(ConfigError, match=rf"(?s)^{said}.*nothing was run; copy the file back"):
        check_records({}, home)
    _, _, err = suite("status", "--home", home.path)
    assert said in " ".join(err.split()) and "not counted below" in err
    # Where it is just being handed out, nothing is lost.
    (path.parent / "result.json").unlink()
    check_records({}, home)


def test_a_damaged_record_never_reaches_a_storage(home: Home, tmp_path: Path) -> None:
    path = confirm_run(home)
    change(path, score=60.0)
    storage = open_storage((tmp_path / "storage").as_uri())
    mirror = Mirror(home, storage)
    mirror.push_home()
    mirror.settle(home.trial(path.parent.name))
    stored = [key for key in storage.keys("trials") if key.endswith("/result.json")]
    assert len(stored) == 3 and f"trials/{path.parent.name}/result.json" not in stored
    assert all(damage(storage.read(key) or b"") is None for key in stored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_mean": 91.5}, r"rows\[0\]: demo/.* got score_mean 91.5, expected "),
        ({"score_std": 0.01}, "got score_std 0.01, expected "),
        ({"seeds": 5}, "got seeds 5, expected 3"),
        ({"ci_low": 99.0, "ci_high": 99.5}, "expected one that holds score_mean"),
        ({"rejected": ["the output holds NaN"], "admitted": True}, "beside reasons to reject it"),
    ],
)
def test_an_import_computes_its_rows_again(
    exported: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    content = json.loads(exported.read_text())
    content["rows"][0] |= changes
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TrackingError, match=message):
        import_results(path, tracking_uri=f"sqlite:///{tmp_path}/other.db")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    home = make_home(folder / "home", methods=["lora"], tasks=["agreement"], trials=2)
    shutil.copy(empty_db, home.path / "mlflow.db")
    assert sync(home, tracking_uri=home.tracking_uri).unreachable is None
    export_results(folder / "rows.json", tracking_uri=home.tracking_uri)
    return folder / "rows.json"


def test_imported_rows_are_not_verifiable_and_take_nothing_from_verified_ones(
    home: Home, tmp_path: Path, suite: Suite, empty_db: Path
) -> None:
    uri = home.tracking_uri
    shutil.copy(empty_db, home.path / "mlflow.db")
    assert sync(home, tracking_uri=uri).unreachable is None
    path = tmp_path / "rows.json"
    export_results(path, tracking_uri=uri)
    import_results(path, tracking_uri=uri)  # into the home that has the answers
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(empty_db, other / "mlflow.db")
    suite("import-results", path, "--home", other)
    told = {}
    for place in (home.path, other):
        _, out, _ = suite("leaderboard", "--home", place, "--format", "json")
        told[place] = json.loads(out)[0]["unverified"]
    assert told[home.path] is None
    assert told[other].startswith("not verifiable here: imported without its answers")
