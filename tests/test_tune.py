"""Sweeps through real Ray: one local cluster for the module, two CPU workers, training replaced by `tests.fake_trainer`."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from moto.server import ThreadedMotoServer

from suite.cluster.host import oom_kills
from suite.cluster.session import PASSED_ON, worker_environment
from suite.errors import IncompatibleError, ResourceError, StorageError, SweepConflictError
from suite.plan.cell_state import CellStatus
from suite.plan.definition import driver_pid, only_driver
from suite.plan.events import Listener, Listeners, Outcome
from suite.plan.plan import Plan, make_plan
from suite.plan.queue import TrialQueue
from suite.plan.resources import Layout
from suite.plan.status import status
from suite.record.folder import Home
from suite.record.result import EpochRecord, FailureRecord, Status, TrialResult
from suite.record.spec import Phase, TrialSpec
from suite.storage.workspace import Workspace
from suite.train.report import EpochReport
from suite.tune import driver
from suite.tune.callback import SweepCallback
from suite.tune.driver import run_sweep
from suite.tune.group import Group, GroupFailureError, RunSettings
from suite.tune.searcher import SweepSearcher
from suite.tune.trainable import TrialTrainable
from tests.buckets import s3_server
from tests.fake_trainer import calls, score_of
from tests.sweeps import chosen, decided, run_all, toy_cluster, toy_sweep

__all__ = ["s3_server"]
ROOT = Path(__file__).parents[1]
FAKE = "tests.fake_trainer:FakeTrainer"
SLOW = "tests.fake_trainer:SlowTrainer"


@pytest.fixture(scope="module", autouse=True)
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with toy_cluster(tmp_path_factory.mktemp("roots")) as roots:
        yield roots


class Recorder(Listener):
    """Everything that a listener is told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_start(self, plan: Plan, cells: Any) -> None:
        self.events.append(("start", list(cells)))

    def on_trial_start(self, spec: TrialSpec) -> None:
        self.events.append(("trial", spec))

    def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
        self.events.append(("epoch", spec, record.epoch))

    def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
        self.events.append(("trial end", spec, result))

    def on_trial_retry(self, spec: TrialSpec, failure: FailureRecord) -> None:
        self.events.append(("retry", spec, failure))

    def on_end(self, outcome: Outcome) -> None:
        self.events.append(("end", outcome))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == name]


class Broken(Listener):
    def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
        raise RuntimeError("a table that cannot be drawn")


def small(**changes: Any) -> Any:
    """One cell, two search trials, one seed."""
    return toy_sweep(
        **{"methods": ["full"], "search": {"trials": 2}, "confirm": {"seeds": [1]}} | changes
    )


def test_a_sweep_runs_through_and_tells_its_listeners(home: Home, data_root: Path) -> None:
    recorder = Recorder()
    outcome = run_sweep(
        toy_sweep(), home=home, data_root=data_root, listeners=[Broken(), recorder], trainer=FAKE
    )
    assert outcome.ok and outcome.finished == 14 and not outcome.failed
    started = [spec for (spec,) in recorder.named("trial")]
    assert [s.phase for s in started] == ([Phase.SEARCH] * 5 + [Phase.CONFIRM] * 2) * 2
    assert [e for spec, e in recorder.named("epoch") if spec == started[0]] == [1, 2, 3]
    assert [(spec, result.score) for spec, result in recorder.named("trial end")] == [
        (s, score_of(s, 3)) for s in started
    ]
    assert recorder.events[0][0] == "start" and recorder.named("end") == [(outcome,)]
    assert len({c["pid"] for c in calls(home)}) == 1, "one warm group served every trial"
    assert not (home.path / ".tune").exists()

    again = Recorder()
    assert run_sweep(
        toy_sweep(), home=home, data_root=data_root, listeners=[again], trainer=FAKE
    ).ok
    assert not again.named("trial") and len(calls(home)) == 14, "nothing runs twice"
    with pytest.raises(SweepConflictError, match=r"training\.epochs: 3 -> 2"):
        run_sweep(
            toy_sweep(training={"epochs": 2, "batch_size": 8}),
            home=home,
            data_root=data_root,
            trainer=FAKE,
        )

    more = make_plan(toy_sweep(confirm={"seeds": [1, 2, 3]}), where="toy")
    added = run_all(TrialQueue(more, home, slots=1), home)
    assert [spec.seed for spec in added] == [3, 3], "a new seed only adds its runs"


