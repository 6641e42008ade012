"""Curves in MLflow while a trial runs: one run per trial and each epoch once, whatever stops the driver."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from suite.record.folder import Home
from suite.record.result import EpochRecord, Status, TrialResult
from suite.record.spec import TrialSpec
from suite.tracking import TrackingListener, open_store, sync
from suite.tracking.live import LiveTrial
from suite.tracking.store import StoredRun
from suite.tracking.writer import Syncer
from tests.records import make_result, make_spec, write_definition, write_trial
from tests.test_tracking import FailingStore, assert_each_once, runs, wait_until

BEGAN_S = 1_700_000_000.25
"""When the driver saw a trial begin; its record says a little later."""


@pytest.fixture
def home(tmp_path: Path, empty_db: Path) -> Home:
    """A sweep of one method on one task, of which nothing has run."""
    home = Home(tmp_path / "runs")
    write_definition(home, ["lora"], ["agreement"], trials=2, seeds=[1])
    shutil.copy(empty_db, home.path / "mlflow.db")
    return home


def result_of(spec: TrialSpec, **changes: Any) -> TrialResult:
    result = make_result(spec, **changes)
    # Numbered from one, as a trainer does.
    epochs = [epoch.model_copy(update={"epoch": epoch.epoch + 1}) for epoch in result.epochs]
    return result.model_copy(update={"epochs": epochs, "started_at": BEGAN_S + 2})


def commit(home: Home, spec: TrialSpec, epochs: Sequence[EpochRecord]) -> None:
    """Append epochs to the curve of a trial, as its first rank does."""
    folder = home.trial(write_trial(home, spec))
    with (folder.path / "epochs.jsonl").open("a") as file:
        for epoch in epochs:
            file.write(json.dumps(epoch.model_dump(mode="json")) + "\n")


def trial_run(home: Home, spec: TrialSpec) -> StoredRun:
    (run,) = runs(home.tracking_uri, "trial", **{"suite.trial": spec.hash})
    return run


def state_of(home: Home, spec: TrialSpec) -> tuple[str, list[int]] | None:
    """State of a trial's run and the steps of its curve; None where it has no run."""
    if "demo" not in open_store(home.tracking_uri).experiments():
        return None
    found = runs(home.tracking_uri, "trial", **{"suite.trial": spec.hash})
    return (found[0].status, steps(home, found[0])) if found else None


def steps(home: Home, run: StoredRun, key: str = "epoch.train_loss") -> list[int]:
    history = open_store(home.tracking_uri).client.get_metric_history(run.id, key)
    return sorted(point.step for point in history)


def live_sync(home: Home, *specs: TrialSpec) -> None:
    """One look of a driver that was just started and runs these trials."""
    live = {spec.hash: LiveTrial(spec, BEGAN_S) for spec in specs}
    assert Syncer(home, open_store(home.tracking_uri)).run(live=live).unreachable is None


def curves(uri: str, run: StoredRun) -> dict[str, list[tuple[int, float, int]]]:
    """Step, value and time after the first, by name of the curve."""
    client = open_store(uri).client
    found = {}
    for key in client.get_run(run.id).data.metrics:
        if key.startswith("epoch."):
            history = client.get_metric_history(run.id, key)
            began = min(point.timestamp for point in history)
            found[key] = [(p.step, p.value, p.timestamp - began) for p in history]
    return found


def test_a_reason_whose_name_mlflow_refuses_ends_a_run_that_was_begun_live(home: Home) -> None:
    spec = make_spec("lora")
    result = result_of(spec)
    commit(home, spec, result.epochs[:1])
    live_sync(home, spec)
    commit(home, spec, result.epochs[1:])
    missing = {"phases.train.energy_kwh[rapl]": "other work took 30%"}
    home.trial(spec).write_result(result.model_copy(update={"missing": missing}))
    assert sync(home, tracking_uri=home.tracking_uri).unreachable is None
    run = trial_run(home, spec)
    assert run.ended and run.tags["missing.phases.train.energy_kwh_rapl_"] == "other work took 30%"


