"""What can happen to a group, through real Ray: who notices, what is kept, and what the sweep makes of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch

from suite.errors import (
    DataError,
    HubUnreachableError,
    IncompatibleError,
    OtherCodeError,
    OwnCodeError,
    ResourceError,
    UnknownNameError,
)
from suite.plan.definition import only_driver
from suite.plan.events import Listener, Listeners, Outcome
from suite.plan.plan import make_plan
from suite.plan.queue import TrialQueue
from suite.plan.resources import Layout
from suite.plan.status import status
from suite.record.attempts import (
    AGAIN,
    OUT_OF_MEMORY,
    PREEMPTED,
    REMOVED,
    counted,
    is_given_up,
    result_of,
)
from suite.record.folder import Home, TrialFolder
from suite.record.result import EpochRecord, FailureRecord, Status, TrialResult
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.failure import is_infrastructure, status_of
from suite.tune.breaker import MID_WORK, CircuitBreaker
from suite.tune.callback import SweepCallback
from suite.tune.driver import run_sweep
from suite.tune.group import GroupFailureError, RunSettings
from suite.tune.rank import Rank
from suite.tune.searcher import SweepSearcher
from suite.tune.trainable import TrialTrainable
from tests.fake_trainer import all_calls
from tests.sweeps import toy_cluster, toy_roots, toy_sweep

__all__ = ["toy_roots"]
FAKE = "tests.fake_trainer:FakeTrainer"
SLOW = "tests.fake_trainer:SlowTrainer"
CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of the task `toy`, with a cluster of two CPUs."""
    with toy_cluster(tmp_path_factory.mktemp("roots")) as roots:
        yield roots


class Told(Listener):
    """Retries and ends; may do something at a trial's start or at an epoch."""

    def __init__(
        self,
        at_epoch: Callable[[TrialSpec, EpochRecord], None] = lambda spec, record: None,
        *,
        at_start: Callable[[TrialSpec], None] = lambda spec: None,
    ) -> None:
        self.at_epoch = at_epoch
        self.at_start = at_start
        self.retries: list[FailureRecord] = []
        self.ends: list[TrialResult | None] = []

    def on_trial_start(self, spec: TrialSpec) -> None:
        self.at_start(spec)

    def on_epoch(self, spec: TrialSpec, record: EpochRecord) -> None:
        self.at_epoch(spec, record)

    def on_trial_retry(self, spec: TrialSpec, failure: FailureRecord) -> None:
        self.retries.append(failure)

    def on_trial_end(self, spec: TrialSpec, result: TrialResult | None) -> None:
        self.ends.append(result)


def fault(home: Home, what: str, *, again: bool = False, trial: str = "any") -> None:
    (home.path / f"fault-{what}").write_text(trial)
    if again:
        (home.path / f"fault-{what}-again").touch()


def mend(home: Home) -> None:
    for path in home.path.glob("fault-*"):
        path.unlink()


def run(
    home: Home,
    data_root: Path,
    told: Listener | None = None,
    *,
    trainer: str = FAKE,
    again: bool = False,
    **changes: Any,
) -> Outcome:
    """One trial per cell and one to confirm; one cell unless `methods` says otherwise."""
    patient = {"setup_s": 300.0, "epoch_s": 60.0} | changes.pop("timeouts", {})
    config = toy_sweep(
        **{
            "methods": ["full"],
            "search": {"trials": 1},
            "confirm": {"seeds": [1]},
            "timeouts": patient,
        }
        | changes
    )
    listeners = [told] if told is not None else []
    return run_sweep(
        config,
        home=home,
        data_root=data_root,
        listeners=listeners,
        trainer=trainer,
        retry_given_up=again,
    )


# ---- a rank that does not answer --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_before_a_group_that_hangs_is_ended_the_stacks_of_all_its_ranks_are_kept(
    home: Home, data_root: Path
) -> None:
    fault(home, "hang")
    told = Told()
    assert run(home, data_root, told, timeouts={"epoch_s": 4.0}).ok
    (hung,) = told.retries
    assert hung.type == "Timeout" and "from rank [1] within 4 s" in hung.message
    assert "sleep_through_everything" in hung.traceback, "where it hangs"
    assert re.findall(r"--- rank (\d), (?:sleeping|running) ---", hung.traceback) == ["0", "1"]
    assert "fake_trainer.py" in Path(hung.log_path).read_text()


# ---- memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A control group with little memory."""
    path = CGROUPS / f"suite-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(512 * 2**20))
    except OSError as error:
        pytest.skip(f"needs root and control groups of version 1: {error}")
    yield path
    for _ in range(100):
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.1)


