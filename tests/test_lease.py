"""One live driver per sweep: claims, beats and fences, between real processes."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from suite.errors import ResourceError, StaleDriverError, StorageError, SweepConflictError
from suite.plan.definition import lease_root
from suite.record.folder import Home
from suite.storage import lease as leases
from suite.storage.base import Storage
from suite.storage.fence import Fence, claim_key
from suite.storage.lease import Beat, Claim, acquire, held_lease, holder, newest_epoch
from suite.storage.local import FileStorage
from suite.storage.shared_run import SharedRun
from suite.storage.urls import open_storage
from suite.storage.workspace import Workspace
from suite.tracking import open_store
from suite.train.failure import is_infrastructure
from tests.clocks import FakeClock
from tests.heads import ray_head
from tests.sweeps import make_roots

ROOT = Path(__file__).parents[1]
BEAT_S = 3.0
HOLD = """
import sys, time
from suite.storage.lease import acquire
held = acquire(sys.argv[1], "toy", beat_s=float(sys.argv[2]))
print("held", flush=True)
while not held.loss():
    time.sleep(0.02)
print(held.loss(), flush=True)
time.sleep(60)
"""


@contextmanager
def process(script: str, *arguments: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, and all that it started, for the time of the block."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    found = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield found
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(found.pid).children(recursive=True):
                child.kill()
        found.kill()
        found.wait()


def line(found: subprocess.Popen[str]) -> str:
    assert found.stdout is not None
    return found.stdout.readline().strip()


def await_true(what: Callable[[], Any], *, within_s: float = 120.0) -> None:
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.05)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sweeps"


def test_a_released_sweep_is_free_at_once_and_every_claim_is_a_higher_epoch(root: Path) -> None:
    epochs = []
    for _ in range(3):
        held = acquire(root, "toy")
        assert (
            held.held()
            and held.loss() == ""
            and str(holder(root, "toy")) == f"process {os.getpid()} on {held.claim.host}"
        )
        epochs.append(held.fence.epoch)
        held.release()
        assert holder(root, "toy") is None
    assert (
        epochs == [1, 2, 3] == [newest_epoch(open_storage(root), "toy") - 2 + i for i in range(3)]
    )
    other = acquire(root, "other")
    assert other.fence.epoch == 1, "sweeps of one home do not know of one another"
    other.release()


def test_workers_wait_for_a_storage_as_long_as_their_driver_says(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def open_it(url: str, *, patience_s: float) -> Storage:
        asked.append(patience_s)
        return open_storage(url)

    with held_lease(root, "toy", patience_s=7.0) as held:
        fence = pickle.loads(pickle.dumps(held.fence))
        with monkeypatch.context() as patched:
            patched.setattr("suite.storage.fence.open_storage", open_it)
            assert fence.holds() and asked == [7.0]


def test_a_live_holder_is_named_at_once_and_a_killed_one_is_replaced_at_once(root: Path) -> None:
    with process(HOLD, root, 30.0) as first:
        assert line(first) == "held"
        began_s = time.monotonic()
        with pytest.raises(SweepConflictError, match=f"process {first.pid} on"):
            acquire(root, "toy")
        first.kill()
        first.wait()
        held = acquire(root, "toy")
        assert time.monotonic() - began_s < 30.0 and held.fence.epoch == 2, (
            "not one beat was waited for"
        )
        held.release()


def test_a_host_that_does_not_see_the_claim_says_so_instead_of_training(
    root: Path, tmp_path: Path
) -> None:
    with held_lease(root, "toy") as held:
        held.fence.check_seen()
        elsewhere = replace(held.fence, root=str(tmp_path / "another disk"))
        with pytest.raises(ResourceError, match=r"does not see .*another disk.*--storage s3://"):
            elsewhere.check_seen()
    assert not (tmp_path / "another disk").exists(), "to look makes nothing"


def test_whatever_a_fence_looks_at_it_waits_for_the_storage_as_long_as_it_was_told(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def opened(url: str, *, patience_s: float) -> Storage:
        asked.append(patience_s)
        return open_storage(url, patience_s=patience_s)

    monkeypatch.setattr("suite.storage.fence.open_storage", opened)
    open_storage(root).create(claim_key("toy", 1), b"a driver")
    fence = Fence(str(root), "toy", 1, patience_s=300.0)
    fence.check_seen()
    fence.check(shared="run")
    assert SharedRun(fence, "run").take()
    assert set(asked) == {300.0}


def test_a_storage_that_stays_away_is_waited_for_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    answers = iter([StorageError("away"), StorageError("away"), True, StorageError("away")])

    def holds(_: Fence, *, once: bool = False) -> bool:
        asked.append(once)
        answer = next(answers)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    with held_lease(root, "toy") as held:
        monkeypatch.setattr(held, "_is_late", lambda _: True)
        monkeypatch.setattr(Fence, "holds", holds)
        said = [held.loss() for _ in range(4)]
        monkeypatch.undo()
    assert [bool(why) for why in said] == [True, True, False, True]
    assert asked == [False, True, True, False]


def test_beats_go_on_after_whatever_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = acquire(root, "toy", beat_s=0.05)
    send, failed = lease._send, threading.Event()

    def broken(**given: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise AttributeError("a fault of a library")
        send(**given)

    monkeypatch.setattr(lease, "_send", broken)
    assert failed.wait(10)
    count = lease._count
    deadline_s = time.monotonic() + 10
    while lease._count == count and time.monotonic() < deadline_s:
        time.sleep(0.01)
    beaten = lease._count
    lease.release()
    assert beaten > count


def test_a_frozen_holder_is_replaced_and_finds_out_before_it_writes(root: Path) -> None:
    with process(HOLD, root, 0.5) as first:
        assert line(first) == "held"
        first.send_signal(signal.SIGSTOP)
        time.sleep(leases.SAFE * 0.5)
        held = acquire(root, "toy")
        Fence(str(root), "toy", 2).check()
        with pytest.raises(StaleDriverError, match="claim 2"):
            Fence(str(root), "toy", 1).check()
        first.send_signal(signal.SIGCONT)
        assert (
            line(first)
            == f"another driver took the sweep over: process {os.getpid()} on {held.claim.host}"
        )
        held.release()


def test_a_beat_that_hangs_does_not_keep_a_driver_from_leaving(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a write to a hard mount does whose server is gone."""
    hangs = threading.Event()
    mended = threading.Event()
    held = acquire(root, "toy", beat_s=0.1)

    def hang(self: FileStorage, key: str, data: bytes) -> None:
        hangs.set()
        mended.wait()

    with monkeypatch.context() as patch:
        patch.setattr(FileStorage, "write", hang)
        assert hangs.wait(60)
        began_s = time.monotonic()
        held.release()
        assert time.monotonic() - began_s < 30
    mended.set()


