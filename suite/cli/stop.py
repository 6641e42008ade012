"""`suite stop`: let a sweep's driver end as at Ctrl-C, on this machine or on a cluster."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer

from suite.cli import complete
from suite.cli.options import HomeOption, StorageOption, was_typed
from suite.cli.render import put
from suite.cli.submit import DashboardOption, how_to_stop
from suite.config.names import DEFAULT_HOME
from suite.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from suite.storage.lease import Claim

WAIT_S = 600.0
"""How long a driver may take to end, in seconds.

It first waits `failures.grace_s` for running trials, ends their workers and updates MLflow.
"""


def stop(
    context: typer.Context,
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP",
            autocompletion=complete.sweeps_of_home,
            help="The name of a sweep that is running.",
        ),
    ],
    address: DashboardOption = None,
    home: HomeOption = DEFAULT_HOME,
    storage: StorageOption = None,
) -> None:
    """End a running sweep in order.

    What has finished stays; running trials go on from their last epoch when the sweep is run again.

    With --address it ends the sweep's jobs on that cluster, and with --home or --storage too, only
    those of this home. A --home or --storage without --address is one of this machine.
    """
    named = _named(context, home, storage)
    # An address that is only a variable must not turn one home into all homes of a cluster.
    if address is not None and (was_typed(context, "address") or not named):
        said = _stop_job(address, sweep, named)
    else:
        said = _stop_here(home, storage, sweep)
    # On stderr with all other news: the command has no result to pipe.
    put(f"sweep {sweep}: {said}; run or submit it again to go on", err=True)


def _named(context: typer.Context, home: Path, storage: str | None) -> list[str]:
    """What a job of the home that was typed may call it, the likelier first; empty = none was."""
    # A job with a storage knows its home by that alone.
    if storage is not None and was_typed(context, "storage"):
        return [storage]
    if not was_typed(context, "home"):
        return []
    if storage is None:
        return [str(home)]
    return [str(home), storage]


def _stop_job(address: str, sweep: str, homes: Sequence[str]) -> str:
    """End the jobs of this sweep on a cluster.

    Args:
        address: The dashboard's.
        sweep: The sweep's name.
        homes: Where its jobs may run; those of the first that has any are ended. Empty = anywhere.

    Raises:
        ConfigError: No job runs this sweep there, or jobs of several homes do and none is named.
    """
    from suite.cluster.jobs import JobClient

    cluster = JobClient(address)
    running = [] if homes else cluster.live(sweep)
    for home in homes:
        running = running or cluster.live(sweep, home)
    if not running:
        others = set()
        for job in cluster.jobs():
            # A cluster may also run jobs that are none of the suite's.
            if job.is_live and job.sweep:
                others.add(f"{job.sweep} in {job.home}" if job.home else job.sweep)
        names = ", ".join(sorted(others)) or "none"
        place = f" in {' or '.join(homes)}" if homes else ""
        raise ConfigError(
            f"{sweep}: no such sweep is running{place} on {cluster.address}; running: {names}"
        )
    # Another person may run a sweep of the same name.
    count = len({job.home for job in running})
    if count > 1:
        commands = [how_to_stop(cluster.address, job, sweep) for job in running]
        raise ConfigError(
            f"{sweep}: runs in {count} homes on {cluster.address}; say with --home, or "
            "--storage, which of them to end:\n  " + "\n  ".join(commands)
        )
    for job in running:
        cluster.stop(job.id)
    return f"stopped ({', '.join(job.id for job in running)})"


def _stop_here(home: Path, storage: str | None, sweep: str) -> str:
    """Send SIGTERM to the driver and wait for it.

    Raises:
        ConfigError: No driver runs this sweep, or its driver is on another machine.
        ResourceError: The driver does not end.
    """
    from suite.plan.definition import lease_root, lease_root_here, live_claim
    from suite.record.folder import Home

    place = Home(home.resolve())
    where = ["--home", str(home)]
    if storage is not None:
        where += ["--storage", storage]
    claim = None
    # With a storage the lease lies there; a home that does not exist runs nothing.
    if storage is not None:
        claim = live_claim(place, sweep, lease_root(place, storage))
    elif home.is_dir():
        claim = live_claim(place, sweep, lease_root_here(place, sweep))
    if claim is None:
        raise ConfigError(
            f"{sweep}: no driver of this sweep is running in {storage or home}; "
            f"running ones: suite status {shlex.join(where)}"
        )
    # A pid means another process on another machine: never signal it.
    if not claim.is_here:
        # A driver that runs as a job ends in order only through its cluster.
        if claim.job:
            how = f"suite stop {sweep} --address http://HEAD:8265"
        else:
            how = f"suite stop {sweep} {shlex.join(where)}, on that machine"
        raise ConfigError(f"{sweep}: is run by {claim}, not on this machine; end it with: {how}")
    _end(claim)
    return f"stopped (process {claim.pid})"


def _end(claim: Claim) -> None:
    # It may have ended since its claim was read; then there is nothing to wait for.
    try:
        psutil.Process(claim.pid).terminate()
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        raise ResourceError(
            f"process {claim.pid}: belongs to another user of this machine, who can end it"
        ) from None
    end_s = time.monotonic() + WAIT_S
    while not claim.is_gone:
        if time.monotonic() > end_s:
            raise ResourceError(
                f"process {claim.pid}: has not ended within {WAIT_S:.0f} s; "
                f"end it with: kill -9 {claim.pid}"
            )
        # Often enough that nobody notices, and rarely enough for a lease on S3.
        time.sleep(0.2)