@pytest.mark.slow
def test_a_rank_that_dies_and_one_that_hangs_cost_an_attempt_each_and_no_epoch(
    home: Home, data_root: Path
) -> None:
    for fault in ("kill", "stop"):
        (home.path / f"fault-{fault}").write_text("any")
    recorder = Recorder()
    config = small(timeouts={"setup_s": 60.0, "epoch_s": 4.0})
    before = oom_kills()
    assert before, "there are counters"
    outcome = run_sweep(config, home=home, data_root=data_root, listeners=[recorder], trainer=FAKE)
    assert outcome.ok and outcome.finished == 3
    (spec, died), (same, hung) = recorder.named("retry")
    assert spec == same and home.trial(spec).failures() == [died, hung]
    assert "rank 1" in died.message and "from rank [1]" in hung.message
    assert hung.type == "Timeout" and hung.message.endswith("; rank 1 is stopped")
    assert {died.log_path, hung.log_path} == {str(home.trial(spec).log(1))}
    assert "about to die" in died.traceback, "the end of the rank's log is kept"
    first, second, third, *_ = calls(home)
    assert {c["trial"] for c in (first, second, third)} == {spec.hash}
    assert 0 == first["epoch"] < second["epoch"] <= third["epoch"], (
        "taken up at the last committed epoch"
    )
    assert (
        len({c["pid"] for c in (first, second, third)}) == 3
        and _gone(first["pid"])
        and _gone(second["pid"])
    )
    if oom_kills() != before:
        pytest.skip("somebody else's process was killed for lack of memory meanwhile")
    assert died.type == "RankDied", "without evidence it is called nothing else"
    assert died.message.endswith("as after SIGKILL; by whom is unknown")


@pytest.mark.slow
def test_a_trials_own_end_is_a_result_and_is_not_tried_again(home: Home, data_root: Path) -> None:
    (home.path / "fault-bug").write_text("any")
    choice = {"name": "full", "learning_rate": {"low": 0.1, "high": 1.0}}
    recorder = Recorder()
    config = small(methods=[choice], search={"trials": 3, "sampler": "grid"})
    outcome = run_sweep(config, home=home, data_root=data_root, listeners=[recorder], trainer=FAKE)
    assert outcome.ok and not recorder.named("retry")
    ends = [
        (round(spec.learning_rate, 2), result.status)
        for spec, result in recorder.named("trial end")
    ]
    assert ends == [
        (0.1, Status.FAILED),
        (1.0, Status.DIVERGED),
        (0.32, Status.COMPLETED),
        (0.32, Status.COMPLETED),
    ]


@pytest.mark.slow
def test_a_contest_of_architectures_with_the_edge_guard_runs_through(
    home: Home, data_root: Path
) -> None:
    """The best learning rate of the fake trainer lies below the range; all ranks score alike, so that the first one wins."""
    config = toy_sweep(
        methods=[{"name": "lora", "learning_rate": {"low": 1e-3, "high": 1e-2}}],
        architectures="search",
        search={"trials": 2, "sampler": "grid", "edge_guard": {"extensions": 2, "trials": 2}},
        confirm={"seeds": [1]},
    )
    recorder = Recorder()
    outcome = run_sweep(config, home=home, data_root=data_root, listeners=[recorder], trainer=FAKE)
    assert outcome.ok and outcome.finished == 3 * 4 + 1
    assert [cell.status for cell in outcome.cells] == [
        CellStatus.DONE,
        CellStatus.NOT_CHOSEN,
        CellStatus.NOT_CHOSEN,
    ]
    started = [spec for (spec,) in recorder.named("trial")]
    assert [s.phase for s in started[:-1]] == [Phase.SEARCH] * 12 and started[
        -1
    ].phase is Phase.CONFIRM
    assert {round(s.learning_rate, 6) for s in started} == {1e-3, 1e-2, 0.000316, 1e-4}
    assert started[-1].learning_rate == pytest.approx(3.16e-4, rel=1e-2), (
        "four digits, found in the new decade"
    )
    plan = make_plan(config, where="toy")
    assert {
        (s["extensions"], s["budget"], s["edge"], s["ended"]) for s in decided(plan, home).values()
    } == {(1, 4, False, "budget")}
    assert sorted(won is True for won in chosen(plan, home).values()) == [False, False, True]
    simulated = TrialQueue(
        make_plan(config, where="toy"), whole := Home(home.path / "whole"), slots=1
    )
    assert {t.hash for t in home.trials()} == {spec.hash for spec in run_all(simulated, whole)}
    again = Recorder()
    assert run_sweep(
        config, home=home, data_root=data_root, listeners=[again], trainer=FAKE
    ).ok and not again.named("trial")