def test_a_curve_is_in_mlflow_after_each_epoch_and_the_run_goes_on_to_its_end(home: Home) -> None:
    spec = make_spec("lora")
    result = result_of(spec)
    listener = TrackingListener(home, home.tracking_uri)
    listener.on_start(None, {})
    write_trial(home, spec)
    listener.on_trial_start(spec)
    for epoch in result.epochs:
        commit(home, spec, [epoch])
        listener.on_epoch(spec, epoch)
        expected = ("RUNNING", list(range(1, epoch.epoch + 1)))
        wait_until(lambda expected=expected: state_of(home, spec) == expected)
    live = trial_run(home, spec)
    stored = open_store(home.tracking_uri).client.get_run(live.id)
    (cell,) = runs(home.tracking_uri, "cell")
    assert stored.info.run_name == "lora / agreement / search 0 / lr 1e-4"
    assert stored.data.params["learning_rate"] == "0.0001"
    assert live.tags["mlflow.parentRunId"] == cell.id
    assert "status" not in live.tags
    assert "a toy" in cell.tags["mlflow.note.content"]
    home.trial(spec).write_result(result)
    listener.on_trial_end(spec, result)
    listener.on_end(None)
    ended = trial_run(home, spec)
    assert (ended.id, ended.tags["status"]) == (live.id, "completed")
    assert state_of(home, spec) == ("FINISHED", [1, 2])
    assert_each_once(home.tracking_uri, home)


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
def test_a_run_that_was_written_live_equals_one_that_was_rebuilt(
    home: Home, tmp_path: Path, empty_db: Path, status: Status
) -> None:
    spec = make_spec("lora", seed=1)
    epochs = result_of(spec).epochs
    result = result_of(spec, status=status)
    commit(home, spec, epochs[:1])
    live_sync(home, spec)
    commit(home, spec, epochs[1:])
    home.trial(spec).write_result(result)
    sync(home, tracking_uri=home.tracking_uri)
    rebuilt_uri = f"sqlite:///{shutil.copy(empty_db, tmp_path / 'rebuilt.db')}"
    sync(home, tracking_uri=rebuilt_uri)
    live = trial_run(home, spec)
    (rebuilt,) = runs(rebuilt_uri, "trial")
    first = open_store(home.tracking_uri).client.get_run(live.id)
    second = open_store(rebuilt_uri).client.get_run(rebuilt.id)
    parent = {"mlflow.parentRunId": ""}
    assert first.data.tags | parent == second.data.tags | parent
    assert first.data.params == second.data.params
    assert first.data.metrics == second.data.metrics
    assert (first.info.status, first.info.end_time) == (second.info.status, second.info.end_time)
    assert curves(home.tracking_uri, live) == curves(rebuilt_uri, rebuilt) != {}
    # Times differ by what lies between the driver's start of the trial and the worker's.
    assert second.info.start_time - first.info.start_time == 2000


def test_a_stopped_sweep_shows_nothing_as_running_and_the_next_goes_on_with_the_same_run(
    home: Home,
) -> None:
    specs = [make_spec("lora", number=number) for number in range(2)]
    results = [result_of(spec) for spec in specs]
    listener = TrackingListener(home, home.tracking_uri)
    listener.on_start(None, {})
    for spec, result in zip(specs, results, strict=True):
        listener.on_trial_start(spec)
        commit(home, spec, result.epochs[:1])
        listener.on_epoch(spec, result.epochs[0])
    for spec in specs:
        wait_until(lambda spec=spec: state_of(home, spec) == ("RUNNING", [1]))
    listener.on_end(None)
    assert [state_of(home, spec) for spec in specs] == [("SCHEDULED", [1])] * 2
    begun = [trial_run(home, spec).id for spec in specs]
    again = TrackingListener(home, home.tracking_uri)
    again.on_start(None, {})
    for spec, result in zip(specs, results, strict=True):
        again.on_trial_start(spec)
        commit(home, spec, result.epochs[1:])
        again.on_epoch(spec, result.epochs[1])
        wait_until(lambda spec=spec: state_of(home, spec) == ("RUNNING", [1, 2]))
        home.trial(spec).write_result(result)
        again.on_trial_end(spec, result)
    again.on_end(None)
    assert [trial_run(home, spec).id for spec in specs] == begun
    assert_each_once(home.tracking_uri, home)