@pytest.mark.slow
def test_a_kill_for_lack_of_memory_is_told_from_a_death_without_cause(
    home: Home, data_root: Path, cgroup: Path
) -> None:
    (home.path / "cgroup").write_text(str(cgroup))
    fault(home, "memory-start", again=True)
    told = Told()
    outcome = run(home, data_root, told, failures={"retries": 1})
    (killed,) = told.retries
    assert (
        killed.type == OUT_OF_MEMORY
        and "as /" in killed.message
        and "micro_batch_size" in killed.message
    )
    assert [end.status for end in told.ends if end is not None] == [Status.OOM], (
        "not tried for ever: a result, with the remedy"
    )
    assert outcome.failed and "micro_batch_size" in outcome.cells[0].failures[0].message


# ---- a trial that kills its group every time --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_poison_trial_is_given_up_and_stays_so_until_somebody_wants_it_tried_again(
    home: Home, data_root: Path
) -> None:
    config: dict[str, Any] = {"methods": ["full", "lora"], "failures": {"retries": 2}}
    started: list[str] = []

    def poison(spec: TrialSpec) -> None:
        if not started:
            fault(home, "kill-start", again=True, trial=spec.hash)
        started.append(spec.hash)

    told = Told(at_start=poison)
    outcome = run(home, data_root, told, **config)
    bad, good = status(home, "toy")
    assert outcome.failed == (bad.key,) and good.done == 2, "the sweep went on"
    assert [(f.type, f.status) for f in bad.failures] == [("RankDied", "gave up")]
    assert bad.failures[0].log_path.endswith("rank1.log")
    folder = home.trial(bad.failures[0].trial)
    assert len(folder.failures()) == 3 and len(told.retries) == 2 and told.ends.count(None) == 1

    assert run(home, data_root, **config).failed == (bad.key,)
    assert len(folder.failures()) == 3, "the same command does not burn another three attempts"

    mend(home)
    assert run(home, data_root, again=True, **config).ok
    assert [f.type for f in folder.failures()] == ["RankDied"] * 3 + [AGAIN]


def test_a_trial_whose_own_process_dies_each_time_is_given_up(home: Home, toy_roots: Path) -> None:
    """Such a process never comes to ask for itself how often its trial was tried."""
    config = toy_sweep(methods=["full"], failures={"retries": 1})
    layout = Layout(workers=1, cpus=1.0, gpus=0.0, slots=1)
    settings = RunSettings(Workspace(home), layout, config.timeouts, failures=config.failures)
    queue = TrialQueue(make_plan(config, where="toy"), home, slots=1)
    told = Told()
    searcher = SweepSearcher(queue)
    with only_driver(home, "toy") as lease:
        callback = SweepCallback(searcher, settings, Listeners([told]), lease)
        for attempt in ("first", "second"):
            searcher.suggest(attempt)
            trial: Any = SimpleNamespace(trial_id=attempt, error_file=None)
            callback.on_trial_start(0, [], trial)
            callback.on_trial_error(0, [], trial)
    assert [retry.type for retry in told.retries] == ["TrialProcessDied"] and told.ends == [None]
    assert queue.live == 0 and searcher.suggest("third") == SweepSearcher.FINISHED


def test_other_code_on_a_host_stops_the_sweep_and_costs_no_attempt(
    home: Home, toy_roots: Path
) -> None:
    """Another attempt would find the same files, and a result would end the trial for good."""
    assert is_infrastructure(OtherCodeError("node-1: got other files")), "no result of the trial"
    config = toy_sweep(methods=["full"])
    plan = make_plan(config, where="toy")
    settings = RunSettings(Workspace(home), Layout(1, 1.0, 0.0, 1), config.timeouts)
    spec = plan.search_spec(plan.cells[0], 0, 1e-3)
    home.trial(spec).write_spec(spec)

    def start(specs: Sequence[TrialSpec]) -> int:
        why = "start: rank 0: node-1: got other files; put the same there"
        raise GroupFailureError(FailureRecord(type="OtherCodeError", message=why))

    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.reset_config({"settings": settings, "specs": [spec.model_dump_json()], "peers": [[]]})
    group: Any = SimpleNamespace(start=start)
    trainable._group = group
    with pytest.raises(OtherCodeError) as raised:
        trainable.step()
    assert not home.trial(spec).failures() and home.trial(spec).result() is None
    callback = SweepCallback.__new__(SweepCallback)
    callback.reason = ""
    assert callback._is_of_the_sweep(f"Traceback\n  a line\nOtherCodeError: {raised.value}\n")
    assert callback.reason.endswith("put the same there and run the same command again")
    assert callback.reason.startswith("start: rank 0: node-1: got other files")


