"""Checks whether ranks on different nodes can join one process group, and how fast they talk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from suite.cluster import network
from suite.cluster.session import last_line
from suite.doctor.finding import Finding, fail, ok, warn

# For starting the ranks, which import torch, and for joining.
JOIN_S = 90.0
# Large enough that the network's rate counts, and not its latency.
MESSAGE_BYTES = 16 * 2**20
REPEATS = 5
Backend = Literal["gloo", "nccl"]
REMEDY = (
    "open all ports between the nodes; set resources.interface where they have several networks"
)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster.

    Attributes:
        id: Ray's id of the node.
        label: Its address, with the beginning of its id where several nodes share one.
        address: The address by which the cluster knows it.
        gpus: How many GPUs it has.
    """

    id: str
    label: str
    address: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one rank meets the others.

    Attributes:
        rank, world_size: Its place among them.
        address, port: Of rank 0.
        backend: Over which they talk.
        gpus: Those of all ranks of its node, because NCCL's peer access needs to see them.
        local_rank: Which of them is its own.
    """

    rank: int
    world_size: int
    address: str
    port: int
    backend: Backend
    gpus: tuple[str, ...]
    local_rank: int

    @property
    def device(self) -> str:
        return f"cuda:{self.local_rank}" if self.backend == "nccl" else "cpu"


class JoiningRank:
    """One rank: it joins the others, sums a tensor with them, and leaves."""

    def place(self) -> tuple[int, tuple[str, ...]]:
        """A free port, and the GPUs that Ray gave to this process."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return network.free_port(), tuple(gpu for gpu in visible.split(",") if gpu)

    def sum_with_others(self, meeting: Meeting) -> tuple[float, str]:
        """Seconds per all-reduce of `MESSAGE_BYTES`, and the interface that it goes through.

        Raises:
            RuntimeError: The ranks do not find each other, or the sum is wrong.
        """
        if meeting.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(meeting.gpus)
        # Imported here: only the ranks need torch, not the process that asks them.
        import torch
        import torch.distributed as dist

        # The interface is chosen just as trials choose theirs, so that this tries what they will
        # use.
        if meeting.address == network.LOOPBACK:
            network.use_loopback()
        else:
            interface, _ = network.choose(None, address=str(ray.util.get_node_ip_address()))
            network.use(interface)
        dist.init_process_group(
            meeting.backend,
            init_method=f"tcp://{meeting.address}:{meeting.port}",
            rank=meeting.rank,
            world_size=meeting.world_size,
            # Shorter than the wait of the asking process, which then hears why the ranks did not
            # join.
            timeout=timedelta(seconds=JOIN_S / 2),
        )
        try:
            # float32 takes 4 bytes.
            tensor = torch.ones(MESSAGE_BYTES // 4, device=meeting.device)
            dist.all_reduce(tensor)  # the first one also opens the connections
            # Each rank adds a one.
            if float(tensor[-1]) != meeting.world_size:
                raise RuntimeError(
                    f"the sum over {meeting.world_size} ranks is {float(tensor[-1])}"
                )
            began = time.perf_counter()
            for _ in range(REPEATS):
                dist.all_reduce(tensor)
            tensor.sum().item()  # waits for the device
            seconds = (time.perf_counter() - began) / REPEATS
        finally:
            dist.destroy_process_group()
        return seconds, os.environ.get("GLOO_SOCKET_IFNAME", "an interface of its choice")


def check_join(nodes: Sequence[Node]) -> list[Finding]:
    """Try an all-reduce between one rank per node over gloo, and over NCCL between those with GPUs.

    On a single node two ranks do it.
    """
    found = [_join(_ranks(nodes), "gloo")]
    with_gpus = _ranks([node for node in nodes if node.gpus])
    # NCCL refuses two ranks on one GPU.
    if with_gpus and all(node.gpus >= with_gpus.count(node) for node in with_gpus):
        found.append(_join(with_gpus, "nccl"))
    return found


def _ranks(nodes: Sequence[Node]) -> list[Node]:
    """The node of each rank."""
    # With one rank nothing would be sent.
    if len(nodes) == 1:
        return [nodes[0], nodes[0]]
    return list(nodes)


def _join(nodes: Sequence[Node], backend: Backend) -> Finding:
    several = len(set(nodes)) > 1
    between = f"between {len(nodes)} nodes" if several else "between two ranks of the node"
    address = nodes[0].address if several else network.LOOPBACK
    ranks = [_spawn(node, backend) for node in nodes]
    try:
        places = ray.get([rank.place.remote() for rank in ranks], timeout=JOIN_S)
        asked = []
        for rank, meeting in zip(ranks, meetings(nodes, places, address, backend), strict=True):
            asked.append(rank.sum_with_others.remote(meeting))
        answers = ray.get(asked, timeout=JOIN_S)
    except GetTimeoutError:
        # Trials hold the GPUs of a busy cluster: that is no fault, it only leaves NCCL untried.
        if backend == "nccl":
            return warn(
                backend,
                found=f"no GPU of every node was free within {JOIN_S:g} s",
                remedy="ask again when nothing runs",
            )
        return fail(backend, found=f"{between}: not joined within {JOIN_S:g} s", remedy=REMEDY)
    except RayError as error:
        return fail(backend, found=f"{between}: {last_line(error)}", remedy=REMEDY)
    finally:
        for rank in ranks:
            with contextlib.suppress(RayError):
                ray.kill(rank, no_restart=True)
    # An all-reduce is over when its slowest rank is.
    slowest_s = max(seconds for seconds, _ in answers)
    interfaces = ", ".join(sorted({interface for _, interface in answers}))
    rate = MESSAGE_BYTES / 2**20 / slowest_s
    text = f"16 MiB summed in {slowest_s * 1000:.0f} ms ({rate:.0f} MiB/s)"
    return ok(backend, found=f"{between}, over {interfaces}: {text}")


def meetings(
    nodes: Sequence[Node],
    places: Sequence[tuple[int, tuple[str, ...]]],
    address: str,
    backend: Backend,
) -> list[Meeting]:
    """What each rank needs to meet the others.

    Args:
        nodes: Of each rank.
        places: What `JoiningRank.place` says of each.
        address: Of rank 0, at a port of whose node they meet.
        backend: Over which they talk.
    """
    port = places[0][0]
    found = []
    for rank, node in enumerate(nodes):
        gpus: tuple[str, ...] = ()
        if backend == "nccl":
            for other, (_, own) in zip(nodes, places, strict=True):
                if other == node:
                    gpus += own
        local_rank = nodes[:rank].count(node)
        found.append(Meeting(rank, len(nodes), address, port, backend, gpus, local_rank))
    return found


def _spawn(node: Node, backend: Backend) -> Any:
    actor: Any = ray.remote(JoiningRank)
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    gpus = 1 if backend == "nccl" else 0
    return actor.options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy).remote()
