"""Run a function on real gloo ranks, each in a process of its own, and collect what it returns."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from suite.train.process_group import close_process_group, free_port, init_process_group


def on_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout_s: float = 120.0
) -> list[Any]:
    """`function(rank, *args)` on every rank of a fresh process group; results in rank order. `function` must be importable."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            _rank,
            args=(world_size, free_port(), timeout_s, folder, function, args),
            nprocs=world_size,
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
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
        (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(rank, *args)))
    finally:
        close_process_group()