def test_attempts_are_counted_since_the_last_one_that_got_further(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)

    def fail(kind: str = "RankDied", epoch: int | None = 0) -> list[bool]:
        folder.add_failure(FailureRecord(type=kind, message="", epoch=epoch))
        return [len(counted(folder)) == n for n in range(5)]

    assert fail()[1] and fail()[2]
    assert fail(epoch=1)[1], "an epoch further"
    assert fail(epoch=0)[2] and fail(epoch=1)[3], "no further than before"
    assert fail(PREEMPTED, epoch=1)[3], "announced"
    assert is_given_up(folder, retries=2) and not is_given_up(folder, retries=3)
    assert result_of(folder, started_at=0.0) is None
    assert fail(AGAIN)[0]
    assert fail(OUT_OF_MEMORY, epoch=1)[1] and fail(OUT_OF_MEMORY, epoch=1)[2]
    ended = result_of(folder, started_at=0.0)
    assert (
        ended is not None and ended.status is Status.OOM and "2 attempts" in ended.missing["score"]
    )


# ---- notice -----------------------------------------------------------------------------------------------------------


def _rank_pid(home: Home) -> int:
    return int(next(call["pid"] for call in reversed(all_calls(home)) if call["rank"] == 1))


def _trial_pid() -> int:
    titles = {p.pid: " ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)}
    found = [pid for pid, title in titles.items() if title.startswith("ray::") and "Train" in title]
    assert found, sorted(title.strip() for title in titles.values() if title.startswith("ray::"))
    return found[-1]


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["a rank", "the trial's process"])
def test_sigterm_costs_no_attempt_and_no_epoch(home: Home, data_root: Path, whom: str) -> None:
    def strike(spec: TrialSpec, record: EpochRecord) -> None:
        if not told.retries and not struck:
            struck.append(record.epoch)
            os.kill(_rank_pid(home) if whom == "a rank" else _trial_pid(), signal.SIGTERM)

    struck: list[int] = []
    told = Told(strike)
    outcome = run(
        home,
        data_root,
        told,
        trainer=SLOW,
        failures={"retries": 0},
        training={"epochs": 20, "batch_size": 8},
    )
    assert outcome.ok and [retry.type for retry in told.retries] == [PREEMPTED]


@pytest.mark.slow
def test_sigterm_to_the_driver_lets_running_trials_leave_first(home: Home, data_root: Path) -> None:
    told = Told(
        lambda spec, record: os.kill(os.getpid(), signal.SIGTERM) if record.epoch == 1 else None
    )
    before = signal.getsignal(signal.SIGTERM)
    outcome = run(home, data_root, told, trainer=SLOW, training={"epochs": 40, "batch_size": 8})
    assert outcome.interrupted and outcome.reason == "stopped by SIGTERM" and not told.ends
    (folder,) = home.trials()
    (left,) = folder.failures()
    assert left.type == PREEMPTED and folder.result() is None
    assert signal.getsignal(signal.SIGTERM) is before
    told = Told()
    assert (
        run(
            home, data_root, told, training={"epochs": 40, "batch_size": 8}, failures={"retries": 0}
        ).ok
        and not told.retries
    )


@pytest.mark.slow
def test_a_stop_while_a_group_is_built_costs_no_attempt(home: Home, data_root: Path) -> None:
    def stop() -> None:
        while not (home.path / "joining").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    outcome = run(home, data_root, trainer="tests.fake_trainer:LateTrainer")
    assert outcome.interrupted
    (folder,) = home.trials()
    assert [left.type for left in folder.failures()] == [PREEMPTED]
    assert not counted(folder)


# ---- what happens to files ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_disk_that_fails_pauses_the_sweep_says_where_and_costs_no_attempt(
    home: Home, data_root: Path
) -> None:
    """In a rank, where fsync fails; the same command goes on from what was committed before."""
    fault(home, "fsync")
    told = Told()
    outcome = run(home, data_root, told, failures={"retries": 0})
    (trial,) = home.trials()
    where = trial.checkpoint / "epoch.json"
    assert outcome.interrupted
    assert outcome.reason == (
        f"Input/output error ({where}); look after the disk, or the server behind it (dmesg) "
        "and run the same command again"
    )
    assert not trial.failures() and not told.retries
    assert run(home, data_root, failures={"retries": 0}).ok


@pytest.mark.slow
def test_a_folder_that_is_removed_while_its_trial_runs_is_told_as_that_and_costs_no_attempt(
    home: Home, data_root: Path
) -> None:
    fault(home, "removed")
    told = Told()
    assert run(home, data_root, told, failures={"retries": 0}).ok
    (removed,) = told.retries
    assert removed.type == REMOVED and "was removed while its trial ran" in removed.message
    assert all(result is not None for result in told.ends)
    (folder, _) = home.trials()
    assert folder.spec() is not None and not counted(folder)


