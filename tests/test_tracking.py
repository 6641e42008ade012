"""MLflow as a view of trial folders: written once, completed after any interruption, rebuilt from nothing, never in a sweep's way."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from suite.errors import TrackingError
from suite.leaderboard.collect import sweep_rows
from suite.leaderboard.fields import with_values
from suite.plan.cell_state import CellStatus
from suite.record.folder import Home, TrialFolder
from suite.record.result import Status
from suite.storage.identity import home_id
from suite.tracking import TrackingListener, leaderboard, open_store, sync, to_rows, writer
from suite.tracking.follower import Follower
from suite.tracking.progress import Progress
from suite.tracking.store import Point, Store, StoredRun, key_name
from suite.tracking.sweep_runs import SweepRuns
from suite.tracking.writer import Syncer
from tests.clocks import FakeClock
from tests.commands import Suite, suite  # noqa: F401
from tests.ports import free_port
from tests.records import (
    RATES,
    START_S,
    cell_rows,
    define,
    make_home,
    make_result,
    make_spec,
    write_cell,
    write_definition,
    write_trial,
)


@pytest.fixture
def home(tmp_path: Path, empty_db: Path) -> Home:
    """Two methods on one task, three search trials and two seeds each: ten trials."""
    home = make_home(tmp_path / "runs", tasks=["agreement"], trials=3, seeds=(1, 2))
    shutil.copy(empty_db, home.path / "mlflow.db")
    return home


def runs(uri: str, kind: str, sweep: str = "demo", **tags: str) -> list[StoredRun]:
    store = open_store(uri)
    return store.runs([store.experiments()[sweep]], {"suite.kind": kind, **tags})


def points(uri: str) -> int:
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as connection:
        return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0])


def assert_each_once(uri: str, home: Home) -> None:
    """One complete run per trial folder with a result, under the one run of its cell."""
    cells = {run.tags["suite.cell"]: run.id for run in runs(uri, "cell")}
    assert len(cells) == len(runs(uri, "cell"))
    trials = runs(uri, "trial")
    assert Counter(run.tags["suite.trial"] for run in trials) == Counter(
        f.hash for f in home.trials() if f.result() is not None
    )
    assert all(run.ended for run in trials)
    assert all(run.tags["mlflow.parentRunId"] == cells[run.tags["suite.cell"]] for run in trials)
    assert not [run for run in (*trials, *runs(uri, "cell")) if run.status == "RUNNING"]


def test_a_trial_is_written_with_its_names_choices_and_numbers(home: Home) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    spec = make_spec("lora", number=1)
    (run,) = runs(home.tracking_uri, "trial", **{"suite.trial": spec.hash})
    stored = open_store(home.tracking_uri).client.get_run(run.id)
    expected = {
        "sweep": "demo",
        "backbone": "tiny-bert",
        "attention": "pretrained",
        "method": "lora",
        "task": "agreement",
    }
    expected |= {
        "phase": "search",
        "seed": "0",
        "number": "1",
        "status": "completed",
        "architecture": '{"rank":8}',
    }
    assert expected.items() <= stored.data.tags.items()
    assert stored.info.run_name == "lora / agreement / search 1 / lr 3e-4"
    assert {
        "backbone": "tiny-bert",
        "attention": "pretrained",
        "method": "lora",
        "task": "agreement",
        "phase": "search",
        "learning_rate": "0.0003",
        "architecture.rank": "8",
        "training.batch_size": "8",
    }.items() <= stored.data.params.items()
    result = make_result(spec)
    numbers = {
        "score": result.score,
        "phases.train.energy_kwh": 2e-5,
        "parameters.trainable": 50_000,
        "timing.p50_s": 0.1,
    }
    assert numbers.items() <= stored.data.metrics.items()
    assert (stored.info.status, stored.info.end_time) == (
        "FINISHED",
        int(result.finished_at * 1000),
    )


def test_every_run_of_a_sweep_has_a_name_of_its_own_that_says_what_it_is(
    tmp_path: Path, empty_db: Path
) -> None:
    shutil.copy(empty_db, tmp_path / "mlflow.db")
    home = Home(tmp_path)
    for rank in (4, 8):
        for task in ("agreement", "entailment"):
            spec = make_spec("lora", task, learning_rate=2.1e-3)
            arm = spec.arm.model_copy(update={"architecture": {"rank": rank, "alpha": 8}})
            write_trial(
                home, own := spec.model_copy(update={"arm": arm}), make_result(own, score=0.5)
            )
    spec = make_spec("full", seed=2, learning_rate=1e-5)
    write_trial(home, spec, make_result(spec))
    define(home)
    sync(home, tracking_uri=home.tracking_uri)
    names = [run.tags["mlflow.runName"] for run in runs(home.tracking_uri, "trial")]
    assert sorted(names) == [
        "full / agreement / confirm seed 2 / lr 1e-5",
        "lora rank=4 / agreement / search 0 / lr 2.1e-3",
        "lora rank=4 / entailment / search 0 / lr 2.1e-3",
        "lora rank=8 / agreement / search 0 / lr 2.1e-3",
        "lora rank=8 / entailment / search 0 / lr 2.1e-3",
    ]


def test_a_confirm_run_has_its_log_and_its_record_as_files_and_a_search_trial_has_none(
    home: Home,
) -> None:
    spec = write_cell(home, "lora", trials=3, seeds=[1])[-1]
    (home.trial(spec).log(0)).write_text("epoch 1: loss 0.7")
    sync(home, tracking_uri=home.tracking_uri)
    client = open_store(home.tracking_uri).client
    for run in runs(home.tracking_uri, "trial"):
        files = sorted(file.path for file in client.list_artifacts(run.id))
        if run.tags["suite.trial"] == spec.hash:
            assert files == ["rank0.log", "result.json", "spec.json"]
        elif run.tags["phase"] == "confirm":
            assert files == ["result.json", "spec.json"], "its log was removed"
        else:
            assert files == []


def test_runs_that_were_written_in_an_older_way_are_replaced(home: Home) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    store = open_store(home.tracking_uri)
    older = runs(home.tracking_uri, "trial")[0]
    store.log(older.id, tags={"suite.result": older.tags["suite.result"].partition(".")[0]})
    assert sync(home, tracking_uri=home.tracking_uri, verify=True).written == 1
    assert_each_once(home.tracking_uri, home)


def test_the_training_curve_has_the_times_of_the_record(home: Home) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    (run,) = runs(home.tracking_uri, "trial", **{"suite.trial": make_spec("lora").hash})
    curve = open_store(home.tracking_uri).client.get_metric_history(run.id, "epoch.train_loss")
    assert [(m.step, m.value, m.timestamp) for m in curve] == [
        (0, 0.7, (START_S + 10) * 1000),
        (1, 0.6, (START_S + 20) * 1000),
    ]


def test_a_trial_without_a_score_says_why(home: Home) -> None:
    spec = make_spec("lora", number=3)
    write_trial(home, spec, make_result(spec, status=Status.DIVERGED))
    sync(home, tracking_uri=home.tracking_uri)
    (run,) = runs(home.tracking_uri, "trial", **{"suite.trial": spec.hash})
    assert (run.status, run.tags["status"], run.tags["failure.message"]) == (
        "FAILED",
        "diverged",
        "loss is nan",
    )


def test_a_second_sync_reads_no_result_and_writes_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sync(home, tracking_uri=home.tracking_uri)
    assert (first.written, first.already, first.cells, first.unreachable) == (10, 0, 2, None)
    before = points(home.tracking_uri)
    verified = sync(home, tracking_uri=home.tracking_uri, verify=True)
    assert (verified.written, verified.already) == (0, 10)
    monkeypatch.setattr(TrialFolder, "result", lambda self: pytest.fail("a result was read"))
    again = sync(home, tracking_uri=home.tracking_uri)
    assert (again.written, again.already, again.cells) == (0, 10, 0)
    monkeypatch.undo()
    assert_each_once(home.tracking_uri, home)
    cell_metrics = len(
        {
            k
            for run in runs(home.tracking_uri, "cell")
            for k in open_store(home.tracking_uri).client.get_run(run.id).data.metrics
        }
    )
    assert (
        points(home.tracking_uri) == before + 2 * cell_metrics
    )  # a verified cell is summed up anew, trials stay as they are


def test_handing_out_a_trial_writes_none_and_its_end_writes_one(home: Home) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    spec = write_trial(home, make_spec("lora", number=3))
    assert sync(home, tracking_uri=home.tracking_uri).written == 0
    home.trial(spec).write_result(make_result(spec))
    report = sync(home, tracking_uri=home.tracking_uri)
    assert (report.written, report.already, report.cells) == (1, 10, 1)


class FailingStore(Store):
    """Fails before the n-th call that writes: what a kill there leaves, or the lost answer to the call before."""

    def __init__(self, store: Store, at: int) -> None:
        super().__init__(store.uri, store.page_size)
        self.left = at

    def _counted(self, call: str, /, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise TrackingError("cut off")
        return getattr(Store, call)(self, *args, **kwargs)

    def create_run(self, *args: Any, **kwargs: Any) -> StoredRun:
        return self._counted("create_run", *args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._counted("log", *args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._counted("finish", *args, **kwargs)

    def mark(self, *args: Any, **kwargs: Any) -> None:
        self._counted("mark", *args, **kwargs)

    def add_file(self, *args: Any, **kwargs: Any) -> None:
        self._counted("add_file", *args, **kwargs)


@pytest.mark.slow
def test_a_sync_cut_off_at_any_call_is_completed_by_the_next_without_duplicates(
    tmp_path: Path, empty_db: Path
) -> None:
    home = Home(tmp_path)
    write_definition(home, ["lora"], ["agreement"], trials=1, seeds=[1])
    write_cell(home, trials=1, seeds=[])
    expected = None
    for at in range(20):
        shutil.copy(empty_db, tmp_path / "mlflow.db")
        report = Syncer(home, FailingStore(open_store(home.tracking_uri), at)).run()
        # The run of the rows in four calls, that of the cell, a trial in three, the cell's numbers in two.
        assert (report.unreachable is None) == (at >= 10)
        sync(home, tracking_uri=home.tracking_uri)
        assert_each_once(home.tracking_uri, home)
        rows = to_rows(leaderboard(home.tracking_uri))
        expected = expected or rows
        assert rows == expected
        if report.unreachable is None:
            return
        for path in tmp_path.glob("mlflow.db*"):
            path.unlink()
    pytest.fail("the sync was never let through")


def test_a_sync_says_how_far_it_is_and_how_long_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    for is_terminal in (False, True):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda answer=is_terminal: answer)
        progress = Progress(stream, clock=clock)
        for done, trials in ((1, 0), (2, 1), (3, 16), (4, 480)):
            clock.sleep(40)
            progress(done, 10, trials)
        progress.close()
        lines = re.split("[\r\n]+", stream.getvalue().strip())
        assert [line.strip() for line in lines] == [
            "1 of 10 cells",
            "2 of 10 cells, 80.0 s per trial, 5 min left",
            "3 of 10 cells, 7.5 s per trial, 5 min left",
            "4 of 10 cells, 3 trials/s, 4 min left",
        ]


def test_the_leaderboard_does_not_wait_for_the_runs_of_trials(home: Home) -> None:
    class NoRuns(Store):
        def write_run(self, *args: Any, **kwargs: Any) -> StoredRun:
            raise TrackingError("cut off")

    open_store(home.tracking_uri)
    assert Syncer(home, NoRuns(home.tracking_uri)).run().unreachable == "cut off"
    assert runs(home.tracking_uri, "trial") == []
    before = to_rows(leaderboard(home.tracking_uri))
    sync(home, tracking_uri=home.tracking_uri)
    assert to_rows(leaderboard(home.tracking_uri)) == before


def test_while_many_runs_are_written_the_rows_are_made_anew(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "REFRESH_S", 0.0)
    write_definition(home, ["full", "lora"], ["agreement"], trials=4, seeds=(1, 2))
    seen: list[int] = []
    spec = make_spec("full", number=3, learning_rate=2e-5)

    def step(done: int, total: int, trials: int) -> None:
        if not seen:  # a trial ends while the first cell is written
            write_trial(home, spec, make_result(spec))
        row = next(r for r in to_rows(leaderboard(home.tracking_uri)) if r["method"] == "full")
        seen.append(row["search_trials"])

    assert sync(home, tracking_uri=home.tracking_uri, step=step).written == 11
    assert seen == [3, 4, 4]
    assert_each_once(home.tracking_uri, home)


def test_mlflow_is_rebuilt_from_nothing_in_silence(
    home: Home, capfd: pytest.CaptureFixture[str]
) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    before = to_rows(leaderboard(home.tracking_uri))
    for path in home.path.glob("mlflow.db*"):
        path.unlink()
    assert sync(home, tracking_uri=home.tracking_uri).written == 10
    assert capfd.readouterr() == ("", "")
    assert to_rows(leaderboard(home.tracking_uri)) == before
    assert_each_once(home.tracking_uri, home)


def test_a_trial_that_was_run_again_replaces_its_run(home: Home) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    spec = make_spec("lora", number=0)
    shutil.rmtree(home.trial(spec).path)
    write_trial(home, spec, make_result(spec, score=0.99))
    assert sync(home, tracking_uri=home.tracking_uri).written == 1
    assert_each_once(home.tracking_uri, home)
    (run,) = runs(home.tracking_uri, "trial", **{"suite.trial": spec.hash})
    assert open_store(home.tracking_uri).client.get_run(run.id).data.metrics["score"] == 0.99


def test_runs_deleted_by_hand_come_back_and_duplicates_go(home: Home) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    store = open_store(home.tracking_uri)
    cells = runs(home.tracking_uri, "cell")
    trials = runs(home.tracking_uri, "trial")
    store.delete_run(cells[0].id)
    store.delete_run(trials[-1].id)
    twin = trials[0]
    store.create_run(
        store.experiment("demo"),
        name=twin.tags["mlflow.runName"],
        start_s=time.time(),
        tags=twin.tags,
    )
    assert sync(home, tracking_uri=home.tracking_uri, verify=True).written == 1
    assert_each_once(home.tracking_uri, home)


def test_a_sync_does_not_say_that_runs_are_there_at_which_it_did_not_look(
    home: Home,
    suite: Suite,  # noqa: F811
) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    open_store(home.tracking_uri).delete_run(runs(home.tracking_uri, "trial")[0].id)
    said = suite("sync", "--home", home.path)[1]
    assert said.startswith("0 trials written, 10 others ended before")
    said = suite("sync", "--home", home.path, "--verify")[1]
    assert said.startswith("1 trials written, 9 others ended before")


@pytest.mark.parametrize(
    ("cut_to_bytes", "verify"), [(None, False), (100, True)], ids=["deleted", "cut"]
)
def test_a_lost_file_of_rows_is_written_again_by_the_next_sync(
    cut_to_bytes: int | None, verify: bool, home: Home
) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    before = to_rows(leaderboard(home.tracking_uri))
    (file,) = home.path.glob("mlartifacts/*/artifacts/leaderboard-*.parquet")
    if cut_to_bytes is None:
        shutil.rmtree(home.path / "mlartifacts")
    else:
        file.write_bytes(file.read_bytes()[:cut_to_bytes])
    with pytest.raises(TrackingError, match="suite sync writes the rows of its own home again"):
        leaderboard(home.tracking_uri)
    assert sync(home, tracking_uri=home.tracking_uri, verify=verify).unreachable is None
    assert to_rows(leaderboard(home.tracking_uri)) == before


def test_a_run_without_its_tags_is_named_with_the_way_out(home: Home) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    store = open_store(home.tracking_uri)
    (run,) = runs(home.tracking_uri, "leaderboard")
    store.client.delete_tag(run.id, "suite.home")
    with pytest.raises(TrackingError, match=f"run {run.id} of MLflow lacks the tag suite.home"):
        leaderboard(home.tracking_uri)
    store.delete_run(run.id)
    sync(home, tracking_uri=home.tracking_uri, verify=True)
    assert len(leaderboard(home.tracking_uri))


@pytest.mark.parametrize("edited", ["three", "9" * 30])
def test_an_edited_revision_is_no_number_and_the_newest_values_still_win(
    edited: str, home: Home
) -> None:
    uri = home.tracking_uri
    sync(home, tracking_uri=uri)
    store = open_store(uri)
    cell = runs(uri, "cell")[0]
    store.log(cell.id, tags={"suite.revision": edited, "suite.digest": "old"})
    sync(home, tracking_uri=uri, verify=True)
    (now,) = [run for run in runs(uri, "cell") if run.id == cell.id]
    assert int(now.tags["suite.revision"]) > START_S
    steps = [point.step for point in store.client.get_metric_history(cell.id, "score_mean")]
    assert max(steps) == int(now.tags["suite.revision"])


def metrics(uri: str, run: StoredRun) -> dict[str, float]:
    return open_store(uri).client.get_run(run.id).data.metrics


def test_a_number_that_a_row_no_longer_has_is_nan_in_the_run_of_its_cell(home: Home) -> None:
    uri = home.tracking_uri
    sync(home, tracking_uri=uri)
    store = open_store(uri)
    (cell,) = runs(uri, "cell", method="lora")
    before = metrics(uri, cell)
    assert before["score_std"] > 0 and not any(map(math.isnan, before.values()))
    store.log(cell.id, metrics=[Point("of a person", 1.0, START_S)])
    write_definition(home, ["full", "lora"], ["agreement"], trials=3, seeds=[1])
    sync(home, tracking_uri=uri)
    after = metrics(uri, cell)
    gone = {key for key, value in after.items() if math.isnan(value)}
    assert "score_std" in gone and "score_mean" not in gone
    assert after.keys() == before.keys() | {"of a person"} and after["of a person"] == 1.0
    high = "metrics.score_std > 0"
    found = store.client.search_runs([store.experiment("demo")], high)
    assert found == [], "an unknown number is no high one"
    sync(home, tracking_uri=uri, verify=True)
    history = store.client.get_metric_history(cell.id, "score_std")
    assert [math.isnan(point.value) for point in history] == [False, True], "said once"
    write_definition(home, ["full", "lora"], ["agreement"], trials=3, seeds=[1, 2])
    sync(home, tracking_uri=uri)
    assert metrics(uri, cell)["score_std"] == before["score_std"]


def test_a_rejected_row_is_no_done_one_in_the_run_of_its_cell(home: Home) -> None:
    uri = home.tracking_uri
    search = "tags.suite.kind = 'cell' and tags.status = 'done'"
    both = ["full", "lora"]
    for read, done in (("d", both), ("other", ["full"]), ("d", both)):
        for seed, data_hash in ((1, "d"), (2, read)):
            spec = make_spec("lora", seed=seed, learning_rate=RATES[2])
            write_trial(home, spec, make_result(spec, data_hash=data_hash))
        sync(home, tracking_uri=uri)
        store = open_store(uri)
        found = store.client.search_runs([store.experiment("demo")], search)
        assert sorted(run.data.tags["method"] for run in found) == done
        (cell,) = runs(uri, "cell", method="lora")
        if done == both:
            assert cell.tags["status"] == "done" and not cell.tags.get("rejected")
        else:
            assert cell.tags["status"] == "rejected" and cell.status == "FINISHED"
            assert cell.tags["rejected"] == "its runs read different data"


@pytest.mark.parametrize("status", list(CellStatus))
def test_a_cell_of_which_nothing_is_left_to_run_has_ended(home: Home, status: CellStatus) -> None:
    store = open_store(home.tracking_uri)
    sweep = SweepRuns(store, home="abc", sweep="demo")
    row = with_values(cell_rows(home)[0], status=status.value)
    sweep.publish([row])
    sweep.write_cell(row)
    (cell,) = runs(home.tracking_uri, "cell")
    assert cell.ended == status.is_over


def test_a_deleted_experiment_comes_back(home: Home) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    store = open_store(home.tracking_uri)
    store.client.delete_experiment(store.experiment("demo"))
    sync(home, tracking_uri=home.tracking_uri)
    assert_each_once(home.tracking_uri, home)


@pytest.mark.parametrize("new_name", ["my nice name", "nice"])
def test_an_experiment_that_somebody_renamed_stays_that_of_its_sweep(
    home: Home, new_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    uri = home.tracking_uri
    sync(home, tracking_uri=uri)
    before = to_rows(leaderboard(uri))
    store = open_store(uri)
    own = store.experiments()["demo"]
    store.client.rename_experiment(own, new_name)
    write_trial(home, spec := make_spec("lora", number=3), make_result(spec))
    assert sync(home, tracking_uri=uri).written == 1
    assert store.experiments() == {"demo": own}
    assert len(to_rows(leaderboard(uri, sweep="demo"))) == len(before) and not caplog.text
    store.client.rename_experiment(own, "other")
    with pytest.raises(TrackingError, match="'demo' has the name of the sweep 'other'; rename it"):
        store.experiment("other")


def test_an_experiment_of_an_earlier_version_is_found_by_its_name_and_gets_its_sweeps(
    home: Home,
) -> None:
    store = open_store(home.tracking_uri)
    own = store.client.create_experiment("demo", tags={"suite.kind": "sweep"})
    assert store.experiments() == {"demo": own}
    sync(home, tracking_uri=home.tracking_uri)
    store.client.rename_experiment(own, "mine")
    assert store.experiments() == {"demo": own}


def test_an_experiment_that_can_be_no_sweep_keeps_nobody_from_the_others(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    sync(home, tracking_uri=home.tracking_uri)
    store = open_store(home.tracking_uri)
    store.client.create_experiment("my nice name", tags={"suite.kind": "sweep"})
    assert len(leaderboard(home.tracking_uri)) == 2
    assert "got the sweep 'my nice name'" in caplog.text and "left out" in caplog.text


def test_runs_that_were_replaced_do_not_come_back_with_their_experiment(
    home: Home, tmp_path: Path
) -> None:
    uri = home.tracking_uri
    other = make_home(tmp_path / "other", tasks=["agreement"], trials=3, seeds=(1, 2))
    homes = (home, other)
    later, same = make_spec("lora", number=0), make_spec("lora", number=1)
    for score in (0.5, 0.99):
        for each in homes:
            start_s = START_S + 1000 * score
            write_trial(each, later, make_result(later, score=score, started_at=start_s))
            write_trial(each, same, make_result(same, score=score))
            sync(each, tracking_uri=uri)
    (newer,) = runs(uri, "trial", **{"suite.trial": later.hash, "suite.home": home_id(home)})
    store = open_store(uri)
    store.client.delete_experiment(store.experiment("demo"))
    for each in homes:
        assert sync(each, tracking_uri=uri).cells == 2, "all are looked at"
        assert sync(each, tracking_uri=uri).cells == 0
    found = runs(uri, "trial")
    assert Counter(Counter(run.tags["suite.trial"] for run in found).values()) == {2: 10}
    assert newer.id in {run.id for run in found}, "the newest was kept, not written anew"
    for spec in (later, same):
        for run in runs(uri, "trial", **{"suite.trial": spec.hash}):
            assert metrics(uri, run)["score"] == 0.99


def test_two_homes_with_a_sweep_of_one_name_stay_apart_in_one_store(
    home: Home, tmp_path: Path
) -> None:
    other = make_home(tmp_path / "other", tasks=["agreement"], trials=3, seeds=(1, 2))
    for _ in range(2):
        sync(home, tracking_uri=home.tracking_uri)
        sync(other, tracking_uri=home.tracking_uri)
    assert len(runs(home.tracking_uri, "cell")) == 4
    assert len(runs(home.tracking_uri, "trial")) == 20
    assert leaderboard(home.tracking_uri)["home"].nunique() == 2


def test_searches_go_over_all_pages(home: Home) -> None:
    paged = open_store(home.tracking_uri, page_size=3)
    for sweep in ("second", "third", "fourth"):
        write_definition(home, ["lora"], ["agreement"], trials=1, seeds=[1], sweep=sweep)
        write_cell(home, trials=1, seeds=[], sweep=sweep)
    assert Syncer(home, paged).run().written == 13
    assert Syncer(home, paged).run(verify=True).written == 0
    assert set(paged.experiments()) == {"demo", "second", "third", "fourth"}
    found = paged.runs(list(paged.experiments().values()), {"suite.kind": "trial"})
    assert Counter(run.tags["suite.trial"] for run in found) == Counter(
        folder.hash for folder in home.trials()
    )


def test_one_sweep_of_a_home_can_be_synced_alone(home: Home) -> None:
    make_home(home.path, ["lora"], ["agreement"], trials=1, seeds=[1], sweep="second")
    assert sync(home, tracking_uri=home.tracking_uri, sweep="second").written == 2
    assert list(open_store(home.tracking_uri).experiments()) == ["second"]
    with pytest.raises(TrackingError, match="did you mean second"):
        sync(home, tracking_uri=home.tracking_uri, sweep="secnd")


def test_a_home_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="no trials here"):
        sync(Home(tmp_path / "typo"), tracking_uri=f"sqlite:///{tmp_path}/x.db")
    assert not (tmp_path / "typo").exists()


def test_names_and_texts_that_mlflow_refuses_or_cuts_are_stored_visibly(home: Home) -> None:
    spec = make_spec("lora", number=3)
    result = make_result(spec)
    write_trial(
        home,
        spec,
        result.model_copy(update={"scores": {"eval[0]": 0.5}, "missing": {"x": "y" * 9000}}),
    )
    assert sync(home, tracking_uri=home.tracking_uri).unreachable is None
    (run,) = runs(home.tracking_uri, "trial", **{"suite.trial": spec.hash})
    assert (
        open_store(home.tracking_uri).client.get_run(run.id).data.metrics["scores.eval_0_"] == 0.5
    )
    assert run.tags["missing.x"].endswith("y...")
    assert key_name("a" * 300) == "a" * 250


def test_a_server_that_is_away_is_reported_within_seconds(home: Home) -> None:
    start = time.monotonic()
    report = sync(home, tracking_uri=f"http://user:secret@127.0.0.1:{free_port()}")
    assert report.unreachable is not None
    assert "does not answer" in report.unreachable
    assert "secret" not in report.unreachable
    assert time.monotonic() - start < 40  # one retry; MLflow's own settings would take four minutes


def test_a_listener_follows_a_sweep_into_sqlite(home: Home) -> None:
    said: list[str] = []
    listener = TrackingListener(home, home.tracking_uri, say=said.append)
    listener.on_start(None, {})
    for number in range(3, 6):
        spec = make_spec("lora", number=number, learning_rate=1e-4 * number)
        listener.on_trial_start(spec)
        write_trial(home, spec, make_result(spec))
        listener.on_trial_end(spec, make_result(spec))
    listener.on_trial_end(make_spec("read"), None)  # ran out of retries: no result
    listener.on_end(None)
    assert (listener.behind, said) == (0, [])
    assert_each_once(home.tracking_uri, home)
    assert len(runs(home.tracking_uri, "trial")) == 13


def test_a_trial_that_ends_while_the_rows_are_made_is_written_too(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = make_spec("lora", number=3, learning_rate=3e-4)

    def rows_after_it_ended(*args: Any, **options: Any) -> Any:
        write_trial(home, late, make_result(late))
        return sweep_rows(*args, **options)

    monkeypatch.setattr(writer, "sweep_rows", rows_after_it_ended)
    sync(home, tracking_uri=home.tracking_uri)
    assert_each_once(home.tracking_uri, home)


def test_a_silent_server_delays_nothing_and_the_listener_says_what_is_left(home: Home) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and never answers
        listener = TrackingListener(
            home, f"http://127.0.0.1:{deaf.getsockname()[1]}", say=said.append, patience_s=0.5
        )
        start = time.monotonic()
        listener.on_start(None, {})
        for number in range(2):
            spec = make_spec("lora", number=number)
            listener.on_trial_end(spec, make_result(spec))
        assert time.monotonic() - start < 1
        listener.on_end(None)
        assert time.monotonic() - start < 5
    assert (
        said[-1] == "MLflow is behind by 2 trials; run: suite sync, with the same --home and stores"
    )


class Late(Follower):
    """A store whose attempt fails only after the sweep has stopped waiting for it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__("MLflow", say=say, patience_s=0.05, retry_s=(0.05, 0.1))
        self.answer = threading.Event()

    def bring_up_to_date(self) -> str:
        self.answer.wait()
        return "the server does not answer"


