"""A Ray head with a token, as `ray start` makes it on a cluster: a process of its own, on free ports."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.ports import free_port

START_S = 280.0


@dataclass(frozen=True)
class Head:
    """A running head.

    Attributes:
        url: Of its dashboard and Job API, if it has them.
        address: Of its control store, HOST:PORT.
        environment: What a process needs to talk to it.
    """

    url: str
    address: str
    environment: dict[str, str]


@contextmanager
def ray_head(*, token: str, cpus: int = 4, jobs: bool = True, **variables: str) -> Iterator[Head]:
    """Start one, and end every process of it at the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="h-", dir="/tmp"))  # short: sockets live below it
    port = free_port()
    dashboard = free_port()
    bin_folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        # where many Rays share two cores, a process that does not answer for a while is not dead
        "RAY_health_check_timeout_ms": "60000",
        "RAY_health_check_failure_threshold": "20",
        "RAY_raylet_start_wait_time_s": str(int(START_S)),
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(int(START_S)),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    options = [
        f"--port={port}",
        f"--dashboard-port={dashboard}",
        "--dashboard-host=127.0.0.1",
        "--node-ip-address=127.0.0.1",
    ]
    options += [
        f"--num-cpus={cpus}",
        f"--object-store-memory={80 * 2**20}",
        f"--temp-dir={folder}",
        f"--ray-client-server-port={free_port()}",
    ]
    options += [
        f"--dashboard-agent-listen-port={free_port()}",
        "--include-log-monitor=false",
        "--disable-usage-stats",
    ]
    options += [] if jobs else ["--include-dashboard=false"]
    log = (folder / "start.log").open("wb")
    process = subprocess.Popen(
        [bin_folder / "ray", "start", "--head", "--block", *options],
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    head = Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}", environment)
    try:
        _await(
            lambda: (
                _answers(head, token)
                if jobs
                else b"Ray runtime started" in Path(log.name).read_bytes()
            ),
            process,
        )
        yield head
        assert process.poll() is None, "the head has died"
    except BaseException as error:
        error.add_note(f"the head said:\n{Path(log.name).read_text()}")
        raise
    finally:
        _end(process)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def _await(started: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while not started():
        assert process.poll() is None and time.monotonic() < end_s, "no head"
        time.sleep(0.3)


def _answers(head: Head, token: str) -> bool:
    request = urllib.request.Request(
        f"{head.url}/api/jobs/", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """In order first, as `ray start --block` does; then whatever of it is left."""
    children = (
        psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    )
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(15)
    psutil.wait_procs(children, timeout=5)
    for child in (process, *children):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            child.kill()
    process.wait()