def test_what_a_killed_driver_left_running_is_paused_by_the_next_or_taken_up(home: Home) -> None:
    spec = make_spec("lora")
    result = result_of(spec)
    commit(home, spec, result.epochs[:1])
    live_sync(home, spec)
    left = trial_run(home, spec)
    sync(home, tracking_uri=home.tracking_uri)
    assert state_of(home, spec) == ("RUNNING", [1]), "suite sync cannot know that nothing runs"
    live_sync(home)
    assert state_of(home, spec) == ("SCHEDULED", [1])
    commit(home, spec, result.epochs[1:])
    live_sync(home, spec)
    assert state_of(home, spec) == ("RUNNING", [1, 2])
    home.trial(spec).write_result(result)
    assert sync(home, tracking_uri=home.tracking_uri).written == 1
    assert trial_run(home, spec).id == left.id
    assert_each_once(home.tracking_uri, home)


def test_a_trial_that_ran_out_of_retries_does_not_show_as_running(home: Home) -> None:
    spec = make_spec("lora")
    listener = TrackingListener(home, home.tracking_uri)
    listener.on_start(None, {})
    listener.on_trial_start(spec)
    epoch = result_of(spec).epochs[0]
    commit(home, spec, [epoch])
    listener.on_epoch(spec, epoch)
    wait_until(lambda: state_of(home, spec) == ("RUNNING", [1]))
    listener.on_trial_end(spec, None)
    wait_until(lambda: state_of(home, spec) == ("SCHEDULED", [1]))
    listener.on_end(None)


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_a_trial_that_began_anew_has_a_new_run_with_its_own_curve(home: Home, ended: bool) -> None:
    spec = make_spec("lora")
    result = result_of(spec)
    commit(home, spec, result.epochs)
    live_sync(home, spec)
    if ended:
        home.trial(spec).write_result(result)
        sync(home, tracking_uri=home.tracking_uri)
    old = trial_run(home, spec)
    shutil.rmtree(home.trial(spec).path)
    other = [epoch.model_copy(update={"seconds": 11.0}) for epoch in result.epochs]
    commit(home, spec, other[:1])
    live_sync(home, spec)
    assert state_of(home, spec) == ("RUNNING", [1])
    assert trial_run(home, spec).id != old.id
    home.trial(spec).write_result(result.model_copy(update={"epochs": other}))
    sync(home, tracking_uri=home.tracking_uri)
    assert state_of(home, spec) == ("FINISHED", [1, 2])
    assert_each_once(home.tracking_uri, home)


@pytest.mark.slow
def test_a_driver_killed_at_any_request_doubles_no_run_and_no_point(
    home: Home, empty_db: Path
) -> None:
    spec = make_spec("lora")
    result = result_of(spec)
    folder = home.trial(spec).path
    live = {spec.hash: LiveTrial(spec, BEGAN_S)}
    for at in range(20):
        commit(home, spec, result.epochs[:1])
        live_sync(home, spec)
        commit(home, spec, result.epochs[1:])
        store = FailingStore(open_store(home.tracking_uri), at)
        syncer = Syncer(home, store)
        cut = syncer.run(live=live).unreachable
        if cut is None:
            home.trial(spec).write_result(result)
            cut = syncer.run(live=live).unreachable
        live_sync(home, spec)
        home.trial(spec).write_result(result)
        live_sync(home, spec)
        assert state_of(home, spec) == ("FINISHED", [1, 2])
        assert_each_once(home.tracking_uri, home)
        if cut is None:
            assert at >= 7, at
            return
        shutil.rmtree(folder)
        for path in home.path.glob("mlflow.db*"):
            path.unlink()
        shutil.copy(empty_db, home.path / "mlflow.db")
    pytest.fail("the driver was never let through")


def test_a_pretrain_run_has_no_run_in_mlflow(home: Home) -> None:
    from suite.record.spec import Phase

    spec = make_spec("lora")
    run = spec.model_copy(update={"phase": Phase.PRETRAIN})
    commit(home, spec, result_of(spec).epochs[:1])
    listener = TrackingListener(home, home.tracking_uri)
    listener.on_start(None, {})
    listener.on_trial_start(run)
    listener.on_epoch(run, result_of(spec).epochs[0])
    listener.on_end(None)
    assert runs(home.tracking_uri, "trial") == []