def foreign(root: Path, *, beat_s: float) -> Beat:
    """A claim of a machine that is not this one, as far as can be told."""
    claim = Claim(
        id="x",
        host="elsewhere",
        pid=os.getpid(),
        machine="another:1",
        started_s=0.0,
        beat_s=beat_s,
        job="suite-toy-1",
    )
    beat = Beat(count=1, at_s=1e9)
    open_storage(root).create(claim_key("toy", 1), claim.model_dump_json().encode())
    open_storage(root).write(f"{claim_key('toy', 1)}.beat", beat.model_dump_json().encode())
    return beat


def test_the_clock_of_another_machine_is_not_asked_only_whether_its_beat_changes(
    root: Path,
) -> None:
    foreign(root, beat_s=30.0)
    clock = FakeClock()
    held = acquire(root, "toy", clock=clock)
    assert held.fence.epoch == 2
    assert sum(clock.sleeps_s) >= leases.MISSED * 30.0
    held.release()


def test_another_machine_that_beats_keeps_its_sweep_and_is_named_with_its_job(root: Path) -> None:
    beat = foreign(root, beat_s=30.0)
    later = beat.model_copy(update={"count": 2}).model_dump_json().encode()
    clock = FakeClock(
        on_sleep=lambda _: open_storage(root).write(f"{claim_key('toy', 1)}.beat", later)
    )
    with pytest.raises(SweepConflictError, match=r"on elsewhere \(job suite-toy-1\)"):
        acquire(root, "toy", clock=clock)
    assert len(clock.sleeps_s) == 1, "the first new beat is enough"
    assert str(holder(root, "toy")) == f"process {os.getpid()} on elsewhere (job suite-toy-1)"


