"""Sweeps as jobs of a remote Ray cluster: submit, follow, list and stop them over its dashboard.

A job's driver is `suite run ... --address auto` on the head. The lease (`suite.storage.lease`) sees
to it that a sweep has one driver. Here a sweep that runs already is found among the jobs and
followed, so that typing the same command twice is no error.
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
from math import ceil
from pathlib import Path

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from suite.cluster.package import EXCLUDES
from suite.errors import ClusterError, end_of
from suite.storage.urls import one_url

SWEEP = "suite.sweep"  # keys of a job's metadata
HOME = "suite.home"
LEAVE_S = 60.0
"""What a stopped driver needs besides its trials' grace; Ray alone gives 3 s.

It ends its groups and brings MLflow up to date.
"""
POLL_S = 1.0
HEAD_STARTS_S = 180.0
RECONNECTS = 30  # a head that is replaced may be away for half a minute
STEADY_S = 10.0
"""A connection that has held for so long is not one that breaks again and again."""
ERROR_CHARS = 500
LINES_AT_ATTACH = 20  # enough to see where the sweep stands
COMMAND = re.compile(r"(?:\bsuite\s+run|\brun_sweep\.py)\s+(?P<arguments>.*)", re.DOTALL)
FLAGS = ("--dry-run", "--retry-given-up", "--insecure", "--help", "-h")
"""The options of `suite run` that have no value; a test compares them with the command's own."""
QUOTES = "'\""
PROGRESS = re.compile(r"^\[(\d+)/(\d+)\] ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Job:
    """A driver that was submitted to a cluster.

    Attributes:
        id: Ray's submission id.
        sweep: What it runs, as it was submitted; for a job of `ray job submit`, as its command line
            names it.
        home: Where the sweep lives; known as `sweep` is.
        status: Ray's word: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
        started_s: Seconds since 1970 by the cluster's clock.
        ended_s: The same.
        exit_code: The driver's; None while it runs.
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
        sweep: The sweep's name.
        home: Its home on the cluster.
        command: The driver's command line, for a shell.
        folder: Uploaded, and the driver's and workers' working folder there.
        variables: Environment of driver and workers.
        grace_s: How long running trials may take to leave when the sweep is stopped.
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
        """Pass on the new part of a piece that begins `start` characters into the log."""
        new = text[max(0, self.length - start) :]
        if new:
            self.write(new)
            self.length = start + len(text)


class JobClient:
    """The Job API of one cluster.

    Args:
        address: The dashboard's, http://HEAD:8265.

    Raises:
        ClusterError: Nothing answers there, or it wants another token.
    """

    def __init__(self, address: str) -> None:
        self.address = dashboard_url(address)
        # Ray logs a line for each upload and connection.
        logging.getLogger("ray").setLevel(logging.WARNING)
        with self._explained():
            self._client = JobSubmissionClient(self.address, headers=_token_header())

    def jobs(self) -> list[Job]:
        """Every job that runs a sweep, newest first."""
        found = []
        for details in self._all_jobs():
            if details.submission_id and _runs_a_sweep(details):
                found.append(_job(details))
        return sorted(found, key=lambda job: job.started_s or 0.0, reverse=True)

    def _all_jobs(self) -> list[JobDetails]:
        with self._explained():
            return list(self._client.list_jobs())

    def live(self, sweep: str, home: str | None = None) -> list[Job]:
        """The jobs that run a sweep now, in this home; None = in any home."""
        running = [job for job in self.jobs() if job.is_live and job.sweep == sweep]
        return [job for job in running if home in (None, job.home)]

    def submit(self, wanted: Submission) -> tuple[Job, bool]:
        """Start a sweep's driver unless one is live. A head that has just started is waited for.

        Returns:
            The sweep's job, and whether it is new.
        """
        end_s = time.monotonic() + HEAD_STARTS_S
        while True:
            running = self.live(wanted.sweep, wanted.home)
            if running:
                return running[0], False
            name = self._free_id(wanted.sweep)
            try:
                self._submit_as(name, wanted)
            except ClusterError as error:
                too_early = "try again later" in str(error) and time.monotonic() < end_s
                if not too_early and not self._is_taken(name):
                    raise
                # If somebody else has just taken the name, the next look finds it.
                time.sleep(POLL_S)
            else:
                return self.job(name), True

    def _is_taken(self, name: str) -> bool:
        return any(job.id == name for job in self.jobs())

    def _submit_as(self, name: str, wanted: Submission) -> None:
        variables = {
            **wanted.variables,
            "RAY_JOB_STOP_WAIT_TIME_S": str(ceil(wanted.grace_s + LEAVE_S)),
        }
        with self._explained():
            self._client.submit_job(
                entrypoint=wanted.command,
                submission_id=name,
                runtime_env={
                    "working_dir": str(wanted.folder),
                    "excludes": list(EXCLUDES),
                    "env_vars": variables,
                },
                metadata={SWEEP: wanted.sweep, HOME: wanted.home},
            )

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
        if not found:
            return None
        done, total = found[-1]
        return int(done), int(total)

    def follow(self, name: str, write: Callable[[str], None], *, attached: bool) -> Job:
        """Pass on what the driver prints until it ends; a broken connection is made again.

        Args:
            name: The job's.
            write: Receives the text.
            attached: The job has been running: begin with the last lines of its log.
        """
        printed = _Printed(write)
        broken = 0
        if attached:
            before = self.log(name)
            write("".join(before.splitlines(keepends=True)[-LINES_AT_ATTACH:]))
            printed.length = len(before)
        while True:
            began_s = time.monotonic()
            try:
                asyncio.run(self._tail(name, printed))
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                # A proxy ends a quiet connection each minute, and a sweep may take days.
                if time.monotonic() - began_s >= STEADY_S:
                    broken = 0
                broken += 1
                if broken > RECONNECTS:
                    raise ClusterError(
                        f"--address {self.address}: the connection breaks again and again: {error}"
                    ) from error
            job = self._patient_job(name)
            # The driver may have printed more between the end of the tail and its own.
            if not job.is_live:
                printed.extend(self.log(name), start=0)
                return job
            time.sleep(POLL_S)

    async def _tail(self, name: str, printed: _Printed) -> None:
        """Follow one connection. Each begins with what the driver printed first."""
        start = 0
        async for text in self._client.tail_job_logs(name):
            printed.extend(text, start=start)
            start += len(text)

    def _patient_job(self, name: str) -> Job:
        """The job's state, from a head that may be away for a while."""
        for _ in range(RECONNECTS):
            try:
                return self.job(name)
            except ClusterError:
                time.sleep(POLL_S)
        return self.job(name)

    def stop(self, name: str) -> Job:
        """Let a driver end as at Ctrl-C, and wait for it.

        Ray kills it when the time is over that it was submitted with.
        """
        with self._explained():
            self._client.stop_job(name)
        job = self._patient_job(name)
        while job.is_live:
            time.sleep(POLL_S)
            job = self._patient_job(name)
        return job

    def _free_id(self, sweep: str) -> str:
        """`suite-SWEEP-N`, with a number that no job has."""
        prefix = f"suite-{sweep}-"
        highest = 0
        for details in self._all_jobs():
            name = details.submission_id or ""
            number = name.removeprefix(prefix)
            if name.startswith(prefix) and number.isdecimal():
                highest = max(highest, int(number))
        return f"{prefix}{highest + 1}"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what Ray's client raises into an error that says what to do and shows no token."""
        try:
            yield
        except AuthenticationError as error:
            given = "none was given" if _token() is None else "another one was given"
            raise ClusterError(
                f"--address {self.address}: wants a token, {given};"
                " put the cluster's into ~/.ray/auth_token or RAY_AUTH_TOKEN (docs/cluster.md)"
            ) from error
        except (ConnectionError, requests.RequestException) as error:
            raise ClusterError(
                f"--address {self.address}: nothing answers;"
                " expected the dashboard of a running cluster, http://HEAD:8265, perhaps through"
                " `ray dashboard cluster.yaml` or ssh -L 8265:localhost:8265"
            ) from error
        except RuntimeError as error:
            why = end_of(str(error))[:ERROR_CHARS]
            raise ClusterError(f"--address {self.address}: {why}") from error


def dashboard_url(address: str) -> str:
    """The address with its scheme.

    Raises:
        ClusterError: It is not a dashboard's.
    """
    scheme, found, host = address.rstrip("/").partition("://")
    if not found:
        scheme, host = "http", scheme
    if scheme not in ("http", "https") or host in ("", "auto") or "@" in host:
        shown = "***" if "@" in host else address  # before an @ stands a password
        raise ClusterError(
            f"--address {shown}: expected the cluster's dashboard, http://HEAD:8265"
            " (on the head itself: suite run SWEEP --address auto)"
        )
    return f"{scheme}://{host}"


def _token() -> str | None:
    """The token that Ray itself would use, by the rules of its documentation."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    if not token:
        path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
        try:
            token = Path(path).read_text()
        except OSError:
            return None
    return token.strip() or None


def _token_header() -> dict[str, str]:
    # Given always, because Ray's client sends it only where RAY_AUTH_MODE was set before Ray was
    # imported.
    token = _token()
    if token is None or os.environ.get("RAY_AUTH_MODE") == "disabled":
        return {}
    return {"Authorization": f"Bearer {token}"}


def _runs_a_sweep(details: JobDetails) -> bool:
    return SWEEP in (details.metadata or {}) or COMMAND.search(details.entrypoint) is not None


def named_in(command: str) -> dict[str, str]:
    """The sweep and the home that the command line of a driver names.

    Jobs that `ray job submit` started say nothing else about themselves.

    Args:
        command: `suite run SWEEP ...` or `run_sweep.py SWEEP ...`, also as `python -m` or within a
            shell's. A sweep is called by its file, unless `--set name=` renames it.

    Returns:
        What is found, under `SWEEP` and `HOME`.
    """
    match = COMMAND.search(command)
    if match is None:
        return {}
    words, options = _parsed(match["arguments"])
    # As for a submitted job: where there is a storage, the home is its cache.
    home = one_url(options.get("--storage", ""))
    # As a path, for `--home /runs/` is the home that everybody else calls `/runs`.
    if not home and options.get("--home"):
        home = str(Path(options["--home"]))
    found = {}
    for key, value in ((SWEEP, options.get("--set name") or _sweep_among(words)), (HOME, home)):
        if value and not value.startswith("-"):  # an option where its value should stand
            found[key] = value
    return found


def _parsed(arguments: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command line that are no options, and the last value of each option.

    That of `--set KEY=VALUE` is called `--set KEY`.
    """
    words = []
    options = {}
    # No shell's parser: the line may end within the quotes of another command.
    left = iter(arguments.split())
    for word in left:
        option, is_joined, value = word.strip(QUOTES).partition("=")
        if not option.startswith("-"):
            words.append(word.strip(QUOTES))
        elif option not in FLAGS and option != "--":
            value = (value if is_joined else next(left, "")).strip(QUOTES)
            if option == "--set":
                key, _, value = value.partition("=")
                option = f"--set {key}"
            options[option] = value.strip(QUOTES)
    return words, options


def _sweep_among(words: Sequence[str]) -> str:
    """The sweep's name: the first file, else the first word."""
    for word in words:
        if word.endswith((".yaml", ".yml")):
            return Path(word).stem
    return next(iter(words), "")


def _job(details: JobDetails) -> Job:
    names = named_in(details.entrypoint) | (details.metadata or {})
    return Job(
        id=details.submission_id or "",
        sweep=names.get(SWEEP),
        home=names.get(HOME),
        status=str(details.status.value),
        started_s=_seconds(details.start_time),
        ended_s=_seconds(details.end_time),
        exit_code=details.driver_exit_code,
        message=(details.message or "").strip(),
    )


def _seconds(milliseconds: int | None) -> float | None:
    return milliseconds / 1000 if milliseconds else None