@pytest.mark.slow
def test_a_pruned_trial_ends_early_and_is_done(home: Home, data_root: Path) -> None:
    choice = {"name": "full", "learning_rate": {"low": 1e-6, "high": 1e-4}}
    config = small(methods=[choice], search={"trials": 3, "sampler": "grid", "pruner": "asha"})
    recorder = Recorder()
    outcome = run_sweep(config, home=home, data_root=data_root, listeners=[recorder], trainer=FAKE)
    ends = {
        f"{spec.learning_rate:.0e}": result.status
        for spec, result in recorder.named("trial end")
        if spec.phase is Phase.SEARCH
    }
    assert outcome.ok and ends == {
        "1e-06": Status.COMPLETED,
        "1e-04": Status.COMPLETED,
        "1e-05": Status.PRUNED,
    }
    epochs = {
        f"{spec.learning_rate:.0e}": epoch
        for spec, epoch in recorder.named("epoch")
        if spec.phase is Phase.SEARCH
    }
    assert epochs == {"1e-06": 3, "1e-04": 3, "1e-05": 1}
    (cell,) = outcome.cells
    assert (cell.pruned, cell.failures, cell.best_learning_rate) == (1, (), 1e-4)
    again = Recorder()
    assert run_sweep(
        config, home=home, data_root=data_root, listeners=[again], trainer=FAKE
    ).ok and not again.named("trial")


def lanes_of_read(**changes: Any) -> Any:
    """One cell of READ: a round of three search trials, one of two, and a confirm run."""
    search = {"trials": 5, "startup_trials": 3, "lanes": 3} | changes.pop("search", {})
    return small(**{"methods": ["read"], "search": search} | changes)


@pytest.mark.slow
def test_trials_side_by_side_end_each_with_its_own_result(home: Home, data_root: Path) -> None:
    recorder = Recorder()
    wide = {"name": "read", "learning_rate": {"low": 1e-4, "high": 10.0}}
    config = lanes_of_read(methods=[wide])
    outcome = run_sweep(config, home=home, data_root=data_root, listeners=[recorder], trainer=FAKE)
    assert outcome.ok and outcome.finished == 6
    started = [call["trial"] for call in calls(home)]
    numbers = {spec.hash: spec.number for (spec,) in recorder.named("trial")}
    assert [numbers[trial] for trial in started] == [0, 1, 2, 3, 4, 0]
    kinds = [event[0] for event in recorder.events if event[0] in ("trial", "trial end")]
    assert kinds == ["trial"] * 3 + ["trial end"] * 3 + ["trial"] * 2 + ["trial end"] * 2 + [
        "trial",
        "trial end",
    ]
    diverged = 0
    for spec, result in recorder.named("trial end"):
        epochs = [epoch for of, epoch in recorder.named("epoch") if of == spec]
        if spec.learning_rate > 0.5:
            diverged += 1
            assert (result.status, epochs) == (Status.DIVERGED, [])
        else:
            assert (result.score, epochs) == (score_of(spec, 3), [1, 2, 3])
    assert 0 < diverged < 5, "a lane that diverges ends alone"