def test_nothing_is_said_after_the_last_line_of_a_sweep() -> None:
    said: list[str] = []
    follower = Late(said.append)
    follower.on_start(None, {})
    follower.on_end(None)
    follower.answer.set()
    follower._thread.join()
    assert said == [
        "MLflow is behind (it was never reached); run: suite sync, with the same --home and stores"
    ]


class Defective(Follower):
    """A store whose library raises what nobody foresaw."""

    def bring_up_to_date(self) -> str | None:
        raise KeyError("no such revision, password=marked-secret")


def test_whatever_ends_an_attempt_is_told_in_one_line_and_tried_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said: list[str] = []
    follower = Defective("MLflow", say=said.append, patience_s=0.3, retry_s=(0.05, 0.1))
    assert follower.never_worked is None, "nothing was tried yet"
    follower.on_start(None, {})
    wait_until(lambda: said)
    assert follower._thread.is_alive()
    follower.on_end(None)
    assert said[0].startswith("MLflow: KeyError: 'no such revision, password=***")
    assert "test_tracking.py:" in said[0] and "the sweep goes on" in said[0]
    assert said[1:] == [
        "MLflow is behind (it was never reached); run: suite sync, with the same --home and stores"
    ]
    assert "KeyError" in (follower.never_worked or "")
    assert capfd.readouterr().err == "", "no traceback of a thread"


