"""A cluster to break: hosts of the test bed with Ray, a host with PostgreSQL and an MLflow server, and the sweep's driver on Ray's head.

Whatever is killed is brought up again: the driver by `Fleet.keep_running`, hosts and servers by the fault that took them down.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import shim
from tests.cluster.bed import ENVIRONMENT, Bed, Host
from tests.cluster.launcher import PORT, share_token, start_head, start_worker
from tests.cluster.processes import wait_until

DATABASE_PORT, TRACKING_PORT = 5432, 5000
NOBODY = 65534
"""PostgreSQL refuses to run as root."""
CONTROL = "control"
"""File of each host that its shim looks at."""


@dataclass
class Servers:
    """PostgreSQL and MLflow's server on a host of their own; each starts where its predecessor was killed."""

    host: Host
    password: str = field(default_factory=lambda: secrets.token_urlsafe(9))

    @property
    def uri(self) -> str:
        return f"http://{self.host.address}:{TRACKING_PORT}"

    @property
    def folder(self) -> str:
        return f"{self.host.bed.local}/servers"

    def make(self) -> None:
        options = "--pgdata=data --username=suite --pwfile=password --auth=scram-sha-256 --no-sync --locale=C --encoding=UTF8"
        folders = f"mkdir -p {self.folder}/artifacts && cd {self.folder} && cat > password <<< {self.password} && chown -R {NOBODY}:{NOBODY} ."
        self.host.run(f"{folders} && {_nobody(f'{_binaries()}/initdb {options}')}")
        self.start_database()
        ask = f"{_binaries()}/psql -h 127.0.0.1 -U suite -d postgres"
        wait_until("PostgreSQL answers", lambda: self._asks(f"{ask} -c 'select 1'"))
        self.host.run(f"{ask} -c 'create database mlflow'", env={"PGPASSWORD": self.password})
        self.start_tracking()

    def start_database(self) -> None:
        settings = ("fsync=off", "shared_buffers=32MB", "dynamic_shared_memory_type=mmap")
        options = f"-D data -k {self.folder} -h 127.0.0.1 -p {DATABASE_PORT} " + " ".join(
            f"-c {setting}" for setting in settings
        )
        command = f"cd {self.folder} && exec {_nobody(f'{_binaries()}/postgres {options}')}"
        self.host.popen(command, log=self.host.local / "postgres.log")

    def start_tracking(self) -> None:
        store = f"postgresql+psycopg://suite:{self.password}@127.0.0.1:{DATABASE_PORT}/mlflow"
        command = f"mlflow server --artifacts-destination {self.folder}/artifacts --workers 1 --host 0.0.0.0 --port {TRACKING_PORT}"
        environment = {
            "MLFLOW_BACKEND_STORE_URI": store,
            "MLFLOW_SERVER_ALLOWED_HOSTS": "*",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        self.host.popen(command, env=environment, log=self.host.local / "mlflow.log")

    def wait(self, timeout_s: float = 120.0) -> None:
        wait_until(
            "MLflow answers",
            lambda: self._asks(f"curl -sf http://127.0.0.1:{TRACKING_PORT}/health"),
            timeout_s=timeout_s,
            every_s=1.0,
        )

    def kill(self, words: str) -> None:
        """SIGKILL of everything on this host whose command line holds these words."""
        kill(self.host.pids(words))

    def _asks(self, command: str) -> bool:
        return (
            self.host.run(command, check=False, env={"PGPASSWORD": self.password}).returncode == 0
        )


@dataclass
class Fleet:
    """The hosts, what runs on them, and the driver.

    Attributes:
        sweep: The sweep file.
        home: Of the sweep that the driver is at.
        starts: How often the driver was started for it.
    """

    bed: Bed
    sweep: Path
    home: Path
    servers: Servers
    workers: Sequence[str]
    starts: int = 0
    driver: subprocess.Popen[str] | None = None

    @property
    def head(self) -> Host:
        return self.bed.host("head")

    @property
    def log(self) -> Path:
        return self.home.with_suffix(".log")

    def start_head(self) -> None:
        start_head(self.head)

    def join(self, name: str) -> None:
        """Start Ray on a worker's host."""
        start_worker(self.bed.host(name), self.head)

    def leave(self, name: str) -> None:
        """End what is left of Ray on a host."""
        self.bed.host(name).run("ray stop --force", timeout_s=60, check=False)

    def start_driver(self) -> None:
        options = {
            "--address": f"{self.head.address}:{PORT}",
            "--home": self.home,
            "--tracking-uri": self.servers.uri,
        }
        command = [
            "suite",
            "run",
            self.sweep,
            *(word for option in options.items() for word in option),
        ]
        self.driver = self.head.popen([str(word) for word in command], log=self.log)
        self.starts += 1

    def disturb(self, names: Iterable[str], **how: Any) -> None:
        """Have disk or clock of these hosts fail as `shim.disturb` says; without words they mend."""
        for name in names:
            shim.disturb(self.bed.host(name).local / CONTROL, **how)

    def driver_pids(self) -> list[int]:
        return self.head.pids("suite run")

    def keep_running(self) -> bool:
        """Start the driver again if it ended without having ended the sweep; whether the sweep has ended."""
        if self.driver is None:
            self.start_driver()
        assert self.driver is not None
        code = self.driver.poll()
        if code is None:
            return False
        if code == 0:
            return True
        self.start_driver()
        return False

    def ranks(self) -> dict[str, list[int]]:
        """Processes of ranks by host."""
        return {
            name: self.bed.host(name).pids("ray::Rank")
            for name in self.workers
            if self.bed.host(name).is_on
        }


@contextmanager
def fleet(folder: Path, sweep: str, *, workers: int = 3, disk_bytes: int) -> Iterator[Fleet]:
    """Everything up and running but the driver.

    Args:
        folder: For the hosts' disks and homes.
        sweep: Text of the sweep.
        workers: Hosts with one CPU each.
        disk_bytes: Size of the disk that holds the homes, so that it can be filled.
    """
    names = [f"w{i}" for i in range(1, workers + 1)]
    shared = folder / "shared"
    shared.mkdir(parents=True)
    folder.chmod(0o755)  # PostgreSQL is to get through
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={disk_bytes}", "tmpfs", str(shared)], check=True
    )
    if shim.why_not() is None:
        library = folder.resolve() / "shim.so"
        shim.build(library)
        # Commands on all hosts begin with these; `local` is another folder on each of them
        control = folder.resolve() / "local" / CONTROL
        ENVIRONMENT.update(shim.environment(library, control, below=shared.resolve()))
    try:
        with Bed(folder, ["head", *names, "stores"]) as bed:
            for host in bed.hosts.values():
                shim.disturb(host.local / CONTROL)
            share_token(*bed.hosts.values())
            (shared / "chaos.yaml").write_text(sweep)
            made = Fleet(
                bed, shared / "chaos.yaml", shared / "home", Servers(bed.host("stores")), names
            )
            made.servers.make()
            made.start_head()
            for name in names:
                made.join(name)
            made.servers.wait()
            yield made
    finally:
        subprocess.run(["umount", "--lazy", str(shared)], check=False)


def kill(pids: Sequence[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes that may be gone."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _nobody(command: str) -> str:
    return f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups {command}"


def _binaries() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        raise SystemExit("no PostgreSQL server here; Debian: apt-get install postgresql")
    return found[-1]
