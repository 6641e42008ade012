"""Processes of their own for what a test cannot do in pytest's: join a process group, fork, or leave threads behind.

They are forks of one server that has imported the suite. A process that imports it anew computes for ten seconds first.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from suite.train.process_group import close_process_group, free_port, init_process_group

ROOT = Path(__file__).parents[1]


def on_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout_s: float = 120.0
) -> list[Any]:
    """`function(rank, *args)` on every rank of a fresh process group; results in rank order.

    `function` must be importable.
    """
    return in_processes(
        _joined, world_size, free_port(), timeout_s, function, *args, count=world_size
    )


def in_processes(function: Callable[..., Any], *args: Any, count: int = 1) -> list[Any]:
    """`function(number, *args)` in each of `count` fresh processes; results by number.

    `function` must be importable.
    """
    forkserver_context()
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _process,
            args=(folder, environment, function, args),
            nprocs=count,
            start_method="forkserver",
        )
        return [pickle.loads((Path(folder) / str(n)).read_bytes()) for n in range(count)]


@functools.cache
def forkserver_context() -> BaseContext:
    """What starts processes as forks of the server, which runs from now on and ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with_tests = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in with_tests}
    os.environ.update(with_tests)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _process(
    number: int,
    folder: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()  # a fork has the environment of the day the server was started
    os.environ.update(environment)
    found = function(number, *args)
    (Path(folder) / str(number)).write_bytes(pickle.dumps(found))


def _joined(
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    torch.set_num_threads(1)
    place = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "address": "127.0.0.1",
        "port": port,
    }
    init_process_group(**place, device="cpu", timeout_s=timeout_s)
    try:
        return function(rank, *args)
    finally:
        close_process_group()


def asked_for(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """The values of a parametrised argument that the tests of a module will run with.

    A fixture of the module makes these alone: `-m` and `-k` may have left others out.
    """
    found = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path:
            callspec = getattr(item, "callspec", None)
            if callspec is not None and argument in callspec.params:
                found.append(callspec.params[argument])
    return found