# ---- the circuit breaker ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trials_that_fail_alike_in_a_row_pause_the_sweep(home: Home, data_root: Path) -> None:
    fault(home, "network-start", again=True)
    config: dict[str, Any] = {
        "methods": ["full", "lora", "bitfit", "adapter"],
        "failures": {"retries": 0},
    }
    outcome = run(home, data_root, **config)
    assert (
        outcome.interrupted
        and "3 trials in a row failed alike" in outcome.reason
        and "reset by peer" in outcome.reason
    )
    assert len(list(home.trials())) == 3, "the fourth was not burnt"


def test_only_different_trials_that_fail_alike_without_progress_in_between_count() -> None:
    def record(
        kind: str = "OSError", message: str = "start: rank 0: [Errno 5] I/O error: /a/b"
    ) -> FailureRecord:
        return FailureRecord(type=kind, message=message)

    breaker = CircuitBreaker(2)
    assert not breaker.failed("a", record()) and not breaker.failed("a", record())
    breaker.progressed()
    assert not breaker.failed("b", record())
    assert not breaker.failed("c", record(message="something else"))
    assert not breaker.failed("d", record())
    assert "OSError" in breaker.failed(
        "e", record(message="start: rank 1: [Errno 5] I/O error: /c")
    )
    losses = CircuitBreaker(2)
    assert not any(
        losses.failed(trial, record(kind))
        for trial in "abc"
        for kind in ("RankDied", PREEMPTED, OUT_OF_MEMORY)
    )
    assert not any(
        losses.failed(trial, record("Timeout", "epoch: no answer from rank [0] within 4 s"))
        for trial in "abc"
    )
    assert all(hasattr(Rank, name) for name in MID_WORK), "messages begin with these names"
    joins = [
        losses.failed(trial, record("Timeout", "join: no answer from rank [0] within 4 s"))
        for trial in "ab"
    ]
    assert not joins[0] and "join" in joins[1]
    assert not any(CircuitBreaker(None).failed(trial, record()) for trial in "abcdef")


def test_memory_that_ran_out_is_no_fault_of_the_machine_whoever_says_it() -> None:
    for text in ("CUBLAS_STATUS_ALLOC_FAILED", "NCCL error: cuda failure 2 'out of memory'"):
        error = torch.distributed.DistBackendError(text)
        assert status_of(error) is Status.OOM and not is_infrastructure(error)
    # More than any machine has.
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert status_of(caught.value) is Status.OOM and not is_infrastructure(caught.value)
    lost = RuntimeError("No CUDA GPUs are available")
    assert is_infrastructure(lost) and status_of(lost) is Status.FAILED


def test_a_bug_in_a_kernel_is_the_trials_fault_though_its_message_names_assertions() -> None:
    # As torch builds them: the advice stands below every error of CUDA.
    advice = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    for text in ("device-side assert triggered", "an illegal memory access was encountered"):
        assert not is_infrastructure(RuntimeError(f"CUDA error: {text}{advice}"))
    for text in (
        "unspecified launch failure",
        "uncorrectable NVLink error detected during the execution",
        "hardware stack error",
        "system not yet initialized",
    ):
        assert is_infrastructure(RuntimeError(f"CUDA error: {text}{advice}"))


def test_files_that_a_machine_lacks_are_not_the_trials_fault() -> None:
    for error in (DataError("x"), HubUnreachableError("x"), UnknownNameError("task", "x", [])):
        assert is_infrastructure(error)
    assert not is_infrastructure(IncompatibleError("rank 64 of 32 features"))
    assert is_infrastructure(ResourceError("resources.frozen_states_gib allows 1 GiB; raise it"))


def test_code_of_ones_own_ends_a_trial_as_what_it_raised_does() -> None:
    def wrapped(raised: Exception) -> OwnCodeError:
        error = OwnCodeError("mine.py:3: attach")
        error.__cause__ = raised
        return error

    assert status_of(wrapped(MemoryError())) is Status.OOM
    assert status_of(wrapped(KeyError("a bug"))) is Status.FAILED
    assert is_infrastructure(wrapped(OSError("stale file handle")))
    assert not is_infrastructure(wrapped(KeyError("a bug")))
    assert not is_infrastructure(OwnCodeError("returns None"))


@pytest.mark.slow
def test_the_cluster_is_free_after_all(data_root: Path) -> None:
    end = time.monotonic() + 60
    while ray.available_resources().get("CPU") != ray.cluster_resources().get("CPU"):
        assert time.monotonic() < end
        time.sleep(0.1)
