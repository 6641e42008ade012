"""Work out what one trial gets and how many trials fit, from numbers alone and without Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isclose
from pathlib import Path

from suite.config.sweep import ResourceConfig, SweepConfig
from suite.errors import ResourceError

DEFAULT_CPU_WORKERS = 1
"""Two trials of one worker take less time on two cores than one after the other with two workers,
which wait for one another in every step."""
LEAST_CPUS = 2
CONTEXT_FRAC = 0.05
"""Of a GPU's memory, what each process that shares it takes beside its tensors: CUDA's context with
kernels and libraries, some 0.5 GB. Ours; torch's bound on a process leaves it out."""
FIT_EPS = 1e-6
GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files of NVIDIA, AMD and Windows' Linux."""
CGROUP = Path("/sys/fs/cgroup")
DEVICES = Path("/dev")
Node = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many workers each node of a cluster holds.

    Attributes:
        nodes: Workers by node.
        one_node: Whether the workers of a trial must share a node.
    """

    nodes: tuple[int, ...]
    one_node: bool = False

    @property
    def most(self) -> int:
        """Workers of the largest trial that it holds."""
        if self.one_node:
            return max(self.nodes, default=0)
        return sum(self.nodes)

    def slots(self, workers: int) -> int:
        """Trials of one size that run side by side."""
        if self.one_node:
            return sum(node // workers for node in self.nodes)
        return sum(self.nodes) // workers

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether trials of these sizes run side by side.

        With `one_node` the largest is placed first, each where it leaves the least room.
        """
        if not self.one_node:
            return sum(sizes) <= sum(self.nodes)
        # This is best-fit decreasing: it may miss a packing, and never finds one that does not
        # exist.
        free = sorted(self.nodes)
        for size in sorted(sizes, reverse=True):
            # The first of the sorted nodes that is large enough is the tightest one.
            place = next((i for i, node in enumerate(free) if node >= size), None)
            if place is None:
                return False
            free[place] -= size
            free.sort()
        return True


@dataclass(frozen=True, slots=True)
class Layout:
    """The resources of a sweep's trials.

    Attributes:
        workers: Ranks of a trial (the world size) whose backbone asks for no other number.
        cpus, gpus: CPU cores and GPUs of one worker.
        slots: Trials of that size at a time.
        placement, interface: The same as in `ResourceConfig`.
        capacity: Room in the cluster when it was laid out.
    """

    workers: int
    cpus: float
    gpus: float
    slots: int
    placement: str = "pack"
    interface: str | None = None
    capacity: Capacity = Capacity(())

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for one worker."""
        # Messages list the bundle, and "0 GPU" says nothing in them.
        if not self.gpus:
            return {"CPU": self.cpus}
        return {"CPU": self.cpus, "GPU": self.gpus}

    @property
    def strategy(self) -> str:
        """Ray's word for the placement."""
        return self.placement.upper().replace("-", "_")

    @property
    def device(self) -> str:
        if self.gpus:
            return "cuda"
        return "cpu"

    @property
    def memory_frac(self) -> float:
        """The share of its GPU's memory that a worker's tensors may take."""
        if self.gpus >= 1:
            # A rank computes on one GPU, however many it has reserved.
            return 1.0
        return max(self.gpus - CONTEXT_FRAC, self.gpus / 2)

    def room_on(self, nodes: Sequence[Node]) -> Capacity:
        """The capacity of some nodes for workers of this size."""
        return Capacity(
            tuple(_count(node, self.bundle) for node in nodes), self.placement == "strict-pack"
        )


def planned_workers(config: SweepConfig, given: int | None) -> int:
    """Workers of a trial: as given, else as the sweep says, else as on CPUs."""
    return given or config.resources.workers or DEFAULT_CPU_WORKERS


