"""Groups of ranks as forks of one process that has imported everything, so that dozens of them may be killed in a few seconds."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

FILE_OPERATIONS = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.chmod",
    "shutil.rmtree",
}


def fork_group(
    function: Callable[..., None],
    *args: Any,
    world_size: int = 1,
    timeout_s: float = 120.0,
    join: bool = True,
) -> list[int]:
    """`function(rank, *args)` on the ranks of a new process group. The caller must have no threads.

    Args:
        timeout_s: Of collectives.
        join: False = the function joins by itself, and gets (rank, port, *args).

    Returns:
        Exit codes by rank: 0, 1 after an exception, -9 of a rank that was killed.
    """
    from suite.train.process_group import free_port

    _warm_up()
    port = free_port()
    pids = _forks(world_size)
    if 0 in pids:
        rank = pids.index(0)
        _child(
            partial(function, rank, *args) if join else partial(function, rank, port, *args),
            rank,
            world_size,
            port if join else None,
            timeout_s,
        )
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@functools.cache
def _warm_up() -> None:
    """Import, here and not in every fork, what takes seconds."""
    from tests.test_parity import model_of

    importlib.import_module("deepspeed")
    torch.set_num_threads(1)
    model_of("lora", "bert")


def _forks(world_size: int) -> list[int]:
    pids: list[int] = []
    for _ in range(world_size):
        pids.append(os.fork())
        if pids[-1] == 0:
            break
    return pids


def _child(
    work: Callable[[], None], rank: int, world_size: int, port: int | None, timeout_s: float
) -> None:
    from suite.train.process_group import close_process_group, init_process_group

    code = 1
    try:
        if port is not None:
            place: dict[str, Any] = {
                "rank": rank,
                "world_size": world_size,
                "local_rank": rank,
                "address": "127.0.0.1",
                "port": port,
            }
            init_process_group(**place, device="cpu", timeout_s=timeout_s)
        work()
        close_process_group()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def kill_at(operation: int, folder: Path) -> Callable[[], int]:
    """SIGKILL this process just before its n-th file operation below `folder`, from now on. Returns what tells how many there were."""

    def kill(count: int) -> None:
        if count == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_each(folder, kill)


def copy_at_each(folder: Path, into: Path) -> Callable[[], int]:
    """Copy `folder` to `into/N/NAME` just before each file operation below it, from now on: what a kill there leaves behind.

    Returns what tells how many there were.
    """

    def copy(count: int) -> None:
        shutil.copytree(folder, into / str(count) / folder.name)

    return before_each(folder, copy)


def before_each(folder: Path, act: Callable[[int], None]) -> Callable[[], int]:
    """Call `act` with the number of each file operation below `folder`, just before it."""
    count = 0
    acting = False

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count, acting
        # What `act` does is no operation of the code that is watched.
        if acting or event not in FILE_OPERATIONS:
            return
        if any(isinstance(arg, (str, os.PathLike)) and str(folder) in str(arg) for arg in args):
            count += 1
            acting = True
            try:
                act(count)
            finally:
                acting = False

    sys.addaudithook(watch)
    return lambda: count
