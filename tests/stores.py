"""Real stores, as processes: a PostgreSQL server and an MLflow server on it. Each can be killed, and started again.

Nothing outlives the block that made it. A machine without PostgreSQL's binaries skips, with the reason.
"""

from __future__ import annotations

import os
import pwd
import secrets
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
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.ports import free_port

START_S = 600.0
"""A busy machine is slow to start a server; one that ends instead is noticed at once."""
USER = "suite"


def binaries() -> Path:
    """The newest PostgreSQL of this machine; skips the test where there is none."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        pytest.skip("no PostgreSQL server here; Debian: apt-get install postgresql")
    return found[-1].parent if found else Path(str(on_path)).parent


@dataclass
class Postgres:
    """A server of its own in `folder`, run by a user that is not root, reached on loopback with a password."""

    folder: Path
    port: int = field(default_factory=free_port)
    password: str = field(default_factory=lambda: secrets.token_hex(12))
    process: subprocess.Popen[bytes] | None = None
    guard: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def uri(self, database: str) -> str:
        return f"postgresql+psycopg://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def make(self) -> None:
        (self.folder / "password").write_text(self.password)
        if (user := _unprivileged()) is not None:
            for path in (self.folder, self.folder / "password"):
                shutil.chown(path, user)
        options = [
            f"--username={USER}",
            f"--pwfile={self.folder}/password",
            "--auth=scram-sha-256",
            "--no-sync",
            "--locale=C",
            "--encoding=UTF8",
        ]
        subprocess.run(
            [binaries() / "initdb", f"--pgdata={self.data}", *options],
            check=True,
            capture_output=True,
            user=user,
            cwd=self.folder,
        )

    def start(self) -> None:
        """Start and wait until it answers; what a kill left behind is recovered first."""
        settings = {
            "fsync": "off",
            "dynamic_shared_memory_type": "mmap",
            "shared_buffers": "64MB",
            "max_connections": "60",
        }
        command = [
            binaries() / "postgres",
            "-D",
            self.data,
            "-k",
            self.folder,
            "-h",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]
        command += [item for key, value in settings.items() for item in ("-c", f"{key}={value}")]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                user=_unprivileged(),
                start_new_session=True,
                cwd=self.folder,
            )
        group = self.process.pid
        self.guard = _guard(
            f"kill -INT {group}; sleep 5; kill -KILL -- -{group}; rm -rf {self.folder}"
        )
        ready = [binaries() / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        _wait(lambda: subprocess.run(ready, check=False).returncode == 0, self.process)

    def kill(self) -> None:
        """SIGKILL of the server and of everything that it started."""
        assert self.process is not None
        _dismiss(self.guard)
        _kill(self.process)

    def stop(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is not None:
            self.start()  # a clean end gives back the shared memory that a killed server left
        _dismiss(self.guard)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            _kill(self.process)

    def run(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """One statement, outside of any transaction."""
        import psycopg

        address = self.uri(database).replace("+psycopg", "")
        with psycopg.connect(address, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return list(cursor.fetchall()) if cursor.description else []

    def database(self, name: str, *, like: str = "template1") -> str:
        """The URI of a new database, a copy of another."""
        self.run(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{like}'"
        )  # whoever holds it idle
        self.run(f'CREATE DATABASE "{name}" TEMPLATE "{like}"')
        return self.uri(name)


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A running server that has nothing in it yet."""
    binaries()
    folder = Path(
        tempfile.mkdtemp(prefix="suite-postgres-")
    )  # not below pytest's folder, which other users cannot enter
    server = Postgres(folder)
    try:
        server.make()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class MlflowServer:
    """`mlflow server` on loopback, one worker, with its artifacts below `folder`."""

    folder: Path
    backend: str
    port: int = field(default_factory=free_port)
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    guard: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        own = {
            "MLFLOW_BACKEND_STORE_URI": self.backend,  # a password does not belong on a command line
            "MLFLOW_ARTIFACTS_DESTINATION": str(self.folder / "artifacts"),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--workers",
            "1",
            *self.options,
        ]
        outside = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**outside, **own, **self.environment},
                start_new_session=True,
                cwd=self.folder,
            )
        self.guard = _guard(f"kill -KILL -- -{self.process.pid}")
        _wait(lambda: _answers(f"{self.uri}/health"), self.process)

    def kill(self) -> None:
        assert self.process is not None
        _dismiss(self.guard)
        _kill(self.process)


@contextmanager
def mlflow_server(
    folder: Path, backend: str, *options: str, **environment: str
) -> Iterator[MlflowServer]:
    """A running server; `backend` is the URI of its database."""
    server = MlflowServer(folder, backend, options=options, environment=environment)
    try:
        server.start()
        yield server
    finally:
        if server.process is not None:
            server.kill()


def _unprivileged() -> str | None:
    """Whom PostgreSQL runs as: it refuses root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def _guard(last_words: str) -> subprocess.Popen[bytes]:
    """A process that runs a command when this one is gone, however it went: its input ends then."""
    return subprocess.Popen(
        ["sh", "-c", f"read _; {last_words}"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _dismiss(guard: subprocess.Popen[bytes] | None) -> None:
    if guard is not None and guard.stdin is not None:
        guard.kill()
        guard.wait()
        guard.stdin.close()


def _answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=2).status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while not ready():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < end, f"not ready after {START_S:.0f} s"
        time.sleep(0.2)


MEET = """
import os, sys
import mlflow.store.tracking.sqlalchemy_store  # imported once, so that the processes meet at the store and not on the way to it
from suite.tracking import open_store
children = [pid for _ in range(int(sys.argv[2])) if (pid := os.fork()) or (open_store(sys.argv[1]).experiment("x"), os._exit(0))]
sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))
"""


def meet(uri: str, *, drivers: int) -> subprocess.CompletedProcess[str]:
    """Processes that open a store at once, and want an experiment `x` in it."""
    command = [sys.executable, "-c", MEET, uri, str(drivers)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