class Slow(Follower):
    """A view that takes a while to look at everything, as Optuna's mirror of many studies."""

    looks = 0

    def bring_up_to_date(self) -> None:
        self.looks += 1
        time.sleep(0.05)


def test_every_view_of_a_sweep_rests_longer_than_it_works() -> None:
    follower = Slow("Optuna", say=lambda line: None)
    follower.on_start(None, {})
    began_s = time.monotonic()
    while time.monotonic() - began_s < 0.6:
        trial = make_spec("lora")
        follower.on_trial_end(trial, make_result(trial))
        time.sleep(0.01)
    follower.on_end(None)
    # One look at the start, two with a pause of 0.45 s after each, and one at the end.
    assert follower.looks <= 5


def start_server(db: Path, port: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        f"sqlite:///{db}",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    env = os.environ | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command += ["--artifacts-destination", str(db.parent / "artifacts")]
    with (db.parent / "server.log").open("ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def kill_server(process: subprocess.Popen[bytes]) -> None:
    os.killpg(
        process.pid, signal.SIGKILL
    )  # the group that start_new_session made: the server and its worker
    process.wait()


def wait_until(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_server_that_comes_late_and_is_killed_in_the_middle_delays_nothing_and_misses_nothing(
    tmp_path: Path, empty_db: Path
) -> None:
    home = Home(tmp_path / "runs")
    port = free_port()
    said = []
    write_definition(home, ["lora"], ["agreement"], trials=4, seeds=[1, 2])
    db = tmp_path / "server" / "mlflow.db"
    db.parent.mkdir()
    shutil.copy(empty_db, db)
    listener = TrackingListener(
        home, f"http://127.0.0.1:{port}", say=said.append, patience_s=2, retry_s=(0.2, 1.0)
    )

    def end_trial(number: int) -> None:
        spec = make_spec("lora", number=number)
        write_trial(home, spec, make_result(spec))
        start = time.monotonic()
        listener.on_trial_end(spec, make_result(spec))
        assert time.monotonic() - start < 1

    listener.on_start(None, {})
    end_trial(0)
    end_trial(1)
    wait_until(lambda: said)
    server = start_server(db, port)
    try:
        wait_until(lambda: listener.behind == 0)
    finally:
        kill_server(server)
    end_trial(2)
    end_trial(3)
    listener.on_end(None)
    assert len(said) == 2
    assert "does not answer" in said[0] and "the sweep goes on" in said[0]
    assert (
        said[1] == "MLflow is behind by 2 trials; run: suite sync, with the same --home and stores"
    )
    server = start_server(db, port)
    try:
        wait_until(lambda: sync(home, tracking_uri=f"http://127.0.0.1:{port}").unreachable is None)
    finally:
        kill_server(server)
    assert_each_once(f"sqlite:///{db}", home)


def test_mlflow_is_imported_before_a_second_thread_could_import_it_too(home: Home) -> None:
    """Ray imports it in the driver's thread; two threads at once end in `_DeadlockError`."""
    code = (
        "import sys, threading; from pathlib import Path\n"
        "from suite.tracking import TrackingListener; from suite.record.folder import Home\n"
        "started = []\n"
        "threading.Thread.start = lambda self: started.append(hasattr(sys.modules.get('mlflow'), 'version'))\n"
        f"listener = TrackingListener(Home(Path({str(home.path)!r})), 'sqlite:////nowhere/mlflow.db')\n"
        "assert 'mlflow' not in sys.modules\n"
        "listener.on_start(None, {})\n"
        "assert started == [True], started\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_trials_of_no_sweep_are_not_passed_over_in_silence(home: Home) -> None:
    shutil.rmtree(home.path / "sweeps")
    with pytest.raises(TrackingError, match=r"holds trials but defines no sweep"):
        sync(home, tracking_uri=home.tracking_uri)
