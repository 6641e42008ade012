"""The process group of one trial's ranks: how they join it, leave it and talk to each other.

Every function marked *collective* must be called on all ranks.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from suite.train.quiet import quieten_deepspeed


def init_process_group(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    address: str,
    port: int,
    device: str,
    timeout_s: float,
) -> None:
    """Join the group's own rendezvous; every later collective has the deadline `timeout_s`."""
    quieten_deepspeed()
    # Left alone, DeepSpeed takes a GPU that it sees, also where the trial trains on processors.
    os.environ["DS_ACCELERATOR"] = device
    # Imported before there is a group: DeepSpeed takes the one that it finds for a default
    # argument, and that group is then never freed.
    import deepspeed  # noqa: F401
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().device_name()
    assert found == device, f"DeepSpeed has settled on {found} in this process, not on {device}"

    # DeepSpeed reads these, and `suite.train.checkpoint` asks for the local rank.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    if device == "cuda":
        # cuDNN's recurrent cells (READ) would use TF32 where all other products are in fp32.
        torch.backends.cudnn.allow_tf32 = False
    backend = "nccl" if device == "cuda" else "gloo"
    # Left alone, torch notices a rank that hangs only after half an hour.
    timeout = timedelta(seconds=timeout_s)
    store = _rendezvous(address, port, rank=rank, world_size=world_size, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    adopt_process_group(backend, timeout_s=timeout_s)


def _rendezvous(address: str, port: int, *, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Make the store at which the ranks find each other.

    Rank 0 listens at the group's own address only. Left alone, torch would listen at every address
    of the machine.
    """
    untyped: Any = dist
    listening: int | None = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, port), family=family, backlog=world_size + 8)
        # torch takes the descriptor over, so Python must not close it.
        listening = server.detach()
    return untyped.TCPStore(
        address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listening
    )


def adopt_process_group(backend: str, *, timeout_s: float) -> None:
    """Let DeepSpeed use the process group that this process has joined.

    DeepSpeed's shared-memory all-reduce for CPUs is left out: it wants a compiler at run time,
    waits without a deadline and leaves 66 MiB of /dev/shm behind when a rank is killed. Training's
    collectives go through gloo in any case.
    """
    import deepspeed

    # The table says what was built; DeepSpeed reads it for this one only. Left alone, it would fill
    # it now: it compiles and links a program for each operation, and a notebook shows what the
    # linker says of those that fail. The table has no public setter.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 has deprecated, thousands of times
    # an epoch.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=timeout_s),
    )


def close_process_group() -> None:
    """Leave the group without waiting for anyone.

    Without this a process may abort at exit after success. The call is DeepSpeed's own, because
    DeepSpeed would keep handles of the group otherwise, and the next trainer of this process would
    get these.
    """
    if dist.is_initialized():
        import deepspeed

        deepspeed.comm.destroy_process_group()


def free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def all_agree(ok: bool) -> bool:
    """True on every rank if `ok` is True on every rank. Collective."""
    flag = torch.tensor(int(ok), device=_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def lowest(*values: float) -> list[float]:
    """The lowest of each value over the ranks, in single precision. Collective."""
    found = torch.tensor(values, dtype=torch.float32, device=_device())
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    lows: list[float] = found.tolist()
    return lows


def gather_objects(value: Any) -> list[Any]:
    """Return the `value` of every rank, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _device() -> str:
    """The device on which the group's backend wants its tensors."""
    if dist.get_backend() == "nccl":
        return "cuda"
    return "cpu"
