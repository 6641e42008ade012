"""Sweeps as jobs of a Ray cluster that is elsewhere: submitted with the working folder, followed, listed and stopped over its dashboard.

A job's driver is `suite run ... --address auto` on the head. That a sweep has one driver is the lease's doing (`suite.storage.lease`);
here a sweep that runs already is found among the jobs and followed, so that nobody meets the lease by typing the same command twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from suite.cluster.package import EXCLUDES
from suite.errors import ClusterError

SWEEP, HOME = "suite.sweep", "suite.home"
LEAVE_S = 60.0
"""What a stopped driver needs besides the grace of its trials, to end its groups and bring MLflow up to date; Ray alone gives 3 s."""
POLL_S = 1.0
HEAD_STARTS_S = 180.0
RECONNECTS = 30
LINES_AT_ATTACH = 20
COMMAND = re.compile(r"(?:\bsuite\s+run|\brun_sweep\.py)\s+(?P<arguments>.*)", re.DOTALL)
PROGRESS = re.compile(r"^\[(\d+)/(\d+)\] ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Job:
    """A driver that was submitted to a cluster.

    Attributes:
        id: Ray's submission id.
        sweep, home: What it runs and where, as they were submitted; of a job of `ray job submit`, as its command line names them.
        status: Ray's word: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
        started_s, ended_s: Seconds since the epoch by the cluster's clock.
        exit_code: Of the driver; None while it runs.
        message: Why Ray ended it.
    """

    id: str
    sweep: str | None
    home: str | None
    status: str
    started_s: float | None
    ended_s: float | None
    exit_code: int | None
    message: str

    @property
    def is_live(self) -> bool:
        return not JobStatus(self.status).is_terminal()


@dataclass(frozen=True, slots=True)
class Submission:
    """What is handed to a cluster.

    Attributes:
        sweep, home: The sweep's name, and its home on the cluster.
        command: The driver's command line, for a shell.
        folder: Uploaded, and the driver's and workers' working folder there.
        variables: Environment of driver and workers.
        grace_s: What running trials are given to leave when the sweep is stopped.
    """

    sweep: str
    home: str
    command: str
    folder: Path
    variables: Mapping[str, str]
    grace_s: float


@dataclass(slots=True)
class _Printed:
    """How much of a log has been passed on."""

    write: Callable[[str], None]
    length: int = 0

    def extend(self, text: str, *, start: int) -> None:
        """Pass on what is new of a piece that begins `start` characters into the log."""
        new = text[max(0, self.length - start) :]
        if new:
            self.write(new)
            self.length = start + len(text)


class JobClient:
    """The Job API of one cluster.

    Args:
        address: Of its dashboard, http://HEAD:8265.

    Raises:
        ClusterError: Nothing answers there, or it wants another token.
    """

    def __init__(self, address: str) -> None:
        self.address = dashboard_url(address)
        logging.getLogger("ray").setLevel(
            logging.WARNING
        )  # of each upload and connection it says a line
        with self._explained():
            self._client = JobSubmissionClient(self.address, headers=_token_header())

    def jobs(self) -> list[Job]:
        """Every job that runs a sweep, newest first."""
        with self._explained():
            found = [
                _job(details)
                for details in self._client.list_jobs()
                if details.submission_id and _is_ours(details)
            ]
        return sorted(found, key=lambda job: job.started_s or 0.0, reverse=True)

    def live(self, sweep: str, home: str | None = None) -> list[Job]:
        """The jobs that run a sweep now, in any home or in this one."""
        return [
            job
            for job in self.jobs()
            if job.is_live and job.sweep == sweep and home in (None, job.home)
        ]

    def submit(self, wanted: Submission) -> tuple[Job, bool]:
        """Start a sweep's driver unless one is live; returns its job, and whether it is new. A head that has just started is waited for."""
        end_s = time.monotonic() + HEAD_STARTS_S
        while True:
            running = self.live(wanted.sweep, wanted.home)
            if running:
                return running[0], False
            name = self._free_id(wanted.sweep)
            try:
                with self._explained():
                    self._client.submit_job(
                        entrypoint=wanted.command,
                        submission_id=name,
                        runtime_env={
                            "working_dir": str(wanted.folder),
                            "excludes": list(EXCLUDES),
                            "env_vars": {
                                **wanted.variables,
                                "RAY_JOB_STOP_WAIT_TIME_S": str(ceil(wanted.grace_s + LEAVE_S)),
                            },
                        },
                        metadata={SWEEP: wanted.sweep, HOME: wanted.home},
                    )
            except ClusterError as error:
                early = "try again later" in str(error) and time.monotonic() < end_s
                if not early and name not in {job.id for job in self.jobs()}:
                    raise
                time.sleep(POLL_S)  # or somebody else has submitted it in this moment
            else:
                return self.job(name), True

    def job(self, name: str) -> Job:
        with self._explained():
            return _job(self._client.get_job_info(name))

    def log(self, name: str) -> str:
        """Everything that the driver has printed."""
        with self._explained():
            return str(self._client.get_job_logs(name))

    def progress(self, name: str) -> tuple[int, int] | None:
        """Trials done and trials in all, by the last line that says so; None before the first."""
        found = PROGRESS.findall(self.log(name))
        return (int(found[-1][0]), int(found[-1][1])) if found else None

    def follow(self, name: str, write: Callable[[str], None], *, attached: bool) -> Job:
        """Pass on what the driver prints until it ends; a broken connection is made again.

        Args:
            name: Of the job.
            write: Receives the text.
            attached: It has been running: begin with its last lines.
        """
        printed, broken = _Printed(write), 0
        if attached:
            before = self.log(name)
            write("".join(before.splitlines(keepends=True)[-LINES_AT_ATTACH:]))
            printed.length = len(before)
        while True:
            try:
                asyncio.run(self._tail(name, printed))
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                broken += 1
                if broken > RECONNECTS:
                    raise ClusterError(
                        f"--address {self.address}: the connection breaks again and again: {error}"
                    ) from error
            job = self._patient_job(name)
            if not job.is_live:
                printed.extend(self.log(name), start=0)
                return job
            time.sleep(POLL_S)

    async def _tail(self, name: str, printed: _Printed) -> None:
        """Follow one connection, which begins with what the driver printed first."""
        start = 0
        async for text in self._client.tail_job_logs(name):
            printed.extend(text, start=start)
            start += len(text)

    def _patient_job(self, name: str) -> Job:
        """The job, from a head that may be away for a while."""
        for _ in range(RECONNECTS):
            try:
                return self.job(name)
            except ClusterError:
                time.sleep(POLL_S)
        return self.job(name)

    def stop(self, name: str) -> Job:
        """Let a driver end as at Ctrl-C, and wait for it; Ray kills it once the time that it was submitted with is over."""
        with self._explained():
            self._client.stop_job(name)
        while (job := self._patient_job(name)).is_live:
            time.sleep(POLL_S)
        return job

    def _free_id(self, sweep: str) -> str:
        prefix = f"suite-{sweep}-"
        with self._explained():
            names = [details.submission_id or "" for details in self._client.list_jobs()]
        numbers = [
            int(tail)
            for name in names
            if name.startswith(prefix) and (tail := name.removeprefix(prefix)).isdigit()
        ]
        return f"{prefix}{max(numbers, default=0) + 1}"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what Ray's client raises into an error that says what to do; tokens are in none of them."""
        try:
            yield
        except AuthenticationError as error:
            given = "none was given" if _token() is None else "another one was given"
            raise ClusterError(
                f"--address {self.address}: wants a token, {given}; put the cluster's into ~/.ray/auth_token "
                "or RAY_AUTH_TOKEN (docs/cluster.md)"
            ) from error
        except (ConnectionError, requests.RequestException) as error:
            raise ClusterError(
                f"--address {self.address}: nothing answers; expected the dashboard of a running cluster, "
                "http://HEAD:8265, perhaps through `ray dashboard cluster.yaml` or ssh -L 8265:localhost:8265"
            ) from error
        except RuntimeError as error:
            raise ClusterError(
                f"--address {self.address}: {str(error).strip().splitlines()[-1][:500]}"
            ) from error


