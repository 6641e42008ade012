"""Whether ranks on different nodes can join one process group, and how fast they then talk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from suite.cluster import network
from suite.doctor.finding import Finding, fail, ok, warn

JOIN_S = 90.0
MESSAGE_BYTES = 16 * 2**20
REPEATS = 5
REMEDY = (
    "open all ports between the nodes; set resources.interface where they have several networks"
)

Place = tuple[str, str, str, int]
"""Node id, label, address, GPUs."""


class Talker:
    """One rank: joins, sums a tensor with the others, leaves."""

    def port(self) -> int:
        return network.free_port()

    def talk(
        self, rank: int, world_size: int, address: str, port: int, device: str
    ) -> tuple[float, str]:
        """Seconds per all-reduce of `MESSAGE_BYTES`, and the interface it went through.

        Raises:
            RuntimeError: The ranks do not find each other, or the sum is wrong.
        """
        import torch
        import torch.distributed as dist

        if address == network.LOOPBACK:
            network.use_loopback()
        else:
            network.use(network.choose(None, address=str(ray.util.get_node_ip_address()))[0])
        backend = "nccl" if device == "cuda" else "gloo"
        timeout = timedelta(seconds=JOIN_S / 2)
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        try:
            tensor = torch.ones(MESSAGE_BYTES // 4, device=device)
            dist.all_reduce(tensor)
            if float(tensor[-1]) != world_size:
                raise RuntimeError(f"the sum over {world_size} ranks is {float(tensor[-1])}")
            began = time.perf_counter()
            for _ in range(REPEATS):
                dist.all_reduce(tensor)
            tensor.sum().item()  # waits for the device
            return (time.perf_counter() - began) / REPEATS, os.environ.get(
                "GLOO_SOCKET_IFNAME", "an interface of its choice"
            )
        finally:
            dist.destroy_process_group()


def check_join(places: Sequence[Place]) -> list[Finding]:
    """An all-reduce between one rank per node, or two on a single node; over NCCL where every node has a GPU, and over gloo."""
    ranks = list(places) if len(places) > 1 else [places[0]] * 2
    devices = ["cpu", *(["cuda"] if all(place[3] >= ranks.count(place) for place in ranks) else [])]
    return [_talk(ranks, device) for device in devices]


def _talk(ranks: Sequence[Place], device: str) -> Finding:
    backend = "nccl" if device == "cuda" else "gloo"
    hosts = len({place[0] for place in ranks})
    between = f"between {hosts} nodes" if hosts > 1 else "between two ranks of the node"
    talkers = [_spawn(place, device) for place in ranks]
    try:
        port = ray.get(talkers[0].port.remote(), timeout=JOIN_S)
        address = ranks[0][2] if hosts > 1 else network.LOOPBACK
        answers = ray.get(
            [t.talk.remote(i, len(ranks), address, port, device) for i, t in enumerate(talkers)],
            timeout=JOIN_S,
        )
    except GetTimeoutError:
        if device == "cuda":
            return warn(
                backend,
                found=f"no GPU of every node was free within {JOIN_S:g} s",
                remedy="ask again when nothing runs",
            )
        return fail(backend, found=f"{between}: not joined within {JOIN_S:g} s", remedy=REMEDY)
    except RayError as error:
        return fail(
            backend, found=f"{between}: {str(error).strip().splitlines()[-1][:300]}", remedy=REMEDY
        )
    finally:
        for talker in talkers:
            with contextlib.suppress(RayError):
                ray.kill(talker, no_restart=True)
    slowest_s, names = (
        max(seconds for seconds, _ in answers),
        ", ".join(sorted({name for _, name in answers})),
    )
    rate = MESSAGE_BYTES / 2**20 / slowest_s
    return ok(
        backend,
        found=f"{between}, over {names}: 16 MiB summed in {slowest_s * 1000:.0f} ms ({rate:.0f} MiB/s)",
    )


def _spawn(place: Place, device: str) -> Any:
    actor: Any = ray.remote(Talker)
    strategy = NodeAffinitySchedulingStrategy(place[0], soft=False)
    return actor.options(
        num_cpus=0, num_gpus=1 if device == "cuda" else 0, scheduling_strategy=strategy
    ).remote()