@pytest.mark.slow
def test_a_rank_that_dies_under_lanes_costs_each_an_attempt_and_they_go_on_one_by_one(
    home: Home, data_root: Path
) -> None:
    (home.path / "fault-kill").write_text("any")
    recorder = Recorder()
    config = lanes_of_read()
    outcome = run_sweep(config, home=home, data_root=data_root, listeners=[recorder], trainer=FAKE)
    assert outcome.ok and outcome.finished == 6 and not outcome.interrupted
    lanes = [spec for (spec,) in recorder.named("trial")][:3]
    retries = recorder.named("retry")
    assert [spec for spec, _ in retries] == lanes
    assert {failure.type for _, failure in retries} == {"RankDied"}
    starts = [(call["trial"], call["epoch"]) for call in calls(home)]
    assert starts[:3] == [(spec.hash, 0) for spec in lanes]
    taken_up = dict(starts[3:6])
    assert taken_up.keys() == {spec.hash for spec in lanes}
    assert all(epoch >= 1 for epoch in taken_up.values()), "at what each has committed"
    assert len(calls(home)) == 3 + 6, "the next round trains side by side again"
    pids = [call["pid"] for call in calls(home)]
    assert len(set(pids)) == 2


class FailsAtItsEnd:
    """A group of lanes, of which the first to end is its own undoing."""

    def __init__(self, home: Home) -> None:
        self.home = home

    def start(self, specs: Sequence[TrialSpec]) -> int:
        self.trials = [spec.hash for spec in specs]
        return 0

    def epoch(self) -> dict[str, EpochReport]:
        return {trial: EpochReport(None, True) for trial in self.trials}

    def finish(self, trial: str, *, pruned: bool = False) -> TrialResult:
        failed = TrialResult(
            trial=trial, status=Status.FAILED, score=None, started_at=0.0, finished_at=1.0
        )
        self.home.trial(trial).write_result(failed)
        raise GroupFailureError(FailureRecord(type="TrialEndedError", message="a bug"))


def test_a_lane_that_fails_by_itself_costs_the_others_no_attempt(home: Home) -> None:
    plan = make_plan(lanes_of_read(), where="toy")
    (cell,) = plan.cells
    specs = [plan.search_spec(cell, number, 1e-3 * (number + 1)) for number in range(3)]
    trainable = TrialTrainable.__new__(TrialTrainable)
    settings = RunSettings(Workspace(home), Layout(1, 1.0, 0.0, 1), plan.config.timeouts, FAKE)
    trainable.reset_config(
        {
            "settings": settings,
            "specs": [spec.model_dump_json() for spec in specs],
            "peers": [[], [], []],
        }
    )
    trainable._group = FailsAtItsEnd(home)  # type: ignore[assignment]
    report = trainable.step()
    assert (report["done"], report["apart"]) == (True, "LanesUnevenError")
    ends = [home.trial(spec).result() for spec in specs]
    assert [end is not None for end in ends] == [True, False, False]
    assert not any(home.trial(spec).failures() for spec in specs)


@pytest.mark.slow
def test_a_weak_lane_is_pruned_and_the_others_go_on(home: Home, data_root: Path) -> None:
    choice = {"name": "read", "learning_rate": {"low": 1e-6, "high": 1e-4}}
    config = lanes_of_read(
        methods=[choice], search={"trials": 3, "sampler": "grid", "pruner": "asha"}
    )
    recorder = Recorder()
    outcome = run_sweep(config, home=home, data_root=data_root, listeners=[recorder], trainer=FAKE)
    ends = {}
    for spec, result in recorder.named("trial end"):
        if spec.phase is Phase.SEARCH:
            ends[f"{spec.learning_rate:.0e}"] = result.status
    assert outcome.ok and ends == {
        "1e-06": Status.COMPLETED,
        "1e-04": Status.COMPLETED,
        "1e-05": Status.PRUNED,
    }


@pytest.mark.slow
def test_an_objective_that_is_not_measured_halts_the_sweep_and_loses_nothing(
    home: Home, data_root: Path
) -> None:
    """The fake trainer meters nothing."""
    config = small(search={"trials": 4, "objective": ["score", "time"]})
    for finished in (1, 0):
        outcome = run_sweep(config, home=home, data_root=data_root, trainer=FAKE)
        assert (
            outcome.interrupted
            and outcome.finished == finished
            and "time was not measured in trial" in outcome.reason
        )
    assert status(home, "toy")[0].done == 1