def local_cpus(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use, and at least two: two workers share one well enough."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    if quota is not None:
        cores = min(cores, ceil(quota))
    return max(LEAST_CPUS, cores)


def may_have_gpu() -> bool:
    """Whether this machine has a GPU, by the files of its drivers: without one it has none."""
    return any(any(DEVICES.glob(pattern)) for pattern in GPU_FILES)


def _cpu_quota(cgroup: Path) -> float | None:
    """The processor time that a control group (version 2) gives, in cores; None = no limit.

    A container sees all cores of its host, and may have the time of a few.
    """
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    if quota == "max":
        return None
    return int(quota) / int(period)


def lay_out(config: ResourceConfig, nodes: Sequence[Node], *, workers: int | None = None) -> Layout:
    """Resolve a sweep's resources on the nodes of a cluster.

    Args:
        config: What the sweep says.
        nodes: `{"CPU": 8.0, "GPU": 1.0, ...}` of every node, at the size the cluster can grow to.
        workers: World size of an earlier run of this sweep, used where the sweep leaves it open.

    Raises:
        ResourceError: A trial can never fit, or GPUs are shared by ranks.
    """
    gpus = config.gpus_per_worker
    if gpus is None:
        gpus = 0.0
        if any(node.get("GPU") for node in nodes):
            gpus = 1.0
    layout = Layout(
        DEFAULT_CPU_WORKERS,
        config.cpus_per_worker,
        float(gpus),
        1,
        config.placement,
        config.interface,
    )
    capacity = layout.room_on(nodes)
    default_workers = DEFAULT_CPU_WORKERS
    # On GPUs a trial gets as many workers as have room. Where a sweep wants GPUs and there are
    # none, one worker is enough to be told so below. Only a single rank may have a part of one.
    if gpus >= 1:
        default_workers = max(1, capacity.most)
    # An earlier run of the sweep comes before the cluster's size, because the world size is part of
    # every trial's identity.
    workers = config.workers or workers or default_workers
    sizes = {"workers": workers}
    for name, size in config.workers_by_backbone.items():
        sizes[f"workers_by_backbone.{name}"] = size
    broken = not isclose(gpus, round(gpus))
    # Ray gives whole GPUs or a part of one.
    if broken and gpus > 1:
        raise ResourceError(
            f"resources.gpus_per_worker: got {gpus:g}, expected a whole number, or a part of one"
            " GPU below 1"
        )
    largest = max(sizes, key=sizes.__getitem__)
    if broken and sizes[largest] > 1:
        raise ResourceError(
            f"resources.gpus_per_worker: got {gpus:g} with {sizes[largest]} workers "
            f"(resources.{largest}), expected a whole number; NCCL refuses two ranks on one GPU"
        )
    for key, size in sizes.items():
        # A trial that may shrink needs room for its smallest size only.
        if config.min_workers is not None and config.min_workers < size:
            key, size = "min_workers", config.min_workers
        if capacity.most < size:
            raise ResourceError(_never_fits(key, size, layout, nodes))
    # There may be no room for the full size where a trial may shrink; it starts smaller.
    slots = max(1, capacity.slots(workers))
    if config.concurrent_trials is not None:
        slots = min(slots, config.concurrent_trials)
    return replace(layout, workers=workers, slots=slots, capacity=capacity)


def _never_fits(key: str, workers: int, layout: Layout, nodes: Sequence[Node]) -> str:
    bundle = layout.bundle
    need = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    has = []
    for node in nodes:
        has.append(", ".join(f"{node.get(name, 0):g} {name}" for name in bundle))
    have = " + ".join(has) or "nothing"
    room = layout.room_on(nodes)
    if room.one_node:
        where = f"no node of the cluster ({have}) holds more than {room.most}"
    else:
        where = f"the cluster ({have}) holds {room.most}"
    rooms = _room_by_resource(layout, nodes)
    # Of equals it is the last, the GPU.
    short = min(reversed(rooms), key=rooms.__getitem__)
    # Where only one resource is asked for, its name says nothing new.
    if len(bundle) > 1 and rooms[short] < workers:
        where += f" for want of {short}s"
    elif len(bundle) > 1:
        where += " on nodes that have both"
    *remedies, last = _remedies(key, workers, layout, nodes, short=short)
    what = f"{workers} workers of {need} each never fit"
    if workers == 1:
        what = f"1 worker of {need} never fits"
    return f"resources: {what}: {where}; {', '.join([*remedies, f'or {last}'])}"


def _room_by_resource(layout: Layout, nodes: Sequence[Node]) -> dict[str, int]:
    """How many workers of one trial would fit if each resource were the only one."""
    rooms = {}
    for name, amount in layout.bundle.items():
        counts = tuple(_count(node, {name: amount}) for node in nodes)
        rooms[name] = Capacity(counts, layout.room_on(nodes).one_node).most
    return rooms


def _remedies(
    key: str, workers: int, layout: Layout, nodes: Sequence[Node], *, short: str
) -> list[str]:
    """What helps where a trial never fits: the nearest first, and more machines last."""
    room = layout.room_on(nodes)
    if short == "GPU" and not any(node.get("GPU") for node in nodes):
        return ["set resources.gpus_per_worker: 0 to train on CPUs", "add nodes with GPUs"]
    lower = []
    if room.most:
        lower.append(f"resources.{key}")
    if short == "CPU":
        lower.append("resources.cpus_per_worker")
    # Below one, ranks would share a GPU.
    elif layout.gpus > 1:
        lower.append("resources.gpus_per_worker")
    remedies = []
    if lower:
        remedies.append("lower " + " or ".join(lower))
    if room.one_node and sum(room.nodes) >= workers:
        remedies.append("set resources.placement: pack")
    more = "add nodes"
    if room.one_node or not room.most:
        more = "add larger nodes"
    return [*remedies, more]


def _count(node: Node, bundle: Mapping[str, float]) -> int:
    """The number of workers that a node holds."""
    counts = []
    for name, amount in bundle.items():
        here = node.get(name, 0.0)
        count = 0
        if name == "GPU" and amount < 1:
            # No part of a GPU reaches over to another one.
            whole = int(here + FIT_EPS)
            count = whole * _times(1.0, amount)
            here = max(0.0, here - whole)
        counts.append(count + _times(here, amount))
    return max(0, min(counts))


def _times(room: float, amount: float) -> int:
    # Amounts are sums of floats: 0.3 is to hold three times 0.1.
    return int(room / amount + FIT_EPS)