def dashboard_url(address: str) -> str:
    """The address with its scheme; raises ClusterError for one that is no dashboard's."""
    scheme, found, rest = address.rstrip("/").partition("://")
    scheme, rest = (scheme, rest) if found else ("http", scheme)
    if scheme not in ("http", "https") or rest == "auto" or "@" in rest or not rest:
        raise ClusterError(
            f"--address {'***' if '@' in rest else address}: expected the cluster's dashboard, http://HEAD:8265 "
            "(on the head itself: suite run SWEEP --address auto)"
        )
    return f"{scheme}://{rest}"


def _token() -> str | None:
    """The token that Ray itself would use: `RAY_AUTH_TOKEN`, the file `RAY_AUTH_TOKEN_PATH`, else ~/.ray/auth_token."""
    given = os.environ.get("RAY_AUTH_TOKEN")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return (given or path.read_text()).strip() or None
    except OSError:
        return None


def _token_header() -> dict[str, str]:
    """Given always, because Ray's client sends it only where RAY_AUTH_MODE was set before Ray was imported."""
    token = None if os.environ.get("RAY_AUTH_MODE") == "disabled" else _token()
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _is_ours(details: JobDetails) -> bool:
    return SWEEP in (details.metadata or {}) or COMMAND.search(details.entrypoint) is not None


def named_in(command: str) -> dict[str, str]:
    """Sweep and home of a driver's command line, for a job of somebody's own; what is not to be found there is left out.

    Args:
        command: `suite run SWEEP ...` or `run_sweep.py SWEEP ...`, also as `python -m` or within a shell's. A sweep is called by its file,
            unless `--set name=` renames it.
    """
    found = COMMAND.search(command)
    words = (
        []
        if found is None
        else [word.strip("'\"") for word in re.split(r"[\s=]+", found["arguments"])]
    )
    files = [Path(word).stem for word in words if word.endswith((".yaml", ".yml"))]
    renamed = [
        name
        for option, key, name in zip(words, words[1:], words[2:], strict=False)
        if (option, key) == ("--set", "name")
    ]
    sweeps = renamed[-1:] or files or [word for word in words if word != "--"][:1]
    homes = [after for word, after in pairwise(words) if word == "--home"]
    return {
        key: values[0]
        for key, values in ((SWEEP, sweeps), (HOME, homes))
        if values and not values[0].startswith("-")
    }


def _job(details: JobDetails) -> Job:
    told: Mapping[str, str] = named_in(details.entrypoint) | (details.metadata or {})
    times: Sequence[Any] = (details.start_time, details.end_time)
    started_s, ended_s = (None if not ms else ms / 1000 for ms in times)
    name, message = details.submission_id or "", (details.message or "").strip()
    return Job(
        name,
        told.get(SWEEP),
        told.get(HOME),
        str(details.status.value),
        started_s,
        ended_s,
        details.driver_exit_code,
        message,
    )
