"""What can happen to a cluster: each fault strikes once and, where somebody would have to mend it, mends it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.fleet import Fleet, kill
from suite.plan.definition import lease_root
from suite.record.folder import Home, TrialFolder
from suite.storage.lease import newest_epoch
from suite.storage.urls import open_storage
from tests.cluster.processes import wait_until

T = TypeVar("T")
Fault = Callable[[Fleet, random.Random], str]
FAULTS: dict[str, Fault] = {}
"""Kind -> what does it; returns what it did, in words."""
BY_SHIM = ("fsync-fails", "home-read-only", "clock-jumps")
"""Kinds that need benchmarks/shim.c."""
SWEEP = "chaos"
LEAVES_S = 600.0
"""For a driver to leave: ranks that are starting find a disk's fault at their first checkpoint, minutes later on a busy machine."""


class NotNowError(Exception):
    """There is nothing that this fault could strike."""


def fault(function: Fault) -> Fault:
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


@fault
def driver_killed(fleet: Fleet, chance: random.Random) -> str:
    pids = _some(fleet.driver_pids())
    kill(pids)
    return "SIGKILL of the driver"


@fault
def driver_preempted(fleet: Fleet, chance: random.Random) -> str:
    kill(_some(fleet.driver_pids())[:1], signal.SIGTERM)
    return "SIGTERM to the driver"


@fault
def rank_killed(fleet: Fleet, chance: random.Random) -> str:
    name, pid = chance.choice(_ranks(fleet))
    kill([pid])
    return f"SIGKILL of a rank on {name}"


@fault
def rank_preempted(fleet: Fleet, chance: random.Random) -> str:
    name, pid = chance.choice(_ranks(fleet))
    kill([pid], signal.SIGTERM)
    return f"SIGTERM to a rank on {name}"


@fault
def group_killed(fleet: Fleet, chance: random.Random) -> str:
    ranks = _ranks(fleet)
    kill([pid for _, pid in ranks])
    return f"SIGKILL of all {len(ranks)} ranks"


@fault
def rank_hangs(fleet: Fleet, chance: random.Random) -> str:
    name, pid = chance.choice(_ranks(fleet))
    kill([pid], signal.SIGSTOP)
    return f"SIGSTOP of a rank on {name}"


@fault
def trial_process_killed(fleet: Fleet, chance: random.Random) -> str:
    """The process that Tune knows as the trial, which holds its group."""
    hosts = [fleet.bed.host(name) for name in (*fleet.workers, "head")]
    found = [pid for host in hosts if host.is_on for pid in host.pids("ray::ResourceTrain")]
    kill([chance.choice(_some(found))])
    return "SIGKILL of the trial's own process"


@fault
def raylet_killed(fleet: Fleet, chance: random.Random) -> str:
    name = chance.choice(list(fleet.workers))
    kill(_some(fleet.bed.host(name).pids("raylet/raylet ")))
    time.sleep(chance.uniform(1, 5))
    fleet.leave(name)
    fleet.join(name)
    return f"SIGKILL of {name}'s raylet; Ray started there again"


@fault
def host_lost(fleet: Fleet, chance: random.Random) -> str:
    name = chance.choice(list(fleet.workers))
    fleet.bed.host(name).kill()
    time.sleep(away_s := chance.uniform(2, 20))
    fleet.bed.host(name).start()
    fleet.join(name)
    return f"{name} switched off, back after {away_s:.0f} s"


@fault
def head_lost(fleet: Fleet, chance: random.Random) -> str:
    """The driver goes with it. The new head knows nothing of the old one's cluster."""
    fleet.head.kill()
    time.sleep(chance.uniform(1, 5))
    fleet.head.start()
    fleet.start_head()
    for name in fleet.workers:
        fleet.leave(name)
        fleet.join(name)
    return "the head switched off; a new head, and the workers joined it"


@fault
def host_cut_off(fleet: Fleet, chance: random.Random) -> str:
    host = fleet.bed.host(chance.choice(list(fleet.workers)))
    host.cut()
    time.sleep(away_s := chance.uniform(2, 20))
    host.mend()
    time.sleep(2)
    if not host.pids("raylet/raylet "):  # Ray gave the host up
        fleet.leave(host.name)
        fleet.join(host.name)
    return f"{host.name} without network for {away_s:.0f} s"


@fault
def tracking_killed(fleet: Fleet, chance: random.Random) -> str:
    return _killed(fleet, "mlflow", fleet.servers.start_tracking, away_s=chance.uniform(2, 20))


@fault
def database_killed(fleet: Fleet, chance: random.Random) -> str:
    return _killed(fleet, "postgres", fleet.servers.start_database, away_s=chance.uniform(2, 10))


def _killed(fleet: Fleet, server: str, start: Callable[[], object], *, away_s: float) -> str:
    fleet.servers.kill(server)
    time.sleep(away_s)
    start()
    return f"SIGKILL of {server}, back after {away_s:.0f} s"