def test_a_full_disk_pauses_the_sweep_and_costs_no_trial(home: Home, data_root: Path) -> None:
    (home.path / "fault-disk").write_text("any")
    outcome = run_sweep(small(), home=home, data_root=data_root, trainer=FAKE)
    assert outcome.interrupted and not outcome.ok and "free some space" in outcome.reason
    assert status(home, "toy")[0].done == 0
    (trial,) = home.trials()
    assert trial.result() is None and not trial.failures()


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "right to read and write there")],
)
def test_no_room_for_the_record_of_a_failure_pauses_the_sweep_instead_of_breaking_it(
    home: Home, number: int, says: str
) -> None:
    """Where a host took the trial's process along while the disk failed: the driver writes the record."""
    config = small()
    settings = RunSettings(
        Workspace(home), Layout(workers=1, cpus=1.0, gpus=0.0, slots=1), config.timeouts, FAKE
    )
    schedule = TrialQueue(make_plan(config, where="toy"), home, slots=1)

    def write(number: int) -> None:
        raise OSError(number, os.strerror(number))

    with only_driver(home, "toy") as lease:
        callback = SweepCallback(SweepSearcher(schedule), settings, Listeners([]), lease)
        callback._stored(lambda: write(number))
        assert callback.must_stop() and f"{says} and run the same command again" in callback.reason


def test_a_signal_that_comes_while_the_storage_is_asked_stops_the_sweep() -> None:
    callback = SweepCallback.__new__(SweepCallback)
    callback.reason = ""

    class Asked:
        def loss(self) -> str:
            callback.reason = "stopped by Ctrl-C"  # as the handler sets it
            return ""

    callback.lease = Asked()  # type: ignore[assignment]
    assert callback.must_stop()
    assert callback.reason == "stopped by Ctrl-C"


def test_a_bucket_that_is_not_there_is_told_before_the_sweep_is_claimed(
    s3_server: ThreadedMotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "only_driver", lambda *_, **__: pytest.fail("claimed"))
    with pytest.raises(StorageError, match="no such bucket"):
        run_sweep(toy_sweep(), home=Home(tmp_path / "home"), storage="s3://no-such-bucket/x")


def test_ctrl_c_stops_cleanly_and_says_so(home: Home, data_root: Path) -> None:
    class Impatient(Listener):
        def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # a background job ignores it
    outcome = run_sweep(
        small(), home=home, data_root=data_root, listeners=[Impatient()], trainer=FAKE
    )
    assert outcome.interrupted and outcome.reason == "stopped by Ctrl-C" and outcome.finished == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert driver_pid(home, "toy") is None


def test_a_signal_to_the_drivers_process_group_does_not_reach_the_cluster() -> None:
    """`timeout` sends SIGTERM to it, which would end Ray before the trials have left."""
    started = {process.name(): process.pid for process in psutil.Process().children()}
    for name in ("gcs_server", "raylet"):
        assert os.getpgid(started[name]) != os.getpgid(0), name


def test_more_workers_than_the_cluster_holds_is_an_error_before_any_worker(
    home: Home, data_root: Path
) -> None:
    with pytest.raises(ResourceError, match="16 workers of 1 CPU each never fit"):
        run_sweep(
            small(resources={"workers": 16}, training={"batch_size": 16}),
            home=home,
            data_root=data_root,
            trainer=FAKE,
        )
    assert not calls(home) and not (home.path / "trials").exists()


