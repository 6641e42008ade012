"""Checks whether ranks on different nodes can join one process group, and how fast they talk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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


class JoiningRank:
    """One rank: it joins the others, sums a tensor with them, and leaves."""

    def port(self) -> int:
        return network.free_port()

    def sum_with_others(
        self, rank: int, world_size: int, address: str, port: int, device: str
    ) -> tuple[float, str]:
        """Seconds per all-reduce of `MESSAGE_BYTES`, and the interface that it goes through.

        Raises:
            RuntimeError: The ranks do not find each other, or the sum is wrong.
        """
        # Imported here: only the ranks need torch, not the process that asks them.
        import torch
        import torch.distributed as dist

        # The interface is chosen just as trials choose theirs, so that this tries what they will
        # use.
        if address == network.LOOPBACK:
            network.use_loopback()
        else:
            interface, _ = network.choose(None, address=str(ray.util.get_node_ip_address()))
            network.use(interface)
        dist.init_process_group(
            _backend(device),
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=world_size,
            # Shorter than the wait of the asking process, which then hears why the ranks did not
            # join.
            timeout=timedelta(seconds=JOIN_S / 2),
        )
        try:
            # float32 takes 4 bytes.
            tensor = torch.ones(MESSAGE_BYTES // 4, device=device)
            dist.all_reduce(tensor)  # the first one also opens the connections
            # Each rank adds a one.
            if float(tensor[-1]) != world_size:
                raise RuntimeError(f"the sum over {world_size} ranks is {float(tensor[-1])}")
            began = time.perf_counter()
            for _ in range(REPEATS):
                dist.all_reduce(tensor)
            tensor.sum().item()  # waits for the device
            seconds = (time.perf_counter() - began) / REPEATS
        finally:
            dist.destroy_process_group()
        return seconds, os.environ.get("GLOO_SOCKET_IFNAME", "an interface of its choice")


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


def check_join(nodes: Sequence[Node]) -> list[Finding]:
    """Try an all-reduce between one rank per node, over gloo, and over NCCL if each has a GPU.

    On a single node two ranks do it.
    """
    # With one rank nothing would be sent.
    ranks = list(nodes) if len(nodes) > 1 else [nodes[0]] * 2
    found = [_join(ranks, "cpu")]
    # NCCL refuses two ranks on one GPU.
    if all(node.gpus >= ranks.count(node) for node in nodes):
        found.append(_join(ranks, "cuda"))
    return found


def _join(nodes: Sequence[Node], device: str) -> Finding:
    backend = _backend(device)
    several = len(set(nodes)) > 1
    between = f"between {len(nodes)} nodes" if several else "between two ranks of the node"
    address = nodes[0].address if several else network.LOOPBACK
    ranks = [_spawn(node, device) for node in nodes]
    try:
        # Rank 0 chooses it, since the ranks meet at a port of its node.
        port = ray.get(ranks[0].port.remote(), timeout=JOIN_S)
        asked = []
        for number, rank in enumerate(ranks):
            asked.append(rank.sum_with_others.remote(number, len(ranks), address, port, device))
        answers = ray.get(asked, timeout=JOIN_S)
    except GetTimeoutError:
        # Trials hold the GPUs of a busy cluster: that is no fault, it only leaves NCCL untried.
        if device == "cuda":
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


def _spawn(node: Node, device: str) -> Any:
    actor: Any = ray.remote(JoiningRank)
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    gpus = 1 if device == "cuda" else 0
    return actor.options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy).remote()