@fault
def driver_killed_early(fleet: Fleet, chance: random.Random) -> str:
    """In the first 20 s: while it connects, takes the sweep over, reads the home, makes plans."""
    kill(_some(fleet.driver_pids()))
    _driver_leaves(fleet)
    fleet.start_driver()
    time.sleep(after_s := chance.uniform(0, 20))
    kill(fleet.driver_pids())
    return f"SIGKILL of the driver, and of the next one {after_s:.1f} s after its start"


@fault
def driver_frozen(fleet: Fleet, chance: random.Random) -> str:
    """A second driver takes the sweep over; the first one wakes up, and has to leave."""
    pids = _some(fleet.driver_pids())
    leases = open_storage(lease_root(Home(fleet.home), None))
    before = newest_epoch(leases, SWEEP)
    frozen = fleet.driver
    assert frozen is not None
    kill(pids, signal.SIGSTOP)
    try:
        fleet.start_driver()

        def taken_over() -> bool:
            # The first ones find a fresh beat and are refused
            fleet.keep_running()
            return newest_epoch(leases, SWEEP) > before

        wait_until("a second driver has taken the sweep over", taken_over, timeout_s=LEAVES_S)
        time.sleep(asleep_s := chance.uniform(0, 10))
    finally:
        # `nsenter` stops itself with its child
        kill([*pids, frozen.pid], signal.SIGCONT)
    wait_until("the frozen driver has left", lambda: frozen.poll() is not None, timeout_s=LEAVES_S)
    return f"SIGSTOP of the driver until {asleep_s:.0f} s after a second one had the sweep"


@fault
def disk_full(fleet: Fleet, chance: random.Random) -> str:
    filler = fleet.home.parent / "filler"
    _fill(filler)
    try:
        _driver_leaves(fleet)
    finally:
        filler.unlink()
    return "the homes' disk full until the driver had paused the sweep"


@fault
def fsync_fails(fleet: Fleet, chance: random.Random) -> str:
    with _disturbed(fleet, fsync_fails=True):
        _driver_leaves(fleet)
    return "EIO of every fsync in the homes until the driver had paused the sweep"


@fault
def home_read_only(fleet: Fleet, chance: random.Random) -> str:
    with _disturbed(fleet, read_only=True):
        _driver_leaves(fleet)
    return "the homes read-only until the driver had paused the sweep"


@fault
def clock_jumps(fleet: Fleet, chance: random.Random) -> str:
    name = chance.choice(["head", *fleet.workers])
    hours = chance.choice((-24, -1, 1, 24))
    away_s = chance.uniform(5, 20)
    fleet.disturb([name], clock_s=hours * 3600)
    time.sleep(away_s)
    fleet.disturb([name])
    return f"the clock of {name} jumped by {hours:+} h, and back after {away_s:.0f} s"


@contextmanager
def _disturbed(fleet: Fleet, **how: Any) -> Iterator[None]:
    """The homes lie on one disk, so that it fails for all hosts."""
    _some(fleet.driver_pids())
    fleet.disturb(fleet.bed.hosts, **how)
    try:
        yield
    finally:
        fleet.disturb(fleet.bed.hosts)


def _driver_leaves(fleet: Fleet) -> None:
    wait_until(
        "the driver has left",
        lambda: fleet.driver is None or fleet.driver.poll() is not None,
        timeout_s=LEAVES_S,
    )


@fault
def checkpoint_damaged(fleet: Fleet, chance: random.Random) -> str:
    """Bytes of the newest generation turned or cut off; then its ranks are killed, so that it will be read."""
    folders = [folder for folder in Home(fleet.home).trials() if folder.result() is None]
    found = [path for folder in folders for path in _newest_generation(folder)]
    path = chance.choice(_some(found))
    how = chance.choice([_cut_short, _flip])
    try:
        how(path, chance)
    except OSError as error:
        raise NotNowError(str(error)) from error
    kill([pid for _, pid in _ranks(fleet)])
    return f"{how.__name__.strip('_').replace('_', ' ')}: {path.name}; and all ranks killed"


def _ranks(fleet: Fleet) -> list[tuple[str, int]]:
    return _some([(name, pid) for name, pids in fleet.ranks().items() for pid in pids])


def _some(found: list[T]) -> list[T]:
    if not found:
        raise NotNowError
    return found


def _newest_generation(folder: TrialFolder) -> list[Path]:
    found = sorted(
        folder.checkpoint.glob("epoch-*/COMMIT.json"),
        key=lambda path: int(path.parent.name.removeprefix("epoch-")),
    )
    return sorted(path for path in found[-1].parent.iterdir() if path.is_file()) if found else []


def _cut_short(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _flip(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        at = chance.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def _fill(path: Path) -> None:
    """Take every block that is left."""
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 2**12):
            with suppress(OSError):
                while file.write(b"\0" * size):
                    pass