def test_a_sweep_that_cannot_be_measured_stores_no_definition_that_could_not_be_mended(
    home: Home, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise IncompatibleError("search.objective: no energy here")

    monkeypatch.setattr(driver, "check_measurable", refuse)
    with pytest.raises(IncompatibleError, match="no energy here"):
        run_sweep(small(), home=home, data_root=data_root, trainer=FAKE)
    assert not list((home.path / "sweeps").glob("*.json"))


def test_fewer_rows_than_a_batch_are_an_error_before_any_worker(
    home: Home, data_root: Path
) -> None:
    with pytest.raises(
        IncompatibleError,
        match=r"toy: training.batch_size is 4096, but there are only \d+ training rows",
    ):
        run_sweep(
            small(training={"batch_size": 4096}), home=home, data_root=data_root, trainer=FAKE
        )
    assert not calls(home)


@pytest.mark.slow
def test_a_group_is_replaced_when_it_grew_served_its_time_or_died(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suite.tune.group.MAX_TRIALS", 3)
    config = small()
    plan = make_plan(config, where="toy")
    settings = RunSettings(
        Workspace(home), Layout(workers=1, cpus=1.0, gpus=0.0, slots=1), config.timeouts, FAKE
    )
    group = Group(settings, None)
    try:
        for number in range(2):
            group.start([plan.search_spec(plan.cells[0], number, 1e-3)])
        (home.path / "baseline").write_text(str(500_000_000))
        group.start([plan.search_spec(plan.cells[0], 2, 1e-3)])  # notices the growth
        group.start([plan.search_spec(plan.cells[0], 3, 1e-3)])  # on new processes
        os.kill(calls(home)[-1]["pid"], signal.SIGKILL)
        for number in range(4, 8):
            group.start([plan.search_spec(plan.cells[0], number, 1e-3)])
    finally:
        group.close()
    pids = [c["pid"] for c in calls(home)]
    generations = [pids.index(p) for p in pids]
    assert generations == [0, 0, 0, 3, 4, 4, 4, 7]
    assert all(_gone(p) for p in set(pids))


def test_workers_get_the_listed_variables_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("SUITE_PATH", "/somewhere")
    environment = worker_environment(3)
    assert environment["SUITE_PATH"] == "/somewhere" and environment["OMP_NUM_THREADS"] == "3"
    assert "canary" not in environment.values() and not [
        name for name in PASSED_ON if "TOKEN" in name
    ]


def test_workers_ask_for_large_pages_unless_the_user_has_settings_of_malloc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert worker_environment(1)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert worker_environment(1)["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2"


@pytest.mark.slow
def test_a_killed_driver_loses_nothing_and_reruns_nothing(home: Home, data_root: Path) -> None:
    """SIGKILL in the middle; the next run must end as an uninterrupted one. The subprocess has a cluster of its own."""
    code = (
        "import sys; from pathlib import Path; from suite.record.folder import Home; from suite.tune.driver import run_sweep\n"
        "from tests.sweeps import toy_sweep\n"
        f"run_sweep(toy_sweep(), home=Home(Path(sys.argv[1])), data_root=Path(sys.argv[2]), trainer={SLOW!r})"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    driver = subprocess.Popen(
        [sys.executable, "-c", code, str(home.path), str(data_root)], env=environment, cwd=ROOT
    )
    try:
        _wait_for(lambda: len(calls(home, "finish")) >= 2, driver)
    finally:
        driver.kill()
        driver.wait()
    done = {c["trial"] for c in calls(home, "finish")}
    _wait_for(lambda: all(_gone(c["pid"]) for c in calls(home)))
    outcome = run_sweep(toy_sweep(), home=home, data_root=data_root, trainer=FAKE)
    assert outcome.ok
    finished = [c["trial"] for c in calls(home, "finish")]
    assert len(finished) == len(set(finished)) == 14 and done < set(finished)
    uninterrupted = run_all(
        TrialQueue(
            make_plan(toy_sweep(), where="toy"), whole := Home(home.path / "whole"), slots=1
        ),
        whole,
    )
    assert {t.hash for t in home.trials()} == {spec.hash for spec in uninterrupted}


def test_the_cluster_is_free_after_all(home: Home) -> None:
    """Placement groups are gone and every CPU is back."""
    _wait_for(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))


def _wait_for(
    condition: Any, process: subprocess.Popen[bytes] | None = None, *, deadline_s: float = 90.0
) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert process is None or process.poll() is None, "the driver ended early"
        assert time.monotonic() < end, "nothing happened within the deadline"
        time.sleep(0.05)


def _gone(pid: int) -> bool:
    """Whether a process ends within a few seconds; a zombie has ended."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False
