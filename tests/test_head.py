"""A cluster whose head is gone: noticed, told in a line, and left before Ray ends the process by itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from suite.cluster import head
from suite.cluster.session import cluster
from suite.errors import ResourceError
from suite.plan.events import Outcome
from suite.record.folder import Home
from suite.storage.lease import holder
from suite.tune import driver
from tests.sweeps import make_roots

ROOT = Path(__file__).parents[1]
DRIVER = """
import sys
from pathlib import Path
from suite.plan.events import Listener
from suite.record.folder import Home
from suite.tune.driver import run_sweep
from tests.sweeps import toy_sweep

class Told(Listener):
    def on_epoch(self, spec, record):
        print("epoch", flush=True)
    def on_end(self, outcome):
        print("end", outcome.interrupted, outcome.reason, flush=True)

config = toy_sweep(
    methods=["full"], search={"trials": 1}, confirm={"seeds": [1]},
    training={"epochs": 10_000, "batch_size": 8}, timeouts={"setup_s": 300.0},
)
home, roots = Home(Path(sys.argv[1])), Path(sys.argv[2])
trainer = "tests.fake_trainer:SlowTrainer"
run_sweep(config, home=home, data_root=roots, listeners=[Told()], trainer=trainer)
"""


def test_a_head_that_refuses_connections_is_told_of_once_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listening.getsockname()[1]}"

    class Context:
        gcs_address = address

    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(head, "LOOK_S", 0.02)
    monkeypatch.setenv(head.RAYS_PATIENCE, "0.6")
    told: list[str] = []
    heard = threading.Event()

    def on_gone(why: str) -> None:
        told.append(why)
        heard.set()

    with head.head_watched(on_gone):
        assert not heard.wait(0.5), "it answers, for longer than it may be silent"
        listening.close()
        assert heard.wait(60)
    assert told == [f"the head of the Ray cluster at {address} has not answered for 0.3 s"]


def test_a_driver_that_was_asked_to_end_does_not_wait_for_a_head_that_was_ended_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`systemctl stop` and Slurm send SIGTERM to all processes, and kill what is left soon."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
    monkeypatch.setattr(head, "LOOK_S", 0.02)
    monkeypatch.setattr(head, "LEAVING_S", 0.1)
    told: list[str] = []
    heard = threading.Event()

    def on_gone(why: str) -> None:
        told.append(why)
        heard.set()

    with head.head_watched(on_gone, leaving=lambda: True):
        assert heard.wait(20)

    ends: list[Outcome] = []
    callback: Any = SimpleNamespace(
        in_order=True,
        reason="stopped by SIGTERM",
        finished=1,
        searcher=SimpleNamespace(queue=SimpleNamespace(states={})),
        listeners=SimpleNamespace(on_end=ends.append),
        lease=SimpleNamespace(release=lambda: None),
    )
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        driver._end_without_head(callback, told[0])
    assert ended.value.code == 143 and ends[0].reason == "stopped by SIGTERM"
    assert capsys.readouterr().err.startswith("stopped by SIGTERM, and the head of the Ray cluster")


def test_the_drivers_handler_of_sigterm_outlives_the_start_of_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's own ends the process with code 1 and no word of how to go on."""
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr("suite.cluster.session.cluster_nodes", list)

    def ours(number: int, frame: object) -> None:
        """Ends in order."""

    before = signal.signal(signal.SIGTERM, ours)
    try:
        with cluster("auto", threads=1):
            assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_a_driver_whose_head_dies_says_so_and_leaves_the_sweep_free(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = make_roots(tmp_path / "roots", monkeypatch)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), head.RAYS_PATIENCE: "30"}
    command = [sys.executable, "-c", DRIVER, str(home.path), str(roots)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = []
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "epoch\n"
        children = psutil.Process(process.pid).children(recursive=True)
        (server,) = [child for child in children if child.name() == "gcs_server"]
        server.kill()
        killed_s = time.monotonic()
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        for child in children:
            if child.is_running():
                child.kill()
    assert process.returncode == 1 and time.monotonic() - killed_s < 30
    why = err.splitlines()[-1]
    assert "has not answered for 15 s; nothing that finished is lost; run the same command" in why
    assert out.splitlines()[-1].startswith("end True the head of the Ray cluster at ")
    assert holder(home.path / "sweeps", "toy") is None, "the next driver need not wait"


@pytest.mark.parametrize("kind", [Exception, RuntimeError])
def test_a_ray_that_does_not_start_in_time_is_told_in_a_sentence(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a plain Exception where a machine has too much to do, and others for a broken start."""

    def too_late(**options: object) -> None:
        raise kind("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", too_late)
    with (
        pytest.raises(
            ResourceError, match=r"^a local Ray did not start: The current node timed out"
        ),
        cluster(None, threads=1),
    ):
        pass