@pytest.mark.parametrize("beat_s", [-1.0, 0.0, 1e9])
def test_a_claim_with_an_absurd_beat_is_refused_and_not_watched_for_years(
    root: Path, beat_s: float
) -> None:
    foreign(root, beat_s=10.0)
    claim = json.loads(open_storage(root).read(claim_key("toy", 1)) or b"")
    claim["beat_s"] = beat_s
    open_storage(root).write(claim_key("toy", 1), json.dumps(claim).encode())
    clock = FakeClock()
    with pytest.raises(SweepConflictError, match="leases/toy/1 is no claim of this version"):
        acquire(root, "toy", clock=clock)
    assert not clock.sleeps_s


@pytest.mark.parametrize("name", ["²", "٣"])
def test_a_claim_whose_name_is_no_number_is_none(root: Path, name: str) -> None:
    open_storage(root).create(f"leases/toy/{name}", b"")
    assert newest_epoch(open_storage(root), "toy") == 0


def test_of_many_that_want_a_free_sweep_one_gets_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(_: int) -> Any:
        try:
            return acquire(root, "toy")
        except SweepConflictError:
            return None

    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        got = [held for held in pool.map(attempt, range(8)) if held is not None]
        for held in got:
            stack.callback(held.release)
        assert len(got) == 1


def test_a_late_beat_is_no_proof_until_the_storage_was_asked(root: Path) -> None:
    clock = FakeClock()
    # The thread that beats is as good as frozen: only the end of the lease wakes it.
    clock.wait = lambda event, _: event.wait()  # type: ignore[method-assign]
    held = acquire(root, "toy", clock=clock)
    try:
        open_storage(root).create(claim_key("toy", 2), b"of a version to come")
        assert held.held(), "nobody can have taken it within two beats"
        clock.advance(leases.SAFE * leases.BEAT_S + 0.1)
        assert not held.held() and "took the sweep over" in held.loss()
    finally:
        held.release()
    assert (
        open_storage(root).read(f"{claim_key('toy', 1)}.beat")
        == Beat(count=1, at_s=_beat(root).at_s).model_dump_json().encode()
    )


def test_a_holder_beats_by_its_clock_and_a_late_beat_leaves_time_for_a_newcomer(
    root: Path,
) -> None:
    clock = FakeClock()
    held = acquire(root, "toy", clock=clock)
    clock.advance(leases.BEAT_S)
    await_true(lambda: _beat(root).count == 2)
    # Three beats are missed, and another driver creates its claim before this one beats again.
    open_storage(root).create(claim_key("toy", 2), b"of a version to come")
    clock.advance(leases.MISSED * leases.BEAT_S)
    await_true(lambda: _beat(root).count == 3)
    clock.advance(leases.BEAT_S)
    assert "took the sweep over" in held.loss()
    held.release()
    assert not _beat(root).released, "what is another's now is not released"


def _beat(root: Path) -> Beat:
    return Beat.model_validate_json(open_storage(root).read(f"{claim_key('toy', 1)}.beat") or b"")


@pytest.mark.slow
def test_a_worker_of_a_stale_driver_writes_neither_checkpoint_nor_result(tmp_path: Path) -> None:
    with process(FENCED, tmp_path) as trained:
        output, _ = trained.communicate()
    told = json.loads(output.splitlines()[-1])
    assert told == {
        "epoch": "StaleDriverError",
        "finish": "StaleDriverError",
        "bug": "StaleDriverError",
        "committed": ["epoch-1"],
        "epochs": 1,
        "results": 0,
    }


FENCED = """
import json, sys
from pathlib import Path
from suite.train.process_group import free_port
from suite.storage.fence import Fence, claim_key
from suite.record.folder import Home
from suite.storage.workspace import Workspace
from suite.train.loop import Trainer
from suite.storage.base import Storage
from suite.storage.urls import open_storage
from tests.test_loop import make_spec

home, root = Home(Path(sys.argv[1]) / "home"), Path(sys.argv[1]) / "sweeps"
trainer = Trainer(Workspace(home, fence=Fence(str(root), "test", 1)), master_port=free_port())

def name(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__

trainer.start(make_spec())
trainer.epoch()
open_storage(root).create(claim_key("test", 2), b"")
told = {"epoch": name(trainer.epoch), "finish": name(trainer.finish)}
trainer._evaluate = None
told["bug"] = name(trainer.epoch)
folder = home.trial(make_spec())
committed = sorted(p.parent.name for p in folder.checkpoint.glob("*/COMMIT.json"))
told |= {"committed": committed, "epochs": len(folder.epochs()), "results": len(list(home.path.glob("trials/*/result.json")))}
print(json.dumps(told), flush=True)
trainer.close()
"""


def test_a_driver_lives_on_when_somebody_sets_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = leases._own_claim(BEAT_S)
    at_s = psutil.boot_time()
    # Linux keeps the time since its start, and counts the day of the start back from the clock.
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: at_s + 3600.0)
    assert not claim.is_gone


def test_a_stale_driver_is_not_the_trial_s_fault() -> None:
    assert is_infrastructure(StaleDriverError("sweep 'toy': another driver took it over"))
    assert Workspace(Home(Path("home"))).fence is None, "a trial without a driver has nobody to ask"


DRIVE = """
import json, os, sys
from pathlib import Path
from suite.tracking.listener import TrackingListener
from suite.record.folder import Home
from suite.storage import lease
from suite.tune.driver import run_sweep
from suite.plan.events import Listener
from suite.errors import SweepConflictError
from tests.sweeps import toy_sweep

lease.BEAT_S = float(sys.argv[3])
home = Home(Path(sys.argv[1]))
class Told(Listener):
    def on_trial_end(self, spec, result):
        print("ended", spec.hash, flush=True)
try:
    outcome = run_sweep(
        toy_sweep(methods=["full"], search={"trials": 4}, confirm={"seeds": [1]}, timeouts={"setup_s": 300.0, "epoch_s": 900.0}),
        home=home, data_root=Path(sys.argv[2]), address=os.environ["HEAD"], trainer="tests.fake_trainer:GatedTrainer",
        listeners=[Told(), TrackingListener(home, home.tracking_uri, sweep="toy")],
    )
    print("outcome", json.dumps([outcome.ok, outcome.finished, outcome.reason]), flush=True)
except SweepConflictError as error:
    print("refused", error, flush=True)
"""


@pytest.mark.slow
def test_of_two_drivers_of_one_home_the_second_is_refused_and_takes_over_where_the_first_is_frozen(
    tmp_path: Path, empty_db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = make_roots(tmp_path, monkeypatch)
    home = Home(tmp_path / "home")
    home.path.mkdir()
    (home.path / "mlflow.db").write_bytes(empty_db.read_bytes())
    with ray_head(token="0" * 32, jobs=False) as head, ExitStack() as stack:
        there = {**head.environment, "PYTHONPATH": str(ROOT), "HEAD": head.address}
        first = stack.enter_context(process(DRIVE, home.path, roots, BEAT_S, **there))
        told_first = line(first)
        assert told_first.startswith("ended "), told_first or "it ended and said nothing"
        ended_first = told_first.split()[1]
        refused = stack.enter_context(process(DRIVE, home.path, roots, BEAT_S, **there))
        assert f"is being run by process {first.pid} on" in line(refused)

        scratch = home.path / ".tune" / "toy"
        (scratch / "of-first").touch()
        first.send_signal(signal.SIGSTOP)
        time.sleep(leases.SAFE * BEAT_S)
        second = stack.enter_context(process(DRIVE, home.path, roots, BEAT_S, **there))
        await_true(lambda: newest_epoch(open_storage(lease_root(home, None)), "toy") == 2)
        await_true(lambda: scratch.exists() and not (scratch / "of-first").exists())
        (scratch / "of-second").touch()
        first.send_signal(signal.SIGCONT)
        told = [
            text for text in iter(lambda: line(first), "") if text.startswith(("ended", "outcome"))
        ]
        assert (
            len(told) == 1
            and f"another driver took the sweep over: process {second.pid}" in told[0]
        ), told
        assert (scratch / "of-second").exists(), (
            "what the second one's ranks keep there is left alone"
        )
        (home.path / "go").touch()
        *ended, outcome = [
            text for text in iter(lambda: line(second), "") if text.startswith(("ended", "outcome"))
        ]
    assert json.loads(outcome.removeprefix("outcome "))[0] is True
    names = {folder.hash for folder in home.trials()}
    assert len(names) == 5 and all(folder.result() for folder in home.trials())
    assert ended_first not in {text.split()[1] for text in ended}, (
        "what had finished did not run again"
    )
    store = open_store(home.tracking_uri)
    runs = store.runs(list(store.experiments().values()), {"suite.kind": "trial"})
    assert sorted(run.tags["suite.trial"] for run in runs) == sorted(names), (
        "every trial has one run"
    )
